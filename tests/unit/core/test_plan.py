"""Plan: file round trip, a hash that names what is run, every refusal."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fivefold.core.cluster import Cluster
from fivefold.core.execution import Execution
from fivefold.core.layout import Layout
from fivefold.core.model_spec import AttentionSpec, BlockSpec, MLPSpec, ModelSpec
from fivefold.core.plan import Plan
from fivefold.core.workload import Workload
from fivefold.errors import ConfigError, LayoutError


def make_plan(layout: str = "dp2 tp2", **changes: object) -> Plan:
    block = BlockSpec(attention=AttentionSpec(heads=4, kv_heads=2, head_dim=8), mlp=MLPSpec(ffn=64))
    fields: dict[str, object] = {
        "model": ModelSpec(name="toy", hidden=32, vocab=100, blocks=(block, block)),
        "cluster": Cluster.parse("4x8 A100-80GB"),
        "workload": Workload(seq_len=16, global_batch=8),
        "layout": Layout.parse(layout),
        "execution": Execution(),
        **changes,
    }
    return Plan(**fields)  # type: ignore[arg-type]


def test_file_round_trip(tmp_path: Path) -> None:
    plan = make_plan(predictions={"step_s": 0.25, "events": [1, 2]}, reasons=("tp stays inside a node",))
    path = tmp_path / "plan.json"
    plan.save(path)
    assert Plan.load(path) == plan
    data = json.loads(path.read_text())
    assert (data["schema_version"], data["layout"], data["hash"]) == (1, "dp2 tp2", plan.hash)
    assert list(tmp_path.iterdir()) == [path]


def test_hash_names_what_is_run() -> None:
    plan = make_plan()
    assert len(plan.hash) == 12
    assert int(plan.hash, 16) >= 0
    assert make_plan("tp2 dp2").hash == plan.hash
    assert make_plan(predictions={"step_s": 1.0}, reasons=("because",)).hash == plan.hash
    others = [
        make_plan("dp4"),
        make_plan(workload=Workload(seq_len=16, global_batch=16)),
        make_plan(execution=Execution(micro_batch=2)),
        make_plan(cluster=Cluster.parse("8 H100")),
        make_plan(model=plan.model.replace(hidden=64)),
    ]
    assert len({plan.hash, *(other.hash for other in others)}) == 6


def test_hash_is_the_same_in_another_process() -> None:
    # Pinned without the model, whose fields grow: sha256 over sorted compact JSON, as the docstring promises.
    import hashlib

    plan = make_plan()
    content = json.loads(plan.to_json())
    for name in ("hash", "predictions", "reasons"):
        del content[name]
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    assert plan.hash == hashlib.sha256(text.encode()).hexdigest()[:12]


def test_an_edited_file_is_noticed() -> None:
    plan = make_plan()
    data = json.loads(plan.to_json())
    data["layout"] = "dp4"
    with pytest.raises(ConfigError, match=r"it was edited; remove the hash line"):
        Plan.from_json(json.dumps(data))
    del data["hash"]
    assert Plan.from_json(json.dumps(data)) == plan.replace(layout=Layout(dp=4))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema_version": 2}, "schema version 2 is not supported; this version reads 1"),
        ({"workloda": {}}, r"unknown key 'workloda' \(did you mean 'workload'\?\)"),
        ({"workload": {"seq_len": 4}}, "missing key 'workload.global_batch'"),
        ({"execution": {"dtype": "fp8"}}, "execution.dtype: expected 'float32'"),
    ],
)
def test_refused_content(change: dict[str, object], message: str) -> None:
    data = {**json.loads(make_plan().to_json()), **change}
    with pytest.raises(ConfigError, match=message) as caught:
        Plan.from_json(json.dumps(data))
    assert "\n" not in str(caught.value)


def test_refused_layout_keeps_its_own_message() -> None:
    data = {**json.loads(make_plan().to_json()), "layout": "dp2 ep3"}
    with pytest.raises(LayoutError, match="nearest ep: 2"):
        Plan.from_json(json.dumps(data))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", r"not JSON \(line 1, column 2"),
        ("[1]", "a plan is a JSON object, got a list"),
        ('{"predictions": {"a": NaN}}', "finite numbers only, got NaN"),
        ("[" * 200_000, "nested too deeply"),
        ('{"a": ' + "9" * 5000 + "}", "a number too long"),
    ],
    ids=["cut", "list", "nan", "deep", "long number"],
)
def test_refused_text(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Plan.from_json(text)


def test_refused_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        Plan.load(tmp_path / "absent.json")
    with pytest.raises(ConfigError, match=r"cannot write plan .*No such file"):
        make_plan().save(tmp_path / "absent" / "plan.json")
    binary = tmp_path / "binary.json"
    binary.write_bytes(b"\xff\xfe\xff")
    with pytest.raises(ConfigError, match="not UTF-8"):
        Plan.load(binary)
    large = tmp_path / "large.json"
    with large.open("wb") as file:
        file.truncate(17 * 2**20)
    with pytest.raises(ConfigError, match="has 17 MiB; at most 16 MiB are read"):
        Plan.load(large)


def test_predictions_must_be_finite() -> None:
    plan = make_plan(predictions={"step_s": 1.0})
    plan.predictions["step_s"] = float("inf")  # a dict inside a frozen value can still be written
    with pytest.raises(ConfigError, match="finite numbers only"):
        plan.to_json()

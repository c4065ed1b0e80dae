"""Which layouts the lab runs, and why it leaves others out."""

from __future__ import annotations

import pytest

from fivefold.catalog.models import preset
from fivefold.core.cluster import Cluster
from fivefold.core.execution import Execution
from fivefold.core.layout import Layout
from fivefold.core.model_spec import AttentionSpec, BlockSpec, MLPSpec, ModelSpec
from fivefold.core.plan import Plan
from fivefold.core.workload import Workload
from fivefold.errors import ConfigError, LaunchError, ModelError
from fivefold.lab import grid as grid_module
from fivefold.lab.grid import AXES, check, grid, legal, parse_axes


def plan(model: ModelSpec, batch: int = 16) -> Plan:
    return Plan(
        model=model,
        cluster=Cluster.parse("cpu"),
        workload=Workload(seq_len=128, global_batch=batch),
        layout=Layout(),
        execution=Execution(micro_batch=2),
    )


def llama(heads: int = 8, layers: int = 4) -> ModelSpec:
    block = BlockSpec(attention=AttentionSpec(heads=heads, kv_heads=1, head_dim=8), mlp=MLPSpec(ffn=32))
    return ModelSpec(name="m", hidden=32, vocab=259, blocks=(block,) * layers)


@pytest.mark.parametrize(
    ("ranks", "count"), [(1, 1), (2, 4), (4, 9), (7, 9), (8, 14), (16, 17), (32, 18), (99, 18)]
)
def test_layouts_up_to_so_many_ranks(ranks: int, count: int) -> None:
    """TP 1/2/4 x PP 1/2 x DP 1/2/4: of 18 shapes 14 have at most 8 ranks."""
    layouts = grid(ranks)
    assert len(layouts) == len(set(layouts)) == count
    assert all(cut.tp * cut.pp * cut.dp <= ranks for cut in layouts)
    sizes = [cut.world_size for cut in layouts]
    assert sizes == sorted(sizes)
    assert layouts[0] == Layout()


def test_a_model_that_allows_everything() -> None:
    layouts = grid(32)
    assert legal(plan(llama()), layouts, "cpu") == (layouts, {})


def test_two_heads_leave_tp4_out() -> None:
    allowed, refused = legal(plan(llama(heads=2)), grid(8), "cpu")
    assert {cut.tp for cut in allowed} == {1, 2}
    assert set(refused) == {"tp4", "dp2 tp4", "tp4 pp2"}
    assert all("heads = 2 is not divisible by 4" in reason for reason in refused.values())


def test_one_layer_leaves_pp2_out_and_a_small_batch_dp4() -> None:
    allowed, refused = legal(plan(llama(layers=1), batch=4), grid(4), "cpu")
    assert {str(cut) for cut in allowed} == {"dp1", "dp2", "tp2", "tp4", "dp2 tp2"}
    assert "1 layer" in refused["pp2"]
    assert "global batch 4" in refused["dp4"]


def test_fewer_devices_than_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    def two_devices(kind: str, ranks: int) -> None:
        if ranks > 2:
            raise LaunchError(f"{ranks} ranks need {ranks} {kind} devices, this machine has 2")

    monkeypatch.setattr(grid_module, "check_device_count", two_devices)
    allowed, refused = legal(plan(llama()), grid(4), "cuda")
    assert {cut.world_size for cut in allowed} == {1, 2}
    assert refused["tp4"] == "4 ranks need 4 cuda devices, this machine has 2"


def test_what_cannot_be_run_at_all() -> None:
    with pytest.raises(ModelError, match="learned positions"):
        check(plan(preset("gpt2")), "cpu")
    with pytest.raises(ConfigError, match=r"takes at least .* choose a smaller model"):
        check(plan(preset("llama-3.1-70b")), "cpu")


def test_axes_of_ones_own() -> None:
    """Where the ranks of cp are too few for ep, dp has what is missing."""
    assert list(map(str, grid(8, ("cp", "ep")))) == [
        "dp1", "dp2 ep2", "cp2:ring", "cp2:ring ep2", "dp4 ep4", "dp2 cp2:ring ep4", "cp4:ring", "cp4:ring ep2",
        "cp4:ring ep4",
    ]  # fmt: skip
    assert list(map(str, grid(4, ("dp", "ep")))) == ["dp1", "dp2", "dp2 ep2", "dp4", "dp4 ep2", "dp4 ep4"]
    assert list(map(str, grid(8, ("pp",)))) == ["dp1", "pp2"]
    assert grid(8) == grid(8, AXES) == grid(8, parse_axes("tp, dp,pp"))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("cp,dq", r"no axis 'dq' in the lab \(did you mean 'dp'\?\); it has dp, tp, pp, cp, ep"),
        ("", "no axis ''"),
    ],
)
def test_an_axis_that_there_is_not(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse_axes(text)


@pytest.mark.parametrize(("name", "ep"), [("tiny-llama", False), ("tiny-moe", True), ("tiny-mla-moe", True)])
def test_small_presets_take_every_layout_of_cp_and_ep(name: str, ep: bool) -> None:
    layouts = grid(8, ("cp", "ep"))
    allowed, refused = legal(plan(preset(name)), layouts, "cpu")
    assert allowed == [cut for cut in layouts if ep or cut.ep == 1]
    assert all("has no experts" in reason for reason in refused.values())

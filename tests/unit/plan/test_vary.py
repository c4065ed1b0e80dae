"""Variants of a model: what their fields become, and what is no model."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from fivefold.catalog import models
from fivefold.cli.main import run
from fivefold.core.model_counts import parameter_counts
from fivefold.errors import ConfigError, ModelError
from fivefold.plan.vary import FIELDS, read, variants, vary


def ask(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    run(["plan", *arguments, "--json"])
    answer: dict[str, Any] = json.loads(capsys.readouterr().out)
    return answer


def test_texts() -> None:
    assert read(("experts=8,16 hidden=4096",)) == {"experts": [8, 16], "hidden": [4096]}
    assert read(("experts=8,16", "hidden=4096,4096")) == {"experts": [8, 16], "hidden": [4096]}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("hiden=8", "no field 'hiden' .did you mean 'hidden'"), ("hidden", "expected a field and its values"),
        ("hidden=", "expected a field"), ("hidden=8,x", "'x' is not a whole number"),
        ("hidden=-8", "'-8' is not a whole"),
        ("hidden=1e3", "'1e3' is not a whole number"), ("hidden=8 hidden=9", "hidden is given twice"),
        (f"hidden={','.join(map(str, range(1, 202)))}", "201 combinations, at most 200"),
    ],
)  # fmt: skip
def test_refused_texts(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read((text,))


def test_every_field_changes_what_it_names() -> None:
    found = set()
    for name in ("llama-3-8b", "deepseek-v3", "gpt-oss-20b"):
        spec = models.preset(name)
        for field in FIELDS:
            try:
                made = vary(spec, {field: 4})
            except ModelError:
                continue
            found.add(field)
            if field == "window":
                windows = {getattr(block.attention, "window", None) for block in made.blocks}
                assert windows == {None, 4}
            elif field != "top_k":
                assert (
                    parameter_counts(made)["total_parameters"] != parameter_counts(spec)["total_parameters"]
                )
            assert made.name == f"{name} {field}=4"
    assert {"hidden", "vocab", "layers", "heads", "head_dim", "ffn", "experts", "top_k", "kv_rank"} <= found


def test_parameters_of_varied_models() -> None:
    """Against the counts of models that differ in just these fields: wider MLPs, more experts."""
    mixtral = models.preset("mixtral-8x7b")
    more = vary(mixtral, {"experts": 16})
    extra = parameter_counts(more)["total_parameters"] - parameter_counts(mixtral)["total_parameters"]
    assert extra == 32 * (8 * 3 * 4096 * 14336 + 8 * 4096)
    llama = models.preset("llama-3-8b")
    wider = vary(llama, {"ffn": 14336 + 128})
    extra = parameter_counts(wider)["total_parameters"] - parameter_counts(llama)["total_parameters"]
    assert extra == 32 * 3 * 4096 * 128


def test_layers_keep_the_pattern() -> None:
    deepseek = models.preset("deepseek-v3")
    more, fewer = (vary(deepseek, {"layers": n}) for n in (64, 5))
    assert [b.mlp.kind for b in more.blocks] == ["dense"] * 3 + ["moe"] * 61
    assert [b.mlp.kind for b in fewer.blocks] == ["dense"] * 3 + ["moe"] * 2
    mixed = models.preset("qwen3-next-80b-a3b")
    longer = vary(mixed, {"layers": mixed.layers + 6})
    kinds = [block.attention.kind for block in longer.blocks]
    assert kinds == (["gated_delta"] * 3 + ["gqa"]) * 13 + ["gated_delta"] * 2


def test_combinations_and_those_that_are_no_model() -> None:
    rows = list(variants(models.preset("llama-3-8b"), {"kv_heads": [8, 5], "ffn": [14336, 8192]}))
    assert [row.text for row in rows] == [
        "kv_heads=8 ffn=14336",
        "kv_heads=8 ffn=8192",
        "kv_heads=5 ffn=14336",
        "kv_heads=5 ffn=8192",
    ]
    assert [row.spec is not None for row in rows] == [True, True, False, False]
    assert "32 % 5 != 0" in (rows[2].refusal or "")
    (row,) = variants(models.preset("llama-3-8b"), {"experts": [8]})
    assert row.refusal == "llama-3-8b has no experts: none of its layers has such a part"


def test_each_variant_has_the_plan_of_its_own_model(capsys: pytest.CaptureFixture[str]) -> None:
    common = ("-m", "tiny-llama", "-c", "4 H100", "--seq-len", "64", "--global-batch", "8")
    swept = ask(capsys, *common, "--vary", "layers=4,8", "hidden=64,128")
    assert [row["vary"] for row in swept["variants"]] == [
        {"layers": n, "hidden": d} for n in (4, 8) for d in (64, 128)
    ]
    alone = ask(capsys, *common, "--vary", "layers=8 hidden=64")["variants"][0]
    assert alone["plan"] == swept["variants"][2]["plan"]
    same = ask(capsys, *common, "--vary", f"layers={models.preset('tiny-llama').layers}")["variants"][0]
    plan = ask(capsys, *common, "--top", "1")["plans"][0]
    assert same["plan"] == plan


def test_a_table_and_a_line_for_what_has_no_plan(capsys: pytest.CaptureFixture[str]) -> None:
    common = ("plan", "-m", "llama-3-8b", "-c", "8 A100-40", "--fix", "cp1", "--micro-batch", "1")
    assert run([*common, "--vary", "layers=32,400"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"layers=32 +8.03 G +8.03 G +\w", out)
    assert re.search(
        r"layers=400: llama-3-8b layers=400 does not fit on .* 16 bytes x 88.3 G parameters", out
    )
    assert run([*common, "--vary", "layers=400"]) == 2
    capsys.readouterr()
    assert run([*common, "layers=400"]) == 2
    assert "unexpected 'layers=400'" in capsys.readouterr().err

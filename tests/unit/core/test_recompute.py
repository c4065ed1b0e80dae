"""The text form of recompute, and which parts of which layers it takes."""

from __future__ import annotations

from itertools import combinations

import pytest

from fivefold.catalog.models import preset
from fivefold.core.execution import Execution
from fivefold.core.model_spec import ModelSpec, MoESpec
from fivefold.core.recompute import PARTS, Recompute, check
from fivefold.errors import ConfigError

DENSE = preset("tiny-llama")
"""Four layers."""
ROUTED = MoESpec(experts=4, top_k=2, ffn=8)


def mixed(*routed: int) -> ModelSpec:
    blocks = [block.replace(mlp=ROUTED) if i in routed else block for i, block in enumerate(DENSE.blocks)]
    return DENSE.replace(blocks=tuple(blocks))


SUBSETS = ["+".join(parts) for n in (1, 2, 3) for parts in combinations(PARTS, n)]


@pytest.mark.parametrize(
    "text", ["none", "full", "full/2", "full/10000", *SUBSETS, *(f"{s}/3" for s in SUBSETS)]
)
def test_text_and_value_are_inverse(text: str) -> None:
    assert str(Recompute.parse(text)) == text
    assert Execution(recompute=text).recomputed == Recompute.parse(text)


@pytest.mark.parametrize(
    ("typed", "printed"),
    [("mlp+attention", "attention+mlp"), ("full/1", "full"), (" moe/1 ", "moe"), ("full/02", "full/2")],
)
def test_what_is_typed_is_printed_in_one_form(typed: str, printed: str) -> None:
    assert Execution(recompute=typed).recompute == printed
    assert Execution(recompute=typed) == Execution(recompute=printed)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("atention", r"unknown part 'atention' \(did you mean 'attention'\?\)"),
        ("", "unknown part ''"),
        ("attention+", "unknown part ''"),
        ("attention,mlp", "unknown part 'attention,mlp'"),
        ("full+mlp", "full stands alone"),
        ("none+mlp", "none stands alone"),
        ("mlp+mlp", "mlp is given twice"),
        ("none/2", "none is of no layer"),
        *((f"full/{k}", "whole number of at least 1, such as") for k in ("", "0", "-1", "x", "2/2", "1.5", "9" * 9)),
        ("x" * 500, "unknown part 'x{40}'"),
    ],
)  # fmt: skip
def test_refusals_name_the_forms(text: str, message: str) -> None:
    with pytest.raises(
        ConfigError, match=f"{message}.*write none, full, or some of attention, mlp, moe"
    ) as caught:
        Execution(recompute=text)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("none", [(), (), (), ()]),
        ("full", [("layer",)] * 4),
        ("full/2", [("layer",), (), ("layer",), ()]),
        ("full/3", [("layer",), (), (), ("layer",)]),
        ("attention", [("attention",)] * 4),
        ("mlp", [("mlp",), (), ("mlp",), ()]),
        ("moe", [(), ("moe",), (), ("moe",)]),
        ("attention+mlp+moe", [("attention", "mlp"), ("attention", "moe")] * 2),
        ("attention+moe/3", [("attention",), (), (), ("attention", "moe")]),
    ],
)
def test_which_regions_of_which_layers(text: str, expected: list[tuple[str, ...]]) -> None:
    spec = mixed(1, 3)
    assert Recompute.parse(text).of_layers(spec, range(4)) == expected
    assert Recompute.parse(text).of_layers(spec, range(2, 4)) == expected[2:], "by the index in the model"


@pytest.mark.parametrize(
    ("spec", "text", "message"),
    [
        (DENSE, "moe", r"recompute=moe: no layer of tiny-llama that it takes has moe; nearest: mlp$"),
        (DENSE, "attention+moe", r"nearest: attention$"),
        (mixed(0, 1, 2, 3), "mlp", r"has mlp; nearest: moe$"),
        (mixed(1, 3), "moe/2", r"recompute=moe/2: .* nearest: mlp/2$"),
        (DENSE, "full/5", r"takes one layer of 5, but tiny-llama has 4; nearest: full/4$"),
    ],
)
def test_what_does_nothing_is_refused(spec: ModelSpec, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check(Recompute.parse(text), spec)


def test_what_a_model_has_is_legal() -> None:
    for text in ("none", "full", "full/4", "attention+mlp+moe", "moe/3", "mlp/2"):
        check(Recompute.parse(text), mixed(1, 3))

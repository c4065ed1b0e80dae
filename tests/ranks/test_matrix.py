"""Invariants 1 and 2 over the whole grid: the same model as one device, the communication that was predicted."""

from __future__ import annotations

import pytest

from fivefold.core.layout import Layout
from fivefold.core.model_spec import ModelSpec
from fivefold.verify.verify import STEPS, Reference
from fivefold.verify.workload import common_plans

from .models import HARD, PLAIN, layouts

ONE = Layout()
MANY_RANKS = 8
"""Above, one step: two take too long on few cores."""
_references: dict[tuple[str, str, int, int], Reference] = {}


def check(spec: ModelSpec, layout: Layout, dtype: str, *, steps: int = STEPS) -> None:
    plan, reference_plan = common_plans(spec, layout, ONE, dtype)
    key = (spec.name, dtype, layout.dp, steps)
    if key not in _references or _references[key].plan != reference_plan:
        _references[key] = Reference(reference_plan, steps=steps, seed=0, device="cpu")
    verdict = _references[key].judge(plan, find_axis=False)
    assert verdict.passed, f"{verdict.cause}; {verdict.quantities}"
    assert verdict.events_match
    assert set(verdict.absent) == {"buffers", "routed_experts", "routing", "loss_scale"}


# The exhaustive run has them all.
FEW = [
    cut
    for cut in layouts()
    if cut.world_size <= 2
    or (cut.schedule != "gpipe" and (cut.world_size == 4 or (cut.world_size, cut.dp) == (8, 2)))
]


@pytest.mark.parametrize("layout", FEW, ids=str)
def test_float64_hard_model(layout: Layout) -> None:
    check(HARD, layout, "float64", steps=STEPS if layout.world_size <= MANY_RANKS else 1)


@pytest.mark.parametrize(
    "layout", [cut for cut in FEW if cut.world_size <= 4 and cut.schedule != "gpipe"], ids=str
)
def test_float32_plain_model(layout: Layout) -> None:
    check(PLAIN, layout, "float32")


@pytest.mark.parametrize(
    "text",
    [
        "tp2 nosp",
        pytest.param("tp4 pp2 nosp", marks=pytest.mark.exhaustive),
        pytest.param("dp2 tp2 nosp", marks=pytest.mark.exhaustive),
        pytest.param("tp8", marks=pytest.mark.exhaustive),
        "pp3@1+1+1",
        "pp2@flops",
        pytest.param("pp2@1+2", marks=pytest.mark.exhaustive),
        "dp3",
        "order=dp-tp-cp-pp dp2 tp2 pp2",
    ],
)
def test_float64_options(text: str) -> None:
    check(HARD, Layout.parse(text), "float64")


@pytest.mark.parametrize(
    "text", ["dp2 pp2:zbv", pytest.param("dp2 pp2:dualpipev zero1", marks=pytest.mark.exhaustive)]
)
def test_both_ends_of_a_tied_embedding_on_one_rank(text: str) -> None:
    check(HARD.replace(name="hard4", blocks=HARD.blocks[:1] * 4), Layout.parse(text), "float64")


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("spec", [HARD, PLAIN], ids=lambda spec: spec.name)
@pytest.mark.parametrize("layout", layouts(), ids=str)
def test_everything(layout: Layout, spec: ModelSpec, dtype: str) -> None:
    check(spec, layout, dtype)

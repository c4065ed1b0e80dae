"""Experts that are placed anew and have copies, against one device where they stay."""

from __future__ import annotations

from typing import Any

import pytest

from fivefold.core.experts import ExpertsConfig
from fivefold.core.layout import Layout
from fivefold.verify.verify import Reference
from fivefold.verify.workload import ROUTERS, common_plans

from .models import ROUTED

LONG = pytest.mark.exhaustive

FAST = [("dp2 ep2 zero1", 0), ("tp2 ep2", 2), ("cp2 pp2:zbh1 ep2", 1)]
MORE = [
    ("dp2 ep2", 0), ("dp4 ep4", 2), ("dp4 ep2 zero2", 1), ("dp4 ep2 zero3", 2), ("dp4 ep2 zero1/2", 0),
    ("dp2 tp2 etp2 ep2 zero3", 0), ("dp2 tp2 nosp ep2 etp2", 2), ("cp2:ulysses ep2", 2), ("dp8 ep4 zero3/4", 0),
    ("pp2:zbv dp2 ep2", 1), ("pp3 tp2 ep2", 1), ("pp2:bfs@1+2 dp2 ep2", 0), ("dp2 tp2 pp2 ep2 zero1", 2),
]  # fmt: skip
ONCE = ExpertsConfig(rebalance_every=1)
STEPS = 3
"""The first has no copies; experts are placed anew before each of the others."""


def judged(text: str, router: int = 0, experts: ExpertsConfig = ONCE, **options: Any) -> None:
    plan, single = common_plans(
        ROUTED, Layout.parse(text), Layout(), "float64", router=ROUTERS[router], experts=experts, **options
    )
    verdict = Reference(single, seed=0, device="cpu", steps=STEPS).judge(plan)
    assert verdict.passed, verdict.cause
    assert verdict.max_rel_err > 0


@pytest.mark.parametrize(("text", "router"), [*FAST, *(pytest.param(*case, marks=LONG) for case in MORE)])
def test_training_is_that_of_one_device(text: str, router: int) -> None:
    """Everything that `verify` compares, and the communication of every step."""
    judged(text, router)


@LONG
@pytest.mark.parametrize("spare", [0, 2])
@pytest.mark.parametrize("recompute", ["full", "moe"])
def test_with_recompute_and_other_numbers_of_slots(spare: int, recompute: str) -> None:
    judged(
        "dp2 pp2 ep2 zero1",
        experts=ExpertsConfig(rebalance_every=1, spare_slots=spare),
        recompute=recompute,
    )

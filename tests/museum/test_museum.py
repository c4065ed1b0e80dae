"""Every planted fault is caught and named, at its layout and at another one; with none planted nothing is found.

The layout compared with is one device. What it computes is kept from before a fault is planted.
"""

from __future__ import annotations

import pytest

from fivefold.core.experts import ExpertsConfig
from fivefold.core.layout import Layout
from fivefold.core.model_spec import ModelSpec
from fivefold.core.plan import Plan
from fivefold.core.router import RouterConfig
from fivefold.verify.overflow import STEPS as OVERFLOW_STEPS
from fivefold.verify.verify import Reference, Verdict
from fivefold.verify.workload import common_plans

from .exhibit import Fault, Patch
from .faults import FAULTS
from .table import missed_by_the_loss, page

LOSS_ONLY = 1e-5
"""What a check of the first loss would allow."""
SECOND = 2
"""The step in which late faults act."""

_references: list[Reference] = []


def plan_of(text: str, fault: Fault, steps: int) -> tuple[Plan, Reference]:
    """The plan of a layout, and one device on the same data; it is run once for many tests."""
    if fault.overflow:
        steps = OVERFLOW_STEPS
    plan, one = common_plans(
        fault.spec,
        Layout.parse(text),
        Layout(),
        "float64",
        documents=fault.documents,
        overflow=fault.overflow,
        recompute=fault.recompute,
        router=fault.router,
        experts=ExpertsConfig(rebalance_every=1) if fault.rebalance else None,
    )
    wanted = one, steps, fault.overflow
    known = next((r for r in _references if (r.plan, r.steps, r.overflow) == wanted), None)
    if known is None:
        known = Reference(one, steps=steps, seed=0, device="cpu", overflow=fault.overflow)
        _references.append(known)
    return plan, known


def said_of(verdict: Verdict) -> str:
    assert not verdict.passed, "not caught"
    assert verdict.cause is not None
    return verdict.cause


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.plant.__name__)
def test_a_fault_can_be_planted(monkeypatch: Patch, fault: Fault) -> None:
    """What it puts a fault into is still there, by that name."""
    fault.plant(monkeypatch)


@pytest.mark.parametrize(
    "fault",
    [pytest.param(f, marks=() if f.quick else pytest.mark.exhaustive, id=f.plant.__name__) for f in FAULTS],
)
def test_a_fault_is_caught_and_named(monkeypatch: Patch, fault: Fault) -> None:
    plan, one = plan_of(fault.layout, fault, SECOND if fault.late else 1)
    before = plan_of(fault.layout, fault, 1)[1] if fault.late else None
    fault.plant(monkeypatch)
    verdict = one.judge(plan)
    cause = said_of(verdict)
    for word in fault.words:
        assert word in cause
    if fault.overflow:
        assert not fault.loss_sees, "no loss of the first step depends on gradients"
    elif before is None:
        assert (not verdict.quantities["loss"] <= LOSS_ONLY) == fault.loss_sees, verdict.quantities
    else:
        assert before.judge(plan, find_axis=False).passed, "the first step shows it already"


@pytest.mark.exhaustive
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.plant.__name__)
def test_a_fault_is_caught_elsewhere(monkeypatch: Patch, fault: Fault) -> None:
    plan, one = plan_of(fault.elsewhere, fault, SECOND)
    fault.plant(monkeypatch)
    said_of(one.judge(plan, find_axis=False))


Case = tuple[str, ModelSpec, bool, bool, str, RouterConfig | None, bool]


def cases(faults: list[Fault], *, both: bool) -> dict[Case, Fault]:
    """Each layout, model and kind of data once."""
    found: dict[Case, Fault] = {}
    for fault in faults:
        for text in (fault.layout, fault.elsewhere) if both else (fault.layout,):
            case = (
                text, fault.spec, fault.documents, fault.overflow, fault.recompute, fault.router, fault.rebalance,
            )  # fmt: skip
            found.setdefault(case, fault)
    return found


ALL = cases(list(FAULTS), both=True)
QUICK = cases([fault for fault in FAULTS if fault.quick], both=False).keys()


def shown(case: Case) -> str:
    text, spec, documents, overflow, recompute, router, rebalance = case
    options = " documents" * documents + " overflow" * overflow
    options += f" recompute={recompute}" * (recompute != "none") + " rebalance" * rebalance
    if router is not None:
        options += f" {router.balance} capacity={router.capacity_factor}"
    return f"{spec.name} {text}{options}"


@pytest.mark.parametrize(
    "case",
    [pytest.param(c, marks=() if c in QUICK else pytest.mark.exhaustive, id=shown(c)) for c in ALL],
)
def test_no_false_alarm(case: Case) -> None:
    plan, one = plan_of(case[0], ALL[case], SECOND)
    verdict = one.judge(plan, find_axis=False)
    assert verdict.passed, verdict.cause
    assert one.faults == ()


def test_the_collection() -> None:
    names = [fault.name for fault in FAULTS]
    assert len(names) == len(set(names)) >= 30
    assert sum(fault.quick for fault in FAULTS) >= 12
    for fault in FAULTS:
        assert fault.story.endswith(".")
        assert fault.words, fault.name
        first, second = Layout.parse(fault.layout), Layout.parse(fault.elsewhere)
        assert (first.dp, first.tp, first.pp, first.cp, first.schedule) != (
            second.dp, second.tp, second.pp, second.cp, second.schedule,
        )  # fmt: skip
    assert len(missed_by_the_loss()) > len(FAULTS) / 3, "why every gradient is compared"


def test_the_page_has_this_table() -> None:
    """`python -m tests.museum.table` writes it anew."""
    text, wanted = page()
    assert text == wanted

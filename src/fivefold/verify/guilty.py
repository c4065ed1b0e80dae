"""Who is guilty of a difference: recompute, experts that move, a loss scale, a loss of routers, an axis, its options.

Each is left out in turn, and the layout judged again: what the difference goes away with is at fault.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from fivefold.core.experts import ExpertsConfig
from fivefold.core.layout import Layout
from fivefold.core.plan import Plan
from fivefold.core.router import RouterConfig
from fivefold.errors import FivefoldError
from fivefold.verify.cause import CLEAN_RATIO, common_ratio, name_axis, times
from fivefold.verify.compare import Errors, assemble, best_ratio
from fivefold.verify.observe import Observation

if TYPE_CHECKING:
    from fivefold.verify.verify import Reference, Verdict


def find_guilty(
    reference: Reference,
    plan: Plan,
    verdict: Verdict,
    observations: Sequence[Observation],
    counts: dict[str, int],
) -> str:
    """In words. `observations`: what the ranks of `plan` saw; `counts`: what a ratio may be."""

    def still_fails(
        layout: Layout, *, scaled: bool = True, recomputed: bool = True, moving: bool = True
    ) -> bool:
        execution = plan.execution.replace(
            actions=plan.execution.actions if layout.schedule == "custom" else None,
            loss_scale=plan.execution.loss_scale if scaled else None,
            recompute=plan.execution.recompute if recomputed else "none",
            experts=plan.execution.experts if moving and layout.ep > 1 else ExpertsConfig(),
        )
        return _fails(reference, plan.replace(layout=layout, execution=execution))

    if plan.execution.recompute != "none" and not still_fails(plan.layout, recomputed=False):
        return f"recompute={plan.execution.recompute}: without it the difference is gone"
    every = plan.execution.experts.rebalance_every
    if every is not None and not still_fails(plan.layout, moving=False):
        return f"experts.rebalance_every={every}: without it the difference is gone"
    if plan.execution.loss_scale is not None and not still_fails(plan.layout, scaled=False):
        scale = "the loss scale: without one the difference is gone"
        if still_fails(Layout()):
            return f"{scale}, and one device has it too"
        return f"{scale}; {name_axis(plan.layout, still_fails)}"
    loss = None
    if (verdict.first_module or "").endswith(".router"):
        loss = _router_loss(reference, plan, observations, counts, verdict.bound)
    return (f"{loss}; " if loss else "") + name_axis(plan.layout, still_fails)


def _fails(reference: Reference, plan: Plan) -> bool:
    try:
        return not reference.judge(plan, find_axis=False).passed
    except FivefoldError:  # it cannot be run, or breaks: not known to be right
        return True


LOSSES: dict[str, Callable[[RouterConfig], RouterConfig]] = {
    "balance loss": lambda router: router.replace(balance="sequence", balance_coefficient=0.0),
    "z-loss": lambda router: router.replace(z_coefficient=0.0),
}
"""A loss that routers add, and what is asked of them without it."""


def _router_loss(
    reference: Reference,
    plan: Plan,
    observations: Sequence[Observation],
    counts: dict[str, int],
    bound: float,
) -> str | None:
    """Which loss of the routers is guilty, and at which strength it acts; None: neither of them.

    What a loss adds to the gradients of the first step is the difference to a run without it: there, choices and all
    else of the forward pass are the same.
    """
    for name, leave_out in LOSSES.items():
        router = leave_out(plan.execution.router)
        if router == plan.execution.router:
            continue
        without = reference.with_router(router)
        changed = plan.replace(execution=plan.execution.replace(router=router))
        if without.faults or _fails(without, changed):
            continue
        errors, seen = Errors(), assemble(observations)
        keys = [
            key
            for key in without.wholes
            if key[0] == "gradients" and key[1].endswith(".router.weight step 1") and key in seen
        ]
        for key in keys:
            plain = without.wholes[key].values
            errors.shares[key] = best_ratio(seen[key].values - plain, reference.wholes[key].values - plain)
        ratio = common_ratio(keys, errors, bound)
        acts = "" if ratio is None else f" acts {times(ratio, counts, CLEAN_RATIO * bound)}"
        return f"the {name}{acts}: without it the difference is gone"
    return None

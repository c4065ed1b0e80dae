"""Layouts that the estimate cannot tell apart, and the few runs that would."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fivefold.plan.clock import Clock
from fivefold.plan.ranking import REPEAT, no_slower
from fivefold.plan.result import layout_facts
from fivefold.plan.search import Found
from fivefold.units import format_seconds

if TYPE_CHECKING:
    from fivefold.plan.residual import Matrix

FEWEST_RUNS, MOST_RUNS = 3, 5
ENOUGH = 0.5
"""Runs are added until the spread between candidates is below so much of `REPEAT`."""


def alike(this: Found, found: Sequence[Found]) -> list[dict[str, Any]]:
    """Layouts whose step differs by no more than that of repeats of one configuration, by the rule of `ranking`."""
    return [
        {
            **layout_facts(one.choice.layout, one.choice.micro_batch, one.choice.recompute),
            "step_time_s": one.step_s,
            "step_time_p10_s": one.low_s,
            "step_time_p90_s": one.high_s,
            "step_time_ratio": one.step_s / this.step_s,
            "overlaps": one.low_s <= this.high_s and this.low_s <= one.high_s,
        }
        for one in found
        if one.choice != this.choice
        and no_slower(one.step_s, this.step_s)
        and no_slower(this.step_s, one.step_s)
    ]


def alike_text(others: list[dict[str, Any]], looked_at: int) -> str:
    """How many there are."""
    if not others:
        return f"no other layout comes within {REPEAT:.0%}, by which repeats of one configuration differ"
    more = " or more" if len(others) >= looked_at - 1 else ""
    return f"{len(others)}{more} other layouts are within {REPEAT:.0%}, by which repeats of one configuration differ"


def settling_runs(clock: Clock, found: Sequence[Found]) -> dict[str, Any]:
    """The runs among these candidates that leave least doubt about their order.

    Greedy: each next run lowers most the variance of the candidates' log times about their mean, since what all of
    them share decides nothing. Source: Cohn 1996, equation 9, as `fit.reduction`, for differences.
    """
    import numpy as np

    from fivefold.plan import fit

    if len(found) < 2:
        return {"runs": [], "spread_before": 0.0, "spread_after": 0.0, "text": "there is no other candidate"}
    K, noise = fit.belief(
        clock.jobs([one.choice for one in found]),
        clock.coefficients,
        clock.calibration.fit if clock.calibration else None,
    )
    before = spread(K)
    chosen: list[int] = []
    for _ in range(min(MOST_RUNS, len(found))):
        centred = K - K.mean(axis=0)
        gain = (centred * centred).sum(axis=0) / (np.diag(K) + noise**2)
        gain[chosen] = -np.inf
        best = int(gain.argmax())
        chosen.append(best)
        K = K - np.outer(K[:, best], K[best]) / (K[best, best] + noise**2)
        if len(chosen) >= FEWEST_RUNS and spread(K) < ENOUGH * REPEAT:
            break
    runs = [
        layout_facts(found[i].choice.layout, found[i].choice.micro_batch, found[i].choice.recompute)
        | {"step_time_s": found[i].step_s}
        for i in chosen
    ]
    after = spread(K)
    text = (
        f"{len(runs)} runs bring the doubt between {len(found)} candidates from {before:.1%} down to {after:.1%}; "
        f"a step of each takes about {format_seconds(max(one['step_time_s'] for one in runs))}"
    )
    return {"runs": runs, "spread_before": before, "spread_after": after, "text": text}


def spread(covariance: Matrix) -> float:
    """Standard deviation of the candidates' log times about their mean: what of the doubt concerns their order."""
    import numpy as np

    centred = covariance - covariance.mean(axis=0) - covariance.mean(axis=1)[:, None] + covariance.mean()
    return float(np.sqrt(max(0.0, np.diag(centred).mean())))

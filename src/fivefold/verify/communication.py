"""The communication that ranks dispatched in every step against what the strategies predict for a step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from functools import partial

from fivefold.core.events import Events, difference, without_setup
from fivefold.core.plan import Plan
from fivefold.strategies import compose
from fivefold.strategies.expert.replicas import Replicas, placed_after
from fivefold.verify.observe import OPTIMIZERS, Observation, with_optimizer
from fivefold.verify.routes import counts_of

NAMED = 3
"""Ranks and steps that a line names before it counts the rest."""


def event_differences(plan: Plan, observations: Sequence[Observation]) -> list[str]:
    """One line for each event that is not as predicted, with the ranks and steps in which it is so; empty if none.

    Examples: `every rank, every step: backward tp all_gather float64 4096 B: predicted 6, recorded 12 (2x)`,
              `rank 1, adamw step 2: reduce data all_reduce float64 800 B: predicted 1, recorded none (missing)`.
    """
    found: dict[str, dict[tuple[str, ...], list[int]]] = {}
    placed = _placed(plan, observations[0]) if observations else {}
    plans = {str(name): with_optimizer(plan, name) for name in OPTIMIZERS}
    for rank, seen in enumerate(observations):
        plain = compose.predict_events(plan, rank, seen.rows)
        steps_of: dict[str, list[str]] = {}
        for step, events in seen.events.items():
            routed = [other.routed.get(step, {}) for other in observations]
            # The bytes of a dispatch follow from what the routers chose in this step.
            counts = counts_of(routed, plan)
            replicas, places_anew = placed.get(step, ({}, False))
            predict = partial(
                compose.predict_events,
                plans[step.partition(" ")[0]],
                rank,
                seen.rows,
                counts,
                replicas=replicas,
            )
            due = predict(places_anew=places_anew) if seen.routed.get(step) or places_anew else plain
            if step in seen.skipped:  # it places experts all the same
                staying = predict(places_anew=False) if places_anew else due
                due = _skipped(staying) + (due - staying)
            for line in difference(due, without_setup(events)):
                steps_of.setdefault(line, []).append(step)
        for line, steps in steps_of.items():
            every = len(steps) == len(seen.events) > 1
            found.setdefault(line, {}).setdefault(("every step",) if every else tuple(steps), []).append(rank)
    return [
        f"{rank_names(ranks, len(observations))}, {_some(steps)}: {line}"
        for line, places in found.items()
        for steps, ranks in places.items()
    ]


def _placed(plan: Plan, seen: Observation) -> dict[str, tuple[dict[int, Replicas], bool]]:
    """Where experts were in each step, by what was chosen in those before; and whether they were placed after it."""
    every = plan.execution.experts.rebalance_every
    found: dict[str, tuple[dict[int, Replicas], bool]] = {}
    histories: dict[str, list[dict[int, tuple[int, ...]]]] = {}
    for step, chosen in seen.chosen.items() if every else ():
        history = histories.setdefault(step.partition(" ")[0], [])
        replicas = placed_after(history, plan.execution.experts, plan.layout.ep)
        history.append(chosen)
        found[step] = replicas, len(history) % (every or 1) == 0
    return found


def _skipped(events: Events) -> Events:
    """What a step communicates that changes nothing: no updated parameters."""
    return Counter({event: count for event, count in events.items() if event.phase != "optimizer"})


def rank_names(ranks: Sequence[int], world_size: int = 0) -> str:
    """`rank 1`, `ranks 0 and 2`; `every rank` where they are all of a world of more than one."""
    if len(ranks) == world_size > 1:
        return "every rank"
    return f"rank{'s' if len(ranks) > 1 else ''} {_some(ranks)}"


def _some(items: Sequence[object]) -> str:
    """`0`, `0 and 2`, `0, 2 and 5`, `0, 2, 5 and 29 more`."""
    names: Iterable[str] = map(str, items[:NAMED])
    parts = [*names, *([f"{len(items) - NAMED} more"] if len(items) > NAMED else [])]
    return " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)

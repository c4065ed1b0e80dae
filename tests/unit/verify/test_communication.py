"""Recorded communication against predicted, on ledgers made from the prediction by hand."""

from __future__ import annotations

from collections import Counter

import pytest

from fivefold.core.events import Event, Events
from fivefold.core.layout import Layout
from fivefold.core.model_spec import AttentionSpec, BlockSpec, MLPSpec, ModelSpec
from fivefold.strategies import compose
from fivefold.verify.communication import event_differences
from fivefold.verify.observe import Observation
from fivefold.verify.workload import common_plans

BLOCK = BlockSpec(attention=AttentionSpec(heads=8, kv_heads=8, head_dim=8), mlp=MLPSpec(ffn=32))
SPEC = ModelSpec(name="m", hidden=32, vocab=50, blocks=(BLOCK, BLOCK))
STEPS = ("sgd step 1", "sgd step 2", "adamw step 1", "adamw step 2")
EXTRA = Event("backward", "tp", "all_reduce", "float64", 8)
LINE = "backward tp all_reduce float64 8 B: predicted none, recorded 1 (unexpected)"


def lines(text: str, where: dict[int, tuple[str, ...]], steps: tuple[str, ...] = STEPS) -> list[str]:
    """What is said if the ranks in `where` dispatch one event too many in these steps."""
    plan = common_plans(SPEC, Layout.parse(text), Layout(), "float64")[0]

    def recorded(rank: int, step: str) -> Events:
        setup = Counter({Event("setup", "world", "broadcast", "float64", 8): 3})
        return compose.predict_events(plan, rank) + setup + Counter({EXTRA: int(step in where.get(rank, ()))})

    ranks = range(plan.layout.world_size)
    return event_differences(plan, [Observation([], {s: recorded(r, s) for s in steps}) for r in ranks])


@pytest.mark.parametrize(
    ("where", "said"),
    [
        ({}, None),
        ({1: ("adamw step 2",)}, "rank 1, adamw step 2"),
        ({0: STEPS}, "rank 0, every step"),
        ({0: STEPS, 1: STEPS, 2: STEPS, 3: STEPS}, "every rank, every step"),
        ({0: STEPS[1:3], 2: STEPS[1:3]}, "ranks 0 and 2, sgd step 2 and adamw step 1"),
        (
            {0: STEPS[:3], 1: STEPS[:3], 2: STEPS[:3]},
            "ranks 0, 1 and 2, sgd step 1, sgd step 2 and adamw step 1",
        ),
    ],
)
def test_one_line_for_one_event(where: dict[int, tuple[str, ...]], said: str | None) -> None:
    """However many ranks and steps it concerns."""
    assert lines("dp2 tp2", where) == ([f"{said}: {LINE}"] if said else [])


def test_ranks_that_differ_in_their_steps_have_a_line_each() -> None:
    assert lines("tp2", {0: STEPS[:1], 1: STEPS[3:]}) == [
        f"rank 0, sgd step 1: {LINE}", f"rank 1, adamw step 2: {LINE}",
    ]  # fmt: skip


def test_long_lists_are_counted() -> None:
    steps = tuple(f"sgd step {n}" for n in range(1, 21))
    where = dict.fromkeys(range(7), steps[1:])
    assert lines("dp4 tp2", where, steps) == [
        f"ranks 0, 1, 2 and 4 more, sgd step 2, sgd step 3, sgd step 4 and 16 more: {LINE}"
    ]


def test_what_is_missing_in_one_step_is_told() -> None:
    plan = common_plans(SPEC, Layout.parse("dp2"), Layout(), "float64")[0]
    full = [compose.predict_events(plan, rank) for rank in range(2)]
    less = full[1].copy()
    gone = next(event for event in less if event.phase == "reduce")
    del less[gone]
    seen = [Observation([], dict.fromkeys(STEPS, full[rank])) for rank in range(2)]
    seen[1].events["adamw step 2"] = less
    assert event_differences(plan, seen) == [
        f"rank 1, adamw step 2: {gone}: predicted {full[1][gone]}, recorded none (missing)"
    ]


def test_a_skipped_step_updates_nobody() -> None:
    """Under ZeRO-1 it must not gather parameters, and every other step must."""
    plan = common_plans(SPEC, Layout.parse("dp2 zero1"), Layout(), "float64")[0]
    whole = compose.predict_events(plan, 0)
    short = Counter({event: n for event, n in whole.items() if event.op != "all_gather"})
    assert whole != short
    for events, fine in ((short, True), (whole, False)):
        seen = [Observation([], {"sgd step 3": events}, skipped={"sgd step 3"}) for _ in range(2)]
        assert (event_differences(plan, seen) == []) == fine
    assert event_differences(plan, [Observation([], {"sgd step 3": short}) for _ in range(2)])

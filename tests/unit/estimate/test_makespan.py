"""The clock of many pipelines against the timeline of one, and the bubbles of schedules that split the backward."""

from __future__ import annotations

import numpy as np
import pytest

from fivefold.core.layout import Layout
from fivefold.estimate.makespan import KINDS, LONG, counted, makespan, program, run
from fivefold.estimate.step import split_bubble
from fivefold.estimate.timeline import simulate
from fivefold.strategies.pipeline.schedules import all_actions

SCHEDULES = [
    ("1f1b", 1),
    ("1f1b", 2),
    ("1f1b", 3),
    ("zbh1", 1),
    ("zbv", 2),
    ("dualpipev", 2),
    ("gpipe", 1),
    ("bfs", 2),
]


def costs(draw: np.random.Generator, stages: int, n: int, spread: float) -> np.ndarray:
    """F, B, I and W of uneven stages."""
    forward, inputs, weights = (
        draw.uniform(1 - spread, 1 + spread, (stages, n)) * size for size in (1.0, 1.2, 0.8)
    )
    return np.concatenate([forward, inputs + weights, inputs, weights])


def timeline_s(layout: Layout, microbatches: int, durations: np.ndarray, message_s: float) -> float:
    return simulate(
        all_actions(layout, microbatches),
        layout.owner_of,
        lambda action: float(durations[KINDS.index(action.kind) * layout.stages + action.chunk]),
        message_s=lambda send: message_s,
    ).total_s


@pytest.mark.parametrize(("schedule", "chunks"), SCHEDULES)
@pytest.mark.parametrize("pp", [2, 3, 5])
def test_it_is_the_timeline(schedule: str, chunks: int, pp: int) -> None:
    draw = np.random.default_rng(pp * chunks)
    layout = Layout(pp=pp, schedule=schedule, chunks=chunks)  # type: ignore[arg-type]
    for microbatches in (1, 2, 4, 7, 11):
        durations, messages = costs(draw, layout.stages, 3, 0.5), np.array([0.0, 0.1, 1.5])
        mine = run(program(schedule, pp, chunks, microbatches), durations, messages)
        theirs = [timeline_s(layout, microbatches, durations[:, i], messages[i]) for i in range(3)]
        assert mine.tolist() == theirs


@pytest.mark.parametrize(("schedule", "chunks"), SCHEDULES)
def test_many_microbatches_keep_the_pace(schedule: str, chunks: int) -> None:
    draw = np.random.default_rng(3)
    for pp in (2, 4, 8):
        for microbatches in (5 * pp, 12 * pp + 1):
            durations, messages = costs(draw, pp * chunks, 4, 0.1), np.array([0.0, 0.02, 0.1, 0.3])
            assert counted(pp, microbatches) < microbatches
            many = np.full(4, float(microbatches))
            short = makespan(schedule, pp, chunks, many, durations, messages)
            whole = run(program(schedule, pp, chunks, microbatches), durations, messages)
            assert short == pytest.approx(whole, rel=0.015)


def test_equal_stages_under_1f1b_in_closed_form() -> None:
    """(m + p - 1)(F + B), at any number of microbatches. Narayanan et al. 2021, section 2.2.1."""
    for pp, microbatches in ((4, 3), (4, 64), (8, 200)):
        durations = np.repeat(np.array([1.0, 2.0, 1.0, 1.0]), pp)[:, None]
        taken = makespan("1f1b", pp, 1, np.array([float(microbatches)]), durations, np.zeros(1))
        assert taken[0] == pytest.approx((microbatches + pp - 1) * 3)


@pytest.mark.parametrize(("schedule", "chunks"), [("zbh1", 1), ("zbv", 2), ("dualpipev", 2)])
def test_bubbles_of_split_backwards(schedule: str, chunks: int) -> None:
    """What the search takes, against the schedules' own lists."""
    pp, sizes = 16, [(1.0, i, w) for i in (0.5, 1.0, 1.5, 3.0) for w in (0.1, 0.5, 1.0)]
    F, I, W = (np.array(column) for column in zip(*sizes))  # noqa: E741
    rows = [np.tile(part / chunks, (pp * chunks, 1)) for part in (F, I + W, I, W)]
    microbatches = LONG * pp
    total = run(program(schedule, pp, chunks, microbatches), np.concatenate(rows), 0 * F)
    bubble = total - microbatches * (F + I + W)
    expected = split_bubble(schedule, F, I, W) * (pp - 1) * (F + I + W)
    assert bubble == pytest.approx(expected, rel=0.05)

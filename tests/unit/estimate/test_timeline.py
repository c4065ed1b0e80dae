"""The simulated timeline against the papers' closed forms, and against longest paths in the graph of actions.

p pipeline ranks, m microbatches, v chunks on each; F, I, W, B = I + W what a chunk's computations take.
"""

from __future__ import annotations

import random
from functools import cache

import pytest

from fivefold.core.layout import Layout
from fivefold.errors import LayoutError
from fivefold.estimate.timeline import Timeline, draw, equal_chunks, simulate
from fivefold.strategies.pipeline.actions import Action, format_actions, lower, parse_actions
from fivefold.strategies.pipeline.schedules import SCHEDULES, bubble_frac, computations, rank_actions

every_size = pytest.mark.parametrize("p", range(2, 9))


def run(name: str, p: int, m: int, *costs: float, message: float = 0.0) -> Timeline:
    """`costs`: F, I and W; 1 each where they are left out."""
    cut = Layout.parse(f"pp{p}:{name}")
    cost = dict(zip("FIW", costs or (1.0, 1.0, 1.0)))
    cost["B"] = cost["I"] + cost["W"]
    lists = [rank_actions(cut, r, m) for r in range(p)]
    return simulate(lists, cut.owner_of, lambda a: cost[a.kind], message_s=lambda send: message)


def bubble(timeline: Timeline) -> float:
    """Time of the step in which a rank does not compute; equal on all ranks where their work is."""
    return timeline.total_s - timeline.ranks[0].compute_s


@every_size
@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_bubble_of_gpipe_and_1f1b(name: str, p: int) -> None:
    """(p - 1) / (p - 1 + m), whatever F and B are (Narayanan et al. 2021, 2.2.1)."""
    for m in range(1, 14):
        for costs in ((1.0, 1.0, 1.0), (1.0, 0.25, 0.5), (2.0, 3.0, 1.0)):
            assert run(name, p, m, *costs).bubble_frac == pytest.approx(bubble_frac(p, m), abs=1e-12)


@every_size
@pytest.mark.parametrize("name", ["1f1b*2", "1f1b*3", "bfs*2", "bfs*4"])
def test_bubble_of_chunks(name: str, p: int) -> None:
    """(p - 1) / (p - 1 + m v) from m = p on, for multiples of p and all others."""
    v = int(name[-1])
    for m in (p, p + 1, 2 * p - 1, 2 * p, 2 * p + 1):
        for costs in ((1.0, 0.5, 0.5), (1.0, 1.0, 1.0)):
            assert run(name, p, m, *costs).bubble_frac == pytest.approx(bubble_frac(p, m, v), abs=1e-12)


@every_size
def test_bubble_of_zb_h1(p: int) -> None:
    """(p - 1)(F + I - W) from m = p on where W is the shortest (Qi et al. 2023, table 2)."""
    for F, I, W in ((1, 1, 1), (2, 3, 2), (10, 12, 8), (3, 3, 2), (5, 6, 1)):  # noqa: E741
        for m in (p, p + 1, 3 * p):
            assert bubble(run("zbh1", p, m, F, I, W)) == pytest.approx((p - 1) * (F + I - W))


@every_size
def test_zbv_has_no_bubble_of_its_own(p: int) -> None:
    """With F = I = W and m >= 2p - 1 no rank pauses; what is left is that rank p - 1 cannot start before (p - 1) F."""
    for m in (2 * p - 1, 2 * p, 4 * p):
        timeline = run("zbv", p, m)
        for r, spans in enumerate(timeline.spans):
            works = [span for span in spans if span.action.kind != "REDUCE_GRAD"]
            assert works[-1].end_s - works[0].start_s == timeline.ranks[r].compute_s == 6 * m
        assert bubble(timeline) == p - 1


@every_size
def test_bubble_of_dualpipev(p: int) -> None:
    """At most (p - 1)(F + 2 B - 3 W): its README with PP = 2p and nothing overlapped. (p - 1) F where F = I = W."""
    for F, I, W in ((1, 1, 1), (2, 3, 2), (10, 12, 8), (3, 3, 2)):  # noqa: E741
        for m in (2 * p, 3 * p + 1):
            assert bubble(run("dualpipev", p, m, F, I, W)) <= (p - 1) * (F + 2 * I - W)
    assert bubble(run("dualpipev", p, 2 * p)) == p - 1


@every_size
def test_zero_bubble_is_below_1f1b(p: int) -> None:
    """For the same model: a chunk of a V schedule takes half as long. Worked out: (p - 1) times 3, 1 and 1/2."""
    for m in (2 * p, 4 * p):
        times = {n: equal_chunks(Layout.parse(f"pp{p}:{n}"), m) for n in ("1f1b", "zbh1", "zbv", "dualpipev")}
        assert {name: t.total_s - 3 * m for name, t in times.items()} == {
            "1f1b": 3 * (p - 1), "zbh1": p - 1, "zbv": (p - 1) / 2, "dualpipev": (p - 1) / 2
        }  # fmt: skip
        assert {t.ranks[0].compute_s for t in times.values()} == {3 * m}


def test_a_custom_list_that_is_1f1b_has_its_timeline() -> None:
    lines = format_actions(computations(Layout.parse("pp3"), 5))
    custom = equal_chunks(Layout.parse("pp3:custom"), 5, custom=lines)
    assert custom == equal_chunks(Layout.parse("pp3"), 5)


def longest_paths(
    lists: list[list[Action]], cut: Layout, cost: dict[Action, float], message: dict[Action, float]
) -> dict[Action, float]:
    """End of every computation by its definition, action by action backwards: no events, no order of evaluation."""
    before = {a: actions[i - 1] if i else None for actions in lists for i, a in enumerate(actions)}
    sends = [a for actions in lists for a in actions if a.kind.startswith("SEND")]
    edges: dict[tuple[str, int], list[Action]] = {}
    for send in sends:
        edges.setdefault((send.kind, send.chunk), []).append(send)

    @cache
    def end(action: Action) -> float:
        kind, chunk, j = action
        start = end(before[action]) if before[action] else 0.0
        if kind.startswith(("SEND", "RECV", "REDUCE")):
            return start
        if kind == "F" and chunk and cut.owner_of(chunk - 1) != cut.owner_of(chunk):
            start = max(start, arrival(Action("SEND_F", chunk - 1, j)))
        if kind in ("B", "I") and chunk < cut.stages - 1 and cut.owner_of(chunk + 1) != cut.owner_of(chunk):
            start = max(start, arrival(Action("SEND_B", chunk + 1, j)))
        return start + cost[action]

    @cache
    def arrival(send: Action) -> float:
        kind, chunk, j = send
        receive = Action("RECV_F", chunk + 1, j) if kind == "SEND_F" else Action("RECV_B", chunk - 1, j)
        earlier = edges[kind, chunk][: edges[kind, chunk].index(send)]
        free = arrival(earlier[-1]) if earlier else 0.0
        return max(end(send), end(receive), free) + message[send]

    return {action: end(action) for actions in lists for action in actions}


@pytest.mark.parametrize("name", [*SCHEDULES, "1f1b*2", "bfs*3"])
def test_any_costs_against_longest_paths(name: str) -> None:
    rng = random.Random(name)
    for p, m in ((2, 3), (3, 5), (4, 4), (4, 7)):
        cut = Layout.parse(f"pp{p}:{name}")
        lists = lower(computations(cut, m), cut.owner_of, cut.stages)
        every = [action for actions in lists for action in actions]
        cost = {a: rng.choice([0.0, rng.uniform(0.1, 3.0)]) for a in every}
        message = {a: rng.choice([0.0, rng.uniform(0.1, 2.0)]) for a in every}
        ends = longest_paths(lists, cut, cost, message)
        timeline = simulate(lists, cut.owner_of, cost.__getitem__, message_s=message.__getitem__)
        for actions, spans, times in zip(lists, timeline.spans, timeline.ranks):
            works = [span for span in spans if span.action.kind != "REDUCE_GRAD"]
            assert [s.action for s in works] == [a for a in actions if a.kind in ("F", "B", "I", "W")]
            assert [s.end_s for s in works] == pytest.approx([ends[s.action] for s in works])
            assert times.compute_s == pytest.approx(sum(cost[s.action] for s in works))
            parts = (times.compute_s, times.message_s, times.reduce_s, times.idle_s)
            assert min(parts) >= 0
            assert sum(parts) == pytest.approx(timeline.total_s)
        assert timeline.total_s == pytest.approx(max(ends.values()))


def test_waiting_is_told_apart() -> None:
    """Two ranks, one microbatch, F 2, B 3, a message of 5: rank 1 idles for 2 and then waits 5 for the message."""
    cut = Layout.parse("pp2")
    lists = [rank_actions(cut, r, 1) for r in range(2)]
    cost = {"F": 2.0, "B": 3.0}
    timeline = simulate(lists, cut.owner_of, lambda a: cost[a.kind], message_s=lambda send: 5.0)
    first, second = timeline.ranks
    assert timeline.total_s == 2 + 5 + 2 + 3 + 5 + 3
    assert (second.compute_s, second.idle_s, second.message_s) == (5, 2 + 8, 5)
    assert (first.compute_s, first.idle_s, first.message_s) == (5, 5 + 5, 5)


def test_reductions_run_beside_computations_and_are_waited_for_at_the_end() -> None:
    cut = Layout.parse("pp2:1f1b*2")
    lists = [rank_actions(cut, r, 2) for r in range(2)]
    free = simulate(lists, cut.owner_of, lambda a: 1.0)
    timeline = simulate(lists, cut.owner_of, lambda a: 1.0, reduce_s=lambda a: 3.0)
    assert (
        timeline.total_s == free.total_s + 3 + 1
    )  # the last chunk's 2 backwards hide 2 of its predecessor's 3
    spans = [span for span in timeline.spans[0] if span.action.kind == "REDUCE_GRAD"]
    assert [span.action.chunk for span in spans] == [2, 0]
    assert spans[1].start_s == spans[0].end_s
    assert timeline.ranks[0].reduce_s == 4


def test_messages_of_one_edge_follow_each_other() -> None:
    """GPipe with F = 1 and messages of 3: the second arrives 3 after the first, not 1."""
    timeline = run("gpipe", 2, 3, message=3.0)
    assert [span.start_s for span in timeline.spans[1][:3]] == [4, 7, 10]


def test_lists_that_never_end_are_refused() -> None:
    cut = Layout.parse("pp2:custom")
    lists = lower(parse_actions("0F0, 0B0, 0F1, 0B1\n1F1, 1F0, 1B0, 1B1"), cut.owner_of, 2)
    with pytest.raises(
        LayoutError, match="deadlock: rank 0 waits at 0B0 for 1B0 of rank 1, rank 1 waits at 1F1"
    ):
        simulate(lists, cut.owner_of, lambda a: 1.0)


def test_drawing() -> None:
    assert draw(run("zbh1", 2, 2), 1.0).splitlines() == [
        "rank 0  F0 F1  . I0 W0 I1 W1",
        "rank 1   . F0 I0 F1 I1 W0 W1",
    ]
    assert (
        draw(run("zbv", 2, 1, 0.5, 0.5, 1.0), 0.5).splitlines()[1]
        == "rank 1   . F0 f0  .  . i0 w0 -- I0 W0 --  ."
    )

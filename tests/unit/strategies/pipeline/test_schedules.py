"""Schedules against a simulation: what runs, in which order, with how many in flight, and how idle.

p pipeline ranks, m microbatches, r a rank.
"""

from __future__ import annotations

from collections import Counter

import pytest

from fivefold.core.layout import Layout
from fivefold.strategies.pipeline.schedules import (
    SCHEDULES,
    Action,
    bubble_frac,
    in_flight,
    lower,
    rank_actions,
)

RANKS = range(1, 9)
MICROBATCHES = range(1, 13)
NAMES = sorted(SCHEDULES)


def lowered(name: str, p: int, m: int) -> list[list[Action]]:
    return [lower(SCHEDULES[name](r, p, m), lambda chunk: chunk, p) for r in range(p)]


@pytest.mark.parametrize("text", ["dp1", "pp2", "pp4:gpipe", "dp2 tp2 pp3"])
def test_a_layout_has_the_lists_of_its_schedule(text: str) -> None:
    layout = Layout.parse(text)
    lists = [rank_actions(layout, r, 6) for r in range(layout.pp)]
    assert lists == lowered(layout.schedule, layout.pp, 6)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("p", RANKS)
def test_every_rank_runs_each_forward_and_backward_once(name: str, p: int) -> None:
    for m in MICROBATCHES:
        for r, actions in enumerate(lowered(name, p, m)):
            assert all(action.chunk == r for action in actions)
            for kind in ("F", "B"):
                assert [a.microbatch for a in actions if a.kind == kind] == list(range(m))
            for j in range(m):
                assert actions.index(Action("F", r, j)) < actions.index(Action("B", r, j))
            assert actions[-1] == Action("REDUCE_GRAD", r, -1)
            assert [a.kind for a in actions].count("REDUCE_GRAD") == 1


@pytest.mark.parametrize("p", RANKS)
def test_microbatches_in_flight(p: int) -> None:
    """1F1B: min(m, p - r) on rank r (Narayanan et al. 2021, section 2.2.1); GPipe: m (Huang et al. 2019)."""
    for m in MICROBATCHES:
        for r in range(p):
            assert in_flight(lowered("1f1b", p, m)[r]) == min(m, p - r)
            assert in_flight(lowered("gpipe", p, m)[r]) == m


def test_the_published_list_of_1f1b() -> None:
    """p = 4, m = 8: three warm-up forwards on rank 0, none on rank 3 (figure 4 of Narayanan et al. 2021)."""
    first = [f"{a.kind}{a.microbatch}" for a in SCHEDULES["1f1b"](0, 4, 8)]
    assert " ".join(first) == "F0 F1 F2 F3 B0 F4 B1 F5 B2 F6 B3 F7 B4 B5 B6 B7"
    last = [f"{a.kind}{a.microbatch}" for a in SCHEDULES["1f1b"](3, 4, 8)]
    assert " ".join(last) == "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 B7"


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("p", RANKS)
def test_sends_and_receives_pair_in_order(name: str, p: int) -> None:
    """On each directed edge the k-th send meets the k-th receive, of the same microbatch."""
    for m in MICROBATCHES:
        lists = lowered(name, p, m)
        for r in range(p - 1):
            for kind, source, target in (("F", r, r + 1), ("B", r + 1, r)):
                sent = [a.microbatch for a in lists[source] if a.kind == f"SEND_{kind}"]
                received = [a.microbatch for a in lists[target] if a.kind == f"RECV_{kind}"]
                assert sent == received == list(range(m))
        kinds = Counter(a.kind for actions in lists for a in actions)
        assert kinds["SEND_F"] == kinds["RECV_F"] == kinds["SEND_B"] == kinds["RECV_B"] == (p - 1) * m


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("p", RANKS)
def test_messages_travel_while_a_rank_computes(name: str, p: int) -> None:
    """A receive is posted before the computation ahead of its own; a send follows its own at once."""
    for m in MICROBATCHES:
        for actions in lowered(name, p, m):
            computations = [a for a in actions if a.kind in ("F", "B")]
            for i, action in enumerate(actions):
                kind, _, way = action.kind.partition("_")
                if kind == "RECV":
                    done = sum(a.kind in ("F", "B") for a in actions[:i])
                    assert computations.index(Action(way, *action[1:])) in (done, done + 1)
                    assert done == 0 or computations.index(Action(way, *action[1:])) == done + 1
                if kind == "SEND":
                    before = [a for a in actions[:i] if a.kind in ("F", "B")]
                    assert before[-1] == Action(way, *action[1:])


class Rendezvous:
    """Executes lowered lists where a send ends only when its receive is posted, the strictest of backends.

    A rank waits for the message that a computation reads, for the forward message whose gradient it has read, and
    for the previous gradient before it sends the next.
    """

    def __init__(self, lists: list[list[Action]]) -> None:
        self.lists = lists
        self.position = [0] * len(lists)
        self.posted: set[tuple[str, int, int]] = set()
        self.sent: set[tuple[str, int, int]] = set()
        self.done: set[Action] = set()

    def run(self) -> bool:
        """Whether every rank comes to its end."""
        moved = True
        while moved:
            moved = any(self.advance(r) for r in range(len(self.lists)))
        return self.position == [len(actions) for actions in self.lists]

    def advance(self, r: int) -> bool:
        start = self.position[r]
        while self.position[r] < len(self.lists[r]) and self.ready(self.lists[r][self.position[r]]):
            kind, chunk, j = action = self.lists[r][self.position[r]]
            if kind.startswith("RECV"):
                self.posted.add((kind[-1], chunk, j))
            elif kind.startswith("SEND"):
                assert Action(kind[-1], chunk, j) in self.done, "a message is sent after it was made"  # type: ignore[arg-type]
                self.sent.add((kind[-1], chunk + (1 if kind == "SEND_F" else -1), j))
            self.done.add(action)
            self.position[r] += 1
        return self.position[r] > start

    def ready(self, action: Action) -> bool:
        kind, chunk, j = action
        if kind == "F":
            return chunk == 0 or ("F", chunk, j) in self.sent & self.posted
        if kind == "B":
            last = len(self.lists) - 1
            forward_arrived = chunk == last or ("F", chunk + 1, j) in self.posted
            return forward_arrived and (chunk == last or ("B", chunk, j) in self.sent & self.posted)
        if kind == "SEND_B":
            return j == 0 or ("B", chunk - 1, j - 1) in self.posted
        return True


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("p", RANKS)
def test_no_deadlock(name: str, p: int) -> None:
    for m in MICROBATCHES:
        run = Rendezvous(lowered(name, p, m))
        assert run.run(), f"m = {m}: some rank waits for ever, at {run.position}"
        assert run.sent == run.posted


def test_the_simulation_finds_a_deadlock() -> None:
    """Two ranks that each want the other's message first."""
    first, last = lowered("1f1b", 2, 2)
    order = [a for a in first if a.kind != "SEND_F"] + [a for a in first if a.kind == "SEND_F"]
    assert not Rendezvous([order, last]).run()


def finish_times(name: str, p: int, m: int, cost: dict[str, float]) -> list[float]:
    """When each rank is done, with messages that take no time."""
    lists = [SCHEDULES[name](r, p, m) for r in range(p)]
    end: dict[Action, float] = {}
    free, todo = [0.0] * p, [0] * p
    while todo != [len(actions) for actions in lists]:
        for r in range(p):
            if todo[r] == len(lists[r]):
                continue
            action = lists[r][todo[r]]
            source = r + (-1 if action.kind == "F" else 1)
            needs = Action(action.kind, source, action.microbatch)
            if 0 <= source < p and needs not in end:
                continue
            free[r] = end[action] = max(free[r], end.get(needs, 0.0)) + cost[action.kind]
            todo[r] += 1
    return free


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("p", RANKS)
@pytest.mark.parametrize("backward", [1.0, 2.0])
def test_bubble_formula(name: str, p: int, backward: float) -> None:
    """Idle share of all ranks over the whole run, with equal stages."""
    for m in MICROBATCHES:
        total = max(finish_times(name, p, m, {"F": 1.0, "B": backward}))
        assert 1 - m * (1.0 + backward) / total == pytest.approx(bubble_frac(p, m), abs=1e-12)


def test_chunks_on_one_rank_exchange_nothing() -> None:
    """A pipeline folded in two: chunks 1 and 2 are neighbours on rank 1."""
    owner = {0: 0, 1: 1, 2: 1, 3: 0}.__getitem__
    computations = [Action("F", 1, 0), Action("F", 2, 0), Action("B", 2, 0), Action("B", 1, 0)]
    kinds = [str(action) for action in lower(computations, owner, 4)]
    assert kinds == [
        "RECV_F(1,0)", "F(1,0)", "RECV_B(2,0)", "F(2,0)", "SEND_F(2,0)",
        "B(2,0)", "REDUCE_GRAD(2)", "B(1,0)", "SEND_B(1,0)", "REDUCE_GRAD(1)",
    ]  # fmt: skip


def test_in_flight_counts_the_most_at_one_time() -> None:
    actions = [
        Action(k, 0, j)
        for k, j in (("F", 0), ("B", 0), ("F", 1), ("F", 2), ("B", 1), ("F", 3), ("B", 2), ("B", 3))
    ]  # type: ignore[arg-type]
    assert in_flight(actions) == 2

"""Schedules against their papers, torch's own lists and a simulation: what runs, in which order, how much is held.

p pipeline ranks, m microbatches, v chunks on each rank, r a rank.
"""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import pytest
from torch.distributed.pipelining import schedules as theirs

from fivefold.core.layout import Layout
from fivefold.errors import LayoutError
from fivefold.strategies.pipeline.actions import COMPUTATIONS, Action, lower
from fivefold.strategies.pipeline.check import check_actions
from fivefold.strategies.pipeline.schedules import (
    SCHEDULES,
    InFlight,
    bubble_frac,
    computations,
    in_flight,
    in_flight_bound,
    rank_actions,
)

RANKS = range(2, 9)
MICROBATCHES = (*range(1, 14), 16, 19, 31)
NAMES = ("gpipe", "1f1b", "1f1b*2", "1f1b*3", "1f1b*4", "bfs", "bfs*3", "zbh1", "zbv", "dualpipev")

every_schedule = pytest.mark.parametrize("name", NAMES)
every_size = pytest.mark.parametrize("p", RANKS)


def layout(name: str, p: int) -> Layout:
    return Layout.parse(f"pp{p}:{name}")


def lowered(name: str, p: int, m: int) -> list[list[Action]]:
    cut = layout(name, p)
    return lower(computations(cut, m), cut.owner_of, cut.stages)


def test_every_schedule_of_a_layout_is_tried_here() -> None:
    assert {name.partition("*")[0] for name in NAMES} == set(SCHEDULES)


@pytest.mark.parametrize("text", ["dp1", "pp2", "pp4:gpipe", "dp2 tp2 pp3", "pp3:1f1b*2", "dp2 pp4:zbv"])
def test_a_layout_has_the_lists_of_its_schedule(text: str) -> None:
    cut = Layout.parse(text)
    lists = [rank_actions(cut, r, 6) for r in range(cut.pp)]
    assert lists == lower(SCHEDULES[cut.schedule](cut.pp, cut.chunks, 6), cut.owner_of, cut.stages)


@every_schedule
@every_size
def test_every_microbatch_goes_through_every_chunk_once(name: str, p: int) -> None:
    cut = layout(name, p)
    for m in MICROBATCHES:
        lists = computations(cut, m)
        counts = Counter(action for actions in lists for action in actions)
        assert set(counts.values()) == {1}
        split = {(a.chunk, a.microbatch) for a in counts if a.kind == "I"}
        for chunk in range(cut.stages):
            actions = lists[cut.owner_of(chunk)]
            for j in range(m):
                kinds = "FIW" if (chunk, j) in split else "FB"
                places = [actions.index(Action(kind, chunk, j)) for kind in kinds]  # type: ignore[arg-type]
                assert places == sorted(places)
        assert sum(counts.values()) == m * cut.stages * 2 + len(split)
        check_actions(lists, cut, m)
        check_actions(lower(lists, cut.owner_of, cut.stages), cut, m)


@every_schedule
@every_size
def test_the_bound_of_what_is_held_is_reached_and_kept(name: str, p: int) -> None:
    cut = layout(name, p)
    for m in MICROBATCHES:
        counted = [in_flight(actions) for actions in computations(cut, m)]
        assert counted == [in_flight_bound(cut, r, m) for r in range(p)], f"m = {m}"


@every_size
def test_published_memory(p: int) -> None:
    """Activations of m = 4p microbatches, in those of one microbatch of a whole rank.

    1F1B p - r (Narayanan et al. 2021, 2.2.1); interleaved (1 + (p - 1) / (p v)) p on rank 0 (Korthikanti et al. 2022,
    arXiv:2205.05198, 4.2.3); ZB-H1 no more than 1F1B's rank 0 (Qi et al. 2023, 3.1); ZBV p (the same, section 6);
    DualPipeV p + 1/2, its README's PP + 1 stages of PP = 2p.
    """
    m = 4 * p
    most = {
        name: [
            in_flight(actions).stashed / layout(name, p).chunks
            for actions in computations(layout(name, p), m)
        ]
        for name in NAMES
    }
    assert most["gpipe"] == most["bfs*3"] == [m] * p
    assert most["1f1b"] == [p - r for r in range(p)]
    for v in (2, 3, 4):
        assert most[f"1f1b*{v}"][0] == pytest.approx(p * (1 + (p - 1) / (p * v)))
    assert most["zbh1"] == [p] * p
    assert most["zbv"] == [p] * p
    assert most["dualpipev"] == [p + 0.5] * p


def test_the_published_list_of_1f1b() -> None:
    """p = 4, m = 8: three warm-up forwards on rank 0, none on rank 3 (figure 4 of Narayanan et al. 2021)."""
    lists = [[f"{a.kind}{a.microbatch}" for a in actions] for actions in computations(layout("1f1b", 4), 8)]
    assert " ".join(lists[0]) == "F0 F1 F2 F3 B0 F4 B1 F5 B2 F6 B3 F7 B4 B5 B6 B7"
    assert " ".join(lists[3]) == "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 B7"


def test_the_published_list_of_zb_h1() -> None:
    """p = 4: as many forwards first as in 1F1B, and rank 3 puts off three W (figure 3 of Qi et al. 2023)."""
    lists = [[f"{a.kind}{a.microbatch}" for a in actions] for actions in computations(layout("zbh1", 4), 6)]
    assert " ".join(lists[0]) == "F0 F1 F2 F3 I0 W0 F4 I1 W1 F5 I2 W2 I3 W3 I4 W4 I5 W5"
    assert " ".join(lists[3]) == "F0 I0 F1 I1 F2 I2 F3 I3 W0 F4 I4 W1 F5 I5 W2 W3 W4 W5"


def torchs(name: str, p: int, m: int) -> list[list[Action]]:
    """The computations that torch.distributed.pipelining makes of the same schedule."""
    classes = {
        "1f1b": theirs.ScheduleInterleaved1F1B,
        "zbv": theirs.ScheduleZBVZeroBubble,
        "dualpipev": theirs.ScheduleDualPipeV,
    }
    cut = layout(name, p)
    rounds = max(1, m // p)
    self = SimpleNamespace(
        pp_group_size=p, _n_microbatches=m, n_local_stages=cut.chunks, num_stages=cut.stages,
        number_of_rounds=rounds, microbatches_per_round=m // rounds,
    )  # fmt: skip
    make = classes[cut.schedule]._calculate_single_rank_operations
    lists = []
    for r in range(p):
        cells = [cell for cell in make(self, r) if cell is not None]  # type: ignore[arg-type]
        whole = [one for cell in cells for one in (cell.sub_actions or (cell,))]
        lists.append([Action(a.computation_type.value, a.stage_index, a.microbatch_index) for a in whole])  # type: ignore[arg-type]
    return lists


@pytest.mark.parametrize("name", ["1f1b*2", "1f1b*3", "zbv", "dualpipev"])
@every_size
def test_torch_makes_the_same_lists(name: str, p: int) -> None:
    for m in MICROBATCHES:
        if name == "dualpipev" and m < 2 * p:
            continue  # refused there
        if name.startswith("1f1b") and m % max(1, m // p):
            continue  # refused there
        assert computations(layout(name, p), m) == torchs(name, p, m), f"m = {m}"


@every_schedule
@every_size
def test_sends_and_receives_pair_in_order(name: str, p: int) -> None:
    """On each directed edge the k-th send meets the k-th receive, of the same microbatch; nothing else is sent."""
    cut = layout(name, p)
    for m in MICROBATCHES:
        lists = lowered(name, p, m)
        messages = 0
        for way, step in (("F", 1), ("B", -1)):
            for source in range(cut.stages):
                target = source + step
                if not 0 <= target < cut.stages or cut.owner_of(source) == cut.owner_of(target):
                    continue
                actions, others = lists[cut.owner_of(source)], lists[cut.owner_of(target)]
                sent = [a.microbatch for a in actions if a[:2] == (f"SEND_{way}", source)]
                received = [a.microbatch for a in others if a[:2] == (f"RECV_{way}", target)]
                assert sent == received
                assert sorted(sent) == list(range(m))
                messages += 2 * m
        assert messages == sum(a.kind[:4] in ("SEND", "RECV") for actions in lists for a in actions)


@every_schedule
@every_size
def test_messages_travel_while_a_rank_computes(name: str, p: int) -> None:
    """A receive is posted before the computation ahead of its own; a send follows its own at once."""
    for m in (1, 3, p, 2 * p + 1):
        for actions in lowered(name, p, m):
            own = [a for a in actions if a.kind in COMPUTATIONS]
            for i, (kind, chunk, j) in enumerate(actions):
                done = [a for a in actions[:i] if a.kind in COMPUTATIONS]
                made = (("F", chunk, j),) if kind[-1] == "F" else (("B", chunk, j), ("I", chunk, j))
                if kind.startswith("RECV"):
                    use = next(own.index(Action(*one)) for one in made if Action(*one) in own)  # type: ignore[arg-type]
                    assert use - len(done) in ((0, 1) if not done else (1,))
                if kind.startswith("SEND"):
                    assert done[-1] in made


@every_schedule
def test_gradients_are_reduced_once_all_of_a_chunk_are_there(name: str) -> None:
    cut = layout(name, 4)
    for r, actions in enumerate(lowered(name, 4, 5)):
        for chunk in cut.virtual_stages_of(r):
            at = actions.index(Action("REDUCE_GRAD", chunk, -1))
            gradients = [i for i, a in enumerate(actions) if a.kind in ("B", "W") and a.chunk == chunk]
            assert max(gradients) < at
            assert not any(a.kind in COMPUTATIONS for a in actions[max(gradients) + 1 : at])
        assert Counter(a.kind for a in actions)["REDUCE_GRAD"] == cut.chunks


class Rendezvous:
    """Executes lowered lists where a send ends only when its receive is posted, the strictest of backends.

    A rank waits for the message that a computation reads, and for the forward message whose gradient it has read.
    With `sends_in_turn` it also waits for the previous gradient of a chunk before it sends the next.
    """

    def __init__(self, lists: list[list[Action]], cut: Layout, *, sends_in_turn: bool = False) -> None:
        self.lists, self.cut, self.sends_in_turn = lists, cut, sends_in_turn
        self.position = [0] * len(lists)
        self.posted: set[tuple[str, int, int]] = set()
        self.sent: set[tuple[str, int, int]] = set()
        self.done: set[tuple[str, int, int]] = set()

    def run(self) -> bool:
        """Whether every rank comes to its end."""
        moved = True
        while moved:
            moved = any(self.advance(r) for r in range(len(self.lists)))
        return self.position == [len(actions) for actions in self.lists]

    def advance(self, r: int) -> bool:
        start = self.position[r]
        while self.position[r] < len(self.lists[r]) and self.ready(*self.lists[r][self.position[r]]):
            kind, chunk, j = self.lists[r][self.position[r]]
            if kind.startswith("RECV"):
                self.posted.add((kind[-1], chunk, j))
            elif kind.startswith("SEND"):
                assert (kind[-1], chunk, j) in self.done, "a message is sent after it was made"
                self.sent.add((kind[-1], chunk + (1 if kind == "SEND_F" else -1), j))
            self.done.add(("B" if kind == "I" else kind, chunk, j))
            self.position[r] += 1
        return self.position[r] > start

    def arrived(self, way: str, chunk: int, j: int, source: int) -> bool:
        """Whether (chunk, j) can read what `source` made."""
        if self.cut.owner_of(source) == self.cut.owner_of(chunk):
            return (way, source, j) in self.done
        return (way, chunk, j) in self.sent & self.posted

    def ready(self, kind: str, chunk: int, j: int) -> bool:
        if kind == "F":
            return chunk == 0 or self.arrived("F", chunk, j, chunk - 1)
        if kind in ("B", "I"):
            if chunk == self.cut.stages - 1:
                return True
            local = self.cut.owner_of(chunk + 1) == self.cut.owner_of(chunk)
            sent = local or ("F", chunk + 1, j) in self.posted
            return sent and self.arrived("B", chunk, j, chunk + 1)
        if kind == "W":
            return ("B", chunk, j) in self.done
        if kind == "SEND_B" and self.sends_in_turn:
            return j == 0 or ("B", chunk - 1, j - 1) in self.posted
        return True


@every_schedule
@every_size
def test_no_deadlock(name: str, p: int) -> None:
    for m in (1, 2, 3, p - 1, p, p + 1, 2 * p - 1, 2 * p, 3 * p + 1):
        run = Rendezvous(lowered(name, p, m), layout(name, p))
        assert run.run(), f"m = {m}: some rank waits for ever, at {run.position}"
        assert run.sent == run.posted


def test_the_simulation_finds_a_deadlock() -> None:
    """Two ranks that each want the other's message first."""
    first, last = lowered("1f1b", 2, 2)
    order = [a for a in first if a.kind != "SEND_F"] + [a for a in first if a.kind == "SEND_F"]
    assert not Rendezvous([order, last], layout("1f1b", 2)).run()


def test_waiting_for_a_send_could_deadlock() -> None:
    """Why a runtime may wait for what a computation reads, but not for an earlier send.

    Breadth first, rank 1 computes many gradients of chunk 5 before it receives its first of chunk 3.
    """
    lists, cut = lowered("bfs*3", 2, 7), layout("bfs*3", 2)
    assert Rendezvous(lists, cut).run()
    assert not Rendezvous(lists, cut, sends_in_turn=True).run()


def test_in_flight_counts_the_most_at_one_time() -> None:
    text = "F0 B0 F1 F2 I1 F3 I2 W1 B3 W2"
    actions = [Action(cell[0], 0, int(cell[1])) for cell in text.split()]  # type: ignore[arg-type]
    assert in_flight(actions) == InFlight(activations=2, stashed=3)


def test_a_custom_schedule_has_no_known_bound() -> None:
    with pytest.raises(LayoutError, match="schedule custom has no known bound"):
        in_flight_bound(Layout.parse("pp2:custom"), 0, 4)


def test_interleaving_divides_the_bubble() -> None:
    """Narayanan et al. 2021, 2.2.2: (p - 1) / m over the ideal time becomes (p - 1) / (m v)."""
    for v in (1, 2, 4):
        frac = bubble_frac(4, 8, v)
        assert frac / (1 - frac) == pytest.approx(3 / (8 * v))

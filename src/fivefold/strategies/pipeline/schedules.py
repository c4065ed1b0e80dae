"""Pipeline schedules as lists of computations, one per pipeline rank. Torch-free; the runtime runs what stands here.

p pipeline ranks, r a rank, v chunks on each, m microbatches; F, I, W and B = I + W: what a chunk's computations take.

    gpipe       all forwards, then all backwards (Huang et al. 2019, arXiv:1811.06965)
    1f1b        after a warm-up, one forward and one backward in turn (Narayanan et al. 2021, arXiv:2104.04473, 2.2.1);
                with v chunks interleaved (2.2.2): groups of microbatches go through all chunks of a rank in turn
    bfs         breadth first: gpipe chunk after chunk (Lamy-Poirier 2022, arXiv:2211.05953, section 4)
    zbh1        1f1b whose W waits where a gradient can be passed on first (Qi et al. 2023, arXiv:2401.10241, 3.1)
    zbv         two chunks in a V, no idle turn where F = I = W (the same, section 6)
    dualpipev   two chunks in a V, forwards and backwards of both in pairs (DeepSeek-V3, arXiv:2412.19437, 3.2.1, cut in
                half: github.com/deepseek-ai/DualPipe)
    custom      a list that the user wrote

All of them take any number of microbatches. The three last named are defined from 2p - 1 or 2p on; with fewer, their
list for that many runs without the computations of those that do not exist. What is left keeps its order, so it
cannot deadlock where the whole does not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import chain, pairwise
from typing import NamedTuple

from fivefold.core.layout import Layout
from fivefold.errors import LayoutError
from fivefold.strategies.pipeline.actions import Action, Edge, edge_rounds, lower, parse_actions

__all__ = [
    "SCHEDULES",
    "Action",
    "Edge",
    "InFlight",
    "all_actions",
    "bubble_frac",
    "computations",
    "edge_rounds",
    "in_flight",
    "in_flight_bound",
    "rank_actions",
    "schedule_kinds",
]


def computations(
    layout: Layout, microbatches: int, custom: Sequence[str] | None = None
) -> list[list[Action]]:
    """F, B, I and W of every pipeline rank, in order. `custom`: the lines of a `custom` layout."""
    return _computations(layout.schedule, layout.pp, layout.chunks, microbatches, custom)


def _computations(schedule: str, p: int, v: int, m: int, custom: Sequence[str] | None) -> list[list[Action]]:
    if schedule == "custom":
        assert custom is not None, "rules.check refuses a custom schedule without its lines"
        return parse_actions("\n".join(custom))
    return SCHEDULES[schedule](p, v, m)


@lru_cache(maxsize=256)
def schedule_kinds(
    schedule: str, p: int, v: int, m: int, custom: tuple[str, ...] | None = None
) -> frozenset[str]:
    """The kinds of computations in a schedule of p ranks with v chunks each: F and B, or with I and W."""
    lists = _computations(schedule, p, v, m, custom)
    return frozenset(action.kind for actions in lists for action in actions)


def rank_actions(
    layout: Layout, pp_rank: int, microbatches: int, *, custom: Sequence[str] | None = None
) -> list[Action]:
    """The list of one pipeline rank, with its communication."""
    return list(all_actions(layout, microbatches, custom=custom)[pp_rank])


def all_actions(
    layout: Layout, microbatches: int, *, custom: Sequence[str] | None = None
) -> tuple[tuple[Action, ...], ...]:
    """The lists of all pipeline ranks, with their communication."""
    return _all_actions(layout, microbatches, None if custom is None else tuple(custom))


@lru_cache(maxsize=8)
def _all_actions(
    layout: Layout, microbatches: int, custom: tuple[str, ...] | None
) -> tuple[tuple[Action, ...], ...]:
    lists = lower(computations(layout, microbatches, custom), layout.owner_of, layout.stages)
    return tuple(map(tuple, lists))


# The schedules


def breadth_first(p: int, v: int, m: int) -> list[list[Action]]:
    """All forwards, chunk after chunk; then all backwards, last chunk first. With one chunk it is GPipe."""
    lists = []
    for r in range(p):
        chunks = range(r, p * v, p)
        forwards = [Action("F", chunk, j) for chunk in chunks for j in range(m)]
        lists.append(forwards + [Action("B", chunk, j) for chunk in reversed(chunks) for j in range(m)])
    return lists


def one_f_one_b(p: int, v: int, m: int) -> list[list[Action]]:
    """Warm-up forwards, then one forward and one backward in turn, then the remaining backwards.

    Source: Narayanan et al. 2021, section 2.2, where the microbatches are a multiple of p and go through a rank's
    chunks in groups of p. Other numbers are dealt to groups of at least p, as equal as can be (m < p: one group):
    a last group of fewer than p would wait for itself.
    """
    groups = _groups(p, m)
    lists = []
    for r in range(p):
        chunks = range(r, p * v, p)
        forwards = [Action("F", chunk, j) for group in groups for chunk in chunks for j in group]
        backwards = [Action("B", chunk, j) for group in groups for chunk in reversed(chunks) for j in group]
        warm_up = min(_warm_up(p, r, v, m), len(forwards))
        pairs = chain.from_iterable(zip(forwards[warm_up:], backwards))
        lists.append([*forwards[:warm_up], *pairs, *backwards[len(forwards) - warm_up :]])
    return lists


def _warm_up(p: int, r: int, v: int, m: int) -> int:
    """Forwards before the first backward's own: Narayanan et al. 2021, section 2.2, with groups of any size."""
    return p - r - 1 if v == 1 else 2 * (p - r - 1) + (v - 1) * len(_groups(p, m)[0])


def _groups(p: int, m: int) -> list[range]:
    """Consecutive microbatches in max(1, m // p) groups, the larger ones first."""
    number = max(1, m // p)
    size, larger = divmod(m, number)
    starts = [i * size + min(i, larger) for i in range(number + 1)]
    return [range(a, b) for a, b in pairwise(starts)]


def zero_bubble_h1(p: int, v: int, m: int) -> list[list[Action]]:
    """1F1B with the backward in two: rank r is r weight gradients behind, so that it never holds back an I.

    Bubble (p - 1)(F + I - W), memory of 1F1B: at most min(m, p) microbatches on any rank until their W.
    Source: Qi et al. 2023 (arXiv:2401.10241), section 3.1 and table 2.
    """
    lists = []
    for r, whole in enumerate(one_f_one_b(p, 1, m)):
        actions: list[Action] = []
        for kind, chunk, j in whole:
            if kind == "F":
                actions.append(Action("F", chunk, j))
                continue
            actions.append(Action("I", chunk, j))
            if j >= r:
                actions.append(Action("W", chunk, j - r))
        lists.append(actions + [Action("W", r, j) for j in range(max(0, m - r), m)])
    return lists


class _Turns:
    """Writes one rank's list with two chunks; each computation takes the next microbatch of its kind and chunk."""

    def __init__(self, first: int, second: int) -> None:
        self.chunks = first, second
        self.actions: list[Action] = []
        self.next: Counter[tuple[str, int]] = Counter()
        self.owed: list[Action] = []
        """W whose I is done, in this order."""

    def add(self, *turns: str) -> None:
        """`F0` is the next forward of the first chunk, `W1` the W owed longest of the second, `W` of either."""
        for turn in turns:
            kind, chunk = turn[0], self.chunks[int(turn[1:] or 0)]
            if kind == "W":
                owed = next(w for w in self.owed if w.chunk == chunk or turn == "W")
                self.owed.remove(owed)
                self.actions.append(owed)
                continue
            way = "F" if kind == "F" else "B"
            j = self.next[way, chunk]
            self.next[way, chunk] += 1
            self.actions.append(Action(kind, chunk, j))  # type: ignore[arg-type]
            if kind == "I":
                self.owed.append(Action("W", chunk, j))

    def up_to(self, m: int) -> list[Action]:
        """The list without the computations of microbatches from m on."""
        return [action for action in self.actions if action.microbatch < m]


def zero_bubble_v(p: int, v: int, m: int) -> list[list[Action]]:
    """Down the ranks and back up: the first backward starts where the last forward ended, and W fills what is left.

    With F = I = W and m >= 2p - 1 no rank is idle between its first and its last computation; it holds at most 2p
    chunks' activations, those of p microbatches of a whole rank, as 1F1B does on rank 0.
    Source: Qi et al. 2023 (arXiv:2401.10241), section 6.
    """
    lists = []
    whole = max(m, 2 * p - 1)
    for r in range(p):
        turns = _Turns(r, 2 * p - 1 - r)
        turns.add(*["F0"] * (2 * (p - r) - 1), *["F1", "F0"] * r, *["F1", "I1", "W"] * (p - r))
        fresh = whole - (2 * p - 1 - r)  # forwards of the first chunk that are still to come
        for i in range(whole - p):
            turns.add(*["F0"] * (i < fresh), "I0", "W", "F1", "I1", "W")
        turns.add(*["I0", "I1"] * r, *["I0", "W0"] * (p - r), *["W1"] * r, *["W0"] * r)
        lists.append(turns.up_to(m))
    return lists


def dual_pipe_v(p: int, v: int, m: int) -> list[list[Action]]:
    """Each forward of one chunk is followed by a backward of the other, which a runtime may run side by side.

    With m >= 2p a rank holds at most 2p + 1 chunks' activations.
    Source: `dualpipev.py` of github.com/deepseek-ai/DualPipe, the schedule of DeepSeek-V3 (arXiv:2412.19437, 3.2.1) cut
    in half; its eight phases stand here in their order.
    """
    lists = []
    whole = max(m, 2 * p)
    for r in range(p):
        turns = _Turns(r, 2 * p - 1 - r)
        turns.add(*["F0"] * (2 * (p - r - 1)), *["F0", "F1"] * (r + 1), *["I1", "W", "F1"] * (p - r - 1))
        turns.add(*["F0", "B1", "F1", "B0"] * (whole - 2 * p + r + 1), *["B1", "F1", "B0"] * (p - r - 1))
        # In the second half of the last 2 (r + 1) backwards, W is put off to fill the idle turns at the end.
        at_once = 2 * ((r + 1) // 2) + (r % 2 == 0)
        turns.add(*[("B" if i < at_once else "I") + "10"[i % 2] for i in range(2 * (r + 1))])
        turns.add(*["W", "I0"] * (p - r - 1))
        turns.add(*["W"] * len(turns.owed))
        lists.append(turns.up_to(m))
    return lists


SCHEDULES: dict[str, Callable[[int, int, int], list[list[Action]]]] = {
    "gpipe": breadth_first,
    "1f1b": one_f_one_b,
    "bfs": breadth_first,
    "zbh1": zero_bubble_h1,
    "zbv": zero_bubble_v,
    "dualpipev": dual_pipe_v,
}
"""(ranks, chunks of each, microbatches) -> computations of every rank, by the name that a layout gives a schedule."""


# What they hold, and how long they idle


class InFlight(NamedTuple):
    """The most of one rank's (chunk, microbatch) pairs that are held at one time."""

    activations: int
    """Forward done, backward of the input not: all activations of the chunk are held."""
    stashed: int
    """Forward done, backward of the weights not: these, and what a W that is put off still needs."""


def in_flight(actions: Sequence[Action]) -> InFlight:
    """Count them in one rank's list, at every computation."""
    activations = stashed = 0
    most = InFlight(0, 0)
    for action in actions:
        activations += {"F": 1, "B": -1, "I": -1}.get(action.kind, 0)
        stashed += {"F": 1, "B": -1, "W": -1}.get(action.kind, 0)
        most = InFlight(max(most.activations, activations), max(most.stashed, stashed))
    return most


def in_flight_bound(layout: Layout, pp_rank: int, microbatches: int) -> InFlight:
    """What a named schedule holds at most on a rank, in chunks' microbatches. Equal to the count in its list.

    Formula: gpipe, bfs   m v
             1f1b         min(m, p - r); interleaved min(m v, 2 (p - r - 1) + (v - 1) g + 1) with groups of up to g = p
                          microbatches (more where m is not a multiple of p: ceil(m / max(1, m // p)))
             zbh1         min(m, p - r), and min(m, p) until the W
             zbv          min(m, 2p - r - 1) + min(m, r + 1): 2p from m = 2p - 1 on
             dualpipev    as zbv, and 1 more from m = 2p - r on: 2p + 1
    Source:  the papers named at the top; Narayanan et al. 2021, section 2.2; Qi et al. 2023, table 2 and section 6.
    """
    p, v, r, m, name = layout.pp, layout.chunks, pp_rank, microbatches, layout.schedule
    if name in ("gpipe", "bfs"):
        return InFlight(m * v, m * v)
    if name == "1f1b":
        most = min(m * v, _warm_up(p, r, v, m) + 1)
        return InFlight(most, most)
    if name == "zbh1":
        return InFlight(min(m, p - r), min(m, p))
    if name in ("zbv", "dualpipev"):
        most = min(m, 2 * p - r - 1) + min(m, r + 1) + (name == "dualpipev" and m >= 2 * p - r)
        return InFlight(most, most)
    raise LayoutError(f"schedule {name} has no known bound; count what its lists hold with in_flight")


def bubble_frac(ranks: int, microbatches: int, chunks: int = 1) -> float:
    """Idle share of a rank's time under gpipe, 1f1b or bfs with equal chunks and free messages.

    Formula: (p - 1) / (p - 1 + m v), for m >= p where v > 1.
    Source:  Narayanan et al. 2021 (arXiv:2104.04473), sections 2.2.1 and 2.2.2, over total time.
    """
    return (ranks - 1) / (ranks - 1 + microbatches * chunks)

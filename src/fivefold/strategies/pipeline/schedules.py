"""Pipeline schedules as lists of actions, one list per pipeline rank. Torch-free; the runtime runs what stands here.

An action is (kind, chunk, microbatch); a chunk is a virtual stage, numbered over the whole pipeline. A schedule is
written as its F and B actions only; `lower` adds what has to happen around them:

    RECV_F / RECV_B    posted one computation ahead of its use, so that the message travels meanwhile
    SEND_F / SEND_B    right after the computation that made the message
    REDUCE_GRAD        after the last B of a chunk: its gradients are complete, data ranks may sum them

    gpipe   all forwards, then all backwards; m microbatches in flight (Huang et al. 2019)
    1f1b    after a warm-up of p - r - 1 forwards, one forward and one backward in turn; min(m, p - r) in flight on
            rank r (Narayanan et al. 2021, section 2.2.1)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

from fivefold.core.layout import Layout

Kind = Literal["F", "B", "SEND_F", "RECV_F", "SEND_B", "RECV_B", "REDUCE_GRAD"]


class Action(NamedTuple):
    """One step of one rank. `microbatch` is -1 for REDUCE_GRAD."""

    kind: Kind
    chunk: int
    microbatch: int

    def __str__(self) -> str:
        return (
            f"{self.kind}({self.chunk})"
            if self.microbatch < 0
            else f"{self.kind}({self.chunk},{self.microbatch})"
        )


def gpipe(rank: int, ranks: int, microbatches: int) -> list[Action]:
    """All forwards, then all backwards."""
    forwards = [Action("F", rank, j) for j in range(microbatches)]
    return forwards + [Action("B", rank, j) for j in range(microbatches)]


def one_f_one_b(rank: int, ranks: int, microbatches: int) -> list[Action]:
    """Warm-up forwards, then one forward and one backward in turn, then the remaining backwards."""
    warm_up = min(microbatches, ranks - rank - 1)
    actions = [Action("F", rank, j) for j in range(warm_up)]
    for j in range(warm_up, microbatches):
        actions += [Action("F", rank, j), Action("B", rank, j - warm_up)]
    return actions + [Action("B", rank, j) for j in range(microbatches - warm_up, microbatches)]


SCHEDULES: dict[str, Callable[[int, int, int], list[Action]]] = {"gpipe": gpipe, "1f1b": one_f_one_b}
"""Schedules that can be run so far, by the name they have in a layout."""


def rank_actions(layout: Layout, pp_rank: int, microbatches: int) -> list[Action]:
    """The lowered list of one pipeline rank."""
    computations = SCHEDULES[layout.schedule](pp_rank, layout.pp, microbatches)
    return lower(computations, layout.owner_of, layout.stages)


def lower(computations: Sequence[Action], owner_of: Callable[[int], int], stages: int) -> list[Action]:
    """Add the communication of one rank's computations. Neighbours on the same rank exchange nothing."""
    last_backward = {action.chunk: i for i, action in enumerate(computations) if action.kind == "B"}
    lowered: list[Action] = []
    for i, action in enumerate(computations):
        # Post what the next computation reads before this one starts: it travels while we compute.
        ahead = computations[:2] if i == 0 else computations[i + 1 : i + 2]
        lowered += [receive for nxt in ahead for receive in _receives(nxt, owner_of, stages)]
        lowered.append(action)
        lowered += _sends(action, owner_of, stages)
        if last_backward.get(action.chunk) == i:
            lowered.append(Action("REDUCE_GRAD", action.chunk, -1))
    return lowered


def _receives(action: Action, owner_of: Callable[[int], int], stages: int) -> list[Action]:
    source = action.chunk + (-1 if action.kind == "F" else 1)
    if not 0 <= source < stages or owner_of(source) == owner_of(action.chunk):
        return []
    return [Action("RECV_F" if action.kind == "F" else "RECV_B", action.chunk, action.microbatch)]


def _sends(action: Action, owner_of: Callable[[int], int], stages: int) -> list[Action]:
    target = action.chunk + (1 if action.kind == "F" else -1)
    if not 0 <= target < stages or owner_of(target) == owner_of(action.chunk):
        return []
    return [Action("SEND_F" if action.kind == "F" else "SEND_B", action.chunk, action.microbatch)]


class Edge(NamedTuple):
    """Messages of one kind from one chunk to the next: `way` F carries hidden states, B their gradients."""

    way: str
    source: int
    target: int


def edge_rounds(layout: Layout) -> list[list[Edge]]:
    """All edges between different ranks, in rounds in which no pipeline rank has more than one."""
    rounds: list[list[Edge]] = []
    busy: list[set[int]] = []
    for way, step in (("F", 1), ("B", -1)):
        for source in range(layout.stages):
            target = source + step
            if not 0 <= target < layout.stages or layout.owner_of(source) == layout.owner_of(target):
                continue
            ends = {layout.owner_of(source), layout.owner_of(target)}
            turn = next((i for i, taken in enumerate(busy) if not taken & ends), len(rounds))
            if turn == len(rounds):
                rounds.append([])
                busy.append(set())
            rounds[turn].append(Edge(way, source, target))
            busy[turn] |= ends
    return rounds


def bubble_frac(ranks: int, microbatches: int) -> float:
    """Idle share of a rank's time under gpipe or 1f1b with equal stages.

    Formula: (p - 1) / (p - 1 + m). Source: Narayanan et al. 2021 (arXiv:2104.04473), section 2.2.1, over total time.
    """
    return (ranks - 1) / (ranks - 1 + microbatches)


def in_flight(actions: Sequence[Action]) -> int:
    """The most microbatches whose forward is done and whose backward is not, at any time."""
    now = most = 0
    for action in actions:
        now += {"F": 1, "B": -1}.get(action.kind, 0)
        most = max(most, now)
    return most

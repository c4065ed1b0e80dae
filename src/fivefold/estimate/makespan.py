"""How long many pipelines take that run the same lists of actions: the clock of `timeline`, for arrays of costs.

The lists are those that the runtime runs, with the rules of `timeline.simulate`: a rank runs its computations in order;
a message leaves when it is made, its receive is posted (one computation ahead) and the edge's earlier messages have
arrived. Computations that wait for none of each other are taken at one go, all pipelines at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from fivefold.core.layout import Layout
from fivefold.strategies.pipeline.actions import Action
from fivefold.strategies.pipeline.schedules import computations

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from fivefold.estimate.jobs import Column

    Places = NDArray[np.intp]

KINDS = ("F", "B", "I", "W")
LONG = 3
"""Microbatches of each pipeline rank after which a schedule repeats itself: more of them keep the pace of the last."""


@dataclass(frozen=True)
class Program:
    """Computations in an order in which they can run; entry n, beyond the last, stands for none."""

    bounds: tuple[int, ...]
    """Where each go begins, and the end."""
    slot: Places
    """Which duration each takes: kind x stages + stage."""
    before: Places
    """The computation before it on its rank."""
    posted: Places
    """That after which its receive is posted."""
    made_by: Places
    """That which makes the message it waits for; n: it waits for none."""
    message_before: Places
    """The computation that the edge's message before was for."""

    def __len__(self) -> int:
        return len(self.slot)


@lru_cache(maxsize=64)
def program(schedule: str, pp: int, chunks: int, microbatches: int) -> Program:
    """The computations of a schedule as arrays; O(computations)."""
    layout = Layout(pp=pp, schedule=schedule, chunks=chunks)  # type: ignore[arg-type]
    return _ordered(computations(layout, microbatches), layout)


def _ordered(lists: Sequence[Sequence[Action]], layout: Layout) -> Program:
    import numpy as np

    stages, total = layout.stages, sum(map(len, lists))
    number = {kind: i for i, kind in enumerate(KINDS)}
    triples = [(number[kind], chunk, j) for actions in lists for kind, chunk, j in actions]
    kind, chunk, j = np.array(triples, dtype=np.intp).T
    here, starts = np.arange(total), np.cumsum([0, *map(len, lists)])
    first = np.isin(here, starts)
    before = np.where(first, total, here - 1)
    posted = np.where(first | np.isin(here - 1, starts), total, here - 2)
    made_by = _sources(kind, chunk, j, stages)
    owner = np.array([layout.owner_of(stage) for stage in range(stages)])
    own = (made_by < total) & (owner[chunk] == owner[chunk[np.minimum(made_by, total - 1)]])
    made_by[own] = total  # on the same rank, and earlier in its list
    edge = np.where(made_by < total, 2 * chunk + (kind == 0), -1)
    message_before = np.full(total, total)
    by_edge = np.argsort(edge, kind="stable")
    same = (edge[by_edge[1:]] == edge[by_edge[:-1]]) & (edge[by_edge[1:]] >= 0)
    message_before[by_edge[1:][same]] = by_edge[:-1][same]
    posted[made_by == total] = total
    level = np.array(_levels(made_by.tolist(), starts.tolist()))
    order = np.argsort(level, kind="stable")
    place = np.empty(total + 1, dtype=np.intp)
    place[order], place[total] = here, total
    bounds = np.flatnonzero(np.diff(level[order], prepend=0, append=level.max() + 1))
    links = (place[link[order]] for link in (before, posted, made_by, message_before))
    return Program(tuple(bounds.tolist()), (kind * stages + chunk)[order], *links)


def _sources(kind: Places, chunk: Places, j: Places, stages: int) -> Places:
    """For each computation that which makes what it reads of another stage (`actions.Product.for_`); n: none."""
    import numpy as np

    total = len(kind)
    forward, backward = (np.full((stages + 1, int(j.max()) + 1), total) for _ in range(2))
    is_f, is_w = kind == KINDS.index("F"), kind == KINDS.index("W")
    is_b = ~is_f & ~is_w
    here = np.arange(total)
    forward[chunk[is_f], j[is_f]] = here[is_f]
    backward[chunk[is_b], j[is_b]] = here[is_b]
    found = np.where(is_f, np.where(chunk > 0, forward[chunk - 1, j], total), total)
    return np.where(is_b & (chunk < stages - 1), backward[chunk + 1, j], found)


def _levels(made_by: list[int], starts: list[int]) -> list[int]:
    """How many computations have to run one after the other before each, itself included."""
    total = len(made_by)
    level = [0] * (total + 1)
    at, ready, waiting = starts[:-1], deque(range(len(starts) - 1)), {}
    while ready:
        rank = ready.popleft()
        here, end = at[rank], starts[rank + 1]
        last = level[here - 1] if here > starts[rank] else 0
        while here < end:
            source = made_by[here]
            if source < total and not level[source]:
                waiting[source] = rank
                break
            last = level[here] = max(last, level[source]) + 1
            if here in waiting:
                ready.append(waiting.pop(here))
            here += 1
        at[rank] = here
    return level[:total]


def run(what: Program, durations: Column, message_s: Column) -> Column:
    """Seconds from the first computation to the end of the last, of n pipelines.

    `durations`: [kinds x stages, n]. `message_s`: [n], of one message on its way.
    """
    import numpy as np

    total, n = len(what), durations.shape[1]
    ends, arrivals = np.zeros((total + 1, n)), np.zeros((total + 1, n))
    waits = (what.made_by < total)[:, None] * message_s
    for a, b in zip(what.bounds, what.bounds[1:]):
        arrived = np.maximum(ends[what.made_by[a:b]], ends[what.posted[a:b]])
        arrived = np.maximum(arrived, arrivals[what.message_before[a:b]]) + waits[a:b]
        arrivals[a:b] = arrived
        ends[a:b] = np.maximum(ends[what.before[a:b]], arrived) + durations[what.slot[a:b]]
    longest: Column = ends.max(axis=0)
    return longest


def counted(pp: int, microbatches: int) -> int:
    """How many of them are run through; those beyond keep the pace."""
    return microbatches if microbatches <= (LONG + 1) * pp else LONG * pp + microbatches % pp


def makespan(
    schedule: str, pp: int, chunks: int, microbatches: Column, durations: Column, message_s: Column
) -> Column:
    """Seconds of a schedule with these costs of its virtual stages.

    `microbatches`: [n], of all of which as many are `counted`. With more than that a schedule is in its steady state:
    each more of them takes what each of the last p did, and no less than the busiest rank computes.
    """
    import numpy as np

    ran = counted(pp, int(microbatches[0]))
    second = run(program(schedule, pp, chunks, ran), durations, message_s)
    if (microbatches == ran).all():
        return second
    first = run(program(schedule, pp, chunks, ran - pp), durations, message_s)
    pace = np.maximum((second - first) / pp, busiest(schedule, pp, chunks, durations))
    found: Column = second + pace * (microbatches - ran)
    return found


def busiest(schedule: str, pp: int, chunks: int, durations: Column) -> Column:
    """Seconds that the rank with most to compute takes for one microbatch: no pace is faster."""
    import numpy as np

    layout = Layout(pp=pp, schedule=schedule, chunks=chunks)  # type: ignore[arg-type]
    whole = durations.reshape(len(KINDS), layout.stages, -1)[[KINDS.index(kind) for kind in "FIW"]].sum(
        axis=0
    )
    ranks = np.stack([whole[list(layout.virtual_stages_of(rank))].sum(axis=0) for rank in range(pp)])
    found: Column = ranks.max(axis=0)
    return found

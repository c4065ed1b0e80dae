"""When every action of a pipeline runs, from its lists and what each of them takes. Torch-free and exact.

The lists are those that the runtime runs (`schedules.rank_actions`), and so are the rules:

- A rank runs its actions in order. A computation waits for the message that it reads.
- A send takes the rank no time. Its message leaves when it is made, the receive is posted and the edge's earlier
  messages have arrived, and travels for `message_s`.
- REDUCE_GRAD takes the rank no time either: the reductions of one rank follow each other beside its computations, and
  the rank is done when the last one is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from fivefold.core.layout import Layout
from fivefold.errors import LayoutError
from fivefold.strategies.pipeline.actions import COMPUTATIONS, Action, Edge, Lists, Product, incoming
from fivefold.strategies.pipeline.check import deadlock
from fivefold.strategies.pipeline.schedules import rank_actions


class Span(NamedTuple):
    """One action on its rank's clock. A computation starts when its message is there."""

    action: Action
    start_s: float
    end_s: float


@dataclass(frozen=True)
class RankTimes:
    """What one rank did from the beginning of the step to the end of the last rank. The four add up to the total."""

    compute_s: float
    message_s: float
    """Waiting for a message that was sent already: exposed communication."""
    reduce_s: float
    """Waiting for its reductions at the end: exposed communication."""
    idle_s: float
    """Waiting for a message that was not sent yet, or for the other ranks to end."""


@dataclass(frozen=True)
class Timeline:
    """The simulated step."""

    total_s: float
    spans: tuple[tuple[Span, ...], ...]
    """Of every rank: its computations and reductions, by start."""
    ranks: tuple[RankTimes, ...]

    @property
    def bubble_frac(self) -> float:
        """Share of all ranks' time that is not computation."""
        return 1 - sum(rank.compute_s for rank in self.ranks) / (len(self.ranks) * self.total_s)


@dataclass
class _Rank:
    """One rank under way."""

    actions: Sequence[Action]
    at: int = 0
    now_s: float = 0.0
    reduced_s: float = 0.0
    compute_s: float = 0.0
    message_s: float = 0.0
    spans: list[Span] = field(default_factory=list)


@dataclass
class _Message:
    sent_s: float | None = None
    posted_s: float | None = None
    arrived_s: float | None = None


def simulate(
    lists: Lists,
    owner_of: Callable[[int], int],
    seconds: Callable[[Action], float],
    *,
    message_s: Callable[[Action], float] = lambda send: 0.0,
    reduce_s: Callable[[Action], float] = lambda reduce: 0.0,
) -> Timeline:
    """Run the lists, which hold their messages, of all pipeline ranks.

    `seconds`: of an F, B, I or W. `message_s`: of a SEND, on its way. `reduce_s`: of a REDUCE_GRAD.
    Returns:  start and end of every action in seconds, exact in the order of float additions; O(actions).
    Raises:   LayoutError naming who waits for whom, for lists that never end.
    """
    return _Run(lists, owner_of, seconds, message_s, reduce_s).result()


def equal_chunks(layout: Layout, microbatches: int, *, custom: Sequence[str] | None = None) -> Timeline:
    """A layout's schedule with chunks of equal cost and free messages: F = I = W = 1 / chunks, B = 2 / chunks.

    Its `bubble_frac` is what the schedule itself costs. Source of the ratio: backward computes twice what forward does
    (Narayanan et al. 2021, arXiv:2104.04473, appendix A), half of that for the weights (Qi et al. 2023, section 2).
    """
    lists = [rank_actions(layout, rank, microbatches, custom=custom) for rank in range(layout.pp)]
    return simulate(lists, layout.owner_of, lambda a: (2.0 if a.kind == "B" else 1.0) / layout.chunks)


class _Run:
    def __init__(
        self,
        lists: Lists,
        owner_of: Callable[[int], int],
        seconds: Callable[[Action], float],
        message_s: Callable[[Action], float],
        reduce_s: Callable[[Action], float],
    ) -> None:
        self.owner_of, self.seconds, self.message, self.reduce = owner_of, seconds, message_s, reduce_s
        self.stages = 1 + max(action.chunk for actions in lists for action in actions)
        self.ranks = [_Rank(actions) for actions in lists]
        self.messages: dict[tuple[Edge, int], _Message] = {}
        self.edge_free_s: dict[Edge, float] = {}
        self.made: set[Product] = set()
        self.waiting: dict[tuple[Edge, int], int] = {}
        self.ready = deque(range(len(lists)))
        while self.ready:
            rank = self.ready.popleft()
            while self.ranks[rank].at < len(lists[rank]) and self._advance(rank):
                self.ranks[rank].at += 1
        if any(one.at < len(one.actions) for one in self.ranks):
            raise LayoutError(
                f"the actions deadlock: {deadlock(lists, self.stages) or 'a message is missing'}"
            )

    def _advance(self, number: int) -> bool:
        """Run the rank's next action; False where it has to wait for something that has no time yet."""
        rank = self.ranks[number]
        kind, chunk, j = action = rank.actions[rank.at]
        if kind in COMPUTATIONS:
            return self._compute(number, action)
        if kind == "REDUCE_GRAD":
            start = max(rank.now_s, rank.reduced_s)
            rank.reduced_s = start + self.reduce(action)
            rank.spans.append(Span(action, start, rank.reduced_s))
            return True
        step = 1 if kind[-1] == "F" else -1
        if kind.startswith("SEND"):
            edge = Edge(kind[-1], chunk, chunk + step)
            self.messages.setdefault((edge, j), _Message()).sent_s = rank.now_s
        else:
            edge = Edge(kind[-1], chunk - step, chunk)
            self.messages.setdefault((edge, j), _Message()).posted_s = rank.now_s
        self._deliver(edge, j, action)
        return True

    def _deliver(self, edge: Edge, j: int, action: Action) -> None:
        """Once a message is sent and its receive posted, its arrival is known; wake whoever waits for it."""
        message = self.messages[edge, j]
        if message.sent_s is None or message.posted_s is None:
            return
        start = max(message.sent_s, message.posted_s, self.edge_free_s.get(edge, 0.0))
        send = Action("SEND_F" if edge.way == "F" else "SEND_B", edge.source, j)
        message.arrived_s = self.edge_free_s[edge] = start + self.message(send)
        if (edge, j) in self.waiting:
            self.ready.append(self.waiting.pop((edge, j)))

    def _compute(self, number: int, action: Action) -> bool:
        rank = self.ranks[number]
        start = rank.now_s
        edge = incoming(action, self.owner_of, self.stages)
        if edge is not None:
            message = self.messages.get((edge, action.microbatch))
            if message is None or message.arrived_s is None:
                self.waiting[edge, action.microbatch] = number
                return False
            assert message.sent_s is not None
            start = max(start, message.arrived_s)
            rank.message_s += start - min(start, max(rank.now_s, message.sent_s))
        elif (needed := Product.for_(action, self.stages)) and needed not in self.made:
            return False  # it stands further on in the rank's own list: a deadlock
        self.made.add(Product.of(action))
        rank.now_s = start + self.seconds(action)
        rank.compute_s += rank.now_s - start
        rank.spans.append(Span(action, start, rank.now_s))
        return True

    def result(self) -> Timeline:
        ends = [max(rank.now_s, rank.reduced_s) for rank in self.ranks]
        total = max(ends)
        times = []
        for rank, end in zip(self.ranks, ends):
            reduce = end - rank.now_s
            idle = total - rank.compute_s - rank.message_s - reduce
            times.append(RankTimes(rank.compute_s, rank.message_s, reduce, max(0.0, idle)))
        return Timeline(total, tuple(tuple(rank.spans) for rank in self.ranks), tuple(times))


def draw(timeline: Timeline, cell_s: float) -> str:
    """The timeline as text: a line for each rank, a column of 3 characters for each `cell_s` seconds.

    `F0` is the forward of microbatch 0 on a rank's first chunk, `f0` on its second; so B, I and W. A computation longer
    than a cell goes on as `--`, idle time is ` .`. For timelines of whole cells and at most two chunks a rank.
    """
    lines = []
    for number, spans in enumerate(timeline.spans):
        own = sorted({span.action.chunk for span in spans})
        cells = [" ."] * round(timeline.total_s / cell_s)
        for action, start_s, end_s in spans:
            if action.kind in COMPUTATIONS:
                name = action.kind if action.chunk == own[0] else action.kind.lower()
                first, last = round(start_s / cell_s), round(end_s / cell_s)
                cells[first:last] = [f"{name}{action.microbatch}", *["--"] * (last - first - 1)]
        lines.append(f"rank {number}  " + " ".join(f"{cell:<2}" for cell in cells).rstrip())
    return "\n".join(lines)

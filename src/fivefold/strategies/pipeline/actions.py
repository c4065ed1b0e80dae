"""What a pipeline rank does, one step at a time: the action, its text form, and the messages around computations.

An action is (kind, chunk, microbatch); a chunk is a virtual stage, numbered over the whole pipeline. Computations are

    F   forward                                   B   backward, whole
    I   backward of the input                     W   backward of the weights, after its I

`lower` adds what has to happen around them:

    RECV_F / RECV_B    posted one computation ahead of its use, so that the message travels meanwhile
    SEND_F / SEND_B    right after the computation that made the message (F; B or I)
    REDUCE_GRAD        after the last B or W of a chunk: its gradients are complete, data ranks may sum them

Messages of one edge are matched in order, so the receives of an edge are posted in the order of its sends.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from fivefold.core.execution import MOST_MICROBATCHES
from fivefold.core.layout import Layout
from fivefold.core.regular_file import read_text
from fivefold.errors import ConfigError
from fivefold.units import MIB

Kind = Literal["F", "B", "I", "W", "SEND_F", "RECV_F", "SEND_B", "RECV_B", "REDUCE_GRAD"]
COMPUTATIONS = ("F", "B", "I", "W")

FILE_LIMIT_BYTES = 4 * MIB
"""A list of actions for 1,000 ranks and 100 microbatches takes about 2 MiB."""


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

    @property
    def text(self) -> str:
        """The form of a file of actions: `3F0` is the forward of chunk 3, microbatch 0."""
        return f"{self.chunk}{self.kind}{self.microbatch}"


Lists = Sequence[Sequence[Action]]
"""The actions of every pipeline rank."""


class Product(NamedTuple):
    """What a computation makes for another: F, or B (of the input), or W, of a chunk and microbatch."""

    kind: str
    chunk: int
    microbatch: int

    @classmethod
    def of(cls, action: Action) -> Product:
        """B and I both make the gradient that the chunk before waits for."""
        return cls("B" if action.kind == "I" else action.kind, action.chunk, action.microbatch)

    @classmethod
    def for_(cls, action: Action, stages: int) -> Product | None:
        """What a computation has to wait for; None for the first chunk's forward."""
        kind, chunk, j = action
        if kind == "F":
            return cls("F", chunk - 1, j) if chunk else None
        if kind == "W":
            return cls("B", chunk, j)
        return cls("B", chunk + 1, j) if chunk < stages - 1 else cls("F", chunk, j)


# Messages


class Edge(NamedTuple):
    """Messages of one kind from one chunk to the next: `way` F carries hidden states, B their gradients."""

    way: str
    source: int
    target: int


def incoming(action: Action, owner_of: Callable[[int], int], stages: int) -> Edge | None:
    """The edge over which a computation gets what it reads; None where no other rank sends it."""
    if action.kind == "W":
        return None
    way = "F" if action.kind == "F" else "B"
    source = action.chunk + (-1 if way == "F" else 1)
    if not 0 <= source < stages or owner_of(source) == owner_of(action.chunk):
        return None
    return Edge(way, source, action.chunk)


def outgoing(action: Action, owner_of: Callable[[int], int], stages: int) -> Edge | None:
    """The edge over which a computation hands on what it made; None where no other rank takes it."""
    if action.kind == "W":
        return None
    way = "F" if action.kind == "F" else "B"
    target = action.chunk + (1 if way == "F" else -1)
    if not 0 <= target < stages or owner_of(target) == owner_of(action.chunk):
        return None
    return Edge(way, action.chunk, target)


def lower(lists: Lists, owner_of: Callable[[int], int], stages: int) -> list[list[Action]]:
    """Add the communication to the computations of all ranks. Neighbours on the same rank exchange nothing.

    A message that is used later than one that its edge sends after it is received first all the same: it waits in
    its buffer. So the k-th receive of an edge always meets the k-th send, whatever order the lists have.
    """
    sent: dict[Edge, list[Action]] = {}
    turn: dict[tuple[Edge, int], int] = {}
    for computations in lists:
        for action in computations:
            if edge := outgoing(action, owner_of, stages):
                order = sent.setdefault(edge, [])
                turn[edge, action.microbatch] = len(order)
                kind: Kind = "RECV_F" if edge.way == "F" else "RECV_B"
                order.append(Action(kind, edge.target, action.microbatch))
    lowered = []
    for computations in lists:
        edges = [incoming(action, owner_of, stages) for action in computations]
        due = [edge and (edge, turn[edge, action.microbatch]) for edge, action in zip(edges, computations)]
        lowered.append(_lower_rank(computations, due, sent, lambda a: outgoing(a, owner_of, stages)))
    return lowered


def _lower_rank(
    computations: Sequence[Action],
    due: Sequence[tuple[Edge, int] | None],
    sent: dict[Edge, list[Action]],
    out: Callable[[Action], Edge | None],
) -> list[Action]:
    """`due`: for each computation the edge that it reads from, and which of its receives (`sent`) it needs."""
    last_backward = {action.chunk: i for i, action in enumerate(computations) if action.kind in ("B", "W")}
    posted: dict[Edge, int] = {}
    lowered: list[Action] = []
    for i, action in enumerate(computations):
        # Post what the next computation reads before this one starts: it travels while we compute.
        for one in due[:2] if i == 0 else due[i + 1 : i + 2]:
            if one is not None:
                edge, turn = one
                first = posted.get(edge, 0)
                lowered += sent[edge][first : turn + 1]
                posted[edge] = max(first, turn + 1)
        lowered.append(action)
        if out(action):
            lowered.append(
                Action("SEND_F" if action.kind == "F" else "SEND_B", action.chunk, action.microbatch)
            )
        if last_backward.get(action.chunk) == i:
            lowered.append(Action("REDUCE_GRAD", action.chunk, -1))
    return lowered


def arrivals(neighbour: Sequence[Action], chunk: int) -> dict[int, list[int]]:
    """What a message from the rank of the previous chunk tells about the gradients that `chunk` sent there before.

    `neighbour`: the list of that rank. Microbatch whose hidden states arrive -> microbatches whose gradients that rank
    had asked for by then, so that waiting for these sends cannot be in vain, even where a send needs its receive.
    """
    known: dict[int, list[int]] = {}
    asked: list[int] = []
    for action in neighbour:
        if action.chunk != chunk - 1:
            continue
        if action.kind == "RECV_B":
            asked.append(action.microbatch)
        elif action.kind == "SEND_F":
            known[action.microbatch], asked = asked, []
    return known


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


# Text

_CELL = re.compile(r"([0-9]{1,6})([FBIW])([0-9]{1,6})")


def parse_actions(text: str, *, where: str = "actions") -> list[list[Action]]:
    """Read computations: a line for each pipeline rank, cells `chunk kind microbatch` such as `0F0, 0F1, 0B0`.

    Empty cells (idle turns), blank lines and what follows a `#` are passed over. It is the form in which
    torch.distributed.pipelining writes its computations as CSV.
    Raises: ConfigError with line and column.
    """
    lists: list[list[Action]] = []
    for number, line in enumerate(text.splitlines(), 1):
        line = line.partition("#")[0]
        if not line.strip():
            continue
        actions: list[Action] = []
        column = 1
        for cell in line.split(","):
            written = cell.strip()
            if written:
                match = _CELL.fullmatch(written)
                if match is None:
                    at = column + cell.index(written)
                    raise ConfigError(
                        f"{where}, line {number}, column {at}: expected chunk, one of F B I W, and microbatch, "
                        f"such as 0F1, got {written[:40]!r}"
                    )
                actions.append(Action(match[2], int(match[1]), int(match[3])))  # type: ignore[arg-type]
            column += len(cell) + 1
        if actions:
            lists.append(actions)
    if not lists:
        raise ConfigError(f"{where}: no actions; write a line for each pipeline rank, such as 0F0, 0B0")
    return lists


def format_actions(lists: Lists) -> tuple[str, ...]:
    """One line of text for each rank, computations only; `parse_actions` reads the lines back."""
    return tuple(
        ", ".join(action.text for action in actions if action.kind in COMPUTATIONS) for actions in lists
    )


def microbatches_of(lines: Sequence[str]) -> int:
    """How many microbatches an action list has. Raises: ConfigError as `parse_actions`, or for too many."""
    last = max((a.microbatch for rank in parse_actions("\n".join(lines)) for a in rank), default=0)
    if last >= MOST_MICROBATCHES:
        raise ConfigError(f"the actions have a microbatch {last}; at most {MOST_MICROBATCHES} are supported")
    return last + 1


def read_actions(path: Path) -> tuple[str, ...]:
    """The file's actions as a plan keeps them: one line for each pipeline rank, in the form of `format_actions`.

    Raises: ConfigError for a file that cannot be read, is larger than 4 MiB, or does not hold actions.
    """
    text = read_text(path, FILE_LIMIT_BYTES, "actions", ConfigError)
    return format_actions(parse_actions(text, where=f"actions {path}"))

"""Communication events: what the strategies predict and what the ledger of a run observes.

An event is (phase, axis, op, dtype, bytes of the larger local buffer with padding). SEND and RECV are
separate. Two runs communicate alike when the multisets of their events are equal; set-up is listed apart.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, get_args

from fivefold.core.layout import Axis
from fivefold.errors import RecordError

Phase = Literal["setup", "forward", "backward", "reduce", "norm", "optimizer", "metrics"]
Op = Literal[
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "broadcast",
    "all_to_all",
    "send",
    "recv",
    "barrier",
    "reduce",
    "gather",
    "scatter",
]
PHASES: tuple[Phase, ...] = get_args(Phase)
OPS: tuple[Op, ...] = get_args(Op)
_AXES: tuple[Axis, ...] = get_args(Axis)
_MAX_EVENTS = 1_000_000


@dataclass(frozen=True, slots=True, order=True)
class Event:
    """One collective, or one half of a point-to-point transfer, as one rank sees it."""

    phase: Phase
    axis: Axis
    op: Op
    dtype: str
    """Short name, such as `float32`."""
    bytes: int
    """Bytes of the larger of the local input and output buffers, padding included."""

    def __str__(self) -> str:
        return f"{self.phase} {self.axis} {self.op} {self.dtype} {self.bytes} B"


Events = Counter[Event]
"""A multiset of events: how often each happened on one rank."""


def total_bytes(events: Mapping[Event, int], axis: Axis | None = None, phase: Phase | None = None) -> int:
    """Bytes of all events, or of those of one axis or phase."""
    return sum(
        event.bytes * count
        for event, count in events.items()
        if axis in (None, event.axis) and phase in (None, event.phase)
    )


def forward_again(events: Mapping[Event, int]) -> Events:
    """The events of a forward as those of a recompute: they happen once more, in backward."""
    return Counter(
        {replace(event, phase="backward"): n for event, n in events.items() if event.phase == "forward"}
    )


def without_setup(events: Mapping[Event, int]) -> Events:
    """The events of the steps themselves."""
    return Counter({event: count for event, count in events.items() if event.phase != "setup"})


def difference(predicted: Mapping[Event, int], recorded: Mapping[Event, int]) -> list[str]:
    """One readable line for each event whose counts differ, in step order; empty where they are equal.

    Example: `backward tp all_gather float32 4096 B: predicted 6, recorded 12 (2x)`.
    """
    lines = []
    for event in sorted(predicted.keys() | recorded.keys(), key=_step_order):
        before, after = predicted.get(event, 0), recorded.get(event, 0)
        if before != after:
            lines.append(
                f"{event}: predicted {before or 'none'}, recorded {after or 'none'}{_remark(before, after)}"
            )
    return lines


def _remark(predicted: int, recorded: int) -> str:
    if not recorded:
        return " (missing)"
    if not predicted:
        return " (unexpected)"
    if recorded % predicted == 0:
        return f" ({recorded // predicted}x)"
    return f" (1/{predicted // recorded}x)" if predicted % recorded == 0 else ""


def _step_order(event: Event) -> tuple[int, Event]:
    return PHASES.index(event.phase) if event.phase in PHASES else len(PHASES), event


def events_to_json(events: Mapping[Event, int]) -> str:
    """A JSON list of objects with the fields of an event and its `count`, in the order of a step."""
    rows = [
        {**asdict(event), "count": events[event]}
        for event in sorted(events, key=_step_order)
        if events[event]
    ]
    return json.dumps(rows)


def events_from_json(text: str) -> Events:
    """Read what `events_to_json` wrote. Raises RecordError naming the row and the field at fault."""
    try:
        rows = json.loads(text)
    except (ValueError, RecursionError):
        raise RecordError("events: not JSON") from None
    if not isinstance(rows, list) or len(rows) > _MAX_EVENTS:
        raise RecordError(f"events: expected a list of at most {_MAX_EVENTS} objects")
    events: Events = Counter()
    for index, row in enumerate(rows):
        event, count = _event_of(row, f"events, row {index}")
        events[event] += count
    return events


def _event_of(row: Any, where: str) -> tuple[Event, int]:
    fields = ("phase", "axis", "op", "dtype", "bytes", "count")
    if not isinstance(row, dict) or row.keys() != set(fields):
        raise RecordError(f"{where}: expected an object with {', '.join(fields)}")
    known: dict[str, Iterable[str]] = {"phase": PHASES, "axis": _AXES, "op": OPS}
    for name, choices in known.items():
        if row[name] not in choices:
            raise RecordError(f"{where}: unknown {name} {str(row[name])[:40]!r}; known: {', '.join(choices)}")
    for name in ("bytes", "count"):
        if type(row[name]) is not int or row[name] < 0:
            raise RecordError(
                f"{where}: {name} must be a whole number of at least 0, got {str(row[name])[:40]!r}"
            )
    if not isinstance(row["dtype"], str):
        raise RecordError(f"{where}: dtype must be text, got {str(row['dtype'])[:40]!r}")
    return Event(**{name: row[name] for name in fields[:-1]}), row["count"]

"""Events: totals, differences a person can read, JSON."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from fivefold.core.events import (
    Event,
    difference,
    events_from_json,
    events_to_json,
    total_bytes,
    without_setup,
)
from fivefold.errors import RecordError

GATHER = Event("backward", "tp", "all_gather", "float32", 4096)
REDUCE = Event("reduce", "data", "all_reduce", "float32", 100)
SETUP = Event("setup", "world", "broadcast", "int64", 8)


def test_events_are_frozen_hashable_and_ordered_by_fields() -> None:
    assert Event("backward", "tp", "all_gather", "float32", 4096) == GATHER
    assert len({GATHER, Event("backward", "tp", "all_gather", "float32", 4096)}) == 1
    assert sorted([SETUP, REDUCE, GATHER]) == [GATHER, REDUCE, SETUP]
    with pytest.raises(AttributeError):
        GATHER.bytes = 1  # type: ignore[misc]


def test_totals() -> None:
    events = Counter({GATHER: 3, REDUCE: 2, SETUP: 1})
    assert total_bytes(events) == 3 * 4096 + 200 + 8
    assert total_bytes(events, "tp") == 3 * 4096
    assert total_bytes(events, "tp", phase="forward") == 0
    assert total_bytes(events, phase="setup") == 8
    assert without_setup(events) == Counter({GATHER: 3, REDUCE: 2})


def test_equal_multisets_have_no_difference() -> None:
    assert difference(Counter({GATHER: 3}), Counter({GATHER: 3})) == []
    assert difference(Counter({GATHER: 3, REDUCE: 0}), Counter({GATHER: 3})) == []


@pytest.mark.parametrize(
    ("predicted", "recorded", "end"),
    [
        (6, 12, "predicted 6, recorded 12 (2x)"),
        (12, 4, "predicted 12, recorded 4 (1/3x)"),
        (6, 7, "predicted 6, recorded 7"),
        (6, 0, "predicted 6, recorded none (missing)"),
        (0, 2, "predicted none, recorded 2 (unexpected)"),
    ],
)
def test_difference_names_the_ratio(predicted: int, recorded: int, end: str) -> None:
    lines = difference(Counter({GATHER: predicted}), Counter({GATHER: recorded}))
    assert lines == [f"backward tp all_gather float32 4096 B: {end}"]


def test_difference_is_in_step_order() -> None:
    forward = Event("forward", "tp", "all_gather", "float32", 1)
    lines = difference(Counter({REDUCE: 1, GATHER: 1}), Counter({forward: 1}))
    assert [line.split()[0] for line in lines] == ["forward", "backward", "reduce"]


def test_json_round_trip() -> None:
    events = Counter({GATHER: 3, REDUCE: 2, SETUP: 1})
    text = events_to_json(events)
    assert json.loads(text)[0] == {
        "phase": "setup",
        "axis": "world",
        "op": "broadcast",
        "dtype": "int64",
        "bytes": 8,
        "count": 1,
    }
    assert events_from_json(text) == events
    assert events_from_json("[]") == Counter()


ROW = {"phase": "norm", "axis": "world", "op": "all_reduce", "dtype": "float32", "bytes": 4, "count": 1}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("{}", "expected a list"),
        ("[3]", "row 0: expected an object with phase"),
        (json.dumps([ROW, {**ROW, "extra": 1}]), "row 1: expected an object"),
        (json.dumps([{**ROW, "phase": "lunch"}]), "unknown phase 'lunch'; known: setup, forward"),
        (json.dumps([{**ROW, "axis": []}]), "unknown axis"),
        (json.dumps([{**ROW, "bytes": -1}]), "bytes must be a whole number of at least 0, got '-1'"),
        (json.dumps([{**ROW, "count": True}]), "count must be a whole number"),
        (json.dumps([{**ROW, "dtype": 3}]), "dtype must be text"),
    ],
)
def test_bad_json_is_refused(text: str, message: str) -> None:
    with pytest.raises(RecordError, match=message):
        events_from_json(text)

"""Real processes: two that write at once, one that is killed, one whose disk is full."""

from __future__ import annotations

import os
import resource
import signal
import sqlite3
import time
from collections.abc import Callable
from contextlib import closing
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

import pytest

from fivefold.errors import RecordError
from fivefold.records import store as module
from fivefold.records.store import Store


def start_and_log(path: Path, name: str, steps: int) -> str:
    with Store.open(path) as store:
        run = store.start(kind="lab", layout="dp1", model="tiny", plan={}, name=name)
        for step in range(steps):
            run.log_many((step, rank, {"loss": step + rank / 4}) for rank in range(4))
        run.finish()
        return run.id


def sound(path: Path) -> bool:
    with closing(sqlite3.connect(path)) as other:
        return bool(other.execute("PRAGMA integrity_check").fetchone()[0] == "ok")


def test_two_processes_write_thousands_of_rows(path: Path, spawn: Callable[..., ForkProcess]) -> None:
    steps = 1000
    Store.open(path).close()
    writers = [spawn(start_and_log, path, name, steps) for name in "ab"]
    seen = []
    while any(writer.is_alive() for writer in writers):  # a reader is neither in the way nor kept waiting
        with Store.open(path, create=False) as reader:
            seen.append(sum(run.last_step or 0 for run in reader.runs()))
        time.sleep(0.01)
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    assert seen == sorted(seen)
    with Store.open(path, create=False) as store:
        runs = store.runs()
        assert sorted(str(run.name) for run in runs) == ["a", "b"]
        for run in runs:
            rows = [(row.step, row.rank, row.values["loss"]) for row in store.metrics(run.id)]
            assert rows == [(step, rank, step + rank / 4) for step in range(steps) for rank in range(4)]
        starts = [run.started_at for run in runs]
        ends = [run.ended_at or 0.0 for run in runs]
        assert max(starts) < min(ends), "the two did not overlap: the test shows nothing"
    assert sound(path)


def test_ids_of_runs_that_start_in_one_millisecond(
    path: Path, store: Store, spawn: Callable[..., ForkProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module.time, "time", lambda: 1_700_000_000.0)

    def many() -> None:
        for _ in range(100):
            store.start(kind="lab", layout="dp1", model="tiny", plan={})

    children = [spawn(many), spawn(many)]
    for child in children:
        child.join()
        assert child.exitcode == 0
    ids = [run.id for run in store.runs(limit=None)]
    assert len(set(ids)) == 200
    assert len({run_id[:9] for run_id in ids}) == 1


@pytest.mark.parametrize("moment", [1, 40, 200])
def test_kill_9_while_writing_leaves_a_readable_record(
    path: Path, spawn: Callable[..., ForkProcess], moment: int
) -> None:
    """Every step that the writer knows to be recorded is there, and no step by halves."""
    end_read, end_write = os.pipe()

    def write_for_ever() -> None:
        run = Store.open(path).start(kind="train", layout="dp1", model="tiny", plan={})
        step = 0
        while True:
            run.log_many((step, rank, {"loss": 1.0, "filler": 10.0**300}) for rank in range(8))
            os.write(end_write, b".")
            step += 1

    child = spawn(write_for_ever)
    os.close(end_write)
    acknowledged = 0
    while acknowledged < moment:
        acknowledged += len(os.read(end_read, 1))
    with Store.open(path, create=False) as reader:
        assert [run.status for run in reader.runs()] == ["running"]
    assert child.pid is not None
    os.kill(child.pid, signal.SIGKILL)
    child.join()
    while rest := os.read(end_read, 4096):
        acknowledged += len(rest)
    os.close(end_read)

    with Store.open(path, create=False) as reader:
        (run,) = reader.runs()
        assert (run.status, run.ended_at) == ("lost", None)
        rows = [(row.step, row.rank) for row in reader.metrics(run.id)]
    steps = len(rows) // 8
    assert steps in (acknowledged, acknowledged + 1)  # the last may be recorded and not yet acknowledged
    assert rows == [(step, rank) for step in range(steps) for rank in range(8)]
    assert sound(path)
    assert start_and_log(path, "next", 1)  # the store still takes new runs


def fill(path: Path, limit_bytes: int) -> tuple[str, int, int]:
    """Write until files may not grow any more; then whether the same process can go on once there is room."""
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, hard))
    store = Store.open(path)
    run = store.start(kind="train", layout="dp1", model="tiny", plan={})
    recorded = 0
    try:
        while recorded < 100_000:
            run.log_many((recorded, rank, {"loss": 1.0}) for rank in range(50))
            recorded += 1
    except RecordError as error:
        message = str(error)
    readable = len(store.metrics(run.id))
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    run.finish("failed", message)
    return message, recorded, readable


def test_a_full_disk_is_one_line_and_keeps_what_was_recorded(path: Path, answer: Callable[..., Any]) -> None:
    message, recorded, readable = answer(fill, path, 300_000)
    assert "disk full" in message
    assert str(path) in message
    assert "\n" not in message
    assert recorded > 10
    assert readable == 50 * recorded
    with Store.open(path, create=False) as store:
        (run,) = store.runs()
        assert (run.status, run.error) == ("failed", message)
        assert len(store.metrics(run.id)) == 50 * recorded
    assert sound(path)


def test_no_room_even_for_the_tables(path: Path, answer: Callable[..., Any]) -> None:
    message = answer(fill, path, 2000)
    assert message.startswith("RecordError: cannot open records in")
    assert "\n" not in message

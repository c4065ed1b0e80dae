"""Runs, metrics and results: what goes in comes out."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fivefold.core.value import Value
from fivefold.errors import RecordError
from fivefold.records import store as module
from fivefold.records.store import STATUSES, MetricRow, Run, Store


def start(store: Store, **changes: Any) -> Run:
    return store.start(
        **{"kind": "train", "layout": "dp2 tp2", "model": "tiny", "plan": {"steps": 3}, **changes}
    )


def test_everything_comes_back(store: Store) -> None:
    run = start(store, name="first try", machine={"accelerator": "H100"})
    run.log(1, 0, {"loss": 2.5, "tokens": 4096})
    run.log_many([(1, 1, {"memory_bytes": 2**40}), (2, 0, {"loss": 0.1 + 0.2})])
    run.result("events", [{"op": "all_reduce", "bytes": 64}])
    run.result("verdict", {"passed": False})
    run.result("verdict", {"passed": True})
    run.finish()
    record = store.run(run.id)
    assert (record.kind, record.name, record.layout, record.model) == (
        "train",
        "first try",
        "dp2 tp2",
        "tiny",
    )
    assert (record.plan, record.status, record.error) == ({"steps": 3}, "finished", None)
    assert (record.pid, record.host, record.last_step) == (os.getpid(), os.uname().nodename, 2)
    assert record.machine["accelerator"] == "H100"
    assert record.machine["cores"] >= 1
    assert record.versions["python"] == sys.version.split()[0]
    assert record.ended_at is not None
    assert 0 <= record.ended_at - record.started_at < 60
    assert store.metrics(run.id) == [
        MetricRow(1, 0, {"loss": 2.5, "tokens": 4096}),
        MetricRow(1, 1, {"memory_bytes": 2**40}),
        MetricRow(2, 0, {"loss": 0.1 + 0.2}),
    ]
    assert store.results(run.id) == {
        "events": [{"op": "all_reduce", "bytes": 64}],
        "verdict": {"passed": True},
    }


def test_nan_and_infinities_come_back(store: Store) -> None:
    run = start(store)
    run.log(1, 0, {"loss": math.nan, "norm": math.inf, "low": -math.inf})
    run.result("worst", math.inf)
    values = store.metrics(run.id)[0].values
    assert math.isnan(values["loss"])
    assert (values["norm"], values["low"]) == (math.inf, -math.inf)
    assert store.results(run.id) == {"worst": math.inf}


def test_scalars_of_numpy_are_numbers_and_texts_are_not(store: Store) -> None:
    run = start(store)
    run.log(np.int64(1), 0, {"loss": np.float32(0.5), "tokens": np.int32(7)})  # type: ignore[arg-type]
    assert store.metrics(run.id) == [MetricRow(1, 0, {"loss": 0.5, "tokens": 7})]
    with pytest.raises((TypeError, ValueError)):
        run.log_many([(2, 0, {"loss": 1.0}), (3, 0, {"loss": "much"})])  # type: ignore[dict-item]
    assert len(store.metrics(run.id)) == 1  # all or none


def test_a_value_is_recorded_as_its_fields(store: Store) -> None:
    class Part(Value):
        size: int

    class Whole(Value):
        parts: tuple[Part, ...]

    run = start(store, plan=Whole(parts=(Part(size=2),)), layout=Path("dp1"))
    run.result("part", {"kept": Part(size=3)})
    assert store.run(run.id).plan == {"parts": [{"size": 2}]}
    assert store.run(run.id).layout == "dp1"
    assert store.results(run.id) == {"part": {"kept": {"size": 3}}}


def test_a_model_path_that_is_no_utf8(store: Store) -> None:
    run = start(store, model=os.fsdecode(b"mod\xe8le/config.json"))
    assert store.run(run.id).model == "mod\\udce8le/config.json"


def test_the_block_decides_the_ending(store: Store) -> None:
    with start(store) as good:
        pass
    with pytest.raises(ZeroDivisionError), start(store) as bad:
        _ = 1 / 0
    with pytest.raises(KeyboardInterrupt), start(store) as stopped:
        raise KeyboardInterrupt
    with start(store) as told:
        told.finish("failed", "told so")
    assert [(r.status, r.error) for r in map(store.run, (good.id, bad.id, stopped.id, told.id))] == [
        ("finished", None),
        ("failed", "ZeroDivisionError: division by zero"),
        ("interrupted", "KeyboardInterrupt"),
        ("failed", "told so"),
    ]


def test_own_mistakes_are_refused(store: Store) -> None:
    with pytest.raises(ValueError, match="train, verify, lab"):
        start(store, kind="serve")
    with pytest.raises(ValueError, match="finished, failed, interrupted"):
        start(store).finish("lost")  # type: ignore[arg-type]


def test_newest_first_limited_and_by_status(store: Store) -> None:
    runs = [start(store, name=str(i)) for i in range(5)]
    runs[1].finish("failed", "why")
    runs[3].finish("failed", "why")
    assert [run.name for run in store.runs()] == ["4", "3", "2", "1", "0"]
    assert [run.name for run in store.runs(limit=2)] == ["4", "3"]
    assert [run.name for run in store.runs(status="failed")] == ["3", "1"]
    assert [run.name for run in store.runs(limit=2, status="running")] == ["4", "2"]
    assert len(store.runs(limit=None)) == 5
    with pytest.raises(RecordError, match=r"did you mean 'failed'"):
        store.runs(status="faild")


def test_lost_is_a_running_run_whose_process_is_gone(store: Store, answer: Callable[..., Any]) -> None:
    running = start(store)
    lost_id = answer(lambda: start(store).id)
    ended_id = answer(lambda: (run := start(store), run.finish())[0].id)
    assert {run.id: run.status for run in store.runs()} == {
        running.id: "running",
        lost_id: "lost",
        ended_id: "finished",
    }
    assert [run.id for run in store.runs(status="lost")] == [lost_id]
    assert [run.id for run in store.runs(status="running")] == [running.id]
    assert "lost" in STATUSES
    store.attach(lost_id).finish("interrupted", "found dead")  # whoever knows more may say so
    assert store.run(lost_id).status == "interrupted"


def test_a_reused_process_number_is_lost_and_another_host_is_not(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "process_start", lambda pid: "an earlier process of this number")
    reused = start(store)
    monkeypatch.setattr(module, "host_name", lambda: "elsewhere")
    other = start(store)
    monkeypatch.undo()
    assert store.run(reused.id).status == "lost"
    assert store.run(other.id).status == "running"


def test_prefixes(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = iter(["abc1", "abd2", "abd2x", "abd2", "xyz3"])  # abd2 is drawn again while taken
    monkeypatch.setattr(module, "new_id", lambda now: next(ids))
    made = [start(store).id for _ in range(4)]
    assert made == ["abc1", "abd2", "abd2x", "xyz3"]
    assert store.run("abc").id == "abc1"
    assert store.run("abd2").id == "abd2"  # a whole id is no prefix of another
    assert store.run("last").id == "xyz3"
    with pytest.raises(RecordError, match="'ab' begins 3 run ids: abc1, abd2, abd2x; type more"):
        store.run("ab")
    for unknown in ("abz", "%", "a_c1", "ABC1", "\udcff", "'; DROP TABLE runs; --"):
        with pytest.raises(RecordError, match="no run"):
            store.run(unknown)
    with pytest.raises(RecordError, match="no run"):
        store.attach("q")
    with pytest.raises(RecordError, match="begins 3"):
        store.metrics("ab")


def test_attach_from_another_process(path: Path, store: Store, answer: Callable[..., Any]) -> None:
    run = start(store)

    def log() -> str:
        with Store.open(path) as other:
            attached = other.attach(run.id)
            attached.log(1, 3, {"loss": 4.0})
            return attached.id

    assert answer(log) == run.id
    assert store.metrics(run.id) == [MetricRow(1, 3, {"loss": 4.0})]
    assert store.run(run.id).status == "running"  # the child is gone, the run's own process is not


def test_default_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FIVEFOLD_RECORDS", raising=False)
    with Store.open() as store:
        assert store.path == tmp_path / ".fivefold" / "records.sqlite"
    monkeypatch.setenv("FIVEFOLD_RECORDS", str(tmp_path / "x.sqlite"))
    with Store.open() as store:
        run = start(store)
        monkeypatch.chdir("/")
        store.close()
        run.log(1, 0, {"loss": 1.0})  # reopens the same file from another folder
    assert (tmp_path / "x.sqlite").stat().st_size > 0

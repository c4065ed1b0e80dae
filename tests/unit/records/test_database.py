"""The file itself: who may open it, what is refused, and forks."""

from __future__ import annotations

import hashlib
import math
import multiprocessing
import os
import sqlite3
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

import pytest

from fivefold.errors import RecordError
from fivefold.records.database import SCHEMA_VERSION, Database
from fivefold.records.store import Store

NOBODY = 65534
FORK = multiprocessing.get_context("fork")


def refused(path: Path, *, create: bool = True) -> str:
    """The message of the refusal; always one line."""
    with pytest.raises(RecordError) as caught:
        Store.open(path, create=create)
    message = str(caught.value)
    assert "\n" not in message
    assert str(path) in message
    return message


def example(store: Store) -> str:
    run = store.start(kind="train", layout="dp1", model="tiny", plan={})
    run.log(1, 0, {"loss": 1.5})
    return run.id


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_folders_are_made_on_the_way(tmp_path: Path) -> None:
    with Store.open(tmp_path / "a" / "b c?#%" / "r.sqlite") as store:
        example(store)
    assert [p.name for p in (tmp_path / "a" / "b c?#%").iterdir()] == ["r.sqlite"]


def test_reading_makes_no_file(tmp_path: Path) -> None:
    assert "no record store" in refused(tmp_path / "a" / "r.sqlite", create=False)
    assert list(tmp_path.iterdir()) == []


def test_journal_is_wal_and_only_known_tables(path: Path, store: Store) -> None:
    example(store)
    with closing(sqlite3.connect(path)) as other:
        assert other.execute("PRAGMA journal_mode").fetchone()[0] == "wal"
        assert other.execute("PRAGMA user_version").fetchone()[0] == SCHEMA_VERSION
        tables = {row[0] for row in other.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    assert tables == {"runs", "metrics", "results"}


@pytest.mark.parametrize("create", [True, False])
def test_a_file_that_is_no_database_is_refused_and_kept(path: Path, create: bool) -> None:
    path.write_bytes(b"not a database at all\n" * 400)
    before = digest(path)
    assert "damaged or no SQLite file" in refused(path, create=create)
    assert digest(path) == before


@pytest.mark.parametrize("create", [True, False])
def test_the_database_of_another_program_is_refused_and_kept(path: Path, create: bool) -> None:
    with closing(sqlite3.connect(path)) as other:
        other.execute("CREATE TABLE bookmarks (url TEXT)")
    before = digest(path)
    assert "not a Fivefold record store" in refused(path, create=create)
    assert digest(path) == before


@pytest.mark.parametrize("create", [True, False])
def test_a_newer_schema_is_refused_with_both_numbers(path: Path, create: bool) -> None:
    with Store.open(path) as store:
        example(store)
    with closing(sqlite3.connect(path)) as other:
        other.execute("PRAGMA user_version = 99")
    message = refused(path, create=create)
    assert "99" in message
    assert str(SCHEMA_VERSION) in message


def test_a_store_damaged_in_the_middle_is_one_line(path: Path) -> None:
    with Store.open(path) as store:
        run = store.start(kind="train", layout="dp1", model="tiny", plan={})
        run.log_many((step, 0, {"loss": 1.0}) for step in range(5000))
    data = bytearray(path.read_bytes())
    data[4096:] = b"\xff" * (len(data) - 4096)  # all pages but the first
    path.write_bytes(data)
    with pytest.raises(RecordError, match="damaged") as caught:
        Store.open(path, create=False).runs()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("table", "column", "value"),
    [
        ("metrics", "step", "x"), ("metrics", "rank", b"\xff"), ("metrics", "data", None), ("metrics", "data", 3.5),
        ("metrics", "data", '{"loss": "x"}'), ("metrics", "data", '{"loss": null}'), ("results", "key", b"\xff"),
        ("results", "data", "[" * 10**5), ("runs", "started_at", 1e18), ("runs", "id", None),
        ("runs", "started_at", "now"), ("runs", "model", b"x"), ("runs", "plan", None), ("runs", "ended_at", math.inf),
    ],
)  # fmt: skip
def test_a_value_of_another_type_is_one_line(
    path: Path, store: Store, table: str, column: str, value: object
) -> None:
    """SQLite takes any value into any column: whoever wrote it, no command may trip over it."""
    run_id = example(store)
    store.attach(run_id).result("a", 1)
    with closing(sqlite3.connect(path)) as other:
        try:
            other.execute(f"UPDATE {table} SET {column} = ?", (value,))
        except sqlite3.IntegrityError:
            return  # the schema refuses it
        other.commit()
    run_id = "last" if column == "id" else run_id
    with pytest.raises(RecordError, match="a damaged value") as caught:
        (store.run(run_id), store.metrics(run_id), store.results(run_id))
    assert "\n" not in str(caught.value)


def test_a_damaged_value_is_one_line(path: Path, store: Store) -> None:
    run_id = example(store)
    with closing(sqlite3.connect(path)) as other:
        other.execute("UPDATE metrics SET data = '{'")
        other.commit()
    with pytest.raises(RecordError, match="a damaged value"):
        store.metrics(run_id)


def test_an_empty_file_is_made_a_store_but_not_read_as_one(path: Path) -> None:
    path.touch()
    assert "holds no runs yet" in refused(path, create=False)
    assert path.stat().st_size == 0
    with Store.open(path) as store:
        example(store)
        assert len(store.runs()) == 1


def test_a_folder_is_no_store(tmp_path: Path) -> None:
    assert "it is a folder" in refused(tmp_path)


def test_a_file_in_place_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("a file")
    assert "cannot open" in refused(tmp_path / "a" / "r.sqlite")


def as_nobody(function: Callable[[], object]) -> object:
    """In a child: as a user that may not write everywhere, even where the tests run as root."""
    if os.getuid() == 0:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
    return function()


@pytest.fixture
def locked_folder() -> Iterator[Path]:
    """A folder outside those of pytest, which other users may not look into."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        yield folder
        folder.chmod(0o755)


def test_an_unwritable_folder_is_one_line(locked_folder: Path, answer: Callable[..., Any]) -> None:
    locked_folder.chmod(0o555)
    for path in (locked_folder / "r.sqlite", locked_folder / "new" / "r.sqlite"):
        message = answer(as_nobody, lambda path=path: Store.open(path).path)
        assert message.startswith("RecordError: cannot open records in")
        assert "\n" not in message


def test_a_store_in_an_unwritable_folder_can_be_read(locked_folder: Path, answer: Callable[..., Any]) -> None:
    path = locked_folder / "r.sqlite"
    with Store.open(path) as store:
        run_id = example(store)
    path.chmod(0o444)
    locked_folder.chmod(0o555)

    def read() -> object:
        with Store.open(path, create=False) as reader:
            return [run.id for run in reader.runs()], reader.metrics(run_id)[0].values

    assert answer(as_nobody, read) == ([run_id], {"loss": 1.5})
    message = answer(as_nobody, lambda: example(Store.open(path)))
    assert "read-only" in message


def test_a_reader_that_may_not_write_sees_what_a_live_writer_keeps_in_the_wal(
    locked_folder: Path, spawn: Callable[..., ForkProcess]
) -> None:
    path = locked_folder / "r.sqlite"
    go, answers = FORK.Event(), FORK.SimpleQueue()

    def read_when_told() -> None:
        go.wait(8)
        rows = as_nobody(lambda: Store.open(path, create=False).metrics("last"))
        answers.put(rows)

    child = spawn(read_when_told)  # before the writer opens: a fork would make it close, and so empty the WAL
    with Store.open(path) as writer:
        run_id = example(writer)
        assert path.with_name("r.sqlite-wal").stat().st_size > 0
        locked_folder.chmod(0o555)
        go.set()
        child.join()
        assert child.exitcode == 0
        assert answers.get() == writer.metrics(run_id)


def test_a_writer_that_holds_the_lock_too_long_is_named(path: Path) -> None:
    Store.open(path).close()
    with closing(Database(path, create=True, busy_timeout_s=0.05)) as database:
        with closing(sqlite3.connect(path, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            with pytest.raises(RecordError, match=r"locked for 0\.05 s"), database.write():
                pass
        with database.write():  # free again
            pass


def test_an_interrupted_transaction_leaves_nothing(path: Path, store: Store) -> None:
    run_id = example(store)
    with closing(Database(path, create=True)) as database:

        def delete_and_stop() -> None:
            with database.write() as connection:
                connection.execute("DELETE FROM metrics")
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            delete_and_stop()
        with database.write():
            pass
    assert len(store.metrics(run_id)) == 1


def test_no_connection_crosses_a_fork(path: Path, store: Store, answer: Callable[..., Any]) -> None:
    run = store.start(kind="train", layout="dp1", model="tiny", plan={})

    def open_files() -> list[str]:
        links = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
        return [os.readlink(link) for link in links if os.path.exists(link)]

    if not os.path.isdir("/proc/self/fd"):
        pytest.skip("needs /proc")
    assert any(name.startswith(str(path)) for name in open_files())
    assert not [name for name in answer(open_files) if name.startswith(str(path))]
    run.log(1, 0, {"loss": 1.0})  # the parent goes on
    answer(lambda: run.log(2, 0, {"loss": 2.0}))  # and so does a child, with the same object
    run.log(3, 0, {"loss": 3.0})
    assert [row.step for row in store.metrics(run.id)] == [1, 2, 3]


def test_a_fork_while_a_thread_writes(store: Store, answer: Callable[..., Any]) -> None:
    run = store.start(kind="train", layout="dp1", model="tiny", plan={})
    stop, written = threading.Event(), []

    def write() -> None:
        while not stop.is_set():
            run.log(len(written), 0, {"loss": 1.0})
            written.append(1)

    thread = threading.Thread(target=write)
    thread.start()
    try:
        for child in range(10):
            assert answer(run.log, child, 1, {"loss": 2.0}) is None
    finally:
        stop.set()
        thread.join()
    rows = store.metrics(run.id)
    assert len([row for row in rows if row.rank == 0]) == len(written)
    assert [row.step for row in rows if row.rank == 1] == list(range(10))


def test_many_processes_may_make_the_store_at_once(tmp_path: Path, spawn: Callable[..., ForkProcess]) -> None:
    writers, rounds = 6, 8
    ready = FORK.Barrier(writers)

    def make(name: int) -> None:
        for i in range(rounds):
            ready.wait(timeout=8)
            with Store.open(tmp_path / f"{i}.sqlite") as store:
                store.start(kind="lab", layout="dp1", model="tiny", plan={}, name=str(name))

    children = [spawn(make, name) for name in range(writers)]
    for child in children:
        child.join()
    assert [child.exitcode for child in children] == [0] * writers
    for i in range(rounds):
        with Store.open(tmp_path / f"{i}.sqlite", create=False) as store:
            assert sorted(str(run.name) for run in store.runs()) == [str(name) for name in range(writers)]

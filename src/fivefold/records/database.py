"""One SQLite file: a connection per process, short transactions, and faults as one line.

Journal: WAL, so that readers never wait for writers. `synchronous=NORMAL`: a killed process loses nothing
         that it committed; a power cut may lose the last moments, never the file.
Writers: `BEGIN IMMEDIATE` plus a busy timeout; they take turns.
Fork:    SQLite forbids a connection to cross a fork, even to be closed on the other side. All connections
         of a process are closed just before it forks, and each side opens its own at its next use.
"""

from __future__ import annotations

import os
import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from weakref import WeakSet

from fivefold.errors import RecordError

APPLICATION_ID = 0x35464F4C
"""Marks the file as ours ("5FOL"), so that the database of another program is never written to."""

SCHEMA_VERSION = 1

SCHEMA = (
    """CREATE TABLE runs (
        id TEXT PRIMARY KEY, kind TEXT NOT NULL, name TEXT, layout TEXT NOT NULL, model TEXT NOT NULL,
        plan TEXT NOT NULL, versions TEXT NOT NULL, machine TEXT NOT NULL,
        status TEXT NOT NULL, error TEXT,
        pid INTEGER NOT NULL, host TEXT NOT NULL, process_start TEXT,
        started_at REAL NOT NULL, ended_at REAL
    )""",
    "CREATE INDEX runs_by_time ON runs (started_at, id)",
    """CREATE TABLE metrics (
        run_id TEXT NOT NULL REFERENCES runs (id), step INTEGER NOT NULL, rank INTEGER NOT NULL,
        data TEXT NOT NULL
    )""",
    "CREATE INDEX metrics_by_step ON metrics (run_id, step, rank)",
    """CREATE TABLE results (
        run_id TEXT NOT NULL REFERENCES runs (id), key TEXT NOT NULL, data TEXT NOT NULL,
        PRIMARY KEY (run_id, key)
    )""",
)

_LOCK = threading.RLock()
_OPEN: WeakSet[Database] = WeakSet()


class Database:
    """The file at `path`. With `create` it is made (and its folder too) and writable; otherwise only read.

    Raises: RecordError if the file is missing, unreadable, damaged, of another program or of a newer schema.
    """

    def __init__(self, path: Path, *, create: bool, busy_timeout_s: float = 30.0) -> None:
        self.path = path.absolute()
        self._writable, self._busy_timeout_s = create, busy_timeout_s
        self._connection: sqlite3.Connection | None = None
        with _LOCK, self._faults("open"):
            if create:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                with closing(self._connect("rwc")) as connection:
                    self._prepare(connection)
            _OPEN.add(self)
            self._connected()

    @contextmanager
    def read(self) -> Iterator[sqlite3.Connection]:
        """A connection for SELECTs."""
        with _LOCK, self._faults("read"):
            yield self._connected()

    @contextmanager
    def write(self) -> Iterator[sqlite3.Connection]:
        """One transaction: all or nothing, also when it is interrupted."""
        with _LOCK, self._faults("write"):
            connection = self._connected()
            with _transaction(connection):
                yield connection

    def close(self) -> None:
        """Close this process's connection; the next use opens a new one."""
        with _LOCK:
            connection, self._connection = self._connection, None
            if connection is not None:
                connection.close()

    def _connected(self) -> sqlite3.Connection:
        if self._connection is None:
            if not self.path.exists():
                raise RecordError(f"no record store at {self.path}")
            connection = self._connect("rw" if self._writable else self._read_mode())
            try:
                self._check_owner(connection)
            except BaseException:
                connection.close()
                raise
            self._connection = connection
        return self._connection

    def _read_mode(self) -> str:
        """Where the folder is read-only SQLite cannot share a WAL; if there is none, nobody is writing."""
        waiting = self.path.with_name(self.path.name + "-wal").exists()
        return "ro" if waiting or os.access(self.path.parent, os.W_OK) else "ro&immutable=1"

    def _connect(self, mode: str) -> sqlite3.Connection:
        connection = sqlite3.connect(
            f"{self.path.as_uri()}?mode={mode}",
            uri=True,
            timeout=self._busy_timeout_s,
            isolation_level=None,  # transactions are opened by hand, in `_transaction`
            check_same_thread=False,  # `_LOCK` keeps threads apart
        )
        connection.row_factory = sqlite3.Row
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute("PRAGMA foreign_keys = ON")
        return connection

    def _prepare(self, connection: sqlite3.Connection) -> None:
        """Make the tables in an empty file. Another process may be doing the same at this moment."""
        if self._check_owner(connection):
            return
        self._set_wal(connection)
        with _transaction(connection):
            if not self._check_owner(connection):
                for statement in SCHEMA:
                    connection.execute(statement)
                connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
                connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")

    def _set_wal(self, connection: sqlite3.Connection) -> None:
        """SQLite does not apply its busy timeout to a change of journal, so we wait here."""
        deadline = time.monotonic() + self._busy_timeout_s
        while True:
            try:
                connection.execute("PRAGMA journal_mode = WAL")
                return
            except sqlite3.OperationalError as error:
                if _fault_name(error) != "SQLITE_BUSY" or time.monotonic() > deadline:
                    raise
                time.sleep(0.01)

    def _check_owner(self, connection: sqlite3.Connection) -> bool:
        """True if the file is ours, False if it is empty and we may fill it; anything else is refused."""
        owner = connection.execute("PRAGMA application_id").fetchone()[0]
        version = connection.execute("PRAGMA user_version").fetchone()[0]
        if owner != APPLICATION_ID:
            empty = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0] == 0
            # Another process may have made the tables between the two questions: then it is ours after all.
            if not empty and connection.execute("PRAGMA application_id").fetchone()[0] == APPLICATION_ID:
                return self._check_owner(connection)
            if empty and owner == 0 and self._writable:
                return False
            if empty and owner == 0:
                raise RecordError(f"{self.path} is empty: it holds no runs yet")
            raise RecordError(
                f"{self.path} is not a Fivefold record store (application id {owner}); choose another file"
            )
        if version > SCHEMA_VERSION:
            raise RecordError(
                f"{self.path} was written by a newer Fivefold (schema {version}; this one reads up to "
                f"{SCHEMA_VERSION}); upgrade, or choose another file"
            )
        return True

    @contextmanager
    def _faults(self, action: str) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise RecordError(self._explain(action, error)) from error
        except OSError as error:
            raise RecordError(f"cannot {action} records in {self.path}: {error.strerror or error}") from error

    def _explain(self, action: str, error: sqlite3.Error) -> str:
        name, start = _fault_name(error), f"cannot {action} records in {self.path}: "
        if name.startswith("SQLITE_FULL"):
            return f"{start}the disk is full; free some space, or set FIVEFOLD_RECORDS to a file elsewhere"
        if name.startswith("SQLITE_IOERR"):
            return f"{start}{error} ({name}): is the disk full, or a file size limit reached?"
        if name.startswith(("SQLITE_CORRUPT", "SQLITE_NOTADB")):
            return f"{start}the file is damaged or no SQLite file; move it away, or choose another file"
        if name.startswith("SQLITE_BUSY"):
            return f"{start}another process has kept it locked for {self._busy_timeout_s:g} s"
        if name.startswith("SQLITE_CANTOPEN"):
            why = "it is a folder" if self.path.is_dir() else "the file or its folder cannot be opened"
            return f"{start}{why}; set FIVEFOLD_RECORDS to a file that can"
        if name.startswith("SQLITE_READONLY"):
            return f"{start}the file or its folder is read-only; set FIVEFOLD_RECORDS to a file elsewhere"
        return f"{start}{error}"


@contextmanager
def _transaction(connection: sqlite3.Connection) -> Iterator[None]:
    connection.execute("BEGIN IMMEDIATE")  # takes the write lock now: waiting later could not be resolved
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:  # a full disk may have rolled it back already
            connection.execute("ROLLBACK")
        raise


def _fault_name(error: sqlite3.Error) -> str:
    return str(getattr(error, "sqlite_errorname", None) or "")


def _before_fork() -> None:
    _LOCK.acquire()
    for database in list(_OPEN):
        database.close()


os.register_at_fork(before=_before_fork, after_in_parent=_LOCK.release, after_in_child=_LOCK.release)

"""The store of runs: what was run, on what, with which numbers, and how it ended.

    with Store.open() as store:
        with store.start(kind="train", layout="dp2 tp2", model="tiny", plan={...}) as run:
            run.log(step, rank, {"loss": 2.5, "tokens_per_s": 1200})
            run.result("verdict", {"passed": True})

Every process, forked or not, may write to the same run (`store.attach(run_id)`); see `database` for how.
"""

from __future__ import annotations

import json
import os
import sqlite3
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, SupportsFloat, get_args

from fivefold.errors import RecordError, nearest
from fivefold.records.database import Database
from fivefold.records.ids import new_id
from fivefold.records.machine import host_name, machine_facts, process_start, versions

Kind = Literal["train", "verify", "lab"]
Ending = Literal["finished", "failed", "interrupted"]
KINDS: tuple[str, ...] = get_args(Kind)
ENDINGS: tuple[str, ...] = get_args(Ending)
STATUSES: tuple[str, ...] = ("running", *ENDINGS, "lost")
"""`lost` is never stored: it is what a running run is called once its process is gone."""

LAST = "last"
"""Stands for the id of the newest run; no id can start with it (the alphabet of ids has no l)."""

_SELECT = """SELECT *, (SELECT max(step) FROM metrics WHERE run_id = runs.id) AS last_step FROM runs"""


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """One run as recorded. Times are seconds since 1970; `ended_at` is None for a running or lost run."""

    id: str
    kind: str
    name: str | None
    layout: str
    model: str
    plan: Any
    versions: dict[str, Any]
    machine: dict[str, Any]
    status: str
    error: str | None
    pid: int
    host: str
    started_at: float
    ended_at: float | None
    last_step: int | None


NUMBERS = ("step", "rank", "pid", "started_at", "ended_at", "last_step")
MAY_BE_NONE = ("name", "error", "ended_at", "process_start", "last_step")
"""Columns of numbers, and those that can be empty; the others are text."""

MOST_NUMBER = 1e11
"""Of all of them: no date has more seconds (the year 5138), no run more steps."""


@dataclass(frozen=True)
class MetricRow:
    """The numbers of one rank at one step."""

    step: int
    rank: int
    values: dict[str, float]


class Run:
    """The writing end of one run. It may be used in any process, forked ones included."""

    def __init__(self, database: Database, run_id: str) -> None:
        self.id, self._database = run_id, database

    def log(self, step: int, rank: int, values: Mapping[str, SupportsFloat]) -> None:
        """Record numbers of one rank at one step; NaN and infinities are kept.

        Raises: RecordError if it cannot be written; TypeError or ValueError for what is no number.
        """
        self.log_many([(step, rank, values)])

    def log_many(self, rows: Iterable[tuple[int, int, Mapping[str, SupportsFloat]]]) -> None:
        """Record many (step, rank, numbers) in one transaction: all of them or none."""
        encoded = [(self.id, int(step), int(rank), _encode(_numbers(values))) for step, rank, values in rows]
        with self._database.write() as connection:
            connection.executemany(
                "INSERT INTO metrics (run_id, step, rank, data) VALUES (?, ?, ?, ?)", encoded
            )

    def result(self, key: str, value: Any) -> None:
        """Record one outcome under `key`, in place of an earlier one. `value`: JSON types or a `Value`."""
        row = (self.id, _text(key), _encode(value))
        with self._database.write() as connection:
            connection.execute("INSERT OR REPLACE INTO results (run_id, key, data) VALUES (?, ?, ?)", row)

    def finish(self, status: Ending = "finished", error: str | None = None) -> None:
        """End the run. The first ending stands; later calls change nothing."""
        if status not in ENDINGS:
            raise ValueError(f"a run ends as one of {', '.join(ENDINGS)}, not {status!r}")
        with self._database.write() as connection:
            connection.execute(
                "UPDATE runs SET status = ?, error = ?, ended_at = ? WHERE id = ? AND status = 'running'",
                (status, _text(error), time.time(), self.id),
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Finish with what ended the block: nothing, Ctrl-C, or an error (recorded as one line)."""
        if error is None:
            self.finish()
            return
        ending: Ending = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
        try:
            self.finish(ending, f"{type(error).__name__}: {error}".removesuffix(": "))
        except RecordError as fault:  # the first error matters more than a record of it
            error.add_note(f"also: {fault}")


class Store:
    """All runs of one SQLite file. Reading methods return plain values; none of them keeps a lock."""

    def __init__(self, database: Database) -> None:
        self._database = database

    @classmethod
    def open(cls, path: str | Path | None = None, *, create: bool = True) -> Self:
        """The store at `path` (default: `default_path()`); made if need be, or only read if not `create`.

        Raises: RecordError, in one line, if the file cannot be used: missing (with create=False), a folder,
                unwritable, damaged, of another program, or written by a newer Fivefold.
        """
        return cls(Database(Path(path) if path is not None else default_path(), create=create))

    @property
    def path(self) -> Path:
        """The SQLite file."""
        return self._database.path

    def start(
        self,
        *,
        kind: Kind,
        layout: object,
        model: str,
        plan: Any,
        name: str | None = None,
        machine: Mapping[str, Any] | None = None,
    ) -> Run:
        """Record that this process starts a run.

        `layout` is recorded as its text; `plan` is JSON types or a `Value`; `machine` adds facts (such as the
        accelerator) to those that are found here. Raises: RecordError.
        """
        if kind not in KINDS:
            raise ValueError(f"a run is one of {', '.join(KINDS)}, not {kind!r}")
        now, pid = time.time(), os.getpid()
        what = (kind, _text(name), _text(str(layout)), _text(model), _encode(plan), _encode(versions()))
        where = (_encode({**machine_facts(), **(machine or {})}), pid, host_name(), process_start(pid), now)
        with self._database.write() as connection:
            run_id = new_id(now)
            while connection.execute("SELECT 1 FROM runs WHERE id = ?", (run_id,)).fetchone():
                run_id = new_id(now)
            connection.execute(
                """INSERT INTO runs (id, kind, name, layout, model, plan, versions,
                   machine, pid, host, process_start, started_at, status)
                   VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, 'running')""",
                (run_id, *what, *where),
            )
        return Run(self._database, run_id)

    def attach(self, id_or_prefix: str) -> Run:
        """The writing end of a run that any process started. Raises: RecordError if there is none."""
        return Run(self._database, self._full_id(id_or_prefix))

    def runs(self, limit: int | None = 20, status: str | None = None) -> list[RunRecord]:
        """The newest runs first, at most `limit` (None: all), of one `status` if given."""
        if status is not None and status not in STATUSES:
            raise RecordError(f"no status {status!r}{nearest(status, STATUSES)}: {', '.join(STATUSES)}")
        stored = "running" if status == "lost" else status
        found: list[RunRecord] = []
        with self._database.read() as connection:
            for row in connection.execute(
                f"{_SELECT} WHERE ? IS NULL OR status = ? ORDER BY started_at DESC, id DESC", (stored, stored)
            ):
                if len(found) == limit:
                    break
                record = self._record(row)
                if status in (None, record.status):
                    found.append(record)
        return found

    def run(self, id_or_prefix: str) -> RunRecord:
        """The run of that id, of the only id that starts so, or the newest (`last`). Raises: RecordError."""
        run_id = self._full_id(id_or_prefix)
        with self._database.read() as connection:
            return self._record(connection.execute(f"{_SELECT} WHERE id = ?", (run_id,)).fetchone())

    def metrics(self, run_id: str) -> list[MetricRow]:
        """All numbers of a run, in order of step, rank and time of writing. `run_id`: as for `run`."""
        full_id = self._full_id(run_id)
        query = "SELECT step, rank, data FROM metrics WHERE run_id = ? ORDER BY step, rank, rowid"
        with self._database.read() as connection:
            rows = connection.execute(query, (full_id,)).fetchall()
        return [
            MetricRow(self._typed("step", step), self._typed("rank", rank), self._decode_numbers(data))
            for step, rank, data in rows
        ]

    def results(self, run_id: str) -> dict[str, Any]:
        """All outcomes of a run by key. `run_id`: as for `run`."""
        full_id = self._full_id(run_id)
        with self._database.read() as connection:
            rows = connection.execute(
                "SELECT key, data FROM results WHERE run_id = ? ORDER BY key", (full_id,)
            )
            pairs = rows.fetchall()
        return {self._typed("key", key): self._decode(data) for key, data in pairs}

    def close(self) -> None:
        """Close the connection of this process."""
        self._database.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _full_id(self, wanted: str) -> str:
        values: tuple[object, ...] = ()
        if wanted == LAST:
            query = "SELECT id FROM runs ORDER BY started_at DESC, id DESC LIMIT 1"
        else:  # substr and not LIKE: a typed % is no wildcard
            query, values = (
                "SELECT id FROM runs WHERE substr(id, 1, ?) = ? ORDER BY id",
                (len(wanted), wanted),
            )
        with self._database.read() as connection:
            found = [row[0] for row in connection.execute(query, values)] if wanted.isascii() else []
        found = [self._typed("id", run_id) for run_id in found]
        if not found:
            raise RecordError(f"no run {wanted!r} in {self.path}; `fivefold runs list` shows those there are")
        if len(found) > 1 and wanted not in found:
            shown = ", ".join(found[:4]) + (", ..." if len(found) > 4 else "")
            raise RecordError(
                f"{wanted!r} begins {len(found)} run ids: {shown}; type more of the one you mean"
            )
        return wanted if wanted in found else str(found[0])

    def _record(self, row: sqlite3.Row) -> RunRecord:
        fields = {name: self._typed(name, value) for name, value in dict(row).items()}
        if _is_lost(fields["status"], fields["host"], fields["pid"], fields.pop("process_start")):
            fields["status"] = "lost"
        for name in ("plan", "versions", "machine"):
            fields[name] = self._decode(fields[name])
        return RunRecord(**fields)

    def _decode(self, text: Any) -> Any:
        try:
            return json.loads(text)
        except (ValueError, TypeError, RecursionError) as error:
            raise RecordError(f"cannot read records in {self.path}: a damaged value ({error})") from error

    def _decode_numbers(self, text: Any) -> dict[str, float]:
        values = self._decode(text)
        if isinstance(values, dict) and all(type(value) in (int, float) for value in values.values()):
            return values
        raise RecordError(
            f"cannot read records in {self.path}: a damaged value ({str(text)[:40]!r} as metrics)"
        )

    def _typed(self, column: str, value: Any) -> Any:
        """SQLite keeps whatever is written into a column. Raises: RecordError for what no run has written there."""
        if column in NUMBERS:
            good = isinstance(value, int | float) and 0 <= value < MOST_NUMBER
        else:
            good = isinstance(value, str)
        if good or (value is None and column in MAY_BE_NONE):
            return value
        raise RecordError(
            f"cannot read records in {self.path}: a damaged value ({column} is {str(value)[:40]!r})"
        )


def default_path() -> Path:
    """`$FIVEFOLD_RECORDS`, or `.fivefold/records.sqlite` under the current folder."""
    return Path(os.environ.get("FIVEFOLD_RECORDS") or Path(".fivefold", "records.sqlite"))


def store_exists(path: Path) -> bool:
    """Whether there is anything at `path`. Raises: RecordError if its folder may not be looked into."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise RecordError(f"cannot read records in {path}: {error.strerror}") from error
    return True


def _is_lost(status: str, host: str, pid: int, started: str | None) -> bool:
    """A running run whose process is gone. Of processes on other machines we know nothing."""
    return status == "running" and host == host_name() and process_start(pid) != started


def _numbers(values: Mapping[str, SupportsFloat]) -> dict[str, float]:
    """Plain Python numbers from anything that is one (also scalars of numpy and torch)."""
    return {name: int(n) if isinstance(n, Integral) else float(n) for name, n in values.items()}


def _text(text: str | None) -> str | None:
    """A file name that is no UTF-8 is recorded with its odd bytes spelt out: SQLite would refuse it."""
    return None if text is None else text.encode(errors="backslashreplace").decode()


def _encode(value: Any) -> str:
    """JSON text; NaN, Infinity and -Infinity are written as such, as Python reads them back."""
    return json.dumps(value, default=_plain, separators=(",", ":"))


def _plain(value: Any) -> Any:
    """What JSON has no type for. A `Value` is known by its method: importing pydantic would slow the CLI."""
    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json")
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"cannot record a {type(value).__name__}")

"""`fivefold data prepare`: text to shards, in parallel, once. Whatever ends it, the same command goes on from there.

Work is cut into units before anything is read; each unit becomes one shard of each split. A finished unit leaves a
record in `DIR/.work`; after a kill, units whose files still have the recorded sha256 are kept, others are made again.
The manifest is written last. So the result is the same bytes whatever the number of processes, interrupted or not.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from fivefold.core.file_lock import hold
from fivefold.core.regular_file import read_limited
from fivefold.core.value import Value
from fivefold.data.encode import BYTE, Encoder, load_encoder
from fivefold.data.manifest import (
    MANIFEST,
    SHARD_FILE,
    SPLITS,
    TOKENIZER_COPY,
    Manifest,
    SourceEntry,
    is_prepared,
    read_manifest,
    write_json,
)
from fivefold.data.mixture import whole_shares
from fivefold.data.sources import InputFile, Unit, cut_into_units, find_files
from fivefold.data.work import Job, UnitRecord, run_units
from fivefold.errors import DataError
from fivefold.units import MIB

WORK = ".work"
PLAN = "plan.json"
PLAN_LIMIT_BYTES = 1024 * MIB
LOCK_WAIT_S = 5.0
"""Processes of a run that was killed end within a second; until then they hold the lock."""
EXAMPLES = 20
FORMAT_VERSION = 1
"""Raised when the same input would give other bytes: an unfinished folder of another version is not gone on with."""

Progress = Callable[[int, int, int, int], None]
"""(bytes read, bytes in all, finished units, units in all)."""


class PrepareOptions(Value):
    """How text becomes tokens."""

    tokenizer: str = BYTE
    """`byte`, or the path of a tokenizer.json."""
    bos_token: str | None = None
    eos_token: str | None = None
    text_column: str = "text"
    """Of JSON Lines and Parquet."""
    format: Literal["auto", "text", "jsonl", "parquet", "chat"] = "auto"
    validation_frac: Annotated[float, Field(ge=0, lt=1)] = 0.01
    """Share of the documents (by the hash of their text) that is kept for validation."""
    shard_mib: Annotated[float, Field(gt=0, le=4096)] = 64.0
    """Text that goes into a shard, at most about."""
    on_error: Literal["stop", "skip"] = "stop"
    weights: tuple[Annotated[float, Field(gt=0)], ...] | None = None
    """One for each source: the folder is then read as a mixture."""


@dataclass(frozen=True)
class Plan:
    """Everything that is known before the first document is read."""

    options: PrepareOptions
    sources: tuple[str, ...]
    files: list[InputFile]
    units: list[Unit]
    encoder: Encoder

    @property
    def total_bytes(self) -> int:
        return sum(file.bytes for file in self.files)

    def identity(self) -> dict[str, Any]:
        """What must be equal for finished units to be kept, as JSON. `on_error` and weights change no shard."""
        keep = {"text_column", "format", "validation_frac", "shard_mib"}
        files = [asdict(file) for file in self.files]
        digest = hashlib.sha256(json.dumps(files).encode()).hexdigest()
        return {
            "version": FORMAT_VERSION,
            "options": self.options.model_dump(mode="json", include=keep),
            "tokenizer": self.encoder.info.model_dump(mode="json"),
            "sources": list(self.sources),
            "files": digest,
        }


def prepare(
    sources: Sequence[str],
    out: Path,
    options: PrepareOptions,
    *,
    workers: int | None = None,
    restart: bool = False,
    progress: Progress | None = None,
) -> Manifest:
    """Tokenise `sources` into the folder `out`; returns its manifest. Memory: some 100 MiB for each worker.

    `workers`: processes (None: one for each core; 1: this process). `restart`: discard an unfinished folder.

    Raises: DataError, one line: a source that cannot be read (file and line), an empty split, `out` that is
    finished already, in use, unfinished with other options, or on a full disk (finished shards are kept).
    """
    if workers is not None and workers < 1:
        raise DataError(f"workers must be at least 1, got {workers}")
    if options.weights is not None and len(options.weights) != len(sources):
        raise DataError(f"{len(options.weights)} weights for {len(sources)} sources; give one for each")
    if options.weights is not None:
        whole_shares(options.weights)  # refused now rather than when training begins
    encoder = load_encoder(options.tokenizer, options.bos_token, options.eos_token)
    files = find_files(sources, options.format, options.text_column)
    units = cut_into_units(files, max(1, int(options.shard_mib * MIB)))
    plan = Plan(options, tuple(sources), files, units, encoder)
    work = out / WORK
    finished = 0
    try:
        with _locked(out, work):
            if _open_work(plan, out, work, restart=restart):
                return read_manifest(out)[0]
            job = Job(
                folder=out,
                work=work,
                files=files,
                units=units,
                total_bytes=plan.total_bytes,
                encoder=encoder,
                text_column=options.text_column,
                validation_frac=options.validation_frac,
                skip=options.on_error == "skip",
            )
            records: dict[int, UnitRecord] = {}
            with contextlib.closing(run_units(job, workers or _cores())) as running:
                for index, record, done_bytes in running:
                    if record is not None:
                        records[index] = record
                    finished = len(records)
                    if progress is not None:
                        progress(done_bytes, plan.total_bytes, finished, len(units))
            return _finish(plan, out, work, [records[index] for index in range(len(units))])
    except OSError as error:
        name, reason = error.filename or out, error.strerror or error
        kept = (
            f"; {finished} of {len(units)} units are finished and kept: the same command goes on from there"
        )
        raise DataError(f"cannot write {name}: {reason}{kept if finished else ''}") from None


def _open_work(plan: Plan, out: Path, work: Path, *, restart: bool) -> bool:
    """Begin, or go on with, the work in `out`. True where all was done but the clearing up.

    Raises: DataError where `out` is finished, or unfinished with other files or options.
    """
    identity, path = plan.identity(), work / PLAN
    before: Any = None
    if path.exists():
        with contextlib.suppress(ValueError, RecursionError):
            before = json.loads(
                read_limited(path, PLAN_LIMIT_BYTES, "plan of `fivefold data prepare`", DataError)
            )
    if is_prepared(out):
        if before == identity:
            shutil.rmtree(work)
            return True
        if not restart:
            _clear(work, keep_lock=False)
            raise DataError(
                f"{out} is prepared already; choose another --out, or give --restart to replace it"
            )
    if before is not None and before != identity and not any(work.glob("unit-*.json")):
        before = None  # nothing was finished, so nothing is lost
    if before is not None and before != identity and not restart:
        names = ("options", "tokenizer", "sources", "files", "version")
        same = before if isinstance(before, dict) else {}
        other = ", ".join(name for name in names if same.get(name) != identity[name])
        raise DataError(
            f"{out} holds an unfinished preparation with other {other}; give the same again to go on with it, "
            f"or --restart to discard it"
        )
    if restart or before is None:
        _discard(out, work)
    if before != identity or restart:
        write_json(path, identity)
    return False


def _finish(plan: Plan, out: Path, work: Path, records: list[UnitRecord]) -> Manifest:
    """Write the manifest. Raises: DataError where a source or a split came out empty."""
    shards = [
        shard for split in SPLITS for record in records for shard in record.shards if shard.split == split
    ]
    manifest = Manifest(
        tokenizer=plan.encoder.info,
        chat=any(file.kind == "chat" for file in plan.files),
        validation_frac=plan.options.validation_frac,
        sources=tuple(_source(plan, number, records) for number in range(len(plan.sources))),
        shards=tuple(shards),
        skipped_examples=tuple([fault for record in records for fault in record.faults][:EXAMPLES]),
    )
    _check_not_empty(manifest, out, work)
    if plan.encoder.source is not None:
        path = out / TOKENIZER_COPY
        try:
            path.write_bytes(plan.encoder.source)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(path)) from None
    write_json(out / MANIFEST, manifest.model_dump(mode="json"), sync=True)
    shutil.rmtree(work)
    return manifest


def _source(plan: Plan, number: int, records: list[UnitRecord]) -> SourceEntry:
    mine = [record for unit, record in zip(plan.units, records) if unit.source == number]
    files = [file for file in plan.files if file.source == number]
    digest = hashlib.sha256()
    for record in mine:
        digest.update(bytes.fromhex(record.texts_sha256))
    return SourceEntry(
        path=plan.sources[number],
        weight=None if plan.options.weights is None else plan.options.weights[number],
        files=len(files),
        bytes=sum(file.bytes for file in files),
        documents=sum(shard.documents for record in mine for shard in record.shards),
        empty_documents=sum(record.empty for record in mine),
        skipped=sum(record.skipped for record in mine),
        fingerprint=digest.hexdigest(),
    )


def _check_not_empty(manifest: Manifest, out: Path, work: Path) -> None:
    """No other run could make these shards useful, so they go."""
    frac, total = manifest.validation_frac, sum(source.documents for source in manifest.sources)
    message = None
    for source in manifest.sources:
        if not source.documents:
            left_out = f", {source.skipped} were skipped as broken" if source.skipped else ""
            message = f"source {source.path} holds no documents with text{left_out}"
    if message is None and frac and not manifest.documents("validation"):
        message = (
            f"the validation split is empty: none of {total} documents falls into a share of {frac:g}; "
            f"give a larger --validation-frac, more documents, or --validation-frac 0 for no validation"
        )
    if message is None and not manifest.documents("train"):
        message = (
            f"the training split is empty: all of {total} documents fall into a share of {frac:g} for validation; "
            f"give a smaller --validation-frac, or more documents"
        )
    if message is not None:
        _discard(out, work)
        shutil.rmtree(work, ignore_errors=True)
        with contextlib.suppress(OSError):  # somebody else's files are in it
            out.rmdir()
        raise DataError(message)


def _discard(out: Path, work: Path) -> None:
    """Remove what an earlier preparation wrote, by our own names only; the manifest first."""
    (out / MANIFEST).unlink(missing_ok=True)
    _clear(work, keep_lock=True)
    for entry in os.scandir(out):
        if SHARD_FILE.fullmatch(entry.name):
            os.unlink(entry.path)


def _clear(work: Path, *, keep_lock: bool) -> None:
    if not keep_lock:
        shutil.rmtree(work, ignore_errors=True)
        return
    for entry in os.scandir(work):
        if entry.name != "lock":
            os.unlink(entry.path)


@contextlib.contextmanager
def _locked(out: Path, work: Path) -> Iterator[None]:
    """One process at a time. The lock is the system's, so it goes when its holders end, however they do."""
    try:
        work.mkdir(parents=True, exist_ok=True)
        lock = (work / "lock").open("w")
    except OSError as error:
        raise DataError(f"cannot write to {out}: {error.strerror}") from None
    with lock:
        deadline = time.monotonic() + LOCK_WAIT_S
        while not hold(lock.fileno()):
            if time.monotonic() > deadline:
                raise DataError(f"another process is preparing {out}; wait for it, or choose another --out")
            time.sleep(0.1)
        yield


def _cores() -> int:
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:
        return os.cpu_count() or 1

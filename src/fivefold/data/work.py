"""The units of a preparation, here or in other processes.

Processes are forked, so they share the plan and the tokenizer. They look whether their parent lives, stop when they are
told to between two batches, and say how far they are through one shared number.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Generator, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fivefold.core.regular_file import read_limited
from fivefold.core.value import Value
from fivefold.data.documents import Document, Fault, Reader
from fivefold.data.encode import Encoder
from fivefold.data.manifest import SPLITS, ShardEntry, Split, check_sums, write_json
from fivefold.data.shards import ShardWriter
from fivefold.data.sources import InputFile, Unit
from fivefold.errors import DataError, FivefoldError
from fivefold.units import MIB

BATCH_BYTES = MIB
BATCH_DOCUMENTS = 4096
FAULTS_KEPT = 20
RECORD_LIMIT_BYTES = MIB
POLL_S, GRACE_S = 0.25, 5.0


class UnitRecord(Value):
    """What a finished unit came to; lies in the work folder until all are finished."""

    shards: tuple[ShardEntry, ...]
    empty: int
    """Documents without text, or without tokens."""
    skipped: int
    faults: tuple[str, ...]
    """The first of the skipped."""
    texts_sha256: str
    """Of the digests of all documents, in order."""


@dataclass(frozen=True)
class Job:
    """What every process needs to know."""

    folder: Path
    work: Path
    files: list[InputFile]
    units: list[Unit]
    total_bytes: int
    encoder: Encoder
    text_column: str
    validation_frac: float
    skip: bool

    @property
    def chat(self) -> bool:
        """All files are, or none is."""
        return bool(self.files) and self.files[0].kind == "chat"


class _Meter:
    """How far the work is, and whether it should stop; shared by all processes.

    Plain memory without locks: a process that is killed while it holds one would hold up all others. Each number
    has one writer, as each unit is one process's.
    """

    def __init__(self, units: int) -> None:
        context = multiprocessing.get_context("fork")
        self._read_bytes = context.RawArray("q", units)
        self._stopped = context.RawValue("b", 0)

    def add(self, unit: int, count: int) -> None:
        """Count what was read of a unit. Raises DataError once the work is stopped: nobody reads its text."""
        if self._stopped.value:
            raise DataError("stopped")
        self._read_bytes[unit] += count

    def stop(self) -> None:
        self._stopped.value = 1

    @property
    def stopped(self) -> bool:
        return bool(self._stopped.value)

    @property
    def read_bytes(self) -> int:
        return sum(self._read_bytes)


_process: tuple[Job, _Meter] | None = None
"""Of a worker process; set when it starts."""


def run_units(job: Job, workers: int) -> Generator[tuple[int, UnitRecord | None, int], None, None]:
    """Do all units, in any order. Yields (index, record, bytes read so far) as each ends, (-1, None, bytes) between.

    Raises: DataError of a unit that failed (others stop), or where a process was killed; OSError with a file name.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # one thread in each of our processes
    meter = _Meter(len(job.units))
    if min(workers, len(job.units)) == 1:
        for index in range(len(job.units)):
            yield index, do_unit(job, meter, index), meter.read_bytes
        return
    pool = ProcessPoolExecutor(
        min(workers, len(job.units)),
        mp_context=multiprocessing.get_context("fork"),
        initializer=_start_process,
        initargs=(job, meter, os.getpid()),
    )
    try:
        with _interrupt_held():
            pool.submit(_nothing)  # the first task forks all processes
        yield from _collect(pool, len(job.units), workers, meter)
    except BrokenProcessPool:
        raise DataError(
            "a process of the preparation was killed, perhaps for want of memory; finished units are kept: the "
            "same command goes on from there (fewer --workers need less memory)"
        ) from None
    finally:
        meter.stop()
        pool.shutdown(wait=True, cancel_futures=True)


def _collect(
    pool: ProcessPoolExecutor, units: int, workers: int, meter: _Meter
) -> Iterator[tuple[int, UnitRecord | None, int]]:
    waiting = iter(range(units))
    running: dict[Future[UnitRecord], int] = {}
    while True:
        while len(running) < 2 * workers and (index := next(waiting, None)) is not None:
            running[pool.submit(_do_unit_here, index)] = index
        if not running:
            return
        done, _ = wait(running, timeout=POLL_S, return_when=FIRST_COMPLETED)
        for future in sorted(done, key=lambda future: running[future]):
            yield running.pop(future), future.result(), meter.read_bytes
        if not done:
            yield -1, None, meter.read_bytes


@contextlib.contextmanager
def _interrupt_held() -> Iterator[None]:
    """Ctrl-C waits until the block is left: it would end a new process before that one can ignore it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _nothing() -> None:
    """A task."""


def _start_process(job: Job, meter: _Meter, parent: int) -> None:
    """Ctrl-C is for the parent, which tells us; when the parent is gone, so are we.

    So are we when the work has been over for a while: a process that was killed may hold a lock of the pool, at which
    another would wait for the end of its life, and the pool for that one.
    """
    global _process
    _process = job, meter
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})

    def watch() -> None:
        over_s = 0.0
        while os.getppid() == parent and over_s < GRACE_S:
            time.sleep(POLL_S)
            over_s += POLL_S if meter.stopped else 0.0
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _do_unit_here(index: int) -> UnitRecord:
    assert _process is not None
    return do_unit(*_process, index)


def do_unit(job: Job, meter: _Meter, index: int) -> UnitRecord:
    """Keep what an earlier run finished, where its files are still whole; otherwise make it."""
    path = job.work / f"unit-{index:05}.json"
    record = _finished(job, path)
    if record is not None:
        meter.add(index, job.total_bytes // len(job.units))  # about its share, for the progress bar
        return record
    record = _make(job, meter, index)
    write_json(path, record.model_dump(mode="json"))
    return record


def _finished(job: Job, path: Path) -> UnitRecord | None:
    if not path.exists():
        return None
    with contextlib.suppress(FivefoldError, ValueError, RecursionError):
        data: Any = json.loads(read_limited(path, RECORD_LIMIT_BYTES, "record of a unit", DataError))
        record = UnitRecord.read(data, where=str(path))
        if record.skipped and not job.skip:
            return None  # it has to stop at the first of them
        check_sums(job.folder, record.shards)
        return record
    return None


def _make(job: Job, meter: _Meter, index: int) -> UnitRecord:
    """Read, tokenise and write one unit."""
    unit = job.units[index]
    writers = {
        split: ShardWriter(job.folder, job.work, split=split, unit=index, source=unit.source, chat=job.chat)
        for split in SPLITS
    }
    digest = hashlib.sha256()
    faults: list[str] = []
    empty = skipped = 0
    try:
        for documents, broken, read_bytes in _batches(Reader(job.files, job.text_column).documents(unit)):
            meter.add(index, read_bytes)
            if broken and not job.skip:
                raise DataError(f"{broken[0]} (--on-error skip leaves such records out)")
            skipped += len(broken)
            faults += [str(fault) for fault in broken][: FAULTS_KEPT - len(faults)]
            digest.update(b"".join(document.digest for document in documents))
            for split, share in _split(documents, job.validation_frac).items():
                encoded = job.encoder.encode(share)
                empty += int((encoded.lengths == 0).sum())
                writers[split].add(encoded)
            empty += sum(not _has_text(document) for document in documents)
        shards = tuple(entry for writer in writers.values() if (entry := writer.close()) is not None)
    except BaseException:
        for writer in writers.values():
            writer.abort()
        raise
    return UnitRecord(
        shards=shards, empty=empty, skipped=skipped, faults=tuple(faults), texts_sha256=digest.hexdigest()
    )


def _batches(found: Iterator[Document | Fault]) -> Iterator[tuple[list[Document], list[Fault], int]]:
    """About 1 MiB of documents at a time, with the faults among them and the bytes read."""
    documents: list[Document] = []
    faults: list[Fault] = []
    size = 0
    for item in found:
        size += item.read_bytes
        if isinstance(item, Fault):
            faults.append(item)
        else:
            documents.append(item)
        if size >= BATCH_BYTES or len(documents) >= BATCH_DOCUMENTS or faults:
            yield documents, faults, size
            documents, faults, size = [], [], 0
    if documents or faults:
        yield documents, faults, size


def _split(documents: list[Document], validation_frac: float) -> dict[Split, list[Document]]:
    """Documents with text, by split: the first 8 bytes of the digest, as a fraction of 1, against the share."""
    limit = int(validation_frac * 2**64)
    shares: dict[Split, list[Document]] = {}
    for document in documents:
        if _has_text(document):
            held_out = int.from_bytes(document.digest[:8], "big") < limit
            shares.setdefault("validation" if held_out else "train", []).append(document)
    return shares


def _has_text(document: Document) -> bool:
    return document.chat is not None or bool(document.raw)

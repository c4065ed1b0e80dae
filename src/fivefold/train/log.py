"""Writes the numbers of all ranks: a metrics file line by line, and the record of the run."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from itertools import count
from pathlib import Path
from statistics import fmean
from typing import Any

import torch.distributed as dist

from fivefold.core.json_text import strict
from fivefold.core.plan import Plan
from fivefold.errors import RecordError
from fivefold.records.store import Run
from fivefold.runtime.launch import Rank
from fivefold.strategies.expert.counts_file import RESULT as EXPERTS
from fivefold.train.config import TrainConfig
from fivefold.train.experts import ExpertCounts, counts_of
from fivefold.train.precision import PRECISION, Look, Precision, as_result, joined, thinned
from fivefold.train.sinks import open_sinks
from fivefold.train.trainer import StepMetrics

STAGE_SECONDS = "stage_seconds"
"""Result of a run: seconds that each virtual stage computes in a step, the mean over its ranks."""

RANK_ROWS_EVERY = 10
"""Logged steps between two collections of the other ranks' numbers."""


class Log:
    """Writes the numbers of all ranks on rank 0: metrics file line by line, record in small transactions, sinks."""

    def __init__(
        self,
        config: TrainConfig,
        plan: Plan,
        rank: Rank,
        run: Run | None,
        *,
        start: int = 0,
        precision: Precision | None = None,
        experts: ExpertCounts | None = None,
    ) -> None:
        """`start`: steps that were taken before; their lines in the metrics file are kept.

        `precision`: this rank's part of the precision report; `experts`: how often each expert was chosen. Both go to
        the record.
        """
        self.rank, self.run, self.precision, self.experts = rank, run, precision, experts
        self.plan, self.each_expert = plan, config.log.experts
        self.looks: list[Look] = []
        self.sinks = open_sinks(config.log, plan) if rank.rank == 0 else []
        self.rows: list[tuple[int, int, dict[str, float]]] = []
        self.logged = 0
        path = config.log.metrics if rank.rank == 0 else None
        self.file = None if path is None else MetricsFile(path, keep=start)

    def step(self, metrics: StepMetrics) -> None:
        """Log one step. Comm: every `RANK_ROWS_EVERY` logged steps the ranks' numbers are gathered on rank 0."""
        numbers = metrics.numbers()
        if self.file is not None:
            counts = {"experts": counts_of(self.plan, metrics.routing)} if self.each_expert else {}
            self.file.write({"step": metrics.step, **numbers, **counts})
        for sink in self.sinks:
            sink.log(metrics.step, numbers)
        if self.rank.rank == 0 and self.run is not None:
            self.run.log(metrics.step, 0, numbers)
        elif self.rank.rank > 0:
            self.rows.append((metrics.step, self.rank.rank, numbers))
        self.logged += 1
        if self.logged % RANK_ROWS_EVERY == 0:
            self._collect()

    def finish(self, peak_memory_bytes: int, comm_bytes: int, chunk_seconds: dict[int, float]) -> list[int]:
        """Collect what is left, record the profiled step of every rank, and return the peak memory of all ranks."""
        self._collect()
        found = self._gather((peak_memory_bytes, comm_bytes, chunk_seconds))
        if self.rank.rank == 0 and self.run is not None:
            rows = [{"rank": r, "peak_memory_bytes": m, "comm_bytes": c} for r, (m, c, _) in enumerate(found)]
            self.run.result("profiled_step", rows)
            stages: dict[int, list[float]] = {}
            for *_, seconds in found:
                for stage, taken in seconds.items():
                    stages.setdefault(stage, []).append(taken)
            self.run.result(STAGE_SECONDS, [fmean(stages[stage]) for stage in sorted(stages)])
        return [memory for memory, *_ in found]

    def close(self) -> None:
        if self.file is not None:
            self.file.close()
        for sink in self.sinks:
            sink.close()

    def _collect(self) -> None:
        looks = [] if self.precision is None else self.precision.take()
        gathered = self._gather((self.rows, looks))
        self.rows = []
        if self.rank.rank != 0 or self.run is None:
            return
        self.run.log_many([row for rows, _ in gathered[1:] for row in rows])
        if self.precision is not None and self.precision.told:
            self.looks = thinned([*self.looks, *joined(seen for _, seen in gathered)])
            self.run.result(PRECISION, as_result(self.precision, self.looks))
        if self.experts is not None and self.experts.layers:
            self.run.result(EXPERTS, self.experts.as_result())

    def _gather(self, value: Any) -> list[Any]:
        """The value of every rank on rank 0; elsewhere this rank's own."""
        if self.rank.world_size == 1:
            return [value]
        found: list[Any] | None = [None] * self.rank.world_size if self.rank.rank == 0 else None
        dist.gather_object(value, found, dst=0)
        return found if found is not None else [value]


class MetricsFile:
    """One JSON object per line, each written at once: after any end of the run the file holds whole lines only.

    `keep`: a resumed run keeps the lines up to this step, and writes again those of the steps that it takes again. One
    that was told to resume and found nothing to go on from begins at 0: what is there is moved aside, not lost.

    Raises: RecordError, one line, where the file cannot be written (a full disk, a folder that is read-only), or is
            no metrics file.
    """

    def __init__(self, path: Path, *, keep: int = 0) -> None:
        self.path, self.size = path, 0
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self.size = _size_up_to(path, keep) if path.is_file() else 0
            if path.is_file() and not keep and path.stat().st_size:
                path.rename(_aside(path))
            if path.is_file():
                self.file = path.open("r+b", buffering=0)
                self.file.truncate(self.size)
                self.file.seek(self.size)
            else:
                self.file = path.open("wb", buffering=0)
        except OSError as error:
            raise RecordError(f"cannot write metrics to {path}: {error.strerror or error}") from None

    def write(self, values: Mapping[str, Any]) -> None:
        """Append one line; numbers that JSON does not have as the texts nan, inf and -inf."""
        line = json.dumps(strict(dict(values))).encode() + b"\n"
        rest = memoryview(line)
        try:
            while rest:  # a disk that is nearly full takes a part of the line, and refuses only the next part
                rest = rest[self.file.write(rest) :]
        except OSError as error:
            with contextlib.suppress(OSError):  # a pipe cannot be cut
                self.file.truncate(self.size)
            raise RecordError(
                f"cannot write metrics to {self.path}: {error.strerror or error}; the steps before are kept"
            ) from None
        self.size += len(line)

    def close(self) -> None:
        self.file.close()


def _aside(path: Path) -> Path:
    """The first of `metrics.jsonl.1`, `metrics.jsonl.2`, ... that is free."""
    return next(free for n in count(1) if not (free := path.with_name(f"{path.name}.{n}")).exists())


def _size_up_to(path: Path, step: int) -> int:
    """Bytes of the leading lines of steps up to `step`.

    Raises: RecordError if a line is no step of a run, the last one aside, which a killed run may have left in half:
            what would be cut off is not ours.
    """
    size, kept = 0, True
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                break
            try:
                before = json.loads(line)["step"] <= step
            except (ValueError, KeyError, TypeError):
                raise RecordError(
                    f"cannot go on with metrics in {path}: line {number} is no step of a run; name another file"
                ) from None
            kept = kept and before
            size += len(line) if kept else 0
    return size

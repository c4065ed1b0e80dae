"""A training run from its config: ranks, progress, metrics file and record."""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch.distributed as dist

from fivefold.catalog.models import resolve
from fivefold.core.cluster import Cluster, NodeKind
from fivefold.core.events import total_bytes
from fivefold.core.plan import Plan
from fivefold.data.batches import PackedDataset
from fivefold.data.corpus import load_corpus
from fivefold.data.tokenizer import ByteTokenizer
from fivefold.errors import DataError, LaunchError, RecordError
from fivefold.records.store import Run, Store, default_path
from fivefold.runtime.device import device_kind
from fivefold.runtime.launch import Rank, joined_rank, run_ranks, under_launcher
from fivefold.strategies import compose
from fivefold.train.config import TrainConfig
from fivefold.train.trainer import StepMetrics, Trainer
from fivefold.units import MIB

RANK_ROWS_EVERY = 10
"""Logged steps between two collections of the other ranks' numbers."""


class Progress(Protocol):
    """What shows a run while it goes on; lives on rank 0."""

    def start(self, plan: Plan, steps: int, rank: Rank) -> None: ...
    def update(self, metrics: StepMetrics, memory_bytes: int | None) -> None:
        """`memory_bytes`: the peak of the profiled step on this rank; None before that step."""

    def stop(self) -> None: ...


@dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    run_id: str | None
    steps: int
    first_loss: float
    last_loss: float
    tokens_per_s: float
    """Median over the second half of the steps."""
    peak_memory_bytes: int
    """Of the rank that needs most, in one profiled step."""
    comm_bytes: int
    """Bytes of all communication of one step on rank 0."""


def prepare(config: TrainConfig, kind: str) -> tuple[Plan, PackedDataset]:
    """Check everything that can be checked before ranks start, and read the corpus once for all of them."""
    spec = resolve(config.model)
    ByteTokenizer().check_vocab(spec.vocab, model=spec.name)
    plan = Plan(
        model=spec,
        cluster=cluster_here(kind, config.layout.world_size),
        workload=config.workload,
        layout=config.layout,
        execution=config.execution,
    )
    compose.check(plan)
    corpus = load_corpus(config.data, limit_bytes=int(config.data_limit_mib * MIB))
    return plan, PackedDataset(corpus, config.seq_len, config.seed)


def cluster_here(kind: str, ranks: int) -> Cluster:
    """The devices that a job on this machine, or of this launcher, runs on."""
    if kind == "cpu":
        return Cluster.parse("cpu")
    local = int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
    return Cluster(nodes=(NodeKind(count=max(1, ranks // local), devices_per_node=local, device=kind),))


def train(config: TrainConfig, *, device: str, port: int | None, progress: Progress) -> Outcome | None:
    """Run it: as one rank of the job that a launcher started, or by forking all ranks here.

    Returns None on the ranks of a launched job that are not rank 0.
    """
    kind = device_kind(device)
    plan, dataset = prepare(config, kind)
    if under_launcher():
        with joined_rank(device) as rank:
            if rank.world_size != plan.layout.world_size:
                raise LaunchError(
                    f"layout {plan.layout} has {plan.layout.world_size} ranks, the launcher started {rank.world_size}; "
                    f"start {plan.layout.world_size}, or change the layout"
                )
            run = open_run(config, plan, kind) if rank.rank == 0 else None
            with run or _no_run():
                return train_rank(rank, config, plan, dataset, run, progress)
    run = open_run(config, plan, kind)
    with run or _no_run():
        outcomes: list[Outcome | None] = run_ranks(
            train_rank,
            config,
            plan,
            dataset,
            run,
            progress,
            ranks=plan.layout.world_size,
            device=device,
            port=port,
        )
    return outcomes[0]


def open_run(config: TrainConfig, plan: Plan, device: str) -> Run | None:
    """Begin the record of this run, unless it is not to be recorded."""
    if config.log.records is None:
        return None
    path = default_path() if config.log.records == "default" else Path(config.log.records)
    return Store.open(path).start(
        kind="train", layout=str(plan.layout), model=plan.model.name, plan=plan, machine={"device": device}
    )


def train_rank(
    rank: Rank, config: TrainConfig, plan: Plan, dataset: PackedDataset, run: Run | None, progress: Progress
) -> Outcome | None:
    """One rank of the run. Rank 0 writes everything; the others hand it their numbers now and then."""
    check_same_corpus(dataset.corpus.fingerprint, rank)
    trainer = Trainer(plan, rank, dataset, steps=config.steps, seed=config.seed)
    first = rank.rank == 0
    log = Log(config, rank, run)
    history: list[StepMetrics] = []
    if first:
        progress.start(plan, config.steps, rank)
    try:
        for metrics in trainer:
            history.append(metrics)
            if metrics.step % config.log.every == 0 or metrics.step == config.steps:
                log.step(metrics)
            if first:
                progress.update(metrics, trainer.profile.peak_memory_bytes if trainer.profile else None)
        profile = trainer.profile
        assert profile is not None, "a run has at least one step"
        peaks = log.finish(profile.peak_memory_bytes, total_bytes(profile.events))
    finally:
        if first:
            progress.stop()
        log.close()
    if not first:
        return None
    speeds = sorted(m.tokens_per_s for m in history[len(history) // 2 :])
    return Outcome(
        run_id=run.id if run else None,
        steps=len(history),
        first_loss=history[0].loss,
        last_loss=history[-1].loss,
        tokens_per_s=speeds[len(speeds) // 2],
        peak_memory_bytes=max(peaks),
        comm_bytes=total_bytes(profile.events),
    )


def check_same_corpus(fingerprint: str, rank: Rank) -> None:
    """Raises: DataError if the ranks read different text (nodes with another Python, say)."""
    if rank.world_size == 1:
        return
    found: list[Any] = [None] * rank.world_size
    dist.all_gather_object(found, fingerprint)
    if len(set(found)) > 1:
        odd = next(i for i, other in enumerate(found) if other != found[0])
        raise DataError(
            f"rank {odd} reads another corpus than rank 0 ({found[odd][:12]} and {found[0][:12]}); "
            f"every node needs the same files: set data to a shared folder"
        )


class Log:
    """Writes the numbers of all ranks on rank 0: metrics file line by line, record in small transactions."""

    def __init__(self, config: TrainConfig, rank: Rank, run: Run | None) -> None:
        self.rank, self.run = rank, run
        self.rows: list[tuple[int, int, dict[str, float]]] = []
        self.logged = 0
        path = config.log.metrics if rank.rank == 0 else None
        self.file = None if path is None else MetricsFile(path)

    def step(self, metrics: StepMetrics) -> None:
        """Log one step. Comm: every `RANK_ROWS_EVERY` logged steps the ranks' numbers are gathered on rank 0."""
        numbers = metrics.numbers()
        if self.file is not None:
            self.file.write({"step": metrics.step, **numbers})
        if self.rank.rank == 0 and self.run is not None:
            self.run.log(metrics.step, 0, numbers)
        elif self.rank.rank > 0:
            self.rows.append((metrics.step, self.rank.rank, numbers))
        self.logged += 1
        if self.logged % RANK_ROWS_EVERY == 0:
            self._collect()

    def finish(self, peak_memory_bytes: int, comm_bytes: int) -> list[int]:
        """Collect what is left, record the profiled step of every rank, and return the peak memory of all ranks."""
        self._collect()
        found = self._gather((peak_memory_bytes, comm_bytes))
        if self.rank.rank == 0 and self.run is not None:
            rows = [{"rank": r, "peak_memory_bytes": m, "comm_bytes": c} for r, (m, c) in enumerate(found)]
            self.run.result("profiled_step", rows)
        return [memory for memory, _ in found]

    def close(self) -> None:
        if self.file is not None:
            self.file.close()

    def _collect(self) -> None:
        gathered = self._gather(self.rows)
        self.rows = []
        if self.rank.rank == 0 and self.run is not None:
            self.run.log_many([row for rows in gathered[1:] for row in rows])

    def _gather(self, value: Any) -> list[Any]:
        """The value of every rank on rank 0; elsewhere this rank's own."""
        if self.rank.world_size == 1:
            return [value]
        found: list[Any] | None = [None] * self.rank.world_size if self.rank.rank == 0 else None
        dist.gather_object(value, found, dst=0)
        return found if found is not None else [value]


class MetricsFile:
    """One JSON object per line, each written at once: after any end of the run the file holds whole lines only.

    Raises: RecordError, one line, where the file cannot be written (a full disk, a folder that is read-only).
    """

    def __init__(self, path: Path) -> None:
        self.path, self.size = path, 0
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self.file = path.open("wb", buffering=0)
        except OSError as error:
            raise RecordError(f"cannot write metrics to {path}: {error.strerror or error}") from None

    def write(self, values: dict[str, float]) -> None:
        """Append one line."""
        line = json.dumps(values).encode() + b"\n"
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


class _no_run:
    """Stands for the record of a run that is not recorded."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: Any) -> None:
        return None

"""A training run from its config: ranks, progress, metrics file and record."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch.distributed as dist

from fivefold.catalog.models import resolve
from fivefold.core.cluster import Cluster, NodeKind
from fivefold.core.events import total_bytes
from fivefold.core.plan import Plan
from fivefold.data.batches import Dataset
from fivefold.data.open import check_vocab, open_data
from fivefold.engine.size import check_size
from fivefold.errors import ConfigError, DataError, LaunchError, RankFailure
from fivefold.nn.hub import HFCheckpoint
from fivefold.records.store import Run, Store, default_path
from fivefold.runtime.device import device_kind
from fivefold.runtime.launch import Rank, joined_rank, run_ranks, under_launcher
from fivefold.strategies import compose
from fivefold.train.checkpoint import Manifest
from fivefold.train.config import TrainConfig
from fivefold.train.export import export_hf
from fivefold.train.log import Log
from fivefold.train.saver import Saver, load_checkpoint, restart_from, resume_from
from fivefold.train.sinks import check_sinks
from fivefold.train.trainer import StepMetrics, Trainer
from fivefold.units import MIB


class Progress(Protocol):
    """What shows a run while it goes on; lives on rank 0."""

    def start(self, plan: Plan, first: int, steps: int, rank: Rank) -> None: ...
    def update(self, metrics: StepMetrics, memory_bytes: int | None) -> None:
        """`memory_bytes`: the peak of the profiled step on this rank; None before that step."""

    def warn(self, line: str) -> None: ...
    def stop(self) -> None: ...


@dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    run_id: str | None
    steps: int
    """That were taken now."""
    resumed_at: int
    """Steps that were taken before."""
    skipped: int
    """Steps without an update, because the loss or the norm was not finite."""
    first_loss: float
    last_loss: float
    tokens_per_s: float
    """Median over the second half of the steps."""
    peak_memory_bytes: int
    """Of the rank that needs most, in one profiled step."""
    comm_bytes: int
    """Bytes of all communication of one step on rank 0."""
    checkpoints: tuple[int, ...]
    """Steps that were saved, pruned ones included."""


def prepare(config: TrainConfig, kind: str) -> tuple[Plan, Dataset]:
    """Check everything that can be checked before ranks start, and open the data once for all of them."""
    spec = resolve(config.model)
    plan = Plan(
        model=spec,
        cluster=cluster_here(kind, config.layout.world_size),
        workload=config.workload,
        layout=config.layout,
        execution=config.execution,
    )
    compose.check(plan)
    check_sinks(config.log)
    if config.weights is not None:
        HFCheckpoint.open(config.weights)
    if config.export is not None and Path(config.export).exists():
        raise ConfigError(f"export: {config.export} exists; name a folder that does not")
    if kind == "cpu" and not under_launcher():
        check_size(plan, what="training", advice="use a smaller model, or more of tp and pp instead of dp")
    dataset = open_data(
        config.data, config.seq_len, config.seed, limit_bytes=int(config.data_limit_mib * MIB)
    )
    check_vocab(dataset, spec.vocab, model=spec.name)
    return plan, dataset


def cluster_here(kind: str, ranks: int) -> Cluster:
    """The devices that a job on this machine, or of this launcher, runs on."""
    if kind == "cpu":
        return Cluster.parse("cpu")
    local = int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
    return Cluster(nodes=(NodeKind(count=max(1, ranks // local), devices_per_node=local, device=kind),))


def train(
    config: TrainConfig,
    *,
    device: str,
    port: int | None,
    progress: Progress,
    resume: str | None = None,
    restarts: int = 0,
) -> Outcome | None:
    """Run it: as one rank of the job that a launcher started, or by forking all ranks here.

    `resume`: `auto`, a checkpoint's folder, or None. `restarts`: how often to start again, from the newest checkpoint,
    when a rank dies (under a launcher that is the launcher's own option).
    Returns None on the ranks of a launched job that are not rank 0, and where a rank died after the last save.
    """
    kind = device_kind(device)
    plan, dataset = prepare(config, kind)
    if under_launcher():
        return _launched(config, plan, dataset, progress, resume, device)
    if restarts and config.checkpoint.folder is None:
        raise ConfigError("--restarts needs checkpoint.folder: what to start again from")
    start = resume_from(config.checkpoint, resume)
    while True:
        run = open_run(config, plan, kind)
        try:
            with run or _no_run():
                outcomes: list[Outcome | None] = run_ranks(
                    train_rank, config, plan, dataset, run, progress, start,
                    ranks=plan.layout.world_size, device=device, port=port,
                )  # fmt: skip
            return outcomes[0]
        except RankFailure as failure:
            if not restarts:
                raise
            restarts -= 1
            start = restart_from(config.checkpoint, resume)
            if _complete(config, start):
                progress.warn(f"{failure}; nothing is left to do, {start} is the last step")
                return None
            progress.warn(f"{failure}; starting again from {start or 'the beginning'}")


def _launched(
    config: TrainConfig,
    plan: Plan,
    dataset: Dataset,
    progress: Progress,
    resume: str | None,
    device: str,
) -> Outcome | None:
    """This process is one rank of a launched job. Rank 0 chooses the checkpoint for all."""
    with joined_rank(device) as rank:
        if rank.world_size != plan.layout.world_size:
            raise LaunchError(
                f"layout {plan.layout} has {plan.layout.world_size} ranks, the launcher started {rank.world_size}; "
                f"start {plan.layout.world_size}, or change the layout"
            )
        again = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
        choose = restart_from if again else resume_from
        chosen = [choose(config.checkpoint, resume) if rank.rank == 0 else None]
        if rank.world_size > 1:
            dist.broadcast_object_list(chosen, src=0)
        if again and _complete(config, chosen[0]):
            return None
        run = open_run(config, plan, rank.device.kind) if rank.rank == 0 else None
        with run or _no_run():
            return train_rank(rank, config, plan, dataset, run, progress, chosen[0])


def _complete(config: TrainConfig, start: Path | None) -> bool:
    """Whether a run of which a rank died had done everything: the last step is saved, and no export is missing."""
    if start is None or (config.export is not None and not Path(config.export).exists()):
        return False
    return Manifest.load(start).step >= config.steps


def open_run(config: TrainConfig, plan: Plan, device: str) -> Run | None:
    """Begin the record of this run, unless it is not to be recorded."""
    if config.log.records is None:
        return None
    path = default_path() if config.log.records == "default" else Path(config.log.records)
    run = Store.open(path).start(
        kind="train", layout=str(plan.layout), model=plan.model.name, plan=plan, machine={"device": device}
    )
    run.result("config", config)
    return run


def train_rank(
    rank: Rank,
    config: TrainConfig,
    plan: Plan,
    dataset: Dataset,
    run: Run | None,
    progress: Progress,
    start: Path | None,
) -> Outcome | None:
    """One rank of the run. Rank 0 writes everything but the checkpoints, to which every rank adds its part."""
    data = dataset.fingerprint
    check_same_corpus(data, rank)
    trainer = Trainer(
        plan,
        rank,
        dataset,
        steps=config.steps,
        seed=config.seed,
        skip_nonfinite=config.on_nonfinite == "skip",
        weights=None if config.weights is None else HFCheckpoint.open(config.weights).read,
    )
    if start is not None:
        load_checkpoint(start, trainer, rank, data=data)
        if trainer.start >= config.steps:
            raise ConfigError(
                f"{start} is at step {trainer.start} of {config.steps}: nothing is left to do; raise steps"
            )
    saver = None
    if config.checkpoint.folder is not None:
        saver = Saver(config.checkpoint, trainer, rank, data=data, warn=progress.warn)
    first = rank.rank == 0
    log = Log(config, plan, rank, run, start=trainer.start)
    if first:
        progress.start(plan, trainer.start, config.steps, rank)
    try:
        history = _loop(trainer, config, log, saver, progress if first else None)
        profile = trainer.profile
        assert profile is not None, "a run has at least one step"
        peaks = log.finish(profile.peak_memory_bytes, total_bytes(profile.events))
        if config.export is not None:
            pairs = [(row, master) for row, _, master in trainer.engine.data.triples]
            export_hf(config.export, plan, pairs, trainer.mesh)
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
        resumed_at=trainer.start,
        skipped=trainer.skipped,
        first_loss=history[0].loss,
        last_loss=history[-1].loss,
        tokens_per_s=speeds[len(speeds) // 2],
        peak_memory_bytes=max(peaks),
        comm_bytes=total_bytes(profile.events),
        checkpoints=tuple(saver.saved) if saver else (),
    )


def _loop(
    trainer: Trainer, config: TrainConfig, log: Log, saver: Saver | None, progress: Progress | None
) -> list[StepMetrics]:
    """All steps of this rank."""
    history: list[StepMetrics] = []
    try:
        for metrics in trainer:
            history.append(metrics)
            last = metrics.step == config.steps
            if saver is not None and (last or metrics.step % config.checkpoint.every == 0):
                saver.save(metrics.step)
            if last or metrics.step % config.log.every == 0:
                log.step(metrics)
            if progress is not None:
                progress.update(metrics, trainer.profile.peak_memory_bytes if trainer.profile else None)
    finally:
        if saver is not None:
            saver.wait()
    return history


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


class _no_run:
    """Stands for the record of a run that is not recorded."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: Any) -> None:
        return None

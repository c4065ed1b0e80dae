"""A training run from its config: ranks, progress, metrics file and record."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch.distributed as dist

from fivefold.catalog.models import resolve
from fivefold.core.cluster import Cluster, NodeKind
from fivefold.core.events import total_bytes
from fivefold.core.plan import Plan
from fivefold.data.batches import Dataset
from fivefold.data.manifest import Split, is_prepared
from fivefold.data.open import check_tokenizers, check_vocab, open_data
from fivefold.data.validation import FirstSamples
from fivefold.engine.size import check_size
from fivefold.errors import ConfigError, DataError, LaunchError, RankFailure
from fivefold.nn.hub import HFCheckpoint
from fivefold.records.store import Run, Store
from fivefold.runtime.device import check_device_count, device_kind
from fivefold.runtime.ending import first_failure, record_ends_on_sigterm
from fivefold.runtime.launch import Rank, joined_rank, run_ranks, under_launcher
from fivefold.strategies import compose
from fivefold.train.checkpoint import Manifest
from fivefold.train.companions import Companions, find_companions
from fivefold.train.config import TrainConfig
from fivefold.train.export import export_hf, held_by
from fivefold.train.log import Log
from fivefold.train.measured import resolve_placement
from fivefold.train.outcome import Outcome, finish, left_to_do, records_path, refuse_needless
from fivefold.train.outputs import check_outputs
from fivefold.train.saver import Saver, check_same_job, load_checkpoint, restart_from, resume_from
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


class Data(NamedTuple):
    """What a run reads."""

    train: Dataset
    validation: FirstSamples | None
    companions: Companions
    """What an export needs beside the weights."""


def prepare(config: TrainConfig, kind: str) -> tuple[Plan, Data]:
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
        HFCheckpoint.open(config.weights).check_model(spec)
    if kind == "cpu" and not under_launcher():
        advice = "use a smaller model" + ", or tp, pp or zero3 instead of dp" * (config.layout.dp > 1)
        check_size(plan, what="training", advice=advice)
    saves = config.export is not None or config.checkpoint.folder is not None
    data = Data(
        open_data(config.data, config.seq_len, config.seed, limit_bytes=int(config.data_limit_mib * MIB)),
        open_validation(config),
        find_companions(config, spec) if saves else Companions({}, {}),
    )
    for dataset in (data.train, data.validation):
        if dataset is not None:
            check_vocab(dataset, spec.vocab, model=spec.name)
    return plan, data


def open_validation(config: TrainConfig) -> FirstSamples | None:
    """The held-out samples: of `validation.data` (its validation split, or all of a text), or of `data`."""
    if config.validation.every is None:
        return None
    source = config.validation.data
    split: Split = (
        "train" if source is not None and not is_prepared(Path(source).expanduser()) else "validation"
    )
    try:
        dataset = open_data(
            source or config.data, config.seq_len, config.seed, split,
            limit_bytes=int(config.data_limit_mib * MIB),
        )  # fmt: skip
        if source is not None:
            trained_on = (
                [config.data] if isinstance(config.data, str) else [part.path for part in config.data]
            )
            check_tokenizers([*trained_on, source])
    except DataError as error:
        raise DataError(f"validation: {error}; or name other text with validation.data") from None
    return FirstSamples(dataset, config.validation.samples)


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
    A run whose last step is saved and whose export is missing is only exported, without ranks.
    Returns None on the ranks of a launched job that are not rank 0.
    """
    kind = device_kind(device)
    config = resolve_placement(config)
    if not under_launcher():
        check_device_count(kind, config.layout.world_size)
    plan, data = prepare(config, kind)
    if under_launcher():
        check_outputs(config, resumed=resume is not None or _started_again())
        return _launched(config, plan, data, progress, resume, device)
    if restarts and config.checkpoint.folder is None:
        raise ConfigError("--restarts needs checkpoint.folder: what to start again from")
    start = resume_from(config.checkpoint, resume)
    left = left_to_do(config, start)
    refuse_needless(config, start, left)
    if start is not None and left == "export":
        return finish(config, plan, start, data=data.train.fingerprint, began=Manifest.load(start).step)
    check_outputs(config, resumed=resume is not None)
    began = 0
    if start is not None:
        manifest = Manifest.load(start)
        check_same_job(start, manifest, plan, seed=config.seed, data=data.train.fingerprint)
        began = manifest.step
    _tell(data, progress)
    runs: list[Run] = []
    while True:
        run = open_run(config, plan, kind)
        runs += [run] if run else []
        try:
            with run or _no_run():
                outcomes: list[Outcome | None] = run_ranks(
                    train_rank, config, plan, data, run, progress, start,
                    ranks=plan.layout.world_size, device=device, port=port,
                )  # fmt: skip
            return outcomes[0]
        except RankFailure as failure:
            if not restarts:
                raise
            restarts -= 1
            start = restart_from(config.checkpoint, resume)
            if start is not None and left_to_do(config, start) != "steps":
                progress.warn(f"{failure}; {start} is the last step, no other is left to take")
                return finish(config, plan, start, data=data.train.fingerprint, began=began, runs=runs)
            progress.warn(f"{failure}; starting again from {start or 'the beginning'}")


def _launched(
    config: TrainConfig,
    plan: Plan,
    data: Data,
    progress: Progress,
    resume: str | None,
    device: str,
) -> Outcome | None:
    """This process is one rank of a launched job. Rank 0 chooses the checkpoint for all."""
    with joined_rank(device) as rank, first_failure(rank):
        if rank.world_size != plan.layout.world_size:
            raise LaunchError(
                f"layout {plan.layout} has {plan.layout.world_size} ranks, the launcher started {rank.world_size}; "
                f"start {plan.layout.world_size}, or change the layout"
            )
        chosen: list[Any] = [None, None]
        if rank.rank == 0:
            start = (restart_from if _started_again() else resume_from)(config.checkpoint, resume)
            chosen = [start, left_to_do(config, start)]
        if rank.world_size > 1:
            dist.broadcast_object_list(chosen, src=0)
        start, left = chosen
        if left == "export" or (left == "nothing" and _started_again()):
            if rank.rank != 0:
                return None
            return finish(config, plan, start, data=data.train.fingerprint, began=Manifest.load(start).step)
        refuse_needless(config, start, left)
        if rank.rank == 0:
            _tell(data, progress)
        run = open_run(config, plan, rank.device.kind) if rank.rank == 0 else None
        with run or _no_run(), record_ends_on_sigterm(rank, run), first_failure(rank):
            return train_rank(rank, config, plan, data, run, progress, start)


def _started_again() -> bool:
    """Whether the launcher has started this job before, and a rank died."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"


def _tell(data: Data, progress: Progress) -> None:
    if data.companions.left_out is not None:
        progress.warn(data.companions.left_out)


def open_run(config: TrainConfig, plan: Plan, device: str) -> Run | None:
    """Begin the record of this run, unless it is not to be recorded."""
    path = records_path(config)
    if path is None:
        return None
    run = Store.open(path).start(
        kind="train", layout=str(plan.layout), model=plan.model.name, plan=plan, machine={"device": device}
    )
    run.result("config", config)
    return run


def train_rank(
    rank: Rank,
    config: TrainConfig,
    plan: Plan,
    data: Data,
    run: Run | None,
    progress: Progress,
    start: Path | None,
) -> Outcome | None:
    """One rank of the run. Rank 0 writes everything but the checkpoints, to which every rank adds its part."""
    corpus = data.train.fingerprint
    check_told_the_same(config, plan, rank)
    check_same_corpus(corpus, rank)
    if data.validation is not None:
        check_same_corpus(data.validation.fingerprint, rank)
    trainer = Trainer(
        plan,
        rank,
        data.train,
        steps=config.steps,
        seed=config.seed,
        skip_nonfinite=config.on_nonfinite == "skip",
        look_every=config.log.precision,
        weights=None if config.weights is None else HFCheckpoint.open(config.weights).read,
        validation=data.validation,
    )
    if start is not None:
        load_checkpoint(start, trainer, rank, data=corpus)
    saver = None
    if config.checkpoint.folder is not None:
        saver = Saver(
            config.checkpoint, trainer, rank,
            data=corpus, warn=progress.warn, model_files=data.companions.to_files(),
        )  # fmt: skip
    first = rank.rank == 0
    log = Log(
        config, plan, rank, run, start=trainer.start, precision=trainer.precision, experts=trainer.experts
    )
    if first:
        progress.start(plan, trainer.start, config.steps, rank)
    try:
        history = _loop(trainer, config, log, saver, progress if first else None)
        profile = trainer.profile
        assert profile is not None, "a run has at least one step"
        peaks = log.finish(profile.peak_memory_bytes, total_bytes(profile.events), trainer.chunk_seconds())
        if config.export is not None:
            trainer.engine.settle()
            export_hf(config.export, plan, held_by(trainer.engine), trainer.mesh, companions=data.companions)
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
        validation_loss=history[-1].validation_loss,
        tokens_per_s=speeds[len(speeds) // 2],
        peak_memory_bytes=max(peaks),
        comm_bytes=total_bytes(profile.events),
        checkpoints=tuple(saver.saved) if saver else (),
        exported=config.export,
    )


def _loop(
    trainer: Trainer, config: TrainConfig, log: Log, saver: Saver | None, progress: Progress | None
) -> list[StepMetrics]:
    """All steps of this rank."""
    history: list[StepMetrics] = []
    try:
        for metrics in trainer:
            last = metrics.step == config.steps
            every = config.validation.every
            if every is not None and (last or metrics.step % every == 0):
                metrics = replace(metrics, validation_loss=trainer.validate())
            history.append(metrics)
            if saver is not None and (last or metrics.step % config.checkpoint.every == 0):
                saver.save(metrics.step)
            if last or metrics.step % config.log.every == 0 or metrics.validation_loss is not None:
                log.step(metrics)
            if progress is not None:
                progress.update(metrics, trainer.profile.peak_memory_bytes if trainer.profile else None)
    finally:
        if saver is not None:
            saver.wait()
    return history


def check_told_the_same(config: TrainConfig, plan: Plan, rank: Rank) -> None:
    """Raises: ConfigError if the ranks were told to do different things: they would wait for each other for ever."""
    told = {
        "plan": plan.hash,
        "layout": str(plan.layout),
        "steps": config.steps,
        "seed": config.seed,
        "log.every": config.log.every,
        "validation": (config.validation.every, config.validation.samples),
        "checkpoint": (config.checkpoint.folder is not None, config.checkpoint.every),
        "export": config.export is not None,
    }
    if rank.world_size == 1:
        return
    found: list[Any] = [None] * rank.world_size
    dist.all_gather_object(found, told)
    for other, theirs in enumerate(found):
        for key, value in theirs.items():
            if value != found[0][key]:
                raise ConfigError(
                    f"rank {other} was told {key} {value}, rank 0 {found[0][key]}: give every node the same config, "
                    f"and for @measured the same record"
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


class _no_run:
    """Stands for the record of a run that is not recorded."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: Any) -> None:
        return None

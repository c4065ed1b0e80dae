"""Runs that save and resume, and their whole state put together from all ranks."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fivefold.core.cluster import Cluster
from fivefold.core.execution import Execution
from fivefold.core.experts import ExpertsConfig
from fivefold.core.layout import Layout
from fivefold.core.model_spec import ModelSpec
from fivefold.core.optimizer import OptimizerConfig
from fivefold.core.plan import Plan
from fivefold.core.router import RouterConfig
from fivefold.core.workload import Workload
from fivefold.data.batches import Batch, Ints, SyntheticDataset
from fivefold.runtime.launch import Rank, run_ranks
from fivefold.train.saver import Saver, load_checkpoint
from fivefold.train.sections import CheckpointConfig
from fivefold.train.trainer import Trainer

SEQ_LEN, BATCH = 16, 8

Parts = list[tuple[str, tuple[slice, ...], tuple[int, ...], Tensor]]


class Recorded(SyntheticDataset):
    """Remembers the numbers of the samples that it was asked for."""

    asked: list[int]

    def rows(self, numbers: Ints) -> Batch:
        self.asked += numbers.tolist()
        return super().rows(numbers)


@dataclass(frozen=True)
class Job:
    """What every run of one test has in common."""

    spec: ModelSpec
    optimizer: OptimizerConfig
    steps: int
    dtype: str = "float64"
    micro_batch: int = 1
    router: RouterConfig = field(default_factory=RouterConfig)
    experts: ExpertsConfig = field(default_factory=ExpertsConfig)

    def plan(self, layout: str) -> Plan:
        execution = Execution(
            micro_batch=self.micro_batch,
            dtype=self.dtype,  # type: ignore[arg-type]
            optimizer=self.optimizer,
            router=self.router,
            experts=self.experts,
        )
        return Plan(
            model=self.spec,
            cluster=Cluster.parse("cpu"),
            workload=Workload(seq_len=SEQ_LEN, global_batch=BATCH),
            layout=Layout.parse(layout),
            execution=execution,
        )


@dataclass(frozen=True)
class Ran:
    """One rank's account of a run; of a job, if `state` is whole."""

    losses: list[float]
    norms: list[float]
    updates: int
    samples: dict[int, list[int]]
    """Step (from 0) -> numbers of the samples that were read."""
    bytes_loaded: int
    bytes_held: int
    """Weights and moments of this rank, without padding."""
    parts: Parts
    warned: list[str]


def train(
    job: Job, layout: str, *, start: Path | None = None, folder: Path | None = None, **save: Any
) -> list[Ran]:
    """Run the job to its end on all ranks; `start`: a checkpoint, `folder` and `save`: where and when to save."""
    plan = job.plan(layout)
    config = CheckpointConfig(folder=str(folder) if folder else None, **{"every": 3, "keep": 9, **save})
    return run_ranks(_train_rank, job, plan, start, config, ranks=plan.layout.world_size, device="cpu")


def _train_rank(rank: Rank, job: Job, plan: Plan, start: Path | None, config: CheckpointConfig) -> Ran:
    data = Recorded(job.spec.vocab, SEQ_LEN, seed=5)
    trainer = Trainer(plan, rank, data, steps=job.steps, seed=3)
    warned: list[str] = []
    if start is not None:
        load_checkpoint(start, trainer, rank, data="samples")
    saver = Saver(config, trainer, rank, data="samples", warn=warned.append) if config.folder else None
    losses, norms, samples = [], [], {}
    for step in range(trainer.start, job.steps):
        data.asked = []
        metrics = trainer.step(step)
        losses.append(metrics.loss)
        norms.append(metrics.grad_norm)
        samples[step] = data.asked
        if saver is not None and metrics.step % config.every == 0:
            saver.save(metrics.step)
    if saver is not None:
        saver.wait()
    parts: Parts = []
    for kind, row, local in trainer.engine.persistent():
        for inside, region in row.pieces(plan.layout, trainer.mesh.coordinate):
            parts.append((f"{kind}/{row.tied_to or row.name}", region, row.shape, local[inside].clone()))
    held = sum(values.numel() * values.itemsize for *_, values in parts)
    return Ran(losses, norms, trainer.engine.data.updates, samples, trainer.bytes_loaded, held, parts, warned)


def whole(ranks: list[Ran]) -> dict[str, Tensor]:
    """Global tensors by name. Ranks that hold the same elements must hold the same values."""
    found: dict[str, Tensor] = {}
    for ran in ranks:
        for key, region, shape, values in ran.parts:
            target = found.setdefault(key, torch.full(shape, torch.nan, dtype=values.dtype))
            there = target[region]
            assert bool((there.isnan() | (there == values)).all()), f"copies of {key} differ between ranks"
            target[region] = values
    assert not any(bool(values.isnan().any()) for values in found.values()), "parts of it are on no rank"
    return found


def sample_ids(ranks: list[Ran], plan: Plan) -> dict[int, list[int]]:
    """Step -> samples of the job in order; every rank of a data rank reads the same ones."""
    by_step: dict[int, dict[int, list[int]]] = defaultdict(dict)
    for rank, ran in enumerate(ranks):
        dp = plan.layout.coordinate(rank)["dp"]
        for step, numbers in ran.samples.items():
            assert by_step[step].setdefault(dp, numbers) == numbers
    return {step: [n for dp in sorted(parts) for n in parts[dp]] for step, parts in by_step.items()}

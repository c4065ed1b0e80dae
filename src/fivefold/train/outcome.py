"""How a run ends, and what is left to do where its last step is saved already: no ranks are needed for that."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fivefold.core.plan import Plan
from fivefold.errors import ConfigError
from fivefold.records.store import Run, Store, default_path
from fivefold.train.checkpoint import Manifest, checkpoints
from fivefold.train.config import TrainConfig
from fivefold.train.export import export_checkpoint
from fivefold.train.saver import check_same_job

Left = Literal["steps", "export", "nothing"]


@dataclass(frozen=True)
class Outcome:
    """How a run ended. None: not known, as the rank that knew it died, or no step was taken now."""

    run_id: str | None
    steps: int
    """That were taken now."""
    resumed_at: int
    """Steps that were taken before."""
    skipped: int
    """Steps without an update, because the loss or the norm was not finite."""
    first_loss: float | None
    last_loss: float | None
    validation_loss: float | None
    """After the last step; None where there is no validation."""
    tokens_per_s: float | None
    """Median over the second half of the steps."""
    peak_memory_bytes: int | None
    """Of the rank that needs most, in one profiled step."""
    comm_bytes: int | None
    """Bytes of all communication of one step on rank 0."""
    checkpoints: tuple[int, ...]
    """Steps that were saved, pruned ones included; where a rank died, those that are there."""
    exported: str | None
    """Folder of the exported model."""


def left_to_do(config: TrainConfig, start: Path | None) -> Left:
    """Of a run that starts from this checkpoint. Raises: CheckpointError."""
    step = 0 if start is None else Manifest.load(start).step
    if step < config.steps:
        return "steps"
    missing = config.export is not None and not os.path.lexists(config.export)
    return "export" if missing and step == config.steps else "nothing"


def refuse_needless(config: TrainConfig, start: Path | None, left: Left) -> None:
    """Raises: ConfigError for a run without anything to do, or whose export would not find its place free."""
    if left == "nothing":
        assert start is not None
        step = Manifest.load(start).step
        raise ConfigError(f"{start} is at step {step} of {config.steps}: nothing is left to do; raise steps")
    if left == "steps" and config.export is not None and os.path.lexists(config.export):
        raise ConfigError(f"export: {config.export} exists; name a folder that does not")


def finish(
    config: TrainConfig, plan: Plan, start: Path, *, data: str, began: int = 0, runs: Sequence[Run] = ()
) -> Outcome:
    """Do what is left after the last step, which the checkpoint `start` holds: the export, from its files.

    `data`: fingerprint. `began`: steps that were taken before this command; `runs`: what it recorded.
    Raises: CheckpointError for a checkpoint that is damaged or of another job, ModelError where the export fails.
    """
    manifest = Manifest.load(start)
    check_same_job(start, manifest, plan, seed=config.seed, data=data)
    if left_to_do(config, start) == "export":
        assert config.export is not None
        export_checkpoint(start, config.export)
    losses = _recorded(config, runs, "loss")
    speeds = sorted(_recorded(config, runs, "tokens_per_s").values())
    folder = None if config.checkpoint.folder is None else Path(config.checkpoint.folder)
    return Outcome(
        run_id=runs[-1].id if runs else None,
        steps=manifest.step - began,
        resumed_at=began,
        skipped=manifest.step - manifest.updates,
        first_loss=losses.get(began + 1),
        last_loss=losses.get(manifest.step),
        validation_loss=_recorded(config, runs, "validation_loss").get(manifest.step),
        tokens_per_s=speeds[len(speeds) // 2] if speeds else None,
        peak_memory_bytes=None,
        comm_bytes=None,
        checkpoints=tuple(step for step, _ in checkpoints(folder) if step > began) if folder else (),
        exported=config.export,
    )


def records_path(config: TrainConfig) -> Path | None:
    """The store that a run is recorded in; None: it is not."""
    if config.log.records is None:
        return None
    return default_path() if config.log.records == "default" else Path(config.log.records)


def _recorded(config: TrainConfig, runs: Sequence[Run], name: str) -> dict[int, float]:
    """A number of rank 0 by step, as the record has it; of a step that was taken again, the last."""
    path = records_path(config)
    if path is None or not runs:
        return {}
    with Store.open(path, create=False) as store:
        rows = [row for run in runs for row in store.metrics(run.id)]
    return {row.step: row.values[name] for row in rows if row.rank == 0 and name in row.values}

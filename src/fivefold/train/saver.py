"""Saving while training goes on, and finding what to resume from.

The step waits only for the copy of its state to host memory; a thread writes. A save becomes visible in one rename,
after every rank has written its file and rank 0 the manifest: a run that is killed while saving leaves the previous
checkpoint as the newest. A save that fails (a full disk) is told, and the run goes on.

Communication: the ranks' parts of the manifest are gathered on rank 0, over a host-side group of their own, so that
they never mix with the training's collectives.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from fivefold.core.model_spec import ModelSpec
from fivefold.core.plan import Plan
from fivefold.errors import CheckpointError, ConfigError
from fivefold.runtime.launch import Rank
from fivefold.strategies import compose
from fivefold.train.checkpoint import (
    MANIFEST,
    PARTIAL,
    Manifest,
    Piece,
    Reader,
    check_files,
    checkpoints,
    merge_tensors,
    write_pieces,
)
from fivefold.train.config import CheckpointConfig
from fivefold.train.trainer import Trainer

Warn = Callable[[str], None]


class Saver:
    """Saves one run's checkpoints. All ranks call the same methods at the same steps."""

    def __init__(
        self, config: CheckpointConfig, trainer: Trainer, rank: Rank, *, data: str, warn: Warn
    ) -> None:
        assert config.folder is not None, "nothing to save without a folder"
        self.config, self.folder, self.trainer, self.rank = config, Path(config.folder), trainer, rank
        self.data, self.warn = data, warn
        self.thread: threading.Thread | None = None
        self.saved: list[int] = []
        self.group = dist.new_group(backend="gloo") if rank.world_size > 1 else None

    def save(self, step: int) -> None:
        """Begin to save the state after `step` steps; returns as soon as the state is copied."""
        self.wait()
        pieces = self._copy()
        manifest = self._manifest(step)
        self.thread = threading.Thread(target=self._write, args=(step, pieces, manifest), name="checkpoint")
        self.thread.start()
        if not self.config.asynchronous:
            self.wait()

    def wait(self) -> None:
        """Wait for the save under way."""
        if self.thread is not None:
            self.thread.join()
            self.thread = None

    def _copy(self) -> list[Piece]:
        """This rank's share: each element of each tensor is written by one rank."""
        layout, at = self.trainer.plan.layout, self.trainer.mesh.coordinate
        if at["dp"] > 0 or at["cp"] > 0:
            return []
        pieces = []
        for kind, row, local in self.trainer.engine.data.persistent():
            if row.counts_once_here(at):
                region = row.region(layout, at)
                inside = tuple(slice(0, part.stop - part.start) for part in region)
                values = local[inside].to("cpu", copy=True).contiguous()
                if values.numel():
                    pieces.append(Piece(f"{kind}/{row.name}", row.shape, region, values))
        return pieces

    def _manifest(self, step: int) -> dict[str, Any]:
        plan = self.trainer.plan
        return {
            "step": step,
            "next_sample": step * plan.workload.global_batch,
            "updates": self.trainer.engine.data.updates,
            "seed": self.trainer.seed,
            "data": self.data,
            "plan": plan.model_dump(mode="json"),
        }

    def _write(self, step: int, pieces: list[Piece], manifest: dict[str, Any]) -> None:
        final = self.folder / f"step-{step:08d}"
        partial = final.with_name(final.name + PARTIAL)
        part: Any
        try:
            partial.mkdir(parents=True, exist_ok=True)
            part = write_pieces(partial, self.rank.rank, pieces)
        except OSError as error:
            part = f"rank {self.rank.rank}: {error.strerror or error}"
        try:
            parts = self._gather(part)
            if self.rank.rank == 0:
                self._publish(step, parts, manifest, partial, final)
        except (OSError, RuntimeError) as error:
            self.warn(f"checkpoint of step {step} not saved: {error}")

    def _publish(
        self, step: int, parts: list[Any], manifest: dict[str, Any], partial: Path, final: Path
    ) -> None:
        """Rank 0: write the manifest, let the checkpoint appear, drop old ones. Raises: OSError."""
        failed = [part for part in parts if isinstance(part, str)]
        try:
            if failed:
                raise OSError(failed[0])
            tensors = merge_tensors([tensors for tensors, _ in parts])
            files = {name: entry for _, files in parts for name, entry in files.items()}
            text = Manifest(**manifest, tensors=tensors, files=files).model_dump_json(indent=1)
            with (partial / MANIFEST).open("w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            for name in files:
                _sync(partial / name)
            partial.rename(final)
            _sync(final.parent)
        except OSError as error:
            shutil.rmtree(partial, ignore_errors=True)
            reason = error.strerror or error
            self.warn(
                f"checkpoint of step {step} not saved to {final}: {reason}; the run goes on, older ones are kept"
            )
            return
        self.saved.append(step)
        self._prune()

    def _prune(self) -> None:
        """Keep the newest `keep`, and for good every step that is a multiple of `keep_every`."""
        always = self.config.keep_every
        found = [
            (step, path) for step, path in checkpoints(self.folder) if not (always and step % always == 0)
        ]
        for _, path in found[: -self.config.keep]:
            doomed = path.with_name(path.name + PARTIAL)  # first no checkpoint any more, then gone
            path.rename(doomed)
            shutil.rmtree(doomed, ignore_errors=True)

    def _gather(self, part: Any) -> list[Any]:
        if self.group is None:
            return [part]
        found: list[Any] | None = [None] * self.rank.world_size if self.rank.rank == 0 else None
        dist.gather_object(part, found, dst=0, group=self.group)
        return found or []


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# ---------------------------------------------------------------------------------------------------------------------


def resume_from(config: CheckpointConfig, resume: str | None) -> Path | None:
    """The checkpoint to start from: None for a fresh start.

    `resume`: `auto` (the newest of the folder, if there is one), a checkpoint, or None. Also clears away what a killed
    save left behind.

    Raises: CheckpointError for a folder that holds another run's checkpoints, or a path that is no checkpoint.
    """
    folder = Path(config.folder) if config.folder is not None else None
    found = checkpoints(folder) if folder is not None else []
    if resume is None:
        if found:
            raise CheckpointError(
                f"{folder} holds checkpoints up to step {found[-1][0]}; go on with --resume auto, or save elsewhere"
            )
        return None
    if resume == "auto":
        if folder is None:
            raise ConfigError(
                "--resume auto needs checkpoint.folder: where to look for the newest checkpoint"
            )
        for stale in folder.glob(f"step-*{PARTIAL}") if folder.is_dir() else ():
            shutil.rmtree(stale, ignore_errors=True)
        return found[-1][1] if found else None
    path = Path(resume)
    Manifest.load(path)
    return path


def load_checkpoint(path: Path, trainer: Trainer, rank: Rank, *, data: str) -> Manifest:
    """Take over weights, moments and position; afterwards the run goes on as if it had never stopped.

    Every rank reads its own regions, and checks its share of the files against their checksums.

    Raises: CheckpointError naming what is damaged, missing, or of another job.
    """
    manifest = Manifest.load(path)
    plan = trainer.plan
    check_same_job(path, manifest, plan, seed=trainer.seed, data=data)
    table = compose.parameter_table(plan.model, plan.layout, plan.workload.seq_len)
    mine = trainer.engine.data.persistent()
    kinds = sorted({kind for kind, _, _ in mine})
    check_names(
        path, manifest, {f"{kind}/{row.name}" for kind in kinds for row in table if row.tied_to is None}
    )
    check_files(path, manifest, rank=rank.rank, ranks=rank.world_size)
    reader = Reader(path, manifest)
    for kind, row, local in mine:
        region = row.region(plan.layout, trainer.mesh.coordinate)
        inside = tuple(slice(0, part.stop - part.start) for part in region)
        reader.read_into(local[inside], f"{kind}/{row.tied_to or row.name}", row.shape, region)
    trainer.engine.data.loaded(manifest.updates)
    trainer.start = manifest.step
    trainer.bytes_loaded = reader.bytes_read
    return manifest


def check_names(path: Path, manifest: Manifest, wanted: set[str]) -> None:
    """Raises: CheckpointError naming tensors that are missing or too many."""
    missing, extra = sorted(wanted - manifest.tensors.keys()), sorted(manifest.tensors.keys() - wanted)
    if missing:
        raise CheckpointError(
            f"{path} lacks {len(missing)} tensors of this run: {', '.join(missing[:3])} ..."
        )
    if extra:
        raise CheckpointError(
            f"{path} has {len(extra)} tensors that this run lacks: {', '.join(extra[:3])} ..."
        )


def check_same_job(path: Path, manifest: Manifest, plan: Plan, *, seed: int, data: str) -> None:
    """The model, the batch, the data and the optimizer must be those of the saved run; the layout need not.

    Raises: CheckpointError naming the first thing that differs, with both values.
    """
    try:
        saved = Plan.read(manifest.plan, where=str(path))
    except ConfigError as error:
        raise CheckpointError(str(error)) from None
    for name in ModelSpec.model_fields:
        if name not in ("name", "notes") and getattr(saved.model, name) != getattr(plan.model, name):
            was, now = getattr(saved.model, name), getattr(plan.model, name)
            was, now = (f"{len(v)} layers" if name == "blocks" else v for v in (was, now))
            raise CheckpointError(
                f"{path} is of another model, {saved.model.name}: {name} was {was}, is {now}"
            )
    pairs = [
        ("seq_len", saved.workload.seq_len, plan.workload.seq_len),
        ("global_batch", saved.workload.global_batch, plan.workload.global_batch),
        ("dtype", saved.execution.dtype, plan.execution.dtype),
        ("optimizer.name", saved.execution.optimizer.name, plan.execution.optimizer.name),
        ("seed", manifest.seed, seed),
        ("data fingerprint", manifest.data[:12], data[:12]),
    ]
    for name, was, now in pairs:
        if was != now:
            raise CheckpointError(
                f"{path}: {name} was {was}, is {now} now; a resumed run must be the same job"
            )

"""Saving while training goes on, and finding what to resume from.

The step waits only for the copy of its state to host memory; a thread writes. A save becomes visible in one rename,
after every rank has written its file and rank 0 the manifest: a run that is killed while saving leaves the previous
checkpoint as the newest. A save that fails (a full disk) is told, and the run goes on. A state with a NaN or an
infinity is not saved: a finite gradient can still make an infinite weight, and that shows only at the next step.

Communication: the ranks' parts of the manifest are gathered on rank 0, over a host-side group of their own, so that
they never mix with the training's collectives.
"""

from __future__ import annotations

import math
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fivefold.core.model_spec import ModelSpec
from fivefold.core.plan import Plan
from fivefold.core.sharding import buffers, expert_counts
from fivefold.errors import CheckpointError, ConfigError
from fivefold.runtime.launch import Rank
from fivefold.strategies import compose
from fivefold.train.checkpoint import (
    MANIFEST,
    PARTIAL,
    Manifest,
    Piece,
    abandoned,
    checkpoints,
    merge_tensors,
    sync,
    write_model_files,
    write_pieces,
)
from fivefold.train.checkpoint_reader import Reader, check_files
from fivefold.train.sections import CheckpointConfig
from fivefold.train.trainer import Trainer

Warn = Callable[[str], None]


REST = 2.0
"""The writing thread rests so many times as long as it works: at 0 a step took 1.33 times as long, at 1 1.22 times."""


class Saver:
    """Saves one run's checkpoints. All ranks call the same methods at the same steps."""

    def __init__(
        self,
        config: CheckpointConfig,
        trainer: Trainer,
        rank: Rank,
        *,
        data: str,
        warn: Warn,
        model_files: Mapping[str, bytes] | None = None,
    ) -> None:
        """`model_files`: what an export needs beside the weights, kept in every checkpoint."""
        assert config.folder is not None, "nothing to save without a folder"
        self.model_files = model_files or {}
        self.config, self.folder, self.trainer, self.rank = config, Path(config.folder), trainer, rank
        self.data, self.warn = data, warn
        self.thread: threading.Thread | None = None
        self.hurry = threading.Event()
        """Set while somebody waits for the save under way."""
        self.saved: list[int] = []
        self.group = dist.new_group(backend="gloo") if rank.world_size > 1 else None

    def save(self, step: int) -> None:
        """Begin to save the state after `step` steps; returns as soon as the state is copied."""
        self.wait()
        pieces = self._copy()
        manifest = self._manifest(step)
        self.thread = threading.Thread(target=self._write, args=(step, pieces, manifest), name="checkpoint")
        self.hurry.clear()
        self.thread.start()
        if not self.config.asynchronous:
            self.wait()

    def wait(self) -> None:
        """Wait for the save under way."""
        if self.thread is not None:
            self.hurry.set()
            self.thread.join()
            self.thread = None

    def _copy(self) -> list[Piece]:
        """This rank's share: each element of each tensor is written by one rank."""
        layout, at = self.trainer.plan.layout, self.trainer.mesh.coordinate
        pieces = []
        for kind, row, local in self.trainer.engine.persistent():
            if row.written_here(layout, at):
                for part, region in row.pieces(layout, at):
                    values = local[part].to("cpu", copy=True).contiguous()
                    if values.numel():
                        pieces.append(Piece(f"{kind}/{row.name}", row.shape, region, values))
        return pieces

    def _manifest(self, step: int) -> dict[str, Any]:
        plan = self.trainer.plan
        return {
            "step": step,
            "next_sample": step * plan.workload.global_batch,
            "updates": self.trainer.engine.data.updates,
            "loss_scale": self.trainer.engine.loss_scale,
            "seed": self.trainer.seed,
            "data": self.data,
            "plan": plan.model_dump(mode="json"),
        }

    def _write(self, step: int, pieces: list[Piece], manifest: dict[str, Any]) -> None:
        """The thread of every rank. Whatever fails is told to rank 0: a rank that stayed silent would hold up all."""
        final = self.folder / f"step-{step:08d}"
        partial = final.with_name(final.name + PARTIAL)
        part: Any
        if self.config.asynchronous:
            _give_way()
        try:
            for piece in pieces:
                began = time.perf_counter()
                if not _finite(piece.values):
                    raise OSError(f"{piece.key} has a NaN or an infinity")
                self._rest(time.perf_counter() - began)
            partial.mkdir(parents=True, exist_ok=True)
            part = write_pieces(partial, self.rank.rank, pieces, rest=self._rest)
        except Exception as error:
            part = f"rank {self.rank.rank}: {_reason(error)}"
        try:
            parts = self._gather(part)
        except RuntimeError as error:  # a rank is gone, and with it the run
            parts = [_reason(error)]
        if self.rank.rank == 0:
            self._finish(step, parts, manifest, partial, final)

    def _rest(self, worked_s: float) -> None:
        """Cores share caches, memory and often their units with the one that trains: work a third of the time."""
        self.hurry.wait(REST * worked_s)

    def _finish(
        self, step: int, parts: list[Any], manifest: dict[str, Any], partial: Path, final: Path
    ) -> None:
        """Rank 0: let the checkpoint appear and drop old ones, or clear it away and say why."""
        try:
            if failed := [part for part in parts if isinstance(part, str)]:
                raise OSError(failed[0])
            self._publish(parts, manifest, partial, final)
        except Exception as error:
            shutil.rmtree(partial, ignore_errors=True)
            self.warn(
                f"checkpoint of step {step} not saved to {final}: {_reason(error)}; "
                f"the run goes on, older ones are kept"
            )
            return
        self.saved.append(step)
        try:
            self._prune()
        except (OSError, CheckpointError) as error:
            self.warn(f"old checkpoints are not removed from {self.folder}: {_reason(error)}")

    def _publish(self, parts: list[Any], manifest: dict[str, Any], partial: Path, final: Path) -> None:
        """Write the manifest, then let the checkpoint appear. Raises: OSError."""
        tensors = merge_tensors([tensors for tensors, _ in parts])
        files = {name: entry for _, files in parts for name, entry in files.items()}
        model_files = write_model_files(partial, self.model_files)
        text = Manifest(**manifest, tensors=tensors, files=files, model_files=model_files).to_json()
        (partial / MANIFEST).write_text(text, encoding="utf-8")
        sync(partial / MANIFEST)
        sync(partial)
        partial.rename(final)
        sync(final.parent)

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


def _give_way() -> None:
    """Let this thread run after those that compute, where cores are short: Linux has a priority for each thread."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)


def _finite(values: torch.Tensor) -> bool:
    """In one pass, without a mask: minimum and maximum hand a NaN on."""
    low, high = torch.aminmax(values)
    return math.isfinite(low) and math.isfinite(high)


def _reason(error: Exception) -> str:
    text = (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
    return text.splitlines()[0]


# ---------------------------------------------------------------------------------------------------------------------


def resume_from(config: CheckpointConfig, resume: str | None) -> Path | None:
    """The checkpoint to start from: None for a fresh start.

    `resume`: `auto` (the newest of the folder, if there is one), a checkpoint, or None. Also clears away what a killed
    save left behind.

    Raises: CheckpointError for a folder that holds another run's checkpoints, or a path that is no checkpoint.
    """
    folder = Path(config.folder) if config.folder is not None else None
    if resume == "auto" and folder is None:
        raise ConfigError("--resume auto needs checkpoint.folder: where to look for the newest checkpoint")
    found = _prepare_folder(folder) if folder is not None else []
    if resume == "auto":
        return found[-1][1] if found else None
    path = Path(resume) if resume is not None else None
    step = Manifest.load(path).step if path is not None else 0
    # Newer ones would be taken for this run's by the keep rule and by the next --resume auto.
    if found and (
        path is None or found[-1][0] > step or path.resolve().parent != found[-1][1].resolve().parent
    ):
        raise CheckpointError(
            f"{folder} holds checkpoints up to step {found[-1][0]}; go on with --resume auto, or save elsewhere"
        )
    return path


def restart_from(config: CheckpointConfig, resume: str | None) -> Path | None:
    """What a run that was resumed from `resume`, and died, starts again from: its newest checkpoint, if it has one.

    Raises: CheckpointError.
    """
    explicit = Path(resume) if resume not in (None, "auto") else None
    return resume_from(config, "auto") or explicit if config.folder is not None else explicit


def _prepare_folder(folder: Path) -> list[tuple[int, Path]]:
    """Make the folder, clear away what killed saves left. Returns its checkpoints. Raises: CheckpointError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise CheckpointError(f"cannot save checkpoints to {folder}: it cannot be written to")
        for stale in abandoned(folder):
            shutil.rmtree(stale, ignore_errors=True)
    except OSError as error:
        raise CheckpointError(f"cannot save checkpoints to {folder}: {error.strerror}") from None
    return checkpoints(folder)


def load_checkpoint(path: Path, trainer: Trainer, rank: Rank, *, data: str) -> Manifest:
    """Take over weights, moments and position; afterwards the run goes on as if it had never stopped.

    Every rank reads its own regions, and checks its share of the files against their checksums.

    Raises: CheckpointError naming what is damaged, missing, or of another job.
    """
    manifest = Manifest.load(path)
    plan = trainer.plan
    check_same_job(path, manifest, plan, seed=trainer.seed, data=data)
    if manifest.loss_scale is None and plan.execution.scaling is not None:
        raise CheckpointError(
            f"{path} lacks the loss scale that a run in {plan.execution.dtype} goes on with"
        )
    table = compose.parameter_table(plan.model, plan.layout, plan.workload.seq_len)
    mine = trainer.engine.persistent()
    kinds = {kind for kind, _, _ in trainer.engine.data.persistent()}
    wanted = {f"{kind}/{row.name}" for kind in sorted(kinds) for row in table if row.tied_to is None}
    load = plan.execution.router.keeps_load
    wanted |= {f"buffers/{row.name}" for row in buffers(plan.model, load=load)}
    check_names(path, manifest, wanted, {f"buffers/{row.name}" for row in expert_counts(plan.model)})
    check_files(path, manifest, rank=rank.rank, ranks=rank.world_size)
    reader = Reader(path, manifest)
    for kind, row, local in mine:
        key = f"{kind}/{row.tied_to or row.name}"
        for part, region in (
            row.pieces(plan.layout, trainer.mesh.coordinate) if key in manifest.tensors else ()
        ):
            reader.read_into(local[part], key, row.shape, region)
    trainer.engine.restore(manifest.updates, manifest.loss_scale, manifest.step)
    trainer.start = manifest.step
    trainer.skipped = manifest.step - manifest.updates
    trainer.bytes_loaded = reader.bytes_read
    return manifest


def check_names(path: Path, manifest: Manifest, wanted: set[str], optional: Collection[str] = ()) -> None:
    """Raises: CheckpointError naming tensors that are missing or too many."""
    missing = sorted(wanted - manifest.tensors.keys())
    extra = sorted(manifest.tensors.keys() - wanted - set(optional))
    if missing:
        raise CheckpointError(f"{path} lacks tensors of this run: {_some(missing)}")
    if extra:
        raise CheckpointError(f"{path} has tensors that this run lacks: {_some(extra)}")


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


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
        ("separate_documents", saved.workload.separate_documents, plan.workload.separate_documents),
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

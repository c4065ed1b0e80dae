"""Whether a run can write where it is told to: found out before hours of training, and before it overwrites a file."""

from __future__ import annotations

import os
from pathlib import Path

from fivefold.errors import ConfigError
from fivefold.runtime.launch import under_launcher
from fivefold.train.config import TrainConfig


def check_outputs(config: TrainConfig, *, resumed: bool) -> None:
    """Try the places of metrics, TensorBoard and export; those of records and checkpoints try themselves.

    `resumed`: the run goes on from an earlier one, whose metrics file it continues. Of a launched job, rank 0 writes.

    Raises: ConfigError naming the place and why not, or what is there already.
    """
    if under_launcher() and os.environ["RANK"] != "0":
        return
    if config.log.metrics is not None:
        _check_metrics(config.log.metrics, resumed=resumed)
    if config.log.tensorboard is not None:
        _check_folder("log.tensorboard", config.log.tensorboard)
    if config.export is not None and not (resumed and os.path.lexists(config.export)):
        # Of a run that has done everything it may be there; whether that is so, its checkpoint tells.
        _check_export(Path(config.export))


def _check_metrics(path: Path, *, resumed: bool) -> None:
    try:
        if not os.path.lexists(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.open("xb").close()
            path.unlink()
        elif path.is_dir():
            raise ConfigError(
                f"log.metrics: {path} is a folder; name a file, such as {path / 'metrics.jsonl'}"
            )
        elif path.is_file():  # a pipe or a device is not tried: opening one may wait
            path.open("ab").close()
            if path.stat().st_size and not resumed:
                raise ConfigError(
                    f"log.metrics: {path} holds the metrics of an earlier run; name another file, remove this one, or "
                    f"go on with that run (--resume)"
                )
    except OSError as error:
        raise ConfigError(f"log.metrics: cannot write metrics to {path}: {_reason(error)}") from None


def _check_folder(key: str, path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
        fault = None if os.access(path, os.W_OK | os.X_OK) else "it cannot be written to"
    except OSError as error:
        fault = _reason(error)
    if fault is not None:
        raise ConfigError(f"{key}: cannot write to {path}: {fault}")


def _check_export(path: Path) -> None:
    """A folder that can be made; it is made again at the end, when there is something to put in."""
    if os.path.lexists(path):  # whether that is a fault depends on what is left to do
        return
    try:
        path.mkdir(parents=True)
        path.rmdir()
    except OSError as error:
        raise ConfigError(f"export: cannot make the folder {path}: {_reason(error)}") from None


def _reason(error: OSError) -> str:
    return error.strerror or type(error).__name__

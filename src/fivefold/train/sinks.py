"""Other places that see a run while it goes on: TensorBoard, Weights & Biases, MLflow, each through its own package.

Rank 0 writes. A package that is not installed is a user's mistake, told before training starts.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol

from fivefold.core.plan import Plan
from fivefold.errors import ConfigError
from fivefold.train.sections import LogConfig


class Sink(Protocol):
    """Gets the numbers of every logged step."""

    def log(self, step: int, numbers: Mapping[str, float]) -> None: ...
    def close(self) -> None: ...


class TensorBoard:
    """Event files in a folder: `tensorboard --logdir FOLDER`."""

    def __init__(self, folder: Path, plan: Plan) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(folder))
        self.writer.add_text("plan", f"```\n{plan.model.name} {plan.layout}\n```")

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        for name, value in numbers.items():
            self.writer.add_scalar(name, value, step)

    def close(self) -> None:
        self.writer.close()


class WeightsAndBiases:
    """A run of a W&B project."""

    def __init__(self, project: str, plan: Plan) -> None:
        import wandb

        self.run = wandb.init(project=project, config=plan.model_dump(mode="json"))

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        self.run.log(dict(numbers), step=step)

    def close(self) -> None:
        self.run.finish()


class MLflow:
    """A run of an MLflow experiment."""

    def __init__(self, experiment: str, plan: Plan) -> None:
        import mlflow

        self.mlflow: Any = mlflow
        self.mlflow.set_experiment(experiment)
        self.mlflow.start_run()
        self.mlflow.log_params({"model": plan.model.name, "layout": str(plan.layout), "plan": plan.hash})

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        self.mlflow.log_metrics(dict(numbers), step=step)

    def close(self) -> None:
        self.mlflow.end_run()


def check_sinks(config: LogConfig) -> None:
    """Raises: ConfigError naming the package that a sink needs and that is not installed."""
    for wanted, key in (
        (config.tensorboard, "tensorboard"),
        (config.wandb, "wandb"),
        (config.mlflow, "mlflow"),
    ):
        try:
            metadata.version(key if wanted else "fivefold")
        except metadata.PackageNotFoundError:
            raise ConfigError(
                f"log.{key} needs the package {key}: pip install {key}, or set log.{key}=null"
            ) from None


def open_sinks(config: LogConfig, plan: Plan) -> list[Sink]:
    """The sinks that the config asks for."""
    sinks: list[Sink] = []
    if config.tensorboard:
        sinks.append(TensorBoard(config.tensorboard, plan))
    if config.wandb:
        sinks.append(WeightsAndBiases(config.wandb, plan))
    if config.mlflow:
        sinks.append(MLflow(config.mlflow, plan))
    return sinks

"""The sections of a training config: when to save and to validate, what to log."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Self

from pydantic import AfterValidator, model_validator

from fivefold.core.optimizer import Name, Positive, usable_name
from fivefold.core.value import Value

PathName = Annotated[Path, AfterValidator(usable_name)]


class CheckpointConfig(Value):
    """When and where the state of a run is saved."""

    folder: Name | None = None
    """Where checkpoints go; null: none are saved."""
    every: Positive = 100
    """Steps between two checkpoints; the last step is always saved."""
    keep: Positive = 2
    """So many of the newest are kept."""
    keep_every: Positive | None = None
    """Those whose step is a multiple of this are kept for good."""
    asynchronous: bool = True
    """Write while training goes on; the step waits only for a copy of the state."""


class ValidationConfig(Value):
    """The loss on text that is not trained on."""

    every: Positive | None = None
    """Steps between two measurements; the last step is always measured. null: none."""
    samples: Positive = 256
    """So many samples, the same ones each time; fewer where the split has fewer."""
    data: Name | None = None
    """Where they come from; null: the validation split of `data`."""


class LogConfig(Value):
    """What a run tells, and where."""

    every: Positive = 1
    """Steps between two lines of metrics."""
    precision: Positive | None = None
    """Steps between two looks at the gradient norm and the largest output of every layer; null: none."""
    metrics: PathName | None = None
    """File that gets one JSON object per logged step; null: none. A file that is there already is only continued by
    a run that resumes."""
    experts: bool = False
    """Each of these lines also has how often every expert was chosen, by layer; in models with experts."""
    records: Name | None = "default"
    """Store of runs: `default` (the one that `fivefold runs` reads), a path, or null (not recorded)."""
    tensorboard: PathName | None = None
    """Folder of TensorBoard event files; null: none."""
    wandb: Name | None = None
    """Project of Weights & Biases; null: none."""
    mlflow: Name | None = None
    """Experiment of MLflow; null: none."""

    @model_validator(mode="after")
    def _settings_act(self) -> Self:
        """A setting that would be ignored is refused rather than dropped in silence."""
        if self.experts and self.metrics is None:
            raise ValueError("experts does nothing without metrics, the file that it is written to; set it")
        return self

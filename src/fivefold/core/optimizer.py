"""How gradients become weights: settings, and the learning rate of every step."""

from __future__ import annotations

import math
import os
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from fivefold.core.value import Value

MOST_STEPS = 10**9
"""Optimizer steps: 30 years of one each second."""

LARGEST = 1e38
"""About the largest number of float32, in which weights are updated."""

MOST_SETTING = 1e9
"""No setting but a learning rate that is meant to diverge is larger."""

SMALLEST_EPS = 1e-30
"""Well above the least float32, in which anything much smaller would silently be 0."""

LONGEST_NAME = 4096
"""Characters of a path or name; no file system takes longer ones."""


def _not_bool(value: object) -> object:
    """YAML reads `yes` as true, and true would pass as 1."""
    if isinstance(value, bool):
        raise ValueError("expected a number, not true or false")
    return value


def usable_name(value: Any) -> Any:
    """A text or path that an operating system takes, with `~` in place of the folder that it stands for."""
    text = str(value)
    if "\0" in text:
        raise ValueError("expected a name without zero bytes")
    if len(text) > LONGEST_NAME:
        raise ValueError(f"expected at most {LONGEST_NAME} characters")
    if not text.startswith("~"):
        return value
    expanded = os.path.expanduser(text)
    if expanded == text:
        raise ValueError("expected another beginning than ~: there is no such home folder")
    return type(value)(expanded)


Number = Annotated[float, BeforeValidator(_not_bool)]
Integer = Annotated[int, BeforeValidator(_not_bool)]
Positive = Annotated[Integer, Field(ge=1, le=MOST_STEPS)]
Beta = Annotated[Number, Field(ge=0, lt=1)]
Name = Annotated[str, Field(min_length=1), AfterValidator(usable_name)]


class OptimizerConfig(Value):
    """How gradients become weights. Settings of the other optimizer must stay at their defaults."""

    name: Literal["adamw", "sgd"] = "adamw"
    lr: Annotated[Number, Field(gt=0, le=LARGEST)] = 1e-3
    """Peak learning rate, reached at the end of the warm-up."""
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    """AdamW: decay of the first and second moment."""
    eps: Annotated[Number, Field(ge=SMALLEST_EPS, le=MOST_SETTING)] = 1e-8
    """AdamW: added to the root of the second moment."""
    momentum: Beta = 0.0
    """SGD: decay of the velocity; 0 is plain SGD."""
    weight_decay: Annotated[Number, Field(ge=0, le=MOST_SETTING)] = 0.1
    """AdamW: decoupled from the gradient. SGD: added to it."""
    clip_norm: Annotated[Number, Field(gt=0, le=MOST_SETTING)] | None = 1.0
    """Largest global gradient norm (each parameter once, over all ranks); null: no clipping."""
    warmup_steps: Annotated[Integer, Field(ge=0, le=MOST_STEPS)] = 10
    """Steps of linear warm-up. A run shorter than this never reaches `lr`."""
    schedule: Literal["cosine", "constant"] = "cosine"
    """After the warm-up: cosine to `min_lr_frac * lr` at the last step, or constant `lr`."""
    min_lr_frac: Annotated[Number, Field(ge=0, le=1)] = 0.1
    """Cosine: the lowest learning rate as a fraction of `lr`."""

    @property
    def moments(self) -> tuple[str, ...]:
        """What it remembers of each parameter's gradients, of the parameter's shape, by torch's names."""
        if self.name == "adamw":
            return "exp_avg", "exp_avg_sq"
        return ("momentum_buffer",) if self.momentum else ()

    @model_validator(mode="after")
    def _settings_act(self) -> Self:
        """A setting that the chosen optimizer would ignore is refused rather than dropped in silence; overflow, too."""
        if self.lr * self.weight_decay > LARGEST:
            raise ValueError(
                f"lr {self.lr:g} x weight_decay {self.weight_decay:g} is more than float32 holds, {LARGEST:g}"
            )
        foreign = {"adamw": ("momentum",), "sgd": ("betas", "eps")}[self.name]
        for key in foreign:
            default = type(self).model_fields[key].default
            if getattr(self, key) != default:
                raise ValueError(f"{key} does nothing with {self.name}; leave it at {default} or change name")
        return self


def lr_at(step: int, optimizer: OptimizerConfig, steps: int) -> float:
    """Learning rate of step `step` (from 0) of `steps`.

    Formula: w = warmup_steps; step < w:  lr * (step + 1) / (w + 1)
             constant:                    lr
             cosine, x = min(1, (step - w) / (steps - 1 - w)):
                                          lr * (f + (1 - f) * (1 + cos(pi x)) / 2),  f = min_lr_frac
             so step w has lr, and the last step has f * lr (if it is not step w itself).
    Source:  Loshchilov and Hutter, SGDR, equation 5, with one cycle.
    """
    warmup = optimizer.warmup_steps
    if step < warmup:
        return optimizer.lr * (step + 1) / (warmup + 1)
    if optimizer.schedule == "constant":
        return optimizer.lr
    done = min(1.0, (step - warmup) / max(1, steps - 1 - warmup))
    low = optimizer.min_lr_frac
    return optimizer.lr * (low + (1 - low) * (1 + math.cos(math.pi * done)) / 2)

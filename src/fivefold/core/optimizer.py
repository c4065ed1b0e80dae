"""How gradients become weights: settings, and the learning rate of every step."""

from __future__ import annotations

import math
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from fivefold.core.value import Value


def _not_bool(value: object) -> object:
    """YAML reads `yes` as true, and true would pass as 1."""
    if isinstance(value, bool):
        raise ValueError("Input should be a number, not true or false")
    return value


Number = Annotated[float, BeforeValidator(_not_bool)]
Integer = Annotated[int, BeforeValidator(_not_bool)]
Positive = Annotated[Integer, Field(ge=1)]
Beta = Annotated[Number, Field(ge=0, lt=1)]
Name = Annotated[str, Field(min_length=1)]


class OptimizerConfig(Value):
    """How gradients become weights. Settings of the other optimizer must stay at their defaults."""

    name: Literal["adamw", "sgd"] = "adamw"
    lr: Annotated[Number, Field(gt=0)] = 1e-3
    """Peak learning rate, reached at the end of the warm-up."""
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    """AdamW: decay of the first and second moment."""
    eps: Annotated[Number, Field(gt=0)] = 1e-8
    """AdamW: added to the root of the second moment."""
    momentum: Beta = 0.0
    """SGD: decay of the velocity; 0 is plain SGD."""
    weight_decay: Annotated[Number, Field(ge=0)] = 0.1
    """AdamW: decoupled from the gradient. SGD: added to it."""
    clip_norm: Annotated[Number, Field(gt=0)] | None = 1.0
    """Largest global gradient norm (each parameter once, over all ranks); null: no clipping."""
    warmup_steps: Annotated[Integer, Field(ge=0)] = 10
    """Steps of linear warm-up. A run shorter than this never reaches `lr`."""
    schedule: Literal["cosine", "constant"] = "cosine"
    """After the warm-up: cosine to `min_lr_frac * lr` at the last step, or constant `lr`."""
    min_lr_frac: Annotated[Number, Field(ge=0, le=1)] = 0.1
    """Cosine: the lowest learning rate as a fraction of `lr`."""

    @model_validator(mode="after")
    def _only_settings_that_act(self) -> Self:
        """A setting that the chosen optimizer would ignore is refused rather than dropped in silence."""
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

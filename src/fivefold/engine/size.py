"""Whether a job fits the memory that its ranks share on this machine, before any of them starts."""

from __future__ import annotations

import psutil

from fivefold.core.model_counts import parameter_counts
from fivefold.core.plan import Plan
from fivefold.errors import ConfigError
from fivefold.units import format_bytes, format_count

TRAINING_COPIES = 4
"""Parameters, gradients and two moments; what a step keeps beside them is not counted, so this is a lower bound."""


def check_size(plan: Plan, *, what: str, advice: str, copies: int = TRAINING_COPIES) -> None:
    """Raises: ConfigError if `copies` times the parameters of all ranks together exceed the free memory here.

    Formula: parameters x bytes of the gradient dtype x copies x dp*cp (tp and pp share one copy).
    """
    count = parameter_counts(plan.model)["total_parameters"]
    needed = count * plan.execution.grad_itemsize_bytes * copies * plan.layout.data
    free = psutil.virtual_memory().available
    if needed > free:
        raise ConfigError(
            f"{what} {plan.model.name} ({format_count(count)} parameters) under {plan.layout} in "
            f"{plan.execution.dtype} takes at least {format_bytes(needed)}, {format_bytes(free)} are free here; "
            f"{advice}"
        )

"""Whether a job fits the memory that its ranks share on this machine, before any of them starts."""

from __future__ import annotations

import psutil

from fivefold.core.model_counts import parameter_counts
from fivefold.core.plan import Plan
from fivefold.errors import ConfigError
from fivefold.units import format_bytes, format_count

TRAINING_COPIES = 4
"""Parameters, gradients and two moments; what a step keeps beside them is not counted, so this is a lower bound."""

WHOLE_FRAC = (1.0, 0.5, 0.25, 0.0)
"""ZeRO stage -> the part of these copies that every data rank has whole."""


def check_size(plan: Plan, *, what: str, advice: str, copies: int = TRAINING_COPIES) -> None:
    """Raises: ConfigError if `copies` times the parameters of all ranks, and one microbatch, exceed the free memory.

    Formula: parameters x bytes of the gradient dtype x copies x (f + (1 - f) / n) x dp*cp (tp and pp share one copy),
             where ZeRO over n ranks leaves the fraction f on each of them: gradients and parameters with zero1,
             parameters with zero2, nothing with zero3.
    """
    count = parameter_counts(plan.model)["total_parameters"]
    layout = plan.layout
    on_each = WHOLE_FRAC[layout.zero]
    held = layout.data * (on_each + (1 - on_each) / layout.data_shards)
    states = int(count * plan.execution.grad_itemsize_bytes * copies * held)
    activations = _activation_bytes(plan)
    needed, free = states + activations, psutil.virtual_memory().available
    if needed > free:
        if activations > states:
            tokens = f"{plan.execution.micro_batch} x {plan.workload.seq_len} tokens"
            advice = f"most of it are the activations of one microbatch, {tokens}: make it smaller"
        raise ConfigError(
            f"{what} {plan.model.name} ({format_count(count)} parameters) under {plan.layout} in "
            f"{plan.execution.dtype} takes at least {format_bytes(needed)}, {format_bytes(free)} are free here; "
            f"{advice}"
        )


def _activation_bytes(plan: Plan) -> int:
    """Bytes that one microbatch of every data replica needs at least, summed over the ranks that share it.

    Formula: dp x micro-batch x sequence x (layers x hidden + vocabulary) x bytes of the dtype: the input of each layer,
             which backward needs, and the logits.
    """
    spec, execution = plan.model, plan.execution
    tokens = plan.layout.dp * execution.micro_batch * plan.workload.seq_len
    return tokens * (spec.layers * spec.hidden + spec.vocab) * execution.itemsize_bytes

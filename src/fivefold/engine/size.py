"""Whether a job fits the memory that its ranks share on this machine, before any of them starts."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import psutil

from fivefold.core.execution import microbatches
from fivefold.core.model_counts import parameter_counts
from fivefold.core.plan import Plan
from fivefold.errors import ConfigError
from fivefold.strategies.pipeline.actions import Action
from fivefold.strategies.pipeline.placement import stage_layers
from fivefold.strategies.pipeline.schedules import computations, in_flight
from fivefold.units import format_bytes, format_count

TRAINING_COPIES = 4
"""Parameters, gradients and two moments; what a step keeps beside them is not counted, so this is a lower bound."""

ONE = "one microbatch"

WHOLE_FRAC = (1.0, 0.5, 0.25, 0.0)
"""ZeRO stage -> the part of these copies that every data rank has whole."""


def check_size(plan: Plan, *, what: str, advice: str, copies: int = TRAINING_COPIES) -> None:
    """Raises: ConfigError if `copies` times the parameters of all ranks, and activations, exceed the free memory.

    Formula: parameters x bytes of the gradient dtype x copies x (f + (1 - f) / n) x dp*cp (tp and pp share one copy),
             where ZeRO over n ranks leaves the fraction f on each of them: gradients and parameters with zero1,
             parameters with zero2, nothing with zero3. Of routed experts x edp: ep and etp share one copy as well.
    """
    counts = parameter_counts(plan.model)
    count, experts = counts["total_parameters"], counts["by_component"]["experts"]
    layout = plan.layout
    on_each = WHOLE_FRAC[layout.zero]
    held = (count - experts) * layout.data * (on_each + (1 - on_each) / layout.data_shards)
    held += experts * layout.edp * (on_each + (1 - on_each) / max(1, layout.expert_shards))
    states = int(held * plan.execution.grad_itemsize_bytes * copies)
    activations, of = _activation_bytes(plan)
    needed, free = states + activations, psutil.virtual_memory().available
    if needed > free:
        if activations > states:
            tokens = f"{plan.execution.micro_batch} x {plan.workload.seq_len} tokens"
            advice = f"most of it are the activations of {of}, {tokens}: " + (
                "make it smaller" if of == ONE else "make them fewer or smaller, or use another schedule"
            )
        raise ConfigError(
            f"{what} {plan.model.name} ({format_count(count)} parameters) under {plan.layout} in "
            f"{plan.execution.dtype} takes at least {format_bytes(needed)}, {format_bytes(free)} are free here; "
            f"{advice}"
        )


def _activation_bytes(plan: Plan) -> tuple[int, str]:
    """Bytes of activations that all data replicas need at least, and what of, in words.

    Formula: dp x micro-batch x sequence x bytes of the dtype x the larger of
             layers x hidden + vocabulary: one microbatch, the input of each layer, which backward needs, and the logits
             most layers x microbatches x hidden that the actions of a pipeline rank hold at one time.
    """
    spec, layout, execution = plan.model, plan.layout, plan.execution
    tokens = layout.dp * execution.micro_batch * plan.workload.seq_len * execution.itemsize_bytes
    one = spec.layers * spec.hidden + spec.vocab
    count = microbatches(plan.workload, layout, execution)
    lists = computations(layout, count, execution.actions)
    sizes = [len(layers) for layers in stage_layers(spec, layout, plan.workload.seq_len)]
    most, rank = max((_most_layers(actions, sizes), -rank) for rank, actions in enumerate(lists))
    if most * spec.hidden <= one:
        return tokens * one, ONE
    held = f"up to {in_flight(lists[-rank]).activations} microbatches of chunks at a time on pipeline rank {-rank}"
    return tokens * most * spec.hidden, held


def _most_layers(actions: Sequence[Action], sizes: Sequence[int]) -> int:
    """The most layers x microbatches whose forward is done and whose backward of the input is not."""
    signs = {"F": 1, "B": -1, "I": -1}
    return max(accumulate(signs.get(action.kind, 0) * sizes[action.chunk] for action in actions))

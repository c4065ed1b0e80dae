"""Which decoder layers each virtual stage holds. Every layer is placed exactly once, whatever divides and what not.

even      as equal as can be; the remainder goes to the first stages, since the last one also holds the head
flops     contiguous split whose most expensive stage is as cheap as can be, embedding and head counted
measured  the same split of seconds that were measured, rather than of FLOPs
9+11+10   as told
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import NamedTuple

from fivefold.core.layout import Layout
from fivefold.core.model_counts import block_flops, head_flops
from fivefold.core.model_spec import ModelSpec
from fivefold.errors import LayoutError


class Costs(NamedTuple):
    """What a placement weighs, in any one unit."""

    layers: Sequence[float]
    first_extra: float = 0.0
    """On the first stage: the embedding."""
    last_extra: float = 0.0
    """On the last stage: final norm, head and loss."""

    def of_stages(self, counts: Sequence[int]) -> list[float]:
        """The cost of each stage that holds so many layers."""
        starts = [0, *accumulate(counts)]
        stages = [sum(self.layers[a:b]) for a, b in pairwise(starts)]
        stages[0] += self.first_extra
        stages[-1] += self.last_extra
        return stages


def stage_layers(
    spec: ModelSpec, layout: Layout, seq_len: int, *, seconds: Costs | None = None
) -> tuple[range, ...]:
    """The decoder layers of each virtual stage, in order. `seconds`: what @measured weighs.

    Raises: LayoutError if there are more stages than layers, or a list does not add up to the layers.
    """
    stages, layers = layout.stages, spec.layers
    if stages > layers:
        raise LayoutError(
            f"{layout} has {stages} pipeline stages but {spec.name} has {layers} layers; "
            f"at most {layers} stages, one layer each"
        )
    if isinstance(layout.placement, tuple):
        counts = list(layout.placement)
        if sum(counts) != layers:
            raise LayoutError(
                f"placement @{'+'.join(map(str, counts))} places {sum(counts)} layers but {spec.name} has {layers}; "
                f"nearest: @{'+'.join(map(str, even_counts(layers, stages)))}"
            )
    elif layout.placement == "flops":
        counts = list(_balanced_by_flops(spec, seq_len, stages))
    elif layout.placement == "even":
        counts = even_counts(layers, stages)
    elif seconds is None:
        raise LayoutError(
            f"placement @{layout.placement} needs measured stage times, which only `fivefold train` looks up in the "
            f"record; use it there, or @flops, or list the layers of each of {stages} stages"
        )
    else:
        counts = balanced_counts(seconds, stages)
    starts = [0, *accumulate(counts)]
    return tuple(range(a, b) for a, b in pairwise(starts))


def even_counts(layers: int, stages: int) -> list[int]:
    """As equal as can be, the remainder on the first stages."""
    return [layers // stages + (stage < layers % stages) for stage in range(stages)]


def flops(spec: ModelSpec, seq_len: int) -> Costs:
    """Training FLOPs per token: forward and twice that backward for layers and head.

    The embedding's forward is a lookup; its backward adds the gradient to a row of the table, D additions.
    Source: Narayanan et al. 2021, arXiv:2104.04473, appendix A.
    """
    layers = [3 * block_flops(spec, block, seq_len) for block in spec.blocks]
    return Costs(layers, first_extra=spec.hidden, last_extra=3 * head_flops(spec))


@lru_cache(maxsize=256)
def _balanced_by_flops(spec: ModelSpec, seq_len: int, stages: int) -> tuple[int, ...]:
    """Kept, since all layouts of so many stages share it."""
    return tuple(balanced_counts(flops(spec, seq_len), stages))


def split_seconds(stage_seconds: Sequence[float], counts: Sequence[int]) -> Costs:
    """Costs of single layers from the times of whole stages, each of which held `counts` layers.

    Stages between first and last hold layers only, which share their stage's time equally. First and last stage hold
    layers that take as long as the mean of those between, and what is left is their extra. Where nothing lies between,
    embedding and final norm are taken to be free, and layers to take as long as the first stage's. No cost is negative:
    a stage that was faster than that has no extra, and its layers share its time.
    """
    assert len(stage_seconds) == len(counts) >= 2
    between, held = sum(stage_seconds[1:-1]), sum(counts[1:-1])
    layer_s = between / held if held else stage_seconds[0] / counts[0]
    extras = [max(0.0, stage_seconds[i] - counts[i] * layer_s) for i in (0, -1)]
    own = [stage_seconds[0] - extras[0], *stage_seconds[1:-1], stage_seconds[-1] - extras[1]]
    return Costs([s / n for s, n in zip(own, counts) for _ in range(n)], *extras)


def measured_counts(stage_seconds: Sequence[float], counts: Sequence[int], stages: int) -> list[int]:
    """Layers of each of `stages` stages, balanced by what stages of `counts` layers took when measured."""
    return balanced_counts(split_seconds(stage_seconds, counts), stages)


def balanced_counts(costs: Costs, stages: int) -> list[int]:
    """Layers per stage of the contiguous split with the cheapest most expensive stage; each stage gets at least one.

    Among equals the most even one (least sum of squares), then that whose earlier stages hold more. Exact, by dynamic
    programming: O(stages * layers^2).
    """
    worst, _ = _split(costs, stages, max)
    _, counts = _split(costs, stages, lambda cost, rest: cost**2 + rest, most=worst)
    return counts


def _split(
    costs: Costs, stages: int, join: Callable[[float, float], float], *, most: float = math.inf
) -> tuple[float, list[int]]:
    """The least `join` over all stages, and its counts, where no stage costs more than `most`."""
    layers = len(costs.layers)
    sums = [0.0, *accumulate(costs.layers)]
    # table[i]: the least `join` when the stages from `stage` on hold the layers from i on, and their counts.
    table: dict[int, tuple[float, list[int]]] = {layers: (0.0, [])}
    for stage in reversed(range(stages)):
        extra = costs.last_extra if stage == stages - 1 else 0.0
        extra += costs.first_extra if stage == 0 else 0.0
        previous, table = table, {}
        for start in range(stage, layers - (stages - stage) + 1):
            options = []
            for end in range(start + 1, layers + 1):
                cost = sums[end] - sums[start] + extra
                if end in previous and cost <= most:
                    rest, counts = previous[end]
                    options.append((join(cost, rest), start - end, counts))
            if options:
                total, negative, counts = min(options, key=lambda option: option[:2])
                table[start] = (total, [-negative, *counts])
    return table[0]

"""Which decoder layers each virtual stage holds. Every layer is placed exactly once, whatever divides and what not.

even      as equal as can be; the remainder goes to the first stages, since the last one also holds the head
flops     contiguous split whose most expensive stage is as cheap as can be, the head counted
9+11+10   as told
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

from fivefold.core.layout import Layout
from fivefold.core.model_counts import block_flops, head_flops
from fivefold.core.model_spec import ModelSpec
from fivefold.errors import LayoutError


def stage_layers(spec: ModelSpec, layout: Layout, seq_len: int) -> tuple[range, ...]:
    """The decoder layers of each virtual stage, in order.

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
                f"placement @{'+'.join(map(str, counts))} places {sum(counts)} layers but {spec.name} has {layers}"
            )
    elif layout.placement == "flops":
        costs = [block_flops(spec, block, seq_len) for block in spec.blocks]
        counts = balanced_counts(costs, stages, last_extra=head_flops(spec))
    elif layout.placement == "even":
        counts = [layers // stages + (stage < layers % stages) for stage in range(stages)]
    else:
        raise LayoutError(
            f"placement @{layout.placement} needs measured stage times, which are not kept yet; use @flops"
        )
    starts = [0, *accumulate(counts)]
    return tuple(range(a, b) for a, b in pairwise(starts))


def balanced_counts(costs: Sequence[float], stages: int, last_extra: float = 0.0) -> list[int]:
    """Layers per stage of the contiguous split with the cheapest most expensive stage; each stage gets at least one.

    `last_extra` is added to the last stage (the head). Among equals the earlier stages take more.
    Exact, by dynamic programming: O(stages * layers^2).
    """
    layers = len(costs)
    sums = [0.0, *accumulate(costs)]
    # table[i]: the cheapest maximum when the stages from `stage` on hold the layers from i on, and their counts.
    table: dict[int, tuple[float, list[int]]] = {layers: (0.0, [])}
    for stage in reversed(range(stages)):
        extra = last_extra if stage == stages - 1 else 0.0
        previous, table = table, {}
        for start in range(stage, layers - (stages - stage) + 1):
            options = [
                (max(sums[end] - sums[start] + extra, previous[end][0]), -(end - start), previous[end][1])
                for end in range(start + 1, layers + 1)
                if end in previous
            ]
            if options:
                cost, negative, rest = min(options, key=lambda option: option[:2])
                table[start] = (cost, [-negative, *rest])
    return table[0][1]

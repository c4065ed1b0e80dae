"""Whether a layout can be formed for a model, a batch and a sequence: the strategies' own rules.

Unlike `strategies.legal`, a model that this project's runtime cannot compute is judged too: what its layers would need
of each rule is asked of their sizes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from heapq import nsmallest
from math import log2

from fivefold.core.execution import MOST_MICROBATCHES, Execution, microbatches
from fivefold.core.layout import Layout
from fivefold.core.model_spec import AttentionSpec, GatedDeltaSpec, MLASpec, ModelSpec
from fivefold.core.workload import Workload
from fivefold.errors import LayoutError, UserError, nearest_numbers
from fivefold.strategies.context import rules as context
from fivefold.strategies.data import rules as data
from fivefold.strategies.expert import rules as expert
from fivefold.strategies.legal import shapes
from fivefold.strategies.pipeline import rules as pipeline
from fivefold.strategies.tensor import rules as tensor

SPLIT_BACKWARD = ("zbh1", "zbv", "dualpipev")
"""Schedules that compute weight gradients apart, which ZeRO-2 and 3 cannot follow."""

MOST_TRIED = 1000
"""Shapes that are looked at for the nearest legal one: all up to 16,384 devices."""

__all__ = ["MOST_MICROBATCHES", "SPLIT_BACKWARD", "check", "check_devices", "why_not"]


def check(spec: ModelSpec, layout: Layout, *, seq_len: int, global_batch: int, micro_batch: int) -> None:
    """Raises: LayoutError or WorkloadError naming the numbers that break a rule and the nearest that do not."""
    data.check(layout)
    pipeline.check(spec, layout, seq_len)
    tensor.check(spec, layout, seq_len)
    _check_other_heads(spec, layout)
    if layout.cp > 1:
        _check_context(spec, layout, seq_len)
    expert.check(spec, layout)
    microbatches(
        Workload(seq_len=seq_len, global_batch=global_batch), layout, Execution(micro_batch=micro_batch)
    )
    kinds = {"W"} if layout.schedule in SPLIT_BACKWARD else {"B"}
    data.check_schedule(layout, kinds, experts=bool(expert.routed_layers(spec)))


def check_devices(layout: Layout, devices: int, cluster: str, legal: Callable[[Layout], bool]) -> None:
    """Raises: LayoutError where a layout does not take all devices, with the nearest `legal` one that does."""
    if layout.world_size == devices:
        return
    found = next(filter(legal, _all_devices(layout, devices)), None)
    nearest = f"; nearest: {found}" if found is not None else ""
    raise LayoutError(
        f"{layout} takes {layout.world_size} devices (dp x tp x pp x cp), but {cluster} has {devices}{nearest}"
    )


def _all_devices(layout: Layout, devices: int) -> Iterator[Layout]:
    """The layout with other degrees that take all devices, those first whose tp, pp and cp change least."""

    def changed(shape: tuple[int, int, int, int]) -> float:
        return sum(abs(log2(new / old)) for new, old in zip(shape[1:], (layout.tp, layout.pp, layout.cp)))

    for dp, tp, pp, cp in nsmallest(MOST_TRIED, shapes(devices), key=changed):
        with contextlib.suppress(LayoutError):  # such data ranks may not divide by ep or a group
            yield layout.replace(dp=dp, tp=tp, pp=pp, cp=cp)


def why_not(
    spec: ModelSpec, layout: Layout, *, seq_len: int, global_batch: int, micro_batch: int
) -> str | None:
    """The rule that forbids a layout, in one line; None where it can be formed."""
    try:
        check(spec, layout, seq_len=seq_len, global_batch=global_batch, micro_batch=micro_batch)
    except UserError as error:
        return str(error)
    return None


def other_heads(spec: ModelSpec) -> list[tuple[int, str]]:
    """(heads, of what) that tp must divide in layers that are not grouped-query attention."""
    found: dict[tuple[int, str], None] = {}
    for block in spec.blocks:
        if isinstance(block.attention, MLASpec):
            found[block.attention.heads, "heads of the latent attention"] = None
        elif isinstance(block.attention, GatedDeltaSpec):
            found[block.attention.key_heads, "key heads of the linear attention"] = None
            found[block.attention.value_heads, "value heads of the linear attention"] = None
    return list(found)


def _check_other_heads(spec: ModelSpec, layout: Layout) -> None:
    for heads, name in other_heads(spec):
        if heads % layout.tp:
            legal = [d for d in range(1, heads + 1) if heads % d == 0]
            raise LayoutError(
                f"tp{layout.tp} does not fit {spec.name}: {name} = {heads} is not divisible by {layout.tp}; "
                f"nearest legal tp: {nearest_numbers(layout.tp, legal)}"
            )


def context_heads(spec: ModelSpec) -> list[tuple[int, int]]:
    """(query heads, KV heads) that ulysses cuts; latent attention has as many keys as queries."""
    pairs: dict[tuple[int, int], None] = {}
    for block in spec.blocks:
        a = block.attention
        if isinstance(a, AttentionSpec):
            pairs[a.heads, a.kv_heads] = None
        elif isinstance(a, MLASpec):
            pairs[a.heads, a.heads] = None
        else:
            pairs[a.value_heads, a.key_heads] = None
    return list(pairs)


def _check_context(spec: ModelSpec, layout: Layout, seq_len: int) -> None:
    if all(isinstance(block.attention, AttentionSpec) for block in spec.blocks):
        context.check(spec, layout, seq_len)
        return
    unit = context.length_unit(layout)
    if seq_len % unit:
        raise LayoutError(f"sequence length {seq_len} is not a multiple of {unit}, which {layout} needs")
    for heads, kv_heads in context_heads(spec):
        local = heads // layout.tp, max(1, kv_heads // layout.tp)
        if not context.legal_ulysses(*local, layout.cp_ulysses):
            raise LayoutError(
                f"ulysses degree {layout.cp_ulysses} does not divide the {local[0]} heads of a tp{layout.tp} rank of "
                f"{spec.name}; nearest: cp{layout.cp}:ring"
            )

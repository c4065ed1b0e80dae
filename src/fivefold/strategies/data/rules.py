"""Data parallelism: replicas over dp x cp that see different tokens, sum their gradients, and may share what they hold.

The loss of a rank is divided once by the global count of valid tokens, so gradients are summed, never averaged.

P local parameters (after tp and pp), n ranks of a sharding group, m microbatches. Elements that a rank sends per step
(Rajbhandari et al. 2020, section 7, for m = 1):

    zero0    gradients all-reduced once                                               2 P (n-1)/n
    zero1    gradients reduce-scattered once, updated parameters all-gathered         2 P (n-1)/n
    zero2    gradients reduce-scattered after each microbatch, then as zero1    (m + 1) P (n-1)/n
    zero3    parameters gathered for each forward and each backward, gradients
             reduce-scattered after each microbatch                                3 m P (n-1)/n, at most
             with `zero3_gather: step`: gathered and reduce-scattered once            2 P (n-1)/n
    zeroK/G  as above in groups of n = G; then the shards are all-reduced once
             over the data/G groups: 2 P/n (r-1)/r more, r = data/G

"At most": the parameters that a backward does not read (a lookup) or reads right after the forward (the head, where
the backward comes next) are not gathered again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from fivefold.core.events import Event, Events, Phase
from fivefold.core.layout import Layout
from fivefold.core.sharding import ParameterRow, Shard
from fivefold.errors import LayoutError

FEWEST_BUCKETS = 4
"""Even a small model is cut in so many buckets, so that the first reduction starts before backward ends."""


def check(layout: Layout, zero3_gather: str = "microbatch") -> None:
    """Raises: LayoutError for what cannot be run yet, or an option that would do nothing."""
    if zero3_gather != "microbatch" and layout.zero != 3:
        raise LayoutError(
            f"zero3_gather={zero3_gather} does nothing with zero{layout.zero}; leave it out, or use zero3"
        )


def check_schedule(layout: Layout, kinds: Collection[str], *, experts: bool = False) -> None:
    """`kinds`: the computations of the schedule; `experts`: whether the model has any.

    ZeRO-2 and 3 free the gradients of a microbatch when all of a bucket are there. Where a schedule computes weight
    gradients later (W), those of one microbatch come in two parts with another microbatch's between them: never all are
    there.

    Raises: LayoutError for a schedule that they cannot follow.
    """
    shards = max(layout.data_shards, layout.expert_shards if experts else 1)
    if layout.zero >= 2 and shards > 1 and "W" in kinds:
        raise LayoutError(
            f"zero{layout.zero} reduces the gradients of each microbatch as a whole, but "
            f"pp{layout.pp}:{layout.schedule} computes weight gradients apart (W); "
            f"nearest: zero1, or zero{layout.zero} with pp{layout.pp}:1f1b"
        )


def place(row: ParameterRow, layout: Layout) -> ParameterRow:
    """Every gradient is summed over its data ranks; ZeRO cuts dim 0 of the local part, padded at its end."""
    if layout.degree(row.data_axis) == 1:
        return row
    zero = Shard(0) if row.data_shards(layout) > 1 else None
    return replace(row, sums={**row.sums, row.data_axis: None}, zero=zero)


def buckets(
    rows: list[ParameterRow], layout: Layout, bucket_bytes: int, itemsize: int
) -> list[list[ParameterRow]]:
    """The rows of one chunk in the order in which backward completes them (last module first), cut into buckets.

    A bucket closes when it holds `bucket_bytes`, or a quarter of the whole if that is less.
    """
    sizes = [row.local_elements(layout) * itemsize for row in rows]
    limit = min(bucket_bytes, -(-sum(sizes) // FEWEST_BUCKETS))
    result: list[list[ParameterRow]] = []
    filled = limit
    for row, size in zip(reversed(rows), reversed(sizes)):
        if filled >= limit:
            result.append([])
            filled = 0
        result[-1].append(row)
        filled += size
    return result


@dataclass(frozen=True)
class Unit:
    """What ZeRO-3 gathers and frees together: a decoder layer, the embedding, or norm and head."""

    rows: tuple[ParameterRow, ...]
    blocks: frozenset[str]

    @property
    def stays(self) -> bool:
        """Whether it stays gathered from forward to backward: where a chunk ends, its backward begins."""
        return "head" in self.blocks

    @property
    def read_in_backward(self) -> bool:
        """A lookup's gradient does not depend on the table."""
        return self.blocks != {"embedding"}


def units(rows: Sequence[ParameterRow]) -> list[Unit]:
    """The units of one chunk in the order of its forward. A head that reads the embedding makes one unit of both."""
    blocks: dict[str, list[ParameterRow]] = {}
    for row in rows:
        blocks.setdefault(row.block, []).append(row)
    tied = {"embedding", "head"} <= blocks.keys() and not any(row.role == "head" for row in rows)
    if tied:
        blocks["embedding"] += blocks.pop("head")
    return [
        Unit(tuple(held), frozenset(("embedding", "head") if tied and block == "embedding" else (block,)))
        for block, held in blocks.items()
    ]


def gathers(parts: Sequence[Unit], kinds: Iterable[str], *, once: bool) -> Counter[tuple[Phase, int]]:
    """How often ZeRO-3 gathers each unit (by its number) of a chunk, whose computations are F and B in this order.

    A unit is gathered where it is read and is not whole, and let go after it: after the forward unless it `stays`,
    after the backward always. `once`: not before the step ends.
    """
    found: Counter[tuple[Phase, int]] = Counter()
    whole: set[int] = set()
    for kind in kinds:
        phase: Phase = "forward" if kind == "F" else "backward"
        for i, unit in enumerate(parts):
            if i not in whole and (kind == "F" or unit.read_in_backward):
                found[phase, i] += 1
            if once or (kind == "F" and unit.stays):
                whole.add(i)
            elif kind == "B":
                whole.discard(i)
    return found


@dataclass(frozen=True, kw_only=True)
class Numbers:
    """What the communication of one chunk follows from, beside the layout."""

    bucket_bytes: int
    dtype: str
    itemsize: int
    grad_dtype: str
    grad_itemsize: int
    gather_once: bool
    """ZeRO-3: gather and reduce once a step."""


def predict(rows: list[ParameterRow], layout: Layout, numbers: Numbers, kinds: Sequence[str]) -> Events:
    """The events of one chunk and step on axes data and edp; `kinds`: its computations F and B (or I, W) in order."""
    dense = [row for row in rows if row.mesh == "dense"]
    experts = [row for row in rows if row.mesh == "expert"]
    return _predict(dense, layout, numbers, kinds) + _predict(experts, layout, numbers, kinds)


def _predict(rows: list[ParameterRow], layout: Layout, numbers: Numbers, kinds: Sequence[str]) -> Events:
    """Of rows that are all dense, or all experts."""
    if not rows or layout.degree(rows[0].data_axis) == 1:
        return Counter()
    axis, n, grad = rows[0].data_axis, rows[0].data_shards(layout), numbers.grad_itemsize
    cut = buckets(rows, layout, numbers.bucket_bytes, grad)
    if n == 1:
        return Counter(
            Event("reduce", axis, "all_reduce", numbers.grad_dtype, _elements(bucket, layout) * grad)
            for bucket in cut
        )
    parts = units(rows)
    if layout.zero == 3:
        cut = [list(unit.rows) for unit in parts]
    every = layout.zero == 2 or (layout.zero == 3 and not numbers.gather_once)
    microbatches = sum(kind == "F" for kind in kinds)
    events: Events = Counter()
    for bucket in cut:
        held = _elements([row.held for row in bucket], layout)
        reduced = Event("reduce", axis, "reduce_scatter", numbers.grad_dtype, n * held * grad)
        events[reduced] += microbatches if every else 1
        if n < layout.degree(axis):
            events[Event("reduce", axis, "all_reduce", numbers.grad_dtype, held * grad)] += 1
        if layout.zero < 3:
            size = n * held * numbers.itemsize
            events[Event("optimizer", axis, "all_gather", numbers.dtype, size)] += 1
    if layout.zero == 3:
        for (phase, i), count in gathers(parts, kinds, once=numbers.gather_once).items():
            size = n * _elements([row.held for row in parts[i].rows], layout) * numbers.itemsize
            events[Event(phase, axis, "all_gather", numbers.dtype, size)] += count
    return events


def _elements(rows: Iterable[ParameterRow], layout: Layout) -> int:
    return sum(row.local_elements(layout) for row in rows)

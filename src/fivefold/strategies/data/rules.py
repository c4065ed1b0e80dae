"""Data parallelism: replicas over dp x cp that see different tokens and sum their gradients.

The loss of a rank is divided once by the global count of valid tokens, so gradients are summed, never averaged.
Volume per step (ring all-reduce, n = dp*cp): 2 (n-1)/n x P elements per rank, for P local parameters, however many
microbatches there are: gradients accumulate locally and are reduced once.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from fivefold.core.events import Event, Events
from fivefold.core.layout import Layout
from fivefold.core.sharding import ParameterRow
from fivefold.errors import LayoutError

FEWEST_BUCKETS = 4
"""Even a small model is cut in so many buckets, so that the first reduction starts before backward ends."""


def check(layout: Layout) -> None:
    """Raises: LayoutError for what cannot be run yet."""
    if layout.zero > 0:
        raise LayoutError(f"zero{layout.zero} cannot be run yet; use zero0 (leave the token out)")
    if layout.cp > 1:
        raise LayoutError(f"cp{layout.cp} cannot be run yet; use cp1 (leave the token out)")
    if layout.ep > 1 or layout.etp > 1:
        raise LayoutError(f"ep{layout.ep} etp{layout.etp} cannot be run yet; use ep1 (leave the tokens out)")


def place(row: ParameterRow, layout: Layout) -> ParameterRow:
    """Every gradient is summed over the data ranks."""
    return replace(row, sums={**row.sums, "data": None}) if layout.data > 1 else row


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


def predict_reduction(
    rows: list[ParameterRow], layout: Layout, bucket_bytes: int, dtype: str, itemsize: int
) -> Events:
    """One all-reduce per bucket and step, for the rows of one chunk."""
    if layout.data == 1:
        return Counter()
    return Counter(
        Event(
            "reduce",
            "data",
            "all_reduce",
            dtype,
            sum(row.local_elements(layout) for row in bucket) * itemsize,
        )
        for bucket in buckets(rows, layout, bucket_bytes, itemsize)
    )

"""Which tokens of a sequence each cp rank holds, and which of them see which. Torch-free.

    ring, gather        zig-zag: rank r of R holds the chunks r and 2R-1-r of 2R     R = 3:  0 1 2 2 1 0
    ulysses             contiguous: rank u of U holds the u-th of U parts             U = 3:  0 0 1 1 2 2
    ring A x ulysses B  zig-zag over A ring positions; B consecutive ranks share the tokens of one position

Under a causal mask the last tokens see the most: zig-zag gives every rank an early chunk and a late one, so that all
have the same work (Brandon et al. 2023, arXiv:2311.09431, on ring attention; the zig-zag order is that of Llama 3,
arXiv:2407.21783, section 3.3.2). It is for causal masks only, which are all that the decoders here have.

Letters: S sequence, R ring positions, U ulysses ranks; a span is a range of places in the sequence.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Literal

from fivefold.core.layout import Layout

Spans = tuple[range, ...]
"""Places of some tokens: spans in ascending order."""

Kind = Literal["full", "causal", "masked"]

TILE = 1024
"""Where a window or a mask cuts through, queries and keys are cut into tiles of so many: what is hidden is left out,
and the scores of one tile are all that there is in memory."""


def degrees(layout: Layout) -> tuple[int, int]:
    """(ring positions, ulysses ranks); for `gather` the ring positions are the cp ranks."""
    return layout.cp // layout.cp_ulysses, layout.cp_ulysses


def local_spans(seq_len: int, layout: Layout, cp_rank: int) -> Spans:
    """The S/cp tokens of a cp rank: tokens, labels, loss mask and positions are all cut by these."""
    ring, ulysses = degrees(layout)
    place, part = divmod(cp_rank, ulysses)
    size = seq_len // layout.cp
    return section(ring_spans(seq_len, ring, place), part * size, (part + 1) * size)


def section(spans: Spans, start: int, stop: int) -> Spans:
    """The tokens number `start` to `stop` of those in these spans."""
    found, at = [], 0
    for span in spans:
        part = span[max(0, start - at) : max(0, stop - at)]
        found += [part] if part else []
        at += len(span)
    return tuple(found)


def ring_spans(seq_len: int, ring: int, place: int) -> Spans:
    """The spans of one ring position: the chunks `place` and 2R-1-place of 2R; everything for a ring of one."""
    if ring == 1:
        return (range(seq_len),)
    size = seq_len // (2 * ring)
    return tuple(range(c * size, (c + 1) * size) for c in (place, 2 * ring - 1 - place))


@dataclass(frozen=True, slots=True)
class Part:
    """One product of queries and keys, as places in the local tensors.

    full: every query sees every key. causal: query i sees the keys up to i. masked: it takes a mask to tell.
    """

    queries: slice
    keys: slice
    kind: Kind


@lru_cache(maxsize=1024)
def parts(queries: Spans, keys: Spans, window: int | None, masked: bool) -> tuple[Part, ...]:
    """Everything that these queries can see of these keys under a causal mask; what is hidden is left out.

    `window`: a token sees the last so many tokens, itself included. `masked`: a mask that depends on the data hides
    more, so that no part is known to be seen in full.
    """
    longest = queries[-1].stop - min(queries[0].start, keys[0].start)
    cut = masked or (window is not None and window < longest)
    if queries == keys and not cut:
        length = sum(map(len, queries))  # spans ascend, so the order of places is the order in time
        return (Part(slice(0, length), slice(0, length), "causal"),)
    rows = [
        (where, tuple(_row(span, keys, window, masked=masked, cut=cut)))
        for where, span in _placed(queries, cut)
    ]
    return tuple(Part(where, seen, kind) for where, row in _merged_rows(rows) for seen, kind in row)


@lru_cache(maxsize=1024)
def parts_of_whole(queries: Spans, seq_len: int, window: int | None, masked: bool) -> tuple[Part, ...]:
    """`parts` of these queries where the keys are those of the whole sequence, in order."""
    found: list[Part] = []
    for where, span in _placed(queries, False):
        cuts = sorted({0, span.start, span.stop, seq_len})
        keys = tuple(range(a, b) for a, b in pairwise(cuts))
        for part in parts((span,), keys, window, masked):
            inside = slice(where.start + part.queries.start, where.start + part.queries.stop)
            found.append(Part(inside, part.keys, part.kind))
    return tuple(found)


def _placed(spans: Spans, cut: bool) -> Iterator[tuple[slice, range]]:
    """(place in the local tensor, span) of every span, or of every tile of one."""
    at = 0
    for span in spans:
        step = TILE if cut else max(1, len(span))
        for start in range(0, len(span), step):
            tile = span[start : start + step]
            yield slice(at + start, at + start + len(tile)), tile
        at += len(span)


def _row(
    span: range, keys: Spans, window: int | None, *, masked: bool, cut: bool
) -> Iterator[tuple[slice, Kind]]:
    """What one span of queries sees of the keys; neighbours that it sees in full are joined."""
    open_: slice | None = None
    for where, other in _placed(keys, cut):
        kind = _kind(span, other, window, masked)
        if kind == "full" and open_ is not None and open_.stop == where.start:
            open_ = slice(open_.start, where.stop)
            continue
        if open_ is not None:
            yield open_, "full"
        open_ = where if kind == "full" else None
        if kind in ("causal", "masked"):
            yield where, kind
    if open_ is not None:
        yield open_, "full"


def _kind(query: range, key: range, window: int | None, masked: bool) -> Kind | None:
    if key.start >= query.stop or (window is not None and query.start - (key.stop - 1) >= window):
        return None
    inside = window is None or query.stop - 1 - key.start < window
    if masked or not inside:
        return "masked"
    if query == key:
        return "causal"
    return "full" if key.stop <= query.start + 1 else "masked"


Row = tuple[slice, tuple[tuple[slice, Kind], ...]]


def _merged_rows(rows: list[Row]) -> Iterator[Row]:
    """Neighbouring queries that see the same keys in full become one product."""
    last: Row | None = None
    for where, row in rows:
        full = all(kind == "full" for _, kind in row)
        if last is not None and full and row == last[1] and last[0].stop == where.start:
            last = (slice(last[0].start, where.stop), row)
            continue
        if last is not None:
            yield last
        last = (where, row)
    if last is not None:
        yield last

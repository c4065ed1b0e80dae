"""Which tokens a cp rank holds and which parts of attention it computes, against brute force."""

from __future__ import annotations

import numpy as np
import pytest

from fivefold.core.layout import Layout
from fivefold.strategies.context import order
from fivefold.strategies.context.order import Part, Spans, local_spans, parts, parts_of_whole, ring_spans

LAYOUTS = [
    "cp2",
    "cp3",
    "cp4:gather",
    "cp5:ulysses",
    "cp4:ring2xulysses2",
    "cp6:ring3xulysses2",
    "dp2 tp2 cp2 pp2",
]


def flat(spans: Spans) -> np.ndarray:
    return np.concatenate([np.arange(span.start, span.stop) for span in spans])


@pytest.mark.parametrize("text", ["dp1", *LAYOUTS])
def test_every_token_is_on_exactly_one_rank(text: str) -> None:
    layout = Layout.parse(text)
    seq_len = 2 * layout.cp * 3
    held = [flat(local_spans(seq_len, layout, rank)) for rank in range(layout.cp)]
    assert sorted(np.concatenate(held).tolist()) == list(range(seq_len))
    assert {len(tokens) for tokens in held} == {seq_len // layout.cp}
    assert all((np.diff(tokens) > 0).all() for tokens in held), "in time's order"


def test_orders_by_hand() -> None:
    def held(text: str, seq_len: int = 12) -> list[list[int]]:
        layout = Layout.parse(text)
        return [flat(local_spans(seq_len, layout, rank)).tolist() for rank in range(layout.cp)]

    assert held("cp3") == held("cp3:gather") == [[0, 1, 10, 11], [2, 3, 8, 9], [4, 5, 6, 7]]
    assert held("cp3:ulysses") == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert held("cp4:ring2xulysses2", 8) == [[0, 1], [6, 7], [2, 3], [4, 5]]


@pytest.mark.parametrize("ring", [2, 3, 4, 8])
def test_causal_work_is_equal_under_zigzag(ring: int) -> None:
    """Pairs (query, key) that each ring position looks at; contiguous order would be 2R-1 times apart at the ends."""
    seq_len = 4 * ring
    work = [sum(i + 1 for span in ring_spans(seq_len, ring, place) for i in span) for place in range(ring)]
    assert len(set(work)) == 1
    chunks = [sum(range(1 + place * 4, 5 + place * 4)) for place in range(ring)]
    assert max(chunks) > 2 * min(chunks)


def check(
    found: tuple[Part, ...], queries: np.ndarray, keys: np.ndarray, window: int | None, masked: bool
) -> None:
    """Every pair that is seen is in one part, none in two; a part's kind tells the truth."""
    seen = keys <= queries[:, None]
    if window is not None:
        seen &= keys > queries[:, None] - window
    times = np.zeros(seen.shape, dtype=int)
    for part in found:
        inside = seen[part.queries, part.keys]
        assert inside.any(), "nothing to see: left out"
        if part.kind == "full":
            assert inside.all()
        if part.kind == "causal":
            assert (inside == np.tri(len(inside), dtype=bool)).all()
        assert part.kind == "masked" or not masked
        times[part.queries, part.keys] += 1
    assert times.max(initial=0) <= 1
    assert (times[seen] == 1).all()


@pytest.mark.parametrize("tile", [3, 4, order.TILE])
@pytest.mark.parametrize("ring", [1, 2, 3, 4])
def test_parts_cover_what_is_seen(monkeypatch: pytest.MonkeyPatch, ring: int, tile: int) -> None:
    monkeypatch.setattr(order, "TILE", tile)
    for cached in (parts, parts_of_whole):
        cached.cache_clear()
    for seq_len in (2 * ring, 24 * ring):
        spans = [ring_spans(seq_len, ring, place) for place in range(ring)]
        for window in (None, 1, 2, 5, 7, 20, max(1, seq_len - 1), seq_len):
            for masked in (False, True):
                for mine in spans:
                    whole = parts_of_whole(mine, seq_len, window, masked)
                    check(whole, flat(mine), np.arange(seq_len), window, masked)
                    for theirs in spans:
                        check(parts(mine, theirs, window, masked), flat(mine), flat(theirs), window, masked)
    for cached in (parts, parts_of_whole):
        cached.cache_clear()


def test_a_plain_ring_step_is_one_product() -> None:
    """Own block: causal. Earlier position: the first half of its keys. Later one: the second half of the queries."""
    spans = [ring_spans(24, 3, place) for place in range(3)]
    assert parts(spans[1], spans[1], None, False) == (Part(slice(0, 8), slice(0, 8), "causal"),)
    assert parts(spans[1], spans[0], None, False) == (Part(slice(0, 8), slice(0, 4), "full"),)
    assert parts(spans[1], spans[2], None, False) == (Part(slice(4, 8), slice(0, 8), "full"),)

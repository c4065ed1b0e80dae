"""Buckets: every gradient in exactly one, in the order of backward, the first soon full."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fivefold.core.layout import Layout
from fivefold.core.sharding import ParameterRow
from fivefold.strategies.data import rules

LAYOUT = Layout.parse("dp2")
NUMBERS = rules.Numbers(
    bucket_bytes=10**9, dtype="float32", itemsize=4, grad_dtype="float32", grad_itemsize=4, gather_once=False
)


def rows(sizes: list[int]) -> list[ParameterRow]:
    return [ParameterRow(f"p{i}", "up", (size,)) for i, size in enumerate(sizes)]


def names(result: list[list[ParameterRow]]) -> list[list[str]]:
    return [[row.name for row in bucket] for bucket in result]


@pytest.mark.parametrize(
    ("sizes", "bucket_bytes", "expected"),
    [
        ([4, 4, 4, 4], 10**9, [["p3"], ["p2"], ["p1"], ["p0"]]),
        ([1, 1, 1, 1, 4, 4, 4], 10**9, [["p6"], ["p5"], ["p4"], ["p3", "p2", "p1", "p0"]]),
        ([4, 4, 4, 4], 16, [["p3"], ["p2"], ["p1"], ["p0"]]),
        ([2, 2, 2, 2, 2, 2, 2, 2], 16, [["p7", "p6"], ["p5", "p4"], ["p3", "p2"], ["p1", "p0"]]),
        ([100, 1, 1], 10**9, [["p2", "p1", "p0"]]),
        ([7], 1, [["p0"]]),
    ],
)
def test_examples(sizes: list[int], bucket_bytes: int, expected: list[list[str]]) -> None:
    assert names(rules.buckets(rows(sizes), LAYOUT, bucket_bytes, 4)) == expected


@given(
    st.lists(st.integers(1, 1000), min_size=1, max_size=40), st.integers(1, 5000), st.sampled_from([2, 4, 8])
)
def test_every_row_once_in_reverse_order(sizes: list[int], bucket_bytes: int, itemsize: int) -> None:
    table = rows(sizes)
    result = rules.buckets(table, LAYOUT, bucket_bytes, itemsize)
    assert [row for bucket in result for row in bucket] == table[::-1]
    limit = min(bucket_bytes, -(-sum(sizes) * itemsize // 4))
    for i, bucket in enumerate(result):
        held = sum(row.shape[0] for row in bucket) * itemsize
        assert held >= limit or i == len(result) - 1, "only the last may stay open"
        assert held - bucket[-1].shape[0] * itemsize < limit, "a full one takes no more"


def test_prediction_covers_every_local_byte() -> None:
    table = [rules.place(row, LAYOUT) for row in rows([5, 9, 2, 7])]
    events = rules.predict(table, LAYOUT, NUMBERS, "FB")
    assert sum(event.bytes * n for event, n in events.items()) == (5 + 9 + 2 + 7) * 4
    assert {(e.phase, e.axis, e.op, e.dtype) for e in events} == {("reduce", "data", "all_reduce", "float32")}


def test_one_data_rank_reduces_nothing() -> None:
    row = rows([5])[0]
    assert rules.place(row, Layout.parse("tp2")) is row
    assert rules.place(row, LAYOUT).sums == {"data": None}
    assert not rules.predict([row], Layout.parse("tp2"), NUMBERS, "FB")

"""Ids: short, sorted by time, drawn apart."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fivefold.records.ids import ALPHABET, new_id


def test_time_part_is_base_32_of_the_milliseconds() -> None:
    assert new_id(0.0)[:9] == "000000000"
    assert new_id(0.031)[:9] == "00000000z"
    assert new_id(0.032)[:9] == "000000010"
    # 1_700_000_000_000 = 1*32^8 + 17*32^7 + ... ; int() knows base 32 with another alphabet
    python_base_32 = "0123456789abcdefghijklmnopqrstuv"
    digits = new_id(1_700_000_000.0)[:9].translate(str.maketrans(ALPHABET, python_base_32))
    assert int(digits, 32) == 1_700_000_000_000


@given(st.integers(0, 10**13), st.integers(0, 10**13))
def test_ids_sort_as_their_times(a_ms: int, b_ms: int) -> None:
    first, second = sorted((a_ms, b_ms))
    if second - first >= 2:  # seconds are floats: the last millisecond may round
        assert new_id(first / 1000) < new_id(second / 1000)


def test_ids_are_short_and_free_of_misread_letters() -> None:
    for _ in range(100):
        run_id = new_id()
        assert len(run_id) == 13
        assert not set(run_id) - set("0123456789abcdefghjkmnpqrstvwxyz")


def test_ids_of_one_millisecond_differ() -> None:
    ids = {new_id(1_700_000_000.0) for _ in range(100)}
    assert len(ids) >= 98  # 20 random bits: two equal pairs among 100 have a chance of about 1e-5

"""Numbers as text."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fivefold.units import GIB, KIB, MIB, format_bytes, format_count, format_seconds


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.5 KiB"),
        (999.9 * KIB, "1000 KiB"),
        (1023 * KIB, "1023 KiB"),
        (MIB, "1 MiB"),
        (-1.5 * MIB, "-1.5 MiB"),
        (80 * GIB, "80 GiB"),
        (5_000_000 * GIB, "4883 TiB"),
    ],
)
def test_bytes(value: float, text: str) -> None:
    assert format_bytes(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (999, "999"),
        (999.9, "1000"),
        (1_540_000, "1.54 M"),
        (70e9, "70 G"),
        (999_900, "1000 k"),
        (2e16, "20000 T"),
    ],
)
def test_counts(value: float, text: str) -> None:
    assert format_count(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 s"),
        (0.0021, "2.1 ms"),
        (3e-6, "3 us"),
        (2e-9, "0.002 us"),
        (90, "90 s"),
        (0.9999, "1000 ms"),
        (12345, "12345 s"),
    ],
)
def test_seconds(value: float, text: str) -> None:
    assert format_seconds(value) == text


SIZES = {
    "B": 1,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
    "": 1,
    "k": 1e3,
    "M": 1e6,
    "G": 1e9,
    "T": 1e12,
}
TIMES = {"s": 1.0, "ms": 1e-3, "us": 1e-6}


@given(st.floats(1.0, 1e18))
@pytest.mark.parametrize("form", [format_bytes, format_count])
def test_text_reads_back_to_the_number(form: Callable[[float], str], value: float) -> None:
    """Three figures, never an exponent."""
    _reads_back(form(value), SIZES, value)


@given(st.floats(1e-9, 1e7))
def test_seconds_read_back(value: float) -> None:
    _reads_back(format_seconds(value), TIMES, value)


def _reads_back(text: str, sizes: dict[str, float], value: float) -> None:
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?(\D*)", text)
    assert match, text
    back = float(match[1]) * sizes[match[2]]
    assert abs(back - value) <= 0.006 * value or (match[2] == "B" and abs(back - value) <= 0.5)

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fivefold.data.order import shuffled


def order(count: int, *, seed: int = 1, epoch: int = 0) -> list[int]:
    return shuffled(np.arange(count), seed=seed, epoch=epoch, count=count).tolist()


@settings(deadline=None)
@given(st.integers(1, 3000), st.integers(0, 2**63 - 1), st.integers(0, 2**40))
def test_it_is_a_permutation(count: int, seed: int, epoch: int) -> None:
    assert sorted(order(count, seed=seed, epoch=epoch)) == list(range(count))


def test_any_part_of_it_is_that_part() -> None:
    whole = order(1000)
    places = np.array([[999, 0], [5, 5]])
    assert shuffled(places, seed=1, epoch=0, count=1000).tolist() == [[whole[999], whole[0]], [whole[5]] * 2]


def test_seed_and_epoch_change_it() -> None:
    orders = {tuple(order(1000, seed=s, epoch=e)) for s in range(4) for e in range(4)}
    assert len(orders) == 16
    assert tuple(range(1000)) not in orders


def test_it_needs_no_table() -> None:
    """10^15 samples: a table would not fit anywhere."""
    count = 10**15 + 7
    found = shuffled(np.arange(1000), seed=0, epoch=0, count=count)
    assert len(set(found.tolist())) == 1000
    assert found.min() >= 0
    assert found.max() < count
    assert found.max() > count * 0.9


@pytest.mark.parametrize("count", [5, 64, 100])
def test_every_value_is_as_likely_at_every_place(count: int) -> None:
    """Chi-square over 2000 epochs of what stands first, in the middle and last, against equal shares."""
    epochs = 2000
    for place in (0, count // 2, count - 1):
        found = [int(shuffled(np.array([place]), seed=9, epoch=e, count=count)[0]) for e in range(epochs)]
        seen = np.bincount(found, minlength=count)
        chi_square = float(((seen - epochs / count) ** 2 / (epochs / count)).sum())
        degrees = count - 1
        assert chi_square < degrees + 5 * (2 * degrees) ** 0.5  # 5 standard deviations


def test_neighbours_are_torn_apart() -> None:
    """Rank correlation of place and value, and of a value and the next, is that of chance: 5/sqrt(n)."""
    values = np.array(order(10_000), dtype=float)
    for a, b in ((values, np.arange(10_000)), (values[1:], values[:-1])):
        assert abs(np.corrcoef(a, b)[0, 1]) < 0.05


def test_it_is_pinned() -> None:
    """Runs go on from where they were stopped, with another version too: these numbers may never change."""
    assert shuffled(np.arange(6), seed=3, epoch=2, count=1000).tolist() == [847, 969, 318, 886, 693, 209]

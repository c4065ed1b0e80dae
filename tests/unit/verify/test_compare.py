"""The error measure on pieces made by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fivefold.verify.compare import Errors, assemble, compare
from fivefold.verify.observe import Observation, Piece

Q = "gradients"


def piece(
    values: object, name: str = "w", *, at: int = 0, of: int | None = None, block: str = "", what: str = Q
):
    """A run of a vector: `values` from place `at` of a tensor of `of` elements."""
    array = np.asarray(values, dtype=np.float64)
    return Piece(what, name, (of or len(array),), (slice(at, at + len(array)),), array, block)


def seen(*pieces: Piece) -> list[Observation]:
    """One rank."""
    return [Observation(pieces=list(pieces))]


def errors(mine: list[Observation], reference: list[Observation]) -> Errors:
    return compare(mine, assemble(reference))


def test_equal_is_zero() -> None:
    found = errors(seen(piece([1, 2, 3])), seen(piece([1, 2, 3])))
    assert found.by_tensor == {(Q, "w"): 0.0}
    assert not found.missing
    assert not found.shares
    assert found.of("loss") == 0.0
    assert (found.present(Q), found.present("loss")) == (True, False)


def test_error_is_relative_to_the_largest_of_the_reference() -> None:
    found = errors(seen(piece([1.0, 4.5])), seen(piece([2.0, -5.0])))
    assert found.of(Q) == pytest.approx(9.5 / 5.0)


def test_a_tensor_that_is_small_in_its_block_is_measured_by_the_block() -> None:
    """Floor: 0.01 x the largest |b| of that quantity in the block; other blocks and quantities do not count."""
    reference = [
        piece([1e-6], "small", block="layers.0"),
        piece([100.0], "large", block="layers.0"),
        piece([1e9], "elsewhere", block="layers.1"),
        piece([1e9], "large", block="layers.0", what="weights_sgd"),
    ]
    mine = [piece([2e-6], "small", block="layers.0"), *reference[1:]]
    assert errors(seen(*mine), seen(*reference)).by_tensor[Q, "small"] == pytest.approx(1e-6 / 1.0)


def test_without_a_block_a_tensor_is_its_own() -> None:
    reference = [piece([1e-6], "a"), piece([1e6], "b")]
    mine = [piece([2e-6], "a"), piece([1e6], "b")]
    assert errors(seen(*mine), seen(*reference)).by_tensor[Q, "a"] == pytest.approx(1.0)


def test_zero_against_zero_and_against_something() -> None:
    assert errors(seen(piece([0.0])), seen(piece([0.0]))).of(Q) == 0.0
    assert errors(seen(piece([1e-300])), seen(piece([0.0]))).of(Q) == math.inf


def test_shards_of_two_ranks_are_put_together() -> None:
    halves = [*seen(piece([1, 2], of=4)), *seen(piece([3, 4], at=2, of=4))]
    assert assemble(halves)[Q, "w"].values.tolist() == [1, 2, 3, 4]
    assert errors(halves, seen(piece([1, 2, 3, 4]))).of(Q) == 0.0
    assert errors(seen(piece([1, 2, 3, 4])), halves).of(Q) == 0.0
    swapped = [*seen(piece([3, 4], of=4)), *seen(piece([1, 2], at=2, of=4))]
    assert errors(swapped, seen(piece([1, 2, 3, 4]))).of(Q) == pytest.approx(2 / 4)


def test_every_replica_is_compared() -> None:
    """One of two replicas has drifted: the worse one counts, whichever comes first."""
    reference, good, bad = seen(piece([1, 2])), seen(piece([1, 2])), seen(piece([1, 3]))
    assert errors([*good, *bad], reference).of(Q) == errors([*bad, *good], reference).of(Q) == 0.5


def test_a_part_that_nobody_has_is_missing() -> None:
    found = errors(seen(piece([1, 2], of=4)), seen(piece([1, 2, 3, 4])))
    assert found.missing == [(Q, "w")]
    assert found.of(Q) == math.inf


def test_a_tensor_that_one_side_lacks_is_missing() -> None:
    both, one = seen(piece([1.0]), piece([1.0], "extra")), seen(piece([1.0]))
    assert errors(one, both).missing == [(Q, "extra")]
    assert errors(both, one).missing == [(Q, "extra")]
    assert errors(both, one).of(Q) == math.inf


def test_a_part_that_the_reference_lacks_too_is_not_missing() -> None:
    """Logits of a padded vocabulary: neither side has the rest."""
    part = piece([1.0, 2.0], of=3)
    assert not errors(seen(part), seen(part)).missing


def test_an_empty_shard_says_nothing() -> None:
    assert errors([*seen(piece([1.0])), *seen(piece([], at=1, of=1))], seen(piece([1.0]))).of(Q) == 0.0


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("side", ["mine", "reference", "both"])
def test_what_is_not_finite_never_passes(odd: float, side: str) -> None:
    """Also where both sides have it, where it is on one of two ranks, and whatever comes before or after it."""
    for place in range(3):
        good = [piece([1.0, 2.0], name, of=2) for name in "abc"]
        bad = list(good)
        bad[place] = piece([1.0, odd], "abc"[place], of=2)
        mine = good if side == "reference" else bad
        reference = good if side == "mine" else bad
        assert errors(seen(*mine), seen(*reference)).of(Q) == math.inf
        halves = [
            Observation([piece(p.values[:1], p.name, of=2) for p in mine]),
            Observation([piece(p.values[1:], p.name, at=1, of=2) for p in mine]),
        ]
        for ranks in (halves, halves[::-1]):
            assert errors(ranks, seen(*reference)).of(Q) == math.inf


def test_ratio_that_explains_a_difference() -> None:
    reference = [1.0, -2.0, 3.0]
    ratio, left = errors(seen(piece([4.0, -8.0, 12.0])), seen(piece(reference))).shares[Q, "w"]
    assert (ratio, left) == (pytest.approx(4.0), pytest.approx(0.0))
    ratio, left = errors(seen(piece([4.0, -8.0, 0.0])), seen(piece(reference))).shares[Q, "w"]
    assert left > 0.1


def test_no_ratio_to_nothing() -> None:
    ratio, left = errors(seen(piece([1.0])), seen(piece([0.0]))).shares[Q, "w"]
    assert math.isnan(ratio)
    assert left == math.inf


@given(
    st.lists(st.floats(-1e3, 1e3).filter(lambda x: abs(x) > 1e-3), min_size=2, max_size=8),
    st.integers(1, 7),
    st.floats(-0.5, 0.5),
)
def test_cutting_does_not_change_the_error(values: list[float], cut: int, change: float) -> None:
    cut = min(cut, len(values) - 1)
    mine = np.array(values)
    mine[0] += change
    whole = errors(seen(piece(mine)), seen(piece(values))).of(Q)
    n = len(values)
    parts = [*seen(piece(mine[:cut], of=n)), *seen(piece(mine[cut:], at=cut, of=n))]
    assert errors(parts, seen(piece(values))).of(Q) == whole
    assert whole == pytest.approx(np.abs(mine - values).max() / np.abs(values).max())

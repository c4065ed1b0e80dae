"""A random order of n things without a table of n numbers: place k of an epoch is computed, not looked up.

A Feistel network is a bijection of 2b-bit numbers whatever its round function is (Luby and Rackoff 1988). To get a
bijection of 0..n-1, take the smallest 2b with 2^2b >= n and apply the network again to whatever falls at or above n
("cycle walking", Black and Rogaway 2002, section 3); as 2^2b < 4n, that takes fewer than 4 passes on average.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]

ROUNDS = 8
_SHUFFLE = 3
"""Number of this use of a seed; `batches.py` has 1 and 2, `mixture.py` has 4."""


def shuffled(places: Ints, *, seed: int, epoch: int, count: int) -> Ints:
    """What stands at these places (0..count-1) of the order of (seed, epoch): a permutation of 0..count-1.

    Shapes: any; the result has the same. O(size of `places`) time and memory, whatever `count` is.
    """
    half = np.uint64(max(1, -(-(count - 1).bit_length() // 2)))
    mask = np.uint64((1 << int(half)) - 1)
    keys = round_keys(seed, epoch)
    values = places.astype(np.uint64).reshape(-1)
    outside = np.arange(values.size)
    while outside.size:
        walked = _feistel(values[outside], keys, half, mask)
        values[outside] = walked
        outside = outside[walked >= np.uint64(count)]
    return values.astype(np.int64).reshape(places.shape)


def round_keys(seed: int, epoch: int) -> Words:
    """One 64-bit word for each round. Raw Philox words are the same in every numpy version (NEP 19)."""
    words = np.random.Philox(counter=[0, 0, 0, _SHUFFLE], key=[seed, epoch]).random_raw(ROUNDS)
    return np.asarray(words, dtype=np.uint64)


def _feistel(values: Words, keys: Words, half: np.uint64, mask: np.uint64) -> Words:
    left, right = values >> half, values & mask
    for key in keys:
        left, right = right, left ^ (_mix(right ^ key) & mask)
    return (left << half) | right


def _mix(x: Words) -> Words:
    """The finaliser of SplitMix64 (Steele, Lea and Flood 2014): every bit of the input moves every bit out."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))

from __future__ import annotations

from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fivefold.data.batches import PackedDataset, SyntheticDataset
from fivefold.data.corpus import build_corpus
from fivefold.data.mixture import MixtureDataset, interleaved, source_seed, whole_shares
from fivefold.errors import DataError


def packed(letter: bytes, documents: int, seed: int = 3) -> PackedDataset:
    texts = [(str(n), letter * (5 + n % 7)) for n in range(documents)]
    return PackedDataset(build_corpus(letter.decode(), texts), 8, seed)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=8))
def test_every_prefix_is_within_one_sample(shares: list[int]) -> None:
    period = sum(shares)
    choice, nth = interleaved(shares)
    seen = [0] * len(shares)
    for place, (source, before) in enumerate(zip(choice.tolist(), nth.tolist())):
        assert before == seen[source]
        seen[source] += 1
        for count, share in zip(seen, shares):
            assert abs(count - Fraction(share, period) * (place + 1)) < 1
    assert seen == shares


@pytest.mark.parametrize(
    ("weights", "shares"),
    [
        ([0.7, 0.3], (7, 3)),
        ([1, 1, 1], (1, 1, 1)),
        ([2.5, 5], (1, 2)),
        ([0.1, 0.2, 0.7], (1, 2, 7)),
        ([1e-3, 1], (1, 1000)),
        ([4], (1,)),
    ],
)
def test_weights_become_whole_shares(weights: list[float], shares: tuple[int, ...]) -> None:
    assert whole_shares(weights) == shares


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([0.5, 0.0], "above 0, got 0"),
        ([-1, 2], "above 0, got -1"),
        ([float("nan"), 1], "above 0, got nan"),
        ([0.123456789, 0.876543211], "fewer digits, such as 0.123, 0.877"),
    ],
)
def test_weights_that_cannot_be_kept_are_refused(weights: list[float], message: str) -> None:
    with pytest.raises(DataError, match=message):
        whole_shares(weights)


def test_sample_k_depends_on_k_alone() -> None:
    mixture = MixtureDataset([packed(b"a", 40), packed(b"b", 25), packed(b"c", 9)], [0.5, 0.3, 0.2])
    together = mixture.rows(np.arange(100))
    shuffled = np.random.default_rng(0).permutation(100)
    batch = mixture.rows(shuffled)
    for name in ("tokens_BS", "labels_BS", "loss_mask_BS", "positions_BS", "document_ids_BS"):
        whole, part = getattr(together, name), getattr(batch, name)
        assert (whole[shuffled] == part).all()
        assert part.flags.c_contiguous
    step = mixture.microbatch(3, 1, dp_rank=1, dp=2, micro_batch=3, global_batch=12)
    assert (step.tokens_BS == together.tokens_BS[45:48]).all()


def test_each_source_is_read_in_its_own_order_without_gaps() -> None:
    sources = [packed(b"a", 40), packed(b"b", 25)]
    mixture = MixtureDataset(sources, [0.7, 0.3])
    chosen, inner = mixture.chosen(np.arange(1000))
    assert Counter(chosen.tolist()) == {0: 700, 1: 300}
    rows = mixture.rows(np.arange(1000))
    for number, source in enumerate(sources):
        here = chosen == number
        assert inner[here].tolist() == list(range(int(here.sum())))  # over several epochs of each
        assert (rows.tokens_BS[here] == source.rows(np.arange(here.sum())).tokens_BS).all()


def test_documents_of_two_sources_keep_different_ids() -> None:
    mixture = MixtureDataset([packed(b"a", 12), packed(b"b", 12)], [1, 1])
    chosen, _ = mixture.chosen(np.arange(30))
    ids = mixture.rows(np.arange(30)).document_ids_BS
    of = [set(ids[chosen == number].ravel().tolist()) - {-1} for number in (0, 1)]
    assert of[0]
    assert not of[0] & of[1]
    alone = packed(b"a", 12).rows(np.arange(15)).document_ids_BS
    assert (np.where(ids < 0, -1, ids // 2)[chosen == 0] == alone).all()


def test_sources_need_one_vocabulary_and_a_weight_each() -> None:
    with pytest.raises(DataError, match=r"vocabulary of 259, .* has 50"):
        MixtureDataset([packed(b"a", 12), SyntheticDataset(50, 8, 0)], [1, 1])
    with pytest.raises(DataError, match="1 for 2"):
        MixtureDataset([packed(b"a", 12), packed(b"b", 12)], [1])


def test_seeds_of_sources_differ() -> None:
    seeds = {source_seed(seed, number) for seed in range(5) for number in range(5)}
    assert len(seeds) == 25
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_fingerprint_follows_sources_and_shares() -> None:
    a, b = packed(b"a", 12), packed(b"b", 12)
    prints = [
        MixtureDataset(s, w).fingerprint for s, w in (([a, b], [1, 2]), ([a, b], [2, 1]), ([b, a], [1, 2]))
    ]
    assert len(set(prints)) == 3
    assert MixtureDataset([a, b], [0.5, 1]).fingerprint == prints[0]

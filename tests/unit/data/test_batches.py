from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fivefold.data.batches import Batch, Dataset, PackedDataset, SyntheticDataset
from fivefold.data.corpus import Corpus, build_corpus
from fivefold.data.tokenizer import ByteTokenizer
from fivefold.errors import DataError, WorkloadError

BOS, EOS, PAD = ByteTokenizer.bos, ByteTokenizer.eos, ByteTokenizer.pad
FIELDS = ("tokens_BS", "labels_BS", "loss_mask_BS", "positions_BS", "document_ids_BS")


def corpus_of(*lengths: int) -> Corpus:
    rng = np.random.default_rng(7)
    return build_corpus("x", [(str(n), rng.integers(0, 256, n, dtype=np.uint8).tobytes()) for n in lengths])


def row_keys(batch: Batch) -> list[bytes]:
    """Everything about each row, as something that can be counted."""
    fields = [getattr(batch, name) for name in FIELDS]
    return [
        b"".join(np.ascontiguousarray(field[row]).tobytes() for field in fields)
        for row in range(len(fields[0]))
    ]


def datasets() -> list[Dataset]:
    return [PackedDataset(corpus_of(40, 3, 90, 1, 77), 8, seed=5), SyntheticDataset(50, 8, seed=5)]


def in_corpus_order(dataset: PackedDataset) -> Batch:
    """One epoch of rows, put back into the order of the corpus."""
    numbers = np.arange(len(dataset))
    return dataset.rows(numbers[np.argsort(dataset.order(numbers))])


def test_packing_by_hand() -> None:
    # bos A B eos bos C eos bos D E F eos: 12 tokens, S = 4 -> samples at 0, 4 and 8 (the last has 3 labels)
    dataset = PackedDataset(build_corpus("x", [("a", b"AB"), ("b", b"C"), ("c", b"DEF")]), 4, seed=0)
    assert len(dataset) == 3
    batch = in_corpus_order(dataset)
    a, b, c, d, e, f = b"ABCDEF"
    assert batch.tokens_BS.tolist() == [[BOS, a, b, EOS], [BOS, c, EOS, BOS], [d, e, f, EOS]]
    assert batch.labels_BS.tolist() == [[a, b, EOS, BOS], [c, EOS, BOS, d], [e, f, EOS, PAD]]
    # Masked: eos -> bos (twice), and padding.
    assert batch.loss_mask_BS.tolist() == [
        [True, True, True, False],
        [True, True, False, True],
        [True, True, True, False],
    ]
    assert batch.document_ids_BS.tolist() == [[0, 0, 0, 0], [1, 1, 1, 2], [2, 2, 2, 2]]
    assert batch.positions_BS.tolist() == [[0, 1, 2, 3]] * 3
    assert batch.valid_tokens == 9


def test_padding_is_no_document() -> None:
    # bos A B C D E eos: 7 tokens, S = 5 -> the second sample has one label (eos) and four of padding
    batch = in_corpus_order(PackedDataset(build_corpus("x", [("a", b"ABCDE")]), 5, seed=0))
    assert batch.tokens_BS[1].tolist() == [ord("E"), EOS, PAD, PAD, PAD]
    assert batch.labels_BS[1].tolist() == [EOS, PAD, PAD, PAD, PAD]
    assert batch.loss_mask_BS[1].tolist() == [True, False, False, False, False]
    assert batch.document_ids_BS[1].tolist() == [0, 0, -1, -1, -1]


@settings(deadline=None)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=8), st.integers(2, 12), st.integers(0, 2**63 - 1))
def test_an_epoch_trains_on_each_token_once(lengths: list[int], seq_len: int, seed: int) -> None:
    corpus = corpus_of(*lengths)
    if len(corpus.tokens) < seq_len + 1:
        with pytest.raises(DataError):
            PackedDataset(corpus, seq_len, seed)
        return
    dataset = PackedDataset(corpus, seq_len, seed)
    batch = in_corpus_order(dataset)
    labels = batch.labels_BS.reshape(-1)
    real = corpus.tokens[1:].tolist()
    assert labels[: len(real)].tolist() == real
    assert set(labels[len(real) :].tolist()) <= {PAD}
    # Counted: all but the first token (bos) of each document.
    assert Counter(labels[batch.loss_mask_BS.reshape(-1)].tolist()) == Counter(
        token for token in corpus.tokens.tolist() if token != BOS
    )
    assert batch.loss_mask_BS.any(axis=1).all()


@settings(deadline=None)
@given(st.data())
def test_ranks_and_microbatches_share_out_the_global_batch(data: st.DataObject) -> None:
    dp, micro_batch, count = (data.draw(st.integers(1, 6)) for _ in range(3))
    step = data.draw(st.integers(0, 30))  # reaches over the end of an epoch of 28 samples
    global_batch = dp * micro_batch * count
    for dataset in datasets():
        parts: Counter[bytes] = Counter()
        for dp_rank in range(dp):
            for index in range(count):
                batch = dataset.microbatch(
                    step, index, dp_rank=dp_rank, dp=dp, micro_batch=micro_batch, global_batch=global_batch
                )
                assert batch.tokens_BS.shape == (micro_batch, 8)
                parts.update(row_keys(batch))
        assert parts == Counter(row_keys(dataset.global_batch(step, global_batch)))


def test_sample_k_of_the_run_is_the_same_at_every_layout() -> None:
    for dataset in datasets():
        expected = [row_keys(dataset.rows(np.array([k])))[0] for k in range(72)]
        assert len(set(expected)) >= 28
        for global_batch, dp, micro_batch in ((24, 1, 1), (24, 4, 2), (24, 2, 12), (12, 3, 4), (8, 8, 1)):
            seen = []
            for step in range(72 // global_batch):
                for dp_rank in range(dp):
                    for index in range(global_batch // dp // micro_batch):
                        sizes = {"dp": dp, "micro_batch": micro_batch, "global_batch": global_batch}
                        seen += row_keys(dataset.microbatch(step, index, dp_rank=dp_rank, **sizes))
            assert seen == expected


def test_order_is_a_new_permutation_each_epoch_and_each_seed() -> None:
    corpus = corpus_of(500, 300, 200)
    dataset = PackedDataset(corpus, 8, seed=1)
    n = len(dataset)
    first, second = dataset.order(np.arange(n)), dataset.order(np.arange(n, 2 * n))
    for order in (first, second):
        assert sorted(order.tolist()) == list(range(n))
    orders = {tuple(first), tuple(second), tuple(PackedDataset(corpus, 8, seed=2).order(np.arange(n)))}
    assert len(orders) == 3
    assert tuple(range(n)) not in orders
    assert (PackedDataset(corpus, 8, seed=1).order(np.arange(2 * n)) == np.concatenate([first, second])).all()


def test_order_and_synthetic_tokens_are_pinned() -> None:
    """Records of old runs stay reproducible: these numbers may never change."""
    dataset = PackedDataset(corpus_of(500, 300, 200), 8, seed=1)
    assert dataset.order(np.arange(6)).tolist() == [116, 31, 16, 65, 96, 17]
    assert SyntheticDataset(97, 6, seed=3).rows(np.array([4])).tokens_BS.tolist() == [[68, 91, 1, 18, 43, 30]]


def test_arrays_are_ready_for_torch() -> None:
    for dataset in datasets():
        batch = dataset.global_batch(0, 3)
        for name in FIELDS:
            array: np.ndarray[Any, Any] = getattr(batch, name)
            assert array.shape == (3, 8)
            assert array.dtype == (np.bool_ if name == "loss_mask_BS" else np.int64)
            assert array.flags.c_contiguous
            assert array.flags.writeable


def test_short_corpus_names_both_numbers() -> None:
    with pytest.raises(
        DataError, match=r"corpus x has 90 tokens; one sample needs 129 .* seq_len at most 89$"
    ):
        PackedDataset(corpus_of(88), 128, seed=0)
    assert len(PackedDataset(corpus_of(88), 89, seed=0)) == 1
    with pytest.raises(WorkloadError, match="at least 2"):
        PackedDataset(corpus_of(88), 1, seed=0)


@pytest.mark.parametrize(
    ("dp_rank", "index", "dp", "micro_batch"), [(0, 0, 3, 1), (0, 0, 2, 3), (2, 0, 2, 1), (0, 4, 2, 2)]
)
def test_sizes_that_would_lose_or_repeat_samples_are_a_bug(
    dp_rank: int, index: int, dp: int, micro_batch: int
) -> None:
    with pytest.raises(AssertionError):
        datasets()[1].microbatch(0, index, dp_rank=dp_rank, dp=dp, micro_batch=micro_batch, global_batch=16)


@pytest.mark.parametrize("seq_len", [8, 12, 15, 16, 32, 64, 128])
def test_synthetic_tails_are_unequal(seq_len: int) -> None:
    dataset = SyntheticDataset(259, seq_len, seed=0)
    valid = dataset.global_batch(0, 5).loss_mask_BS.sum(axis=1)
    assert valid[0] == 1
    assert len(set(valid.tolist())) == 5
    assert valid.min() >= 1
    assert valid.max() < seq_len
    for dp, per_rank in ((2, 1), (2, 2), (2, 4), (2, 8), (4, 2), (4, 4), (8, 1), (8, 8)):
        for step in range(4):
            rows = dataset.global_batch(step, dp * per_rank).loss_mask_BS.reshape(dp, -1)
            assert len(set(rows.sum(axis=1).tolist())) > 1, (dp, per_rank, step)
    mask = dataset.global_batch(0, 40).loss_mask_BS
    assert (mask[:, :-1] >= mask[:, 1:]).all()  # a tail: once masked, masked to the end


def test_synthetic_documents_differ_between_samples_and_end_in_padding() -> None:
    numbers = np.arange(6)
    ids = SyntheticDataset(50, 16, seed=0, documents=True).rows(numbers).document_ids_BS
    for k, row in zip(numbers, ids):
        ends = 1 + k % 4, 8 + k % 4
        assert row.tolist() == [
            0 if i < ends[0] else 1 if i < ends[1] else 2 if i < 14 else -1 for i in range(16)
        ]
    plain = SyntheticDataset(50, 16, seed=0).rows(numbers)
    assert (plain.document_ids_BS == numbers[:, None]).all()


def test_synthetic_tokens_cover_the_vocabulary_and_differ() -> None:
    batch = SyntheticDataset(11, 64, seed=0, masked_tails=False).global_batch(0, 32)
    assert set(batch.tokens_BS.reshape(-1).tolist()) == set(range(11))
    assert batch.loss_mask_BS.all()
    assert len(set(row_keys(batch))) == 32
    assert (batch.tokens_BS[:, 1:] == batch.labels_BS[:, :-1]).all()
    other = SyntheticDataset(11, 64, seed=1).global_batch(0, 32)
    assert (other.tokens_BS != batch.tokens_BS).any(axis=1).all()


@pytest.mark.parametrize("seq_len", [1, 2, 3])
def test_synthetic_works_at_tiny_lengths(seq_len: int) -> None:
    assert SyntheticDataset(5, seq_len, seed=0).global_batch(0, 4).valid_tokens >= 4


def test_synthetic_refuses_nothing() -> None:
    with pytest.raises(WorkloadError, match="got 0 and 4"):
        SyntheticDataset(0, 4, seed=0)

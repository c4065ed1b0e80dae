"""Samples, and which rank reads which. A row depends on (data, seed, number of the sample) alone.

Sample k of a run is the same at every layout. Step t trains on samples t*G ... (t+1)*G - 1, G = global batch.
Data rank d of dp takes the G/dp consecutive samples from t*G + d*G/dp, and cuts them into microbatches:

    G = 8, dp = 2, micro_batch = 2      rank 0: [0 1] [2 3]      rank 1: [4 5] [6 7]

Shape letters: B rows, S sequence length.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from fivefold.data.corpus import Corpus
from fivefold.data.tokenizer import ByteTokenizer
from fivefold.errors import DataError, WorkloadError

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

_ORDER, _TOKENS = 1, 2  # separate random streams for separate uses of one seed


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Rows of a (micro)batch as numpy arrays of shape [B, S].

    `labels[b, s]` is the token after `tokens[b, s]`; it counts in the loss where `loss_mask[b, s]` is true.
    """

    tokens_BS: Ints
    labels_BS: Ints
    loss_mask_BS: Bools
    positions_BS: Ints
    """0..S-1 in every row: positions do not restart at a document. Attention is causal over the whole row, or within
    each document where the job separates them; rotary positions are relative, so it is the same either way."""
    document_ids_BS: Ints
    """Number of the document that each token belongs to; -1 is padding."""

    @property
    def valid_tokens(self) -> int:
        """Labels that count in the loss."""
        return int(self.loss_mask_BS.sum())


class Dataset(ABC):
    """An endless, numbered sequence of samples. Subclasses say what sample k is."""

    seq_len: int
    vocab: int
    fingerprint: str = ""
    """Equal where the same numbers give the same samples, whatever the seed; empty: not compared."""

    def describe(self) -> str:
        """One line for people."""
        return type(self).__name__

    @abstractmethod
    def rows(self, numbers: Ints) -> Batch:
        """The samples with these numbers [B] (>= 0), in this order. O(B * S) work."""

    def global_batch(self, step: int, global_batch: int) -> Batch:
        """All rows of a step (counted from 0), in order: what one device trains on."""
        first = step * global_batch
        return self.rows(np.arange(first, first + global_batch, dtype=np.int64))

    def microbatch(
        self, step: int, index: int, *, dp_rank: int, dp: int, micro_batch: int, global_batch: int
    ) -> Batch:
        """Microbatch `index` of data rank `dp_rank` at `step` (all counted from 0), `micro_batch` rows.

        Over all ranks and indices, each row of the global batch appears exactly once. The sizes are those of
        a workload that was found legal: global_batch is a multiple of dp * micro_batch.
        """
        count, rest = divmod(global_batch, dp * micro_batch)
        assert rest == 0, (global_batch, dp, micro_batch)
        assert 0 <= dp_rank < dp, (dp_rank, dp)
        assert 0 <= index < count, (index, count)
        first = step * global_batch + dp_rank * (global_batch // dp) + index * micro_batch
        return self.rows(np.arange(first, first + micro_batch, dtype=np.int64))


def packed(sample_BS1: Ints, document_BS1: Ints, counts_BS1: Bools | None = None) -> Batch:
    """Rows of S + 1 tokens as a batch of S. Labels count inside one document, and where `counts_BS1` says so.

    Shapes: all [B, S + 1]; document -1 is padding. What is masked: the first token of a document, and padding.
    """
    rows, length = sample_BS1.shape[0], sample_BS1.shape[1] - 1
    loss_mask_BS = (document_BS1[:, 1:] == document_BS1[:, :-1]) & (document_BS1[:, 1:] >= 0)
    if counts_BS1 is not None:
        loss_mask_BS &= counts_BS1[:, 1:]
    return Batch(
        tokens_BS=np.ascontiguousarray(sample_BS1[:, :-1]),
        labels_BS=np.ascontiguousarray(sample_BS1[:, 1:]),
        loss_mask_BS=loss_mask_BS,
        positions_BS=_positions(rows, length),
        document_ids_BS=np.ascontiguousarray(document_BS1[:, :-1]),
    )


class PackedDataset(Dataset):
    """A corpus cut into samples of seq_len + 1 tokens, in a new random order at every epoch.

    Sample i holds tokens i*S .. i*S + S of the flat corpus. One token is shared with the next sample, first
    as a label and then as an input, so each token after the first is a label exactly once an epoch. The last
    sample is padded. Masked labels: the first token of a document (nothing before it tells which document
    follows), and padding. With seq_len >= 2 every sample has at least one label that counts, since a document
    has at least bos, a byte and eos.

    Order: a permutation per epoch that depends only on (seed, epoch); a step may reach into the next epoch.

    Raises: DataError where the corpus is shorter than one sample, WorkloadError where seq_len < 2.
    """

    def __init__(self, corpus: Corpus, seq_len: int, seed: int) -> None:
        if seq_len < 2:
            raise WorkloadError(f"seq_len must be at least 2 to pack documents, got {seq_len}")
        if len(corpus.tokens) < seq_len + 1:
            raise DataError(
                f"corpus {corpus.source} has {len(corpus.tokens)} tokens; one sample needs {seq_len + 1} "
                f"(seq_len + 1): use more text, or seq_len at most {len(corpus.tokens) - 1}"
            )
        self.corpus, self.seq_len, self.seed = corpus, seq_len, seed
        self.vocab = ByteTokenizer.vocab
        self.fingerprint = corpus.fingerprint

    def __len__(self) -> int:
        """Samples in an epoch."""
        return -(-(len(self.corpus.tokens) - 1) // self.seq_len)

    def order(self, numbers: Ints) -> Ints:
        """Place in the corpus (0..len-1) of the samples with these numbers in the run; any shape."""
        epochs, places = np.divmod(numbers, len(self))
        out = np.empty_like(places)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            out[here] = _permutation(self.seed, int(epoch), len(self))[places[here]]
        return out

    def rows(self, numbers: Ints) -> Batch:
        tokens, offsets = self.corpus.tokens, self.corpus.offsets
        length, last = self.seq_len, len(self.corpus.tokens) - 1
        index_BS1 = self.order(numbers)[:, None] * length + np.arange(length + 1)
        inside_BS1 = index_BS1 <= last
        sample_BS1 = tokens[np.minimum(index_BS1, last)].astype(np.int64)
        document_BS1 = np.searchsorted(offsets, index_BS1, side="right").astype(np.int64) - 1
        if not inside_BS1.all():
            sample_BS1[~inside_BS1] = ByteTokenizer.pad
            document_BS1[~inside_BS1] = -1
        return packed(sample_BS1, document_BS1)

    def describe(self) -> str:
        return self.corpus.describe()


class SyntheticDataset(Dataset):
    """Random tokens of any vocabulary, each sample a document of its own: for verification, not for learning.

    With `masked_tails`, the labels at the end of a sample do not count: sample k keeps 1 + (-k*g mod P) of S,
    P = the largest odd number below S, g coprime to P and near P/5. So P samples in a row all differ, samples
    0, P, 2P ... keep just one label, and (P being odd) ranks that take 2, 4, 8 ... samples each differ too:
    a loss that averages per microbatch or per rank, rather than over all valid tokens, comes out wrong.
    The tokens under the mask are real ones, so that a lost mask shows.
    With `documents`, a sample is several documents whose ends depend on its number, and ends in padding.
    """

    def __init__(
        self, vocab: int, seq_len: int, seed: int, *, masked_tails: bool = True, documents: bool = False
    ) -> None:
        if vocab < 1 or seq_len < 1:
            raise WorkloadError(f"vocabulary and seq_len must be at least 1, got {vocab} and {seq_len}")
        self.vocab, self.seq_len, self.seed, self.masked_tails = vocab, seq_len, seed, masked_tails
        self.documents = documents
        self._period = max(1, seq_len - 1 - seq_len % 2)
        self._stride = _coprime_near(round(self._period / 5), self._period)

    def valid_labels(self, numbers: Ints) -> Ints:
        """Labels that count in each of these samples, 1..S; same shape as `numbers`."""
        if not self.masked_tails:
            return np.full_like(numbers, self.seq_len)
        return 1 + -(numbers % self._period) * self._stride % self._period

    def rows(self, numbers: Ints) -> Batch:
        length = self.seq_len
        streams = [_random_words(self.seed, int(number), _TOKENS, length + 1) for number in numbers]
        sample_BS1 = (np.stack(streams) % np.uint64(self.vocab)).astype(np.int64)
        return Batch(
            tokens_BS=np.ascontiguousarray(sample_BS1[:, :-1]),
            labels_BS=np.ascontiguousarray(sample_BS1[:, 1:]),
            loss_mask_BS=np.arange(length) < self.valid_labels(numbers)[:, None],
            positions_BS=_positions(len(numbers), length),
            document_ids_BS=self._document_ids(numbers),
        )

    def _document_ids(self, numbers: Ints) -> Ints:
        """Shape [B, S]. Documents end after 1 + k mod S/4 and S/2 + k mod S/4 tokens of sample k; padding is 1/8."""
        place = np.arange(self.seq_len)
        if not self.documents:
            return np.repeat(numbers[:, None], self.seq_len, axis=1)
        shift = numbers[:, None] % max(1, self.seq_len // 4)
        ids: Ints = (place > shift).astype(np.int64) + (place >= self.seq_len // 2 + shift)
        return np.where(place >= self.seq_len - self.seq_len // 8, -1, ids)


def _positions(rows: int, length: int) -> Ints:
    return np.tile(np.arange(length, dtype=np.int64), (rows, 1))


def _random_words(seed: int, stream: int, use: int, count: int) -> npt.NDArray[np.uint64]:
    """`count` random 64-bit words that depend on (seed, stream, use) alone.

    Raw words of a bit generator are the same in every numpy version (NEP 19); `Generator` methods may change.
    """
    words = np.random.Philox(counter=[0, 0, 0, use], key=[seed, stream]).random_raw(count)
    return np.asarray(words, dtype=np.uint64)


@lru_cache(maxsize=4)
def _permutation(seed: int, epoch: int, count: int) -> Ints:
    order = np.argsort(_random_words(seed, epoch, _ORDER, count), kind="stable").astype(np.int64)
    order.setflags(write=False)
    return order


def _coprime_near(wanted: int, length: int) -> int:
    """The smallest number >= max(1, wanted) coprime to `length`: its multiples visit every residue."""
    number = max(1, wanted)
    while np.gcd(number, length) != 1:
        number += 1
    return number

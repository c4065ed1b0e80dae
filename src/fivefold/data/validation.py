"""The samples that validation measures: always the same, each counted once."""

from __future__ import annotations

from collections.abc import Sized

import numpy as np

from fivefold.data.batches import Batch, Dataset, Ints


class FirstSamples(Dataset):
    """The first `count` samples of a dataset, no more than it has; later numbers give rows of which no label counts.

    So whole global batches cover them exactly, whatever divides. A mixture is endless: there `count` is exact.
    """

    def __init__(self, dataset: Dataset, count: int) -> None:
        self.dataset = dataset
        self.count = min(count, len(dataset)) if isinstance(dataset, Sized) else count
        self.seq_len, self.vocab = dataset.seq_len, dataset.vocab
        self.fingerprint = f"{dataset.fingerprint} {self.count}" if dataset.fingerprint else ""

    def __len__(self) -> int:
        return self.count

    def rows(self, numbers: Ints) -> Batch:
        inside = numbers < self.count
        batch = self.dataset.rows(np.where(inside, numbers, 0))
        batch.loss_mask_BS[~inside] = False
        return batch

    def describe(self) -> str:
        return f"{self.count} samples of {self.dataset.describe()}"

    def batches(self, global_batch: int) -> int:
        """Global batches that cover all of them."""
        return -(-self.count // global_batch)

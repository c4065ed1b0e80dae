"""Samples from a prepared folder, read from memory-mapped files as they are asked for.

The documents of a split, over all its shards, are one long row of tokens, cut into samples as `PackedDataset` cuts a
corpus. A batch costs O(B * S) work and memory, however much there is; opening costs a look at each file's size.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fivefold.data.batches import Batch, Bools, Dataset, Ints, packed
from fivefold.data.manifest import (
    Manifest,
    ShardEntry,
    Split,
    check_sizes,
    check_sums,
    read_manifest,
)
from fivefold.data.order import shuffled
from fivefold.errors import DataError, WorkloadError
from fivefold.units import GIB, format_bytes, format_count

VERIFY_UP_TO_BYTES = 1 * GIB
"""Folders up to this are read through and compared with their sha256 when opened: a second or so."""
OPEN_SHARDS = 1024
"""Shards mapped at a time; the system allows some 65,000 mappings."""


class _Arrays(NamedTuple):
    """One shard, mapped."""

    tokens: npt.NDArray[Any]
    offsets: Ints
    loss: npt.NDArray[np.uint8] | None


class PreparedDataset(Dataset):
    """A split of what `fivefold data prepare` wrote, in samples of seq_len + 1 tokens, in a new order every epoch.

    Sample i holds tokens i*S .. i*S + S of the split; what is masked: the first token of a document, padding, and
    for chat all but the answers (so a sample may have no label that counts). The order is a permutation that depends
    on (seed, epoch) alone and is computed, not stored (`order.py`).

    `verify`: compare every file with its sha256 now; None: where the split is up to 1 GiB. Sizes are always compared.

    Raises: DataError, one line naming the file: no manifest, damaged or missing files, a newer version, an empty
    split, fewer tokens than one sample needs. WorkloadError where seq_len < 2.
    """

    def __init__(
        self,
        folder: Path | str,
        seq_len: int,
        seed: int,
        split: Split = "train",
        *,
        source: int | None = None,
        verify: bool | None = None,
    ) -> None:
        if seq_len < 2:
            raise WorkloadError(f"seq_len must be at least 2 to pack documents, got {seq_len}")
        self.folder, self.seq_len, self.seed, self.split = Path(folder), seq_len, seed, split
        self.manifest, sha256 = read_manifest(self.folder)
        self.shards = self.manifest.of(split, source)
        self._check(split, source)
        size = sum(file.bytes for shard in self.shards for file in shard.files)
        if size <= VERIFY_UP_TO_BYTES if verify is None else verify:
            check_sums(self.folder, self.shards)
        else:
            check_sizes(self.folder, self.shards)
        self.vocab = self.manifest.tokenizer.vocab
        self.fingerprint = hashlib.sha256(f"{sha256} {split} {source}".encode()).hexdigest()
        self._token_starts = _starts([shard.tokens for shard in self.shards])
        self._document_starts = _starts([shard.documents for shard in self.shards])
        self.tokens, self.documents = int(self._token_starts[-1]), int(self._document_starts[-1])
        if self.tokens < seq_len + 1:
            raise DataError(
                f"the {split} split of {folder} has {self.tokens} tokens; one sample needs {seq_len + 1} "
                f"(seq_len + 1): prepare more text, or use seq_len at most {self.tokens - 1}"
            )
        self._mapped: dict[int, _Arrays] = {}

    def __len__(self) -> int:
        """Samples in an epoch."""
        return -(-(self.tokens - 1) // self.seq_len)

    def __getstate__(self) -> dict[str, Any]:
        """Mapped files are opened again where the dataset is sent to."""
        return {**self.__dict__, "_mapped": {}}

    def describe(self) -> str:
        text = f"{self.folder} ({self.split}): {self.documents} documents, {format_count(self.tokens)} tokens"
        return f"{text}, loss on answers only" if self.manifest.chat else text

    def order(self, numbers: Ints) -> Ints:
        """Place in the split (0..len-1) of the samples with these numbers in the run; any shape."""
        epochs, places = np.divmod(numbers, len(self))
        out = np.empty_like(places)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            out[here] = shuffled(places[here], seed=self.seed, epoch=int(epoch), count=len(self))
        return out

    def rows(self, numbers: Ints) -> Batch:
        shape = (len(numbers), self.seq_len + 1)
        sample_BS1 = np.full(shape, self.manifest.tokenizer.pad, dtype=np.int64)
        document_BS1 = np.full(shape, -1, dtype=np.int64)
        counts_BS1 = np.zeros(shape, dtype=np.bool_) if self.manifest.chat else None
        for row, place in enumerate(self.order(numbers).tolist()):
            counts = None if counts_BS1 is None else counts_BS1[row]
            self._fill(place * self.seq_len, sample_BS1[row], document_BS1[row], counts)
        return packed(sample_BS1, document_BS1, counts_BS1)

    def document_tokens(self, number: int) -> tuple[Ints, Bools]:
        """Tokens of a document [n], and whether each counts as a label [n]. Raises DataError where there is none."""
        if not 0 <= number < self.documents:
            raise DataError(f"no document {number}; the {self.split} split has 0..{self.documents - 1}")
        shard = int(np.searchsorted(self._document_starts, number, side="right")) - 1
        arrays = self._arrays(shard)
        begin, end = arrays.offsets[number - self._document_starts[shard] :][:2].tolist()
        counts = (
            np.ones(end - begin, dtype=np.bool_) if arrays.loss is None else _bits(arrays.loss, begin, end)
        )
        return arrays.tokens[begin:end].astype(np.int64), counts

    def _fill(self, start: int, tokens: Ints, documents: Ints, counts: Bools | None) -> None:
        """One row of S + 1, from the shards that it reaches over; what lies beyond the end stays padding."""
        stop = min(start + self.seq_len + 1, self.tokens)
        shard = int(np.searchsorted(self._token_starts, start, side="right")) - 1
        at = start
        while at < stop:
            base = int(self._token_starts[shard])
            begin, end = at - base, min(stop, int(self._token_starts[shard + 1])) - base
            arrays = self._arrays(shard)
            place = slice(at - start, at - start + end - begin)
            tokens[place] = arrays.tokens[begin:end]
            documents[place] = _document_ids(arrays.offsets, begin, end) + self._document_starts[shard]
            if counts is not None and arrays.loss is not None:
                counts[place] = _bits(arrays.loss, begin, end)
            if int(tokens[place].max()) >= self.vocab:
                raise DataError(
                    f"shard {self.folder / self.shards[shard].files[0].name} is damaged: it holds token "
                    f"{int(tokens[place].max())} of a vocabulary of {self.vocab}; prepare the data again"
                )
            at, shard = base + end, shard + 1

    def _arrays(self, number: int) -> _Arrays:
        found = self._mapped.get(number)
        if found is None:
            if len(self._mapped) >= OPEN_SHARDS:
                self._mapped.clear()
            found = self._mapped[number] = _map(self.folder, self.shards[number], self.manifest)
        return found

    def _check(self, split: Split, source: int | None) -> None:
        if self.shards:
            return
        of = "" if source is None else f" of source {self.manifest.sources[source].path}"
        raise DataError(
            f"{self.folder} has no {split} split{of} (it was prepared with --validation-frac "
            f"{self.manifest.validation_frac:g}): prepare it again with a larger share"
        )


def _map(folder: Path, shard: ShardEntry, manifest: Manifest) -> _Arrays:
    dtypes = {"tokens": manifest.tokenizer.dtype, "offsets": "<i8", "loss": "u1"}
    arrays: dict[str, Any] = {}
    for file in shard.files:
        path, kind = folder / file.name, file.name.rpartition(".")[2]
        try:
            mapped = np.memmap(path, dtype=dtypes[kind], mode="r")
        except (OSError, ValueError) as error:
            raise DataError(f"shard {path} cannot be read: {error}") from None
        arrays[kind] = np.asarray(mapped)  # a plain view: slicing a memmap is slow
        if mapped.nbytes != file.bytes:
            raise DataError(
                f"shard {path} changed after it was opened: {mapped.nbytes} bytes, not {file.bytes}"
            )
    return _Arrays(arrays["tokens"], arrays["offsets"], arrays.get("loss"))


def _document_ids(offsets: Ints, begin: int, end: int) -> Ints:
    """Document (in this shard) of the tokens begin..end-1; the files are looked into, not read through."""
    first = int(np.searchsorted(offsets, np.int64(begin), side="right")) - 1
    last = int(np.searchsorted(offsets, np.int64(end - 1), side="right")) - 1
    inner = offsets[first + 1 : last + 1]
    ids = np.searchsorted(inner, np.arange(begin, end, dtype=np.int64), side="right") + first
    return ids.astype(np.int64)


def _bits(packed_bits: npt.NDArray[np.uint8], begin: int, end: int) -> Bools:
    first = begin // 8
    bits = np.unpackbits(packed_bits[first : -(-end // 8)], bitorder="little")
    return bits[begin - 8 * first : end - 8 * first].astype(np.bool_)


def _starts(sizes: list[int]) -> Ints:
    return np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(np.array(sizes, dtype=np.int64))])


def size_text(manifest: Manifest) -> str:
    """Bytes of all shards, for people."""
    return format_bytes(sum(file.bytes for shard in manifest.shards for file in shard.files))

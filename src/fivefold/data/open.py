"""Whatever a training config calls data, as a Dataset: `builtin`, text, prepared folders, and mixtures of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fivefold.data.batches import Dataset, PackedDataset
from fivefold.data.choice import DataSource
from fivefold.data.corpus import DEFAULT_LIMIT_BYTES, load_corpus
from fivefold.data.manifest import Split, is_prepared, read_manifest
from fivefold.data.mixture import MixtureDataset, source_seed
from fivefold.data.prepare import WORK
from fivefold.data.prepared import PreparedDataset
from fivefold.errors import DataError


def open_data(
    data: str | Sequence[DataSource],
    seq_len: int,
    seed: int,
    split: Split = "train",
    *,
    limit_bytes: int = DEFAULT_LIMIT_BYTES,
    verify: bool | None = None,
) -> Dataset:
    """The samples of `data`. `limit_bytes`: of raw text; prepared folders have no limit.

    A folder that was prepared with weights is a mixture of its sources. Text that is not prepared has no validation
    split. `verify`: see `PreparedDataset`.

    Raises: DataError, one line, for anything that is missing, damaged, empty, or does not go together.
    """
    if isinstance(data, str):
        return _open(data, seq_len, seed, split, limit_bytes, verify)
    if not data:
        raise DataError("data is an empty list; give at least one {path, weight}")
    if len(data) == 1:
        return _open(data[0].path, seq_len, seed, split, limit_bytes, verify)
    check_tokenizers([source.path for source in data])
    parts = [
        _open(source.path, seq_len, source_seed(seed, number), split, limit_bytes, verify)
        for number, source in enumerate(data)
    ]
    return MixtureDataset(parts, [source.weight for source in data])


def check_vocab(dataset: Dataset, vocab: int, *, model: str) -> None:
    """Raises: DataError where a model has too few embeddings for the tokenizer of the data."""
    if dataset.vocab > vocab:
        raise DataError(
            f"the tokenizer of the data has a vocabulary of {dataset.vocab}, model {model!r} has {vocab}: "
            f"use a model with at least {dataset.vocab}, or prepare the data with the model's own tokenizer"
        )


def _open(path: str, seq_len: int, seed: int, split: Split, limit_bytes: int, verify: bool | None) -> Dataset:
    folder = Path(path).expanduser()
    if not is_prepared(folder):
        if (folder / WORK).is_dir():
            raise DataError(f"{path} is not prepared to the end: give the same `fivefold data prepare` again")
        if split != "train":
            raise DataError(f"{path} is text without a {split} split; make one with `fivefold data prepare`")
        return PackedDataset(load_corpus(path, limit_bytes=limit_bytes), seq_len, seed)
    weights = [source.weight for source in read_manifest(folder)[0].sources]
    if len(weights) == 1 or None in weights:
        return PreparedDataset(folder, seq_len, seed, split, verify=verify)
    parts = [
        PreparedDataset(folder, seq_len, source_seed(seed, n), split, source=n, verify=verify)
        for n in range(len(weights))
    ]
    return MixtureDataset(parts, [weight for weight in weights if weight is not None])


def check_tokenizers(paths: Sequence[str]) -> None:
    """Equal sizes of vocabulary are not enough: token numbers must mean the same. Raises: DataError."""
    from fivefold.data.encode import ByteEncoder

    found: dict[str, str] = {}
    for path in paths:
        folder = Path(path).expanduser()
        info = read_manifest(folder)[0].tokenizer if is_prepared(folder) else ByteEncoder().info
        found.setdefault(info.model_dump_json(), path)
    if len(found) > 1:
        first, second = list(found.values())[:2]
        raise DataError(
            f"{first} and {second} were made with different tokenizers; a run needs one: prepare them with the same"
        )

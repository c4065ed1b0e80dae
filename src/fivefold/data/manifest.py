"""What a prepared folder holds, as `manifest.json`: written last, so a folder with one is whole.

manifest.json                 this file
tokenizer.json                a copy of the tokenizer; not there for byte tokens
train-00000.tokens            token numbers, little-endian uint16 or uint32, nothing else
train-00000.offsets           little-endian int64 [documents + 1]: document d is tokens[offsets[d]:offsets[d+1]]
train-00000.loss              chat only: one bit per token, lowest bit first, 1 where the token counts as a label
validation-00000.tokens ...   the same for the validation split
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from fivefold.core.regular_file import read_limited, read_regular
from fivefold.core.value import Value
from fivefold.errors import ConfigError, DataError
from fivefold.units import MIB

MANIFEST = "manifest.json"
TOKENIZER_COPY = "tokenizer.json"
KIND = "fivefold-prepared-data"
SCHEMA_VERSION = 1
MANIFEST_LIMIT_BYTES = 256 * MIB
BLOCK_BYTES = MIB

Split = Literal["train", "validation"]
SPLITS: tuple[Split, ...] = ("train", "validation")
SHARD_FILE = re.compile(r"(train|validation)-\d{5,9}\.(tokens|offsets|loss)")
"""The only names that a manifest may give, so that none leads out of its folder."""

Count = Annotated[int, Field(ge=0)]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class TokenizerInfo(Value):
    """Which tokenizer made the tokens. Equal `sha256` means equal tokens for equal text."""

    kind: Literal["byte", "file"]
    sha256: Sha256
    """Of tokenizer.json; for byte tokens, of a text that names their version."""
    vocab: Annotated[int, Field(ge=1)]
    """One more than the largest token number."""
    bos: Count | None
    """Put before each document; null: nothing is."""
    eos: Count
    """Put after each document."""
    pad: Count

    @property
    def dtype(self) -> Literal["<u2", "<u4"]:
        return "<u2" if self.vocab <= 2**16 else "<u4"


class FileEntry(Value):
    """One file of a shard."""

    name: Annotated[str, Field(pattern=f"^{SHARD_FILE.pattern}$")]
    bytes: Count
    sha256: Sha256


class ShardEntry(Value):
    """One split of one unit of work. `files`: tokens, offsets and, for chat, loss."""

    split: Split
    source: Count
    documents: Annotated[int, Field(ge=1)]
    tokens: Annotated[int, Field(ge=1)]
    loss_tokens: Count
    """Tokens that count as labels, were they all labels: all but the first of each document, or the answers."""
    files: tuple[FileEntry, ...]


class SourceEntry(Value):
    """What one of the given sources came to, over both splits."""

    path: str
    weight: Annotated[float, Field(gt=0)] | None = None
    files: Count
    bytes: Count
    documents: Count
    empty_documents: Count
    skipped: Count
    fingerprint: Sha256
    """Of the text of all documents, in order; files that were renamed or split otherwise give the same."""


class Manifest(Value):
    """Everything about a prepared folder."""

    kind: Literal["fivefold-prepared-data"] = "fivefold-prepared-data"
    schema_version: Literal[1] = 1
    tokenizer: TokenizerInfo
    chat: bool
    """Loss on answers only: shards have a loss file."""
    validation_frac: Annotated[float, Field(ge=0, lt=1)]
    sources: tuple[SourceEntry, ...]
    shards: tuple[ShardEntry, ...]
    skipped_examples: tuple[str, ...] = ()
    """The first records that were left out as broken, with file and line."""

    @model_validator(mode="after")
    def _sizes_agree(self) -> Self:
        """Sizes follow from counts; a manifest that contradicts itself is corrupt."""
        itemsize = int(self.tokenizer.dtype[-1])
        for shard in self.shards:
            wanted = {"tokens": shard.tokens * itemsize, "offsets": (shard.documents + 1) * 8}
            if self.chat:
                wanted["loss"] = -(-shard.tokens // 8)
            found = {file.name.rpartition(".")[2]: file.bytes for file in shard.files}
            if found != wanted or len(shard.files) != len(wanted):
                name = shard.files[0].name if shard.files else "a shard"
                raise ValueError(f"sizes of {name} do not follow from its counts")
            if shard.source >= len(self.sources):
                raise ValueError(f"{shard.files[0].name} names source {shard.source} of {len(self.sources)}")
        return self

    def of(self, split: Split, source: int | None = None) -> tuple[ShardEntry, ...]:
        """Shards of a split, in order; of one source only where asked."""
        return tuple(s for s in self.shards if s.split == split and source in (None, s.source))

    def documents(self, split: Split) -> int:
        return sum(shard.documents for shard in self.of(split))

    def tokens(self, split: Split) -> int:
        return sum(shard.tokens for shard in self.of(split))

    def loss_tokens(self, split: Split) -> int:
        return sum(shard.loss_tokens for shard in self.of(split))

    @property
    def skipped(self) -> int:
        return sum(source.skipped for source in self.sources)


def is_prepared(folder: Path) -> bool:
    """Whether the folder has a manifest of ours (whole or not; `read_manifest` judges)."""
    try:
        return KIND.encode() in read_regular(folder / MANIFEST, 200)
    except OSError:
        return False


def read_manifest(folder: Path) -> tuple[Manifest, str]:
    """The manifest of a prepared folder, and the sha256 of its bytes.

    Raises: DataError, one line: no manifest, too large, not JSON, from a newer Fivefold, or contradicting itself.
    """
    path = folder / MANIFEST
    raw = read_limited(path, MANIFEST_LIMIT_BYTES, "manifest of prepared data", DataError)
    try:
        data: Any = json.loads(raw)
    except (ValueError, RecursionError):
        raise DataError(f"{path} is damaged: it is not JSON; prepare the data again") from None
    if not isinstance(data, dict) or data.get("kind") != KIND:
        raise DataError(f"{path} is no manifest of `fivefold data prepare`")
    version = data.get("schema_version")
    if isinstance(version, int) and version > SCHEMA_VERSION:
        raise DataError(
            f"{path} was written by a newer Fivefold (schema {version}; this one reads {SCHEMA_VERSION}): "
            f"update Fivefold, or prepare the data again"
        )
    try:
        return Manifest.read(data, where=str(path)), hashlib.sha256(raw).hexdigest()
    except ConfigError as error:
        raise DataError(f"{error}: it is damaged; prepare the data again") from None


def write_json(path: Path, value: Any, *, sync: bool = False) -> None:
    """Write JSON so that the file is either whole or not there. Raises OSError with the file's name."""
    temporary = path.with_name(f"{path.name}.tmp")
    text = json.dumps(value, indent=1, allow_nan=False) + "\n"
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            if sync:
                file.flush()
                os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None


def check_sizes(folder: Path, shards: tuple[ShardEntry, ...]) -> None:
    """Raises: DataError where a file is missing or of another size; names it and both sizes."""
    for shard in shards:
        for file in shard.files:
            path = folder / file.name
            try:
                found = path.stat().st_size
            except OSError as error:
                raise DataError(f"shard {path} is missing or cannot be read: {error.strerror}") from None
            if found != file.bytes:
                raise DataError(
                    f"shard {path} is damaged: {found} bytes where the manifest says {file.bytes}; "
                    f"prepare the data again"
                )


def check_sums(folder: Path, shards: tuple[ShardEntry, ...]) -> None:
    """Read everything. Raises: DataError where a file is not what the manifest says; names it."""
    check_sizes(folder, shards)
    for shard in shards:
        for file in shard.files:
            path = folder / file.name
            if sha256_of(path) != file.sha256:
                raise DataError(
                    f"shard {path} is damaged: its sha256 is not that of the manifest; prepare the data again"
                )


def sha256_of(path: Path) -> str:
    """sha256 of a file's bytes, 64 hex digits. Raises DataError where it cannot be read."""
    digest = hashlib.sha256()
    try:
        with path.open("rb", buffering=0) as file:
            while block := file.read(BLOCK_BYTES):
                digest.update(block)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from None
    return digest.hexdigest()

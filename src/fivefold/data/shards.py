"""Writes the shards of one unit. Files get their names when they are whole."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from fivefold.data.encode import Encoded
from fivefold.data.manifest import FileEntry, ShardEntry, Split


class Output:
    """A file that is written under a temporary name, hashed on the way, and renamed when it is whole."""

    def __init__(self, path: Path, temporary: Path) -> None:
        self.path, self.temporary = path, temporary
        self.hash = hashlib.sha256()
        self.size = 0
        with _named(path):
            self.file = temporary.open("wb", buffering=0)

    def write(self, data: npt.NDArray[np.generic]) -> None:
        """Append an array's bytes. Raises OSError with the name of the file."""
        rest = np.ascontiguousarray(data).reshape(-1).view(np.uint8).data
        self.hash.update(rest)
        self.size += len(rest)
        with _named(self.path):
            while rest:  # a disk that is nearly full takes a part, and refuses only the next part
                rest = rest[self.file.write(rest) :]

    def close(self) -> FileEntry:
        with _named(self.path):
            self.file.close()
            os.replace(self.temporary, self.path)
        return FileEntry(name=self.path.name, bytes=self.size, sha256=self.hash.hexdigest())

    def abort(self) -> None:
        self.file.close()
        with contextlib.suppress(OSError):
            self.temporary.unlink()


class ShardWriter:
    """One split of one unit. Files are made with the first document."""

    def __init__(self, folder: Path, work: Path, *, split: Split, unit: int, source: int, chat: bool) -> None:
        self.folder, self.work, self.chat = folder, work, chat
        self.split, self.unit, self.source = split, unit, source
        self.outputs: dict[str, Output] = {}
        self.lengths: list[npt.NDArray[np.int64]] = []
        self.tokens = self.loss_tokens = 0
        self.bits = np.zeros(0, dtype=np.bool_)  # fewer than 8 that do not fill a byte yet

    def add(self, encoded: Encoded) -> None:
        """Append documents; those without tokens are nothing."""
        lengths = encoded.lengths[encoded.lengths > 0]
        if not lengths.size:
            return
        if not self.outputs:
            for kind in ("tokens", "offsets", "loss") if self.chat else ("tokens", "offsets"):
                name = f"{self.split}-{self.unit:05}.{kind}"
                self.outputs[kind] = Output(self.folder / name, self.work / f"{name}.tmp")
        self.lengths.append(lengths)
        self.tokens += len(encoded.tokens)
        self.outputs["tokens"].write(encoded.tokens)
        if encoded.counts is None:
            self.loss_tokens += len(encoded.tokens) - len(lengths)
            return
        self.loss_tokens += int(encoded.counts.sum())
        bits = np.concatenate([self.bits, encoded.counts])
        whole = len(bits) // 8 * 8
        self.outputs["loss"].write(np.packbits(bits[:whole], bitorder="little"))
        self.bits = bits[whole:]

    def close(self) -> ShardEntry | None:
        """What was written; None where there was no document."""
        if not self.outputs:
            return None
        lengths = np.concatenate(self.lengths)
        offsets = np.zeros(len(lengths) + 1, dtype="<i8")
        np.cumsum(lengths, out=offsets[1:])
        self.outputs["offsets"].write(offsets)
        if self.chat and len(self.bits):
            self.outputs["loss"].write(np.packbits(self.bits, bitorder="little"))
        return ShardEntry(
            split=self.split,
            source=self.source,
            documents=len(lengths),
            tokens=self.tokens,
            loss_tokens=self.loss_tokens,
            files=tuple(output.close() for output in self.outputs.values()),
        )

    def abort(self) -> None:
        """Remove what is not whole."""
        for output in self.outputs.values():
            output.abort()


@contextlib.contextmanager
def _named(path: Path) -> Iterator[None]:
    """Errors of an open file do not say which file."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None

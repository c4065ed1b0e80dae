"""What `fivefold data prepare` is asked to read: files, folders and globs, and how the work is cut into units.

A unit is what one process reads at a time and what becomes one shard of each split. Units depend on the files and on
the wanted shard size alone, never on the number of processes.

    text      a document is a file; a file above 1 MiB is cut into equal pieces after a line, each a document
    jsonl     a document is a line; a line belongs to the unit in whose range of bytes it begins
    chat      JSON Lines of messages, or of prompt and completion
    parquet   a document is a row; a unit takes whole row groups
"""

from __future__ import annotations

import glob
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fivefold.data.chat import is_chat
from fivefold.data.corpus import BUILTIN, TEXT_SUFFIXES, builtin_files, walk
from fivefold.data.parquet import parquet_groups
from fivefold.errors import DataError
from fivefold.units import MIB

Kind = Literal["text", "jsonl", "chat", "parquet"]
JSONL_SUFFIXES = (".jsonl", ".ndjson")
PARQUET_SUFFIXES = (".parquet", ".pq")
SUFFIXES: dict[str, tuple[str, ...]] = {
    "auto": (*TEXT_SUFFIXES, *JSONL_SUFFIXES, *PARQUET_SUFFIXES),
    "text": TEXT_SUFFIXES,
    "jsonl": JSONL_SUFFIXES,
    "chat": JSONL_SUFFIXES,
    "parquet": PARQUET_SUFFIXES,
}
"""What is taken from a folder; a file or a glob that is named outright may end in anything that is not refused."""
BINARY_SUFFIXES = frozenset(
    {".pkl", ".pickle", ".pt", ".pth", ".bin", ".ckpt", ".joblib", ".npy", ".npz", ".safetensors", ".arrow"}
)
PACKED_SUFFIXES = frozenset({".gz", ".bz2", ".xz", ".zst", ".lz4", ".zip", ".tar", ".tgz", ".7z"})

PIECE_BYTES = MIB
"""Text files above this are cut: a tokenizer needs some 50 bytes of memory for each byte of a document."""
BORDER_WINDOW = 1 << 16
"""A piece ends with the first line that ends within so many bytes of its nominal end, else after a whole letter."""
SMALL_UNIT_BYTES = 4 * MIB
LEAST_UNITS = 16
"""Small data is cut into up to 16 units of at least 4 MiB, so that a few processes share it evenly."""
FIRST_LINE_LIMIT = 64 * MIB


@dataclass(frozen=True)
class InputFile:
    """One file to read."""

    path: str
    name: str
    """Relative to its source, with `/`."""
    source: int
    kind: Kind
    bytes: int
    """Size of the file; of the text column, uncompressed, for Parquet."""
    mtime_ns: int
    groups: tuple[int, ...] = ()
    """Parquet: bytes of the text column in each row group, uncompressed."""


@dataclass(frozen=True)
class Part:
    """A stretch of one file: pieces (text), bytes (jsonl, chat) or row groups (parquet) from start to stop."""

    file: int
    start: int
    stop: int


@dataclass(frozen=True)
class Unit:
    """Stretches of files of one source, in order."""

    source: int
    parts: tuple[Part, ...]


def find_files(sources: Sequence[str], format: str, text_column: str) -> list[InputFile]:
    """All files of all sources, each source's sorted by path.

    Raises: DataError where a source does not exist, holds nothing to read, or is of a kind that is refused;
    where a Parquet file is damaged or has no such column; where chat and other data are mixed.
    """
    files: list[InputFile] = []
    for number, source in enumerate(sources):
        found = [
            _input_file(path, name, number, format, text_column) for path, name in _paths(source, format)
        ]
        if not sum(file.bytes for file in found):
            raise DataError(f"source {source} holds no text ({len(found)} files, all empty)")
        files += found
    chats = [file for file in files if file.kind == "chat"]
    if chats and len(chats) < len(files):
        other = next(file for file in files if file.kind != "chat")
        raise DataError(
            f"{chats[0].path} is chat and {other.path} is {other.kind}: prepare them into two folders, "
            f"and train on both with weights"
        )
    return files


def cut_into_units(files: Sequence[InputFile], shard_bytes: int) -> list[Unit]:
    """Units of about equal size, at most about `shard_bytes` of input each, in the order of the files."""
    units: list[Unit] = []
    for source in sorted({file.source for file in files}):
        numbers = [n for n, file in enumerate(files) if file.source == source]
        total = sum(files[n].bytes for n in numbers)
        count = max(-(-total // shard_bytes), min(LEAST_UNITS, -(-total // SMALL_UNIT_BYTES)), 1)
        target = -(-total // count)
        parts: list[Part] = []
        room = target
        for number in numbers:
            for part, size in _parts(files[number], number, room, target):
                parts.append(part)
                room -= size
                if room <= 0:
                    units.append(Unit(source, tuple(parts)))
                    parts, room = [], target
        if parts:
            units.append(Unit(source, tuple(parts)))
    return units


def pieces(size: int) -> int:
    """Documents that a text file of so many bytes is cut into."""
    return max(1, -(-size // PIECE_BYTES))


def _parts(file: InputFile, number: int, room: int, target: int) -> Iterator[tuple[Part, int]]:
    """Cut a file where units end: the first part fills `room`, the others `target` bytes each."""
    if file.bytes == 0:
        return
    if file.kind == "parquet":
        sizes: Sequence[int] = file.groups
    elif file.kind == "text":
        count = pieces(file.bytes)
        sizes = [(n + 1) * file.bytes // count - n * file.bytes // count for n in range(count)]
    else:
        start = 0
        while start < file.bytes:
            stop = min(file.bytes, start + room)
            yield Part(number, start, stop), stop - start
            start, room = stop, target
        return
    first, taken = 0, 0
    for index, size in enumerate(sizes):
        taken += size
        if taken >= room or index == len(sizes) - 1:
            yield Part(number, first, index + 1), taken
            first, taken, room = index + 1, 0, target


def _paths(source: str, format: str) -> list[tuple[Path, str]]:
    """(path, relative name) of every file of a source, sorted by name."""
    path = Path(source).expanduser()
    try:
        if source == BUILTIN:
            root, names = builtin_files()
            return [(root / name, name) for name in names]
        if path.is_dir():
            found = [(path / name, name) for name in walk(path, SUFFIXES[format], frozenset())]
            wanted = ", ".join(f"*{suffix}" for suffix in SUFFIXES[format])
            if not found:
                raise DataError(f"folder {source} holds no files to read ({wanted})")
            return found
        if path.is_file():
            return [(path, path.name)]
        if path.exists():
            raise DataError(f"source {source} is neither a file nor a folder")
        if glob.has_magic(source):
            names = sorted(name for name in glob.glob(str(path), recursive=True) if os.path.isfile(name))
            if not names:
                raise DataError(f"glob {source} matches no file")
            return [(Path(name), Path(name).as_posix()) for name in names]
    except (OSError, ValueError) as error:
        raise DataError(f"source {source!r} cannot be read: {error}") from None
    raise DataError(f"source {source} does not exist; give files, folders, globs, or {BUILTIN!r}")


def _input_file(path: Path, name: str, source: int, format: str, text_column: str) -> InputFile:
    refuse_binary(path)
    try:
        status = path.stat()
        kind = _kind(path, format, text_column)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from None
    size = status.st_size
    groups: tuple[int, ...] = ()
    if kind == "parquet":
        groups = parquet_groups(path, text_column)
        size = sum(groups)
    return InputFile(str(path), name, source, kind, size, status.st_mtime_ns, groups)


def refuse_binary(path: Path) -> None:
    """Raises: DataError for a name that ends as pickles, tensors or archives do."""
    suffix = path.suffix.lower()
    if suffix in BINARY_SUFFIXES:
        raise DataError(
            f"{path}: {suffix} files are not supported (pickles can run code); give text, JSON Lines or Parquet"
        )
    if suffix in PACKED_SUFFIXES:
        raise DataError(f"{path}: {suffix} files are not supported; unpack it first")


def _kind(path: Path, format: str, text_column: str) -> Kind:
    if format in ("text", "jsonl", "chat", "parquet"):
        return format  # type: ignore[return-value]  # one of the four literals
    suffix = path.suffix.lower()
    if suffix in PARQUET_SUFFIXES:
        return "parquet"
    if suffix not in (*JSONL_SUFFIXES, ".json"):
        return "text"
    with path.open("rb") as file:
        line = b"\n"
        while line and not line.strip():
            line = file.readline(FIRST_LINE_LIMIT)
    try:
        record = json.loads(line.removeprefix(b"\xef\xbb\xbf").decode())
    except (ValueError, RecursionError):
        return "jsonl"  # reading it says what is wrong, and in which line
    return "chat" if is_chat(record) and text_column not in record else "jsonl"

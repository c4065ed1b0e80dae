"""Documents of a unit, one after the other, and the records that are no documents, with file and line.

A document is known by the sha256 of its text: its split depends on that alone, so that the same text never lies in both
splits, whatever file it came from and however many processes read it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from fivefold.data.chat import Conversation, conversation
from fivefold.data.parquet import parquet_rows
from fivefold.data.sources import BORDER_WINDOW, InputFile, Part, Unit, pieces
from fivefold.errors import DataError
from fivefold.units import MIB, format_bytes

DOCUMENT_LIMIT_BYTES = 64 * MIB
"""A larger document is a mistake more often than not, and would not fit into memory beside its tokens."""
BUFFER_BYTES = MIB
BOM = b"\xef\xbb\xbf"


class Document(NamedTuple):
    """A text to tokenise, or a conversation."""

    text: str
    raw: bytes
    """`text` as UTF-8."""
    chat: Conversation | None
    digest: bytes
    """16 bytes that name the text."""
    read_bytes: int
    """Of input, for the progress bar."""


class Fault(NamedTuple):
    """A record that is no document."""

    place: str
    """`file:line`, or `file: row N`."""
    message: str
    read_bytes: int

    def __str__(self) -> str:
        return f"{self.place}: {self.message}"


@dataclass(frozen=True)
class Reader:
    """Reads units of a list of files."""

    files: Sequence[InputFile]
    text_column: str

    def documents(self, unit: Unit) -> Iterator[Document | Fault]:
        """In order. Raises: DataError where a file cannot be read, or is damaged so that reading cannot go on."""
        for part in unit.parts:
            file = self.files[part.file]
            try:
                if file.kind == "parquet":
                    yield from self._rows(file, part)
                elif file.kind == "text":
                    yield from _pieces(file, part)
                else:
                    yield from self._lines(file, part)
            except OSError as error:
                raise DataError(f"{file.path} cannot be read: {error.strerror or error}") from None

    def _lines(self, file: InputFile, part: Part) -> Iterator[Document | Fault]:
        """Lines that begin in [start, stop). Blank lines are nothing."""
        with open(file.path, "rb", buffering=BUFFER_BYTES) as source:
            _skip_to_line(source, part.start)
            position = source.tell()
            while position < part.stop and (line := source.readline(DOCUMENT_LIMIT_BYTES + 1)):
                begin, size = position, len(line)
                if size > DOCUMENT_LIMIT_BYTES:
                    size += _skip_line(source)
                position += size
                try:
                    yield from self._line(line, size, first=begin == 0)
                except ValueError as error:  # of JSON, of UTF-8, of what the record should hold
                    place = f"{file.path}:{line_number(file.path, begin)}"
                    yield Fault(place, _reason(error), size)

    def _line(self, line: bytes, size: int, *, first: bool) -> Iterator[Document]:
        if size > DOCUMENT_LIMIT_BYTES:
            raise ValueError(f"a line of {format_bytes(size)}; at most {format_bytes(DOCUMENT_LIMIT_BYTES)}")
        if first:
            line = line.removeprefix(BOM)
        if not line.strip():
            return
        try:
            record: Any = json.loads(line.decode())
        except RecursionError:
            raise ValueError("not JSON that can be read: nested too deeply") from None
        if not isinstance(record, dict):
            raise ValueError(f"not a JSON object but a {type(record).__name__}")
        yield self.document(record, size)

    def document(self, record: dict[str, Any], size: int) -> Document:
        """The document of a JSON record. Raises: ValueError where it has no text."""
        if self.files and self.files[0].kind == "chat":  # all are, or none is
            chat = conversation(record)
            return Document("", b"", chat, chat.digest(), size)
        if self.text_column not in record:
            keys = ", ".join(record)[:200] or "none"
            raise ValueError(f"no key {self.text_column!r} (its keys: {keys}; choose with --text-column)")
        text = record[self.text_column]
        if not isinstance(text, str):
            raise ValueError(f"its {self.text_column!r} is a {type(text).__name__}, not text")
        return plain(text, text.encode(), size)

    def _rows(self, file: InputFile, part: Part) -> Iterator[Document | Fault]:
        for row, text in parquet_rows(Path(file.path), self.text_column, part.start, part.stop):
            if text is None:
                yield Fault(f"{file.path}: row {row}", f"its {self.text_column!r} is null, not text", 0)
                continue
            raw = text.encode()
            if len(raw) > DOCUMENT_LIMIT_BYTES:
                limit = format_bytes(DOCUMENT_LIMIT_BYTES)
                message = f"a text of {format_bytes(len(raw))}; at most {limit}"
                yield Fault(f"{file.path}: row {row}", message, len(raw))
            else:
                yield plain(text, raw, len(raw))


def plain(text: str, raw: bytes, read_bytes: int) -> Document:
    """A document without roles."""
    return Document(text, raw, None, hashlib.sha256(raw).digest()[:16], read_bytes)


def line_number(path: str, position: int) -> int:
    """Number (from 1) of the line that holds the byte at `position`. Reads up to there."""
    number, left = 1, position
    with open(path, "rb") as file:
        while left and (block := file.read(min(left, BUFFER_BYTES))):
            number += block.count(b"\n")
            left -= len(block)
    return number


def _pieces(file: InputFile, part: Part) -> Iterator[Document | Fault]:
    """Pieces start..stop-1 of a text file, each a document of its own; a file up to 1 MiB is one piece."""
    with open(file.path, "rb") as source:
        for index in range(part.start, part.stop):
            begin = _border(source, file.bytes, index)
            end = _border(source, file.bytes, index + 1)
            source.seek(begin)
            raw = source.read(end - begin)
            try:
                text = raw.decode()
            except UnicodeDecodeError as error:
                position = begin + error.start
                place = f"{file.path}:{line_number(file.path, position)}"
                yield Fault(place, f"not UTF-8: {error.reason} at byte {position}", len(raw))
                continue
            yield plain(text, raw, len(raw))


def _border(source: BinaryIO, size: int, index: int) -> int:
    """Where piece `index` of a text file begins: after a line end, near index/pieces of its size."""
    count = pieces(size)
    nominal = index * size // count
    if index in (0, count):
        return nominal
    source.seek(nominal)
    window = source.read(BORDER_WINDOW)
    line_end = window.find(b"\n")
    if line_end >= 0:
        return nominal + line_end + 1
    letter = next((n for n, byte in enumerate(window[:4]) if byte & 0xC0 != 0x80), 0)
    return nominal + letter


def _skip_to_line(source: BinaryIO, start: int) -> None:
    """Go to the first line that begins at or after `start`."""
    if start:
        source.seek(start - 1)
        _skip_line(source)


def _skip_line(source: BinaryIO) -> int:
    """Read over the rest of a line, however long; the bytes that it had."""
    skipped = 0
    while block := source.readline(BUFFER_BYTES):
        skipped += len(block)
        if block.endswith(b"\n"):
            break
    return skipped


def _reason(error: ValueError) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"not JSON: {error.msg} at column {error.colno}"
    if isinstance(error, UnicodeDecodeError):
        return f"not UTF-8: {error.reason} at byte {error.start} of the line"
    if isinstance(error, UnicodeEncodeError):
        return f"text that cannot be written as UTF-8: {error.reason}"
    return " ".join(str(error).split())[:300]

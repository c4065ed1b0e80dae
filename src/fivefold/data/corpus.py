"""Text to train on: the source code of the running Python installation, or a user's file, folder or glob.

A document is one file. All documents lie in one flat token array:

    tokens  = bos <bytes of file 0> eos  bos <bytes of file 1> eos  ...
    offsets =  0                         ^len(file 0) + 2           ...  len(tokens)      [documents + 1]
"""

from __future__ import annotations

import codecs
import glob
import hashlib
import os
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from fivefold.data.tokenizer import ByteTokenizer, Tokens
from fivefold.errors import DataError
from fivefold.units import MIB, format_bytes

BUILTIN = "builtin"
TEXT_SUFFIXES = (
    ".py",
    ".txt",
    ".md",
    ".rst",
    ".text",
    ".c",
    ".h",
    ".cpp",
    ".rs",
    ".go",
    ".js",
    ".ts",
    ".java",
)
"""What counts as text in a folder; a file or a glob that is named outright may end in anything."""
LEFT_OUT_FOLDERS = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"})
"""Left out of the built-in corpus: installed packages, caches, and tests (some are not UTF-8 on purpose)."""
DEFAULT_LIMIT_BYTES = 16 * MIB


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Documents as one token array. Equal `fingerprint` means equal tokens and equal document borders."""

    source: str
    """What it was read from: `builtin`, or the user's path."""
    tokens: Tokens
    """[tokens], uint16, read-only."""
    offsets: npt.NDArray[np.int64]
    """[documents + 1]: document d is `tokens[offsets[d]:offsets[d + 1]]`."""
    names: tuple[str, ...]
    """[documents]: path of each file, relative to the corpus, with `/`."""
    limit_bytes: int
    """At most so much text was read."""
    cut: bool
    """True where there was more text than `limit_bytes`; what lies beyond is left out."""
    fingerprint: str
    """sha256 of tokens and offsets, 64 hex digits; ranks compare it to know that they read the same text."""

    @property
    def documents(self) -> int:
        return len(self.names)

    @property
    def text_bytes(self) -> int:
        """Bytes of text, without the bos and eos of each document."""
        return len(self.tokens) - 2 * self.documents

    def describe(self) -> str:
        """One line for people: `builtin: 734 documents, 11.6 MiB of text`, and whether it was cut."""
        text = f"{self.source}: {self.documents} documents, {format_bytes(self.text_bytes)} of text"
        return f"{text} (cut at the limit of {format_bytes(self.limit_bytes)})" if self.cut else text


def load_corpus(data: str = BUILTIN, *, limit_bytes: int = DEFAULT_LIMIT_BYTES) -> Corpus:
    """Read `data`: `builtin`, a file, a folder (at any depth) or a glob (`a/**/*.txt`).

    Files are read in sorted order of their relative paths, so the result does not depend on the file system.
    Empty files are no documents. Reading stops at `limit_bytes` of text (16 MiB unless told otherwise), after
    a whole letter.

    Raises: DataError where nothing is there, nothing is text, or a file cannot be read or is not UTF-8.
    """
    if limit_bytes < 1:
        raise DataError(f"the corpus limit must be at least 1 byte, got {limit_bytes}")
    if data == BUILTIN:
        root, files = builtin_files()
        kinds = "*.py"
    else:
        root, files, kinds = _user_files(data)
    documents, cut = _read(root, files, limit_bytes)
    if not documents:
        where = f"{data} ({root})" if data == BUILTIN else data
        raise DataError(f"corpus {where} holds no text files with text in them ({kinds})")
    return build_corpus(data, documents, limit_bytes=limit_bytes, cut=cut)


def builtin_files() -> tuple[Path, list[str]]:
    """The standard library of this Python: its folder, and sorted paths of its source files relative to it."""
    root = Path(sysconfig.get_paths()["stdlib"])
    return root, walk(root, (".py",), LEFT_OUT_FOLDERS)


def build_corpus(
    source: str,
    documents: Iterable[tuple[str, bytes]],
    *,
    limit_bytes: int = DEFAULT_LIMIT_BYTES,
    cut: bool = False,
) -> Corpus:
    """A corpus of (name, text as bytes) pairs, in the order given. Raises DataError where there is none."""
    pairs = list(documents)
    if not pairs:
        raise DataError(f"corpus {source} holds no documents")
    byte = ByteTokenizer()
    lengths = np.array([len(text) + 2 for _, text in pairs], dtype=np.int64)
    offsets = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(lengths)])
    tokens = np.empty(int(offsets[-1]), dtype=np.uint16)
    tokens[offsets[:-1]] = byte.bos
    tokens[offsets[1:] - 1] = byte.eos
    for start, (_, text) in zip(offsets, pairs):
        tokens[start + 1 : start + 1 + len(text)] = byte.encode(text)
    digest = hashlib.sha256(np.ascontiguousarray(tokens, dtype="<u2").data)
    digest.update(np.ascontiguousarray(offsets, dtype="<i8").data)
    tokens.setflags(write=False)
    offsets.setflags(write=False)
    return Corpus(
        source=source,
        tokens=tokens,
        offsets=offsets,
        names=tuple(name for name, _ in pairs),
        limit_bytes=limit_bytes,
        cut=cut,
        fingerprint=digest.hexdigest(),
    )


def _user_files(data: str) -> tuple[Path, list[str], str]:
    """(root, sorted paths relative to it, what was looked for) of a user's file, folder or glob."""
    path = Path(data).expanduser()
    try:
        if path.is_dir():
            return path, walk(path, TEXT_SUFFIXES, frozenset()), "*.py, *.txt, *.md ..."
        if path.is_file():
            return path.parent, [path.name], path.name
        if path.exists():
            raise DataError(f"corpus {data} is neither a file nor a folder")
        if glob.has_magic(data):
            found = glob.glob(str(path), recursive=True)
            return Path(), sorted(Path(f).as_posix() for f in found if os.path.isfile(f)), data
    except (OSError, ValueError) as error:  # a name too long, a NUL byte, no permission
        raise DataError(f"corpus {data!r} cannot be read: {error}") from None
    raise DataError(f"corpus {data} does not exist; give a file, a folder, a glob, or {BUILTIN!r}")


def walk(root: Path, suffixes: tuple[str, ...], left_out: frozenset[str]) -> list[str]:
    """Sorted relative paths of files with these suffixes. Links to folders are not followed."""
    found: list[str] = []
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in left_out]
        relative = Path(folder).relative_to(root)
        found += [(relative / name).as_posix() for name in files if name.lower().endswith(suffixes)]
    return sorted(found)


def _read(root: Path, files: list[str], limit_bytes: int) -> tuple[list[tuple[str, bytes]], bool]:
    """The (name, text) of each file up to `limit_bytes` in all, and whether anything was cut."""
    documents: list[tuple[str, bytes]] = []
    left = limit_bytes
    for name, text in _open_each(root, files, limit_bytes):
        if len(text) > left:
            shorter = _whole_letters(text[:left], name, at_end=False)
            return documents + ([(name, shorter)] if shorter else []), True
        _whole_letters(text, name, at_end=True)
        documents.append((name, text))
        left -= len(text)
    return documents, False


def _open_each(root: Path, files: list[str], limit_bytes: int) -> Iterator[tuple[str, bytes]]:
    for name in files:
        path = root / name
        try:
            if not path.is_file():  # a pipe or a device would never end; a broken link is nothing
                continue
            with path.open("rb") as file:
                text = file.read(limit_bytes + 1)  # one more shows that there is more
        except OSError as error:
            raise DataError(f"corpus file {path} cannot be read: {error.strerror}") from None
        if text:
            yield name, text


def _whole_letters(text: bytes, name: str, *, at_end: bool) -> bytes:
    """`text` without a letter that the cut at its end has split. Raises DataError where it is not UTF-8."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        decoder.decode(text, final=at_end)
    except UnicodeDecodeError as error:
        raise DataError(
            f"corpus file {name} is not UTF-8 text: {error.reason} at byte {error.start}"
        ) from None
    return text[: len(text) - len(decoder.getstate()[0])]

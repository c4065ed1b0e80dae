"""Files that a person names: what is read may not be without end, what is written takes no device's place."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Mapping
from pathlib import Path

from fivefold.errors import UserError
from fivefold.units import format_bytes


def read_regular(path: Path, most: int) -> bytes:
    """The first `most` bytes of a file. Raises: OSError, also for a pipe or a device, which would wait or never end."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    with open(descriptor, "rb") as file:
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        return file.read(most)


def read_limited(path: Path, most: int, what: str, error: type[UserError]) -> bytes:
    """A whole file of at most `most` bytes. `what`: its kind, as messages call it.

    Raises: `error`, one line, for a file that cannot be read, is a pipe or a device, or is larger.
    """
    try:
        content = read_regular(path, most + 1)
        size = path.stat().st_size if len(content) > most else 0
    except (OSError, ValueError) as refused:  # ValueError: a name that no file can have
        reason = getattr(refused, "strerror", None) or refused
        raise error(f"cannot read {what} {path}: {reason}") from None
    if size:
        raise error(f"{what} {path} has {format_bytes(size)}; at most {format_bytes(most)} are read")
    return content


def read_text(path: Path, most: int, what: str, error: type[UserError]) -> str:
    """A whole file of UTF-8 text, with or without a byte order mark. Raises: `error`, one line, as `read_limited`."""
    try:
        return read_limited(path, most, what, error).decode("utf-8-sig")
    except UnicodeDecodeError:
        raise error(f"{what} {path} is not UTF-8 text") from None


def replaceable(path: Path) -> Path:
    """Where a file that is to take the place of `path` goes: the end of its links.

    Raises: OSError where a folder, a pipe or a device is, which a renamed file would destroy.
    """
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return Path(os.path.realpath(path))


def write_whole(texts: Mapping[Path, str]) -> None:
    """Write files into folders that are there; all are on the disk before the first takes its place.

    Raises: OSError; then no file has changed, unless the disk refused in the midst of renaming.
    """
    places = {replaceable(path): text for path, text in texts.items()}
    waiting = {path: path.with_name(f".{path.name}.{os.getpid()}.tmp") for path in places}
    try:
        for path, partial in waiting.items():
            with partial.open("w", encoding="utf-8") as file:
                file.write(places[path])
                file.flush()
                os.fsync(file.fileno())  # a full disk must show before what was there is replaced
        for path, partial in waiting.items():
            partial.replace(path)
    finally:
        for partial in waiting.values():
            with contextlib.suppress(OSError):
                partial.unlink()

"""Files that a person names: what is read may not be without end, what is written takes no device's place."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path


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


def replaceable(path: Path) -> Path:
    """Where a file that is to take the place of `path` goes: the end of its links.

    Raises: OSError where a folder, a pipe or a device is, which a renamed file would destroy.
    """
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return Path(os.path.realpath(path))


def replace_text(path: Path, text: str) -> None:
    """Write a file, whole or not at all. Raises: OSError as `replaceable`, or what the disk says."""
    place = replaceable(path)
    partial = place.with_name(f".{place.name}.{os.getpid()}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(place)
    except OSError:
        partial.unlink(missing_ok=True)
        raise

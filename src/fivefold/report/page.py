"""What all pages have in common: templates that escape everything, and files that appear whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fivefold.errors import RecordError
from fivefold.units import format_bytes


def fill(template: str, **values: Any) -> str:
    """A page as text: self-contained HTML, no script, nothing to fetch."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("fivefold.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(template).render(**values)


def write_files(folder: Path, texts: Mapping[str, str]) -> None:
    """Write files by name into `folder` (made if missing); all are on the disk before the first takes its place.

    Raises: RecordError, one line, if the disk is full or the folder cannot be written.
    """
    waiting = {name: folder / f".{name}.{os.getpid()}.tmp" for name in texts}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, path in waiting.items():
            with path.open("w", encoding="utf-8") as file:
                file.write(texts[name])
                file.flush()
                os.fsync(file.fileno())  # a full disk must show before the old report is replaced
        for name, path in waiting.items():
            path.replace(folder / name)
    except OSError as error:
        size = sum(len(text.encode()) for text in texts.values())
        hint = f"; {format_bytes(size)} are needed" if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
        raise RecordError(f"cannot write the report to {folder}: {error.strerror or error}{hint}") from None
    finally:
        for path in waiting.values():
            with contextlib.suppress(OSError):
                path.unlink()

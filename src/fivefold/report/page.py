"""What all pages have in common: templates that escape everything, and files that appear whole or not at all."""

from __future__ import annotations

import errno
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fivefold.core.regular_file import write_whole
from fivefold.errors import RecordError
from fivefold.units import format_bytes, format_count, format_seconds


def fill(template: str, figures: Mapping[str, str], **values: Any) -> str:
    """A page as text: self-contained HTML, no script, nothing to fetch. `figures`: our drawings, as SVG."""
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

    from fivefold.report.drawing import PALETTE

    environment = Environment(
        loader=PackageLoader("fivefold.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(seconds=format_seconds, size=format_bytes, count=format_count)
    drawn = {name: Markup(svg) for name, svg in figures.items()}
    return environment.get_template(template).render(**values, figures=drawn, palette=PALETTE)


def write_files(folder: Path, texts: Mapping[str, str]) -> None:
    """Write files by name into `folder` (made if missing); all are on the disk before the first takes its place.

    Raises: RecordError, one line, if the disk is full or the folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_whole({folder / name: text for name, text in texts.items()})
    except OSError as error:
        size = sum(len(text.encode()) for text in texts.values())
        hint = f"; {format_bytes(size)} are needed" if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
        raise RecordError(f"cannot write the report to {folder}: {error.strerror or error}{hint}") from None

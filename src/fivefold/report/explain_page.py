"""An explanation as one HTML page that opens offline: no script, nothing to fetch. Drawn from its facts alone."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

from fivefold.errors import RecordError
from fivefold.units import format_bytes, format_count, format_seconds


def render(facts: dict[str, Any]) -> str:
    """The whole page as text. `facts`: what `fivefold explain --json` prints."""
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

    from fivefold.report.drawing import PALETTE
    from fivefold.report.explain_plots import draw_all

    environment = Environment(
        loader=PackageLoader("fivefold.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(seconds=format_seconds, size=format_bytes, count=format_count)
    return environment.get_template("explain.html").render(
        **facts, figures={name: Markup(svg) for name, svg in draw_all(facts).items()}, palette=PALETTE
    )


def write_page(facts: dict[str, Any], path: Path) -> None:
    """Write the page, whole or not at all. Raises: RecordError where the disk refuses."""
    text = render(facts)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        raise RecordError(f"cannot write the page {path}: {error.strerror or error}") from None
    finally:
        with contextlib.suppress(OSError):
            partial.unlink()

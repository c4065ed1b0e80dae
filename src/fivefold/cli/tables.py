"""Tables of the command line: numbers at a glance, recorded text as it is, and a width that fits the terminal."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

    from fivefold.plan.runs_table import Row

COLOURS = {
    "running": "cyan",
    "finished": "green",
    "failed": "red",
    "interrupted": "yellow",
    "lost": "magenta",
}
SPARKS, ASCII_SPARKS = "▁▂▃▄▅▆▇█", "_.-=+*%#"
SPARK_WIDTH = 60
LAYOUT_WIDTH = 26
"""Characters of a line that a layout should have before it is broken further."""
PIPE_WIDTH = 200
"""Columns when the output is no terminal: a table in a file or a pipe should not lose its columns."""


def brief(name: str, value: Any) -> str:
    """A value as text a person reads at a glance; the unit is the end of its name."""
    from fivefold.units import format_bytes, format_seconds

    if isinstance(value, str) or not isinstance(value, int | float) or isinstance(value, bool):
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        return text if len(text) <= PIPE_WIDTH else f"{text[: PIPE_WIDTH - 1]}… (--json has all of it)"
    if not math.isfinite(value) or value == 0:
        return str(value)
    if name.endswith("_bytes"):
        return format_bytes(value)
    if name.endswith("_s") and not name.endswith("_per_s"):
        return format_seconds(value)
    return str(value) if isinstance(value, int) else f"{value:.5g}"


def clean(text: str) -> Any:
    """Recorded text as it is: no markup, and no control characters that would reach the terminal."""
    from rich.text import Text

    return Text("".join(c if c.isprintable() else "�" for c in text))


def coloured(status: str) -> Any:
    """A status in its colour."""
    from rich.text import Text

    return Text(status, style=COLOURS.get(status, ""))


def make_table(*columns: Any, header: bool = True, tight: bool = False) -> Any:
    """Without lines; the first column is never broken. `tight`: one blank between columns, where there are many."""
    from rich import box
    from rich.table import Table

    made = Table(box=box.SIMPLE, show_header=header, pad_edge=False)
    if tight:
        made.padding = (0, 1, 0, 0)
    for i, column in enumerate(columns):
        made.add_column(column, no_wrap=i == 0, overflow="fold")
    return made


def table_of_layouts(
    console: Console, names: list[str], rows: list[list[str]], *, layout: str = "layout", spare: tuple[str, ...] = ()
) -> Any:  # fmt: skip
    """A table with a column of layouts: in a narrow terminal layouts are broken between their parts, numbers never.

    `spare`: columns that are left out there, one by one, until a layout has room.
    """
    widths = {
        name: max(len(line) for cell in (name, *(row[i] for row in rows)) for line in cell.split("\n"))
        for i, name in enumerate(names)
    }
    kept = list(names)

    def room() -> int:
        return console.width - sum(widths[name] for name in kept if name != layout) - 2 * len(kept)

    for name in spare:
        if room() >= min(widths[layout], LAYOUT_WIDTH):
            break
        kept.remove(name)
    made = make_table(*kept, tight=True)
    for column, name in zip(made.columns, kept):
        column.no_wrap = name != layout
    for row in rows:
        made.add_row(*(cell for name, cell in zip(names, row) if name in kept))
    return made


def span(low_s: float, high_s: float) -> str:
    """`40.5..56.6 s`: two times, with one unit where it is the same."""
    from fivefold.units import format_seconds

    low, high = format_seconds(low_s), format_seconds(high_s)
    return f"{low.split()[0]}..{high}" if low.split()[-1] == high.split()[-1] else f"{low}..{high}"


def say(console: Console, line: str) -> None:
    """One line; in a terminal, broken between words, with what follows indented."""
    import textwrap

    if console.is_terminal:
        indent = " " * (len(line) - len(line.lstrip()) + 3)
        line = textwrap.fill(
            line, console.width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
        )
    console.print(line, markup=False, highlight=False, soft_wrap=True)


def skipped_lines(skipped: Sequence[tuple[Row, str]], most: int, *, rest: str) -> list[str]:
    """Rows of a runs table that are left out, with the reason; `rest`: where more than `most` are listed."""
    lines = [f"skipped {row.name}: {reason}" for row, reason in skipped[:most]]
    if len(skipped) > most:
        lines.append(f"... and {len(skipped) - most} more; {rest}")
    return lines


def make_console() -> Console:
    """The terminal as it is; a file or a pipe as a wide one."""
    from rich.console import Console

    console = Console()
    return console if console.is_terminal else Console(width=PIPE_WIDTH)


def fits(console: Console, table: Any) -> bool:
    """Whether the terminal is wide enough for all of a table."""
    return bool(console.measure(table, options=console.options.update(width=10**6)).maximum <= console.width)


def local(moment: float) -> str:
    """Date and time here."""
    return datetime.fromtimestamp(moment).strftime("%Y-%m-%d %H:%M:%S")


def sparkline(values: list[float], *, ramp: str = SPARKS, width: int = SPARK_WIDTH) -> str:
    """`values` as one line of bars, lowest to highest, at most `width` of them (each the mean of its share).

    A share that holds a NaN or an infinity is drawn as `!`.
    """
    count = min(width, len(values))
    shares = [values[i * len(values) // count : (i + 1) * len(values) // count] for i in range(count)]
    means = [sum(share) / len(share) for share in shares]
    finite = [mean for mean in means if math.isfinite(mean)]
    low, high = (min(finite), max(finite)) if finite else (0.0, 0.0)
    scale = (len(ramp) - 1) / (high - low) if high > low else 0.0
    return "".join(ramp[round((m - low) * scale)] if math.isfinite(m) else "!" for m in means)

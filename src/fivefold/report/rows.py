"""What figures of the lab share: a row for each layout, numbers at the ends of bars, a scale with room for them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from fivefold.report.drawing import BAD, INK, MUTED, Drawing
from fivefold.report.lab_report import LayoutResult, short
from fivefold.units import GIB, KIB, MIB

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def rows(name: str, alt: str, layouts: Sequence[LayoutResult], extra_in: float = 0.0) -> Drawing:
    """A figure with a row for each layout."""
    return Drawing(name, alt, 0.85 + extra_in + 0.27 * max(len(layouts), 1))


def label_rows(
    axes: Axes, layouts: Sequence[LayoutResult], values: Sequence[float | None], *, named: bool = True
) -> None:
    """One row a layout, the first on top; a row without a value says so in place of a bar."""
    if named:
        labels = axes.set_yticks(range(len(layouts)), [short(one.layout) for one in layouts])
        for tick, layout in zip(labels, layouts):
            tick.label1.set_color(INK if layout.passed else BAD)
    axes.set_ylim(max(len(layouts), 1) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    for y, (layout, value) in enumerate(zip(layouts, values)):
        if value is None or not math.isfinite(value):
            text = "failed, no measurement" if layout.error else "no measurement"
            where = axes.get_yaxis_transform()
            axes.text(0.008, y, text, color=BAD if layout.error else MUTED, va="center", transform=where)


def scale(
    axes: Axes,
    values: Iterable[float | None],
    label: str,
    form: Callable[[float], str] | None = None,
    room: float = 1.2,
) -> None:
    """A linear axis from 0, with room for the numbers at the ends of the bars."""
    top = max([v for v in map(finite, values) if v is not None], default=0.0)
    axes.set_xlim(0, top * room or 1)
    axes.set_xlabel(label)
    axes.grid(axis="x")
    axes.locator_params(axis="x", nbins=6)
    if form:
        axes.xaxis.set_major_formatter(lambda value, _: form(value) if value else "0")


def note(axes: Axes, x: float, y: float, text: str, gap: int = 5) -> None:
    """Small text to the right of a point."""
    axes.annotate(text, (x, y), (gap, 0), textcoords="offset points", va="center", color=MUTED, fontsize=8)


def byte_unit(sizes: Sequence[float | None]) -> tuple[float, str]:
    """The largest unit in which the largest of these is at least 1, and its name."""
    top = max([size for size in sizes if size is not None], default=0)
    return next(
        ((unit, name) for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")) if top >= unit),
        (1, "bytes"),
    )


def mean(values: Sequence[float]) -> float | None:
    """None where there are no values, or it is not finite."""
    return finite(sum(values) / len(values)) if values else None


def finite(value: float | None) -> float | None:
    """The value, or None where it is not finite."""
    return value if value is not None and math.isfinite(value) else None

"""The figures of the lab's report, one function each: a result in, an inline <svg> out."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fivefold.report.drawing import BAD, BAR, INK, MUTED, PALETTE, SURFACE, Drawing, Legend
from fivefold.report.lab_report import (
    BOUND,
    JUDGED_STEPS,
    LabResult,
    LayoutResult,
    printable,
    scientific,
    short,
    show,
)
from fivefold.units import GIB, KIB, MIB, format_bytes, format_count, format_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes

AXES = ("dp", "data", "tp", "pp", "cp", "ep", "etp", "edp", "tie", "world")
"""Axes of the mesh in the order in which they are stacked."""


def draw_all(result: LabResult) -> dict[str, str]:
    """Every figure by name; a figure without data is left out."""
    figures = {
        "error": error,
        "loss": loss,
        "throughput": throughput,
        "cpu": cpu,
        "memory": memory,
        "communication": communication,
        "bubble": bubble,
    }
    drawn = {name: figure(result) for name, figure in figures.items()} if result.layouts else {}
    return {name: svg for name, svg in drawn.items() if svg}


def throughput(result: LabResult) -> str:
    """Tokens per second, one bar a layout; pale where ranks share cores."""
    layouts = result.layouts
    with _rows("throughput", "Tokens per second of every layout", layouts) as drawing:
        axes = drawing.figure.subplots()
        _label_rows(axes, layouts, [layout.tokens_per_s for layout in layouts])
        for y, layout in enumerate(layouts):
            value = _finite(layout.tokens_per_s)
            if value is not None:
                note = " · oversubscribed" if layout.oversubscribed else ""
                bar = axes.barh(y, value, 0.62, **_shade(BAR, layout))
                drawing.tip(bar, f"{layout.layout}: {format_count(value)} tokens/s")
                _note(axes, value, y, f"{format_count(value)}{note}")
        _scale(axes, [layout.tokens_per_s for layout in layouts], "tokens per second", format_count)
        return drawing.svg()


def cpu(result: LabResult) -> str:
    """Seconds of CPU inside seconds of wall time, per rank and step: bars are means, dots are ranks."""
    layouts = result.layouts
    walls = [_mean(layout.wall_s) for layout in layouts]
    with _rows("cpu", "CPU time and wall time per rank", layouts, extra_in=0.3) as drawing:
        axes, legend = drawing.figure.subplots(), Legend()
        _label_rows(axes, layouts, walls)
        for y, (layout, wall) in enumerate(zip(layouts, walls)):
            busy = _mean(layout.cpu_s)
            if wall is None or busy is None:
                continue
            for what, value, height, colour in (
                ("wall", wall, 0.66, PALETTE["pale"][0]),
                ("CPU", busy, 0.3, BAR),
            ):
                bar = axes.barh(y, value, height, color=colour)
                drawing.tip(
                    bar, f"{layout.layout}: {format_seconds(value)} of {what} time a step, mean of ranks"
                )
                legend.setdefault(f"{what} time", bar)
            for values, face in ((layout.wall_s, SURFACE), (layout.cpu_s, INK)):
                (dots,) = axes.plot(values, [y] * len(values), "o", ms=3.2, mfc=face, mec=INK, mew=0.7)
                legend.setdefault("one rank, wall" if face == SURFACE else "one rank, CPU", dots)
            end = max(v for v in (*layout.wall_s, *layout.cpu_s) if math.isfinite(v))
            _note(axes, end, y, f"{busy / wall:.0%} busy" if wall > 0 else "")
        _scale(
            axes,
            [v for one in layouts for v in (*one.wall_s, *one.cpu_s)],
            "seconds per step",
            format_seconds,
        )
        legend.draw(axes)
        return drawing.svg()


def memory(result: LabResult) -> str:
    """Peak memory per rank: the bar is the rank that needs most, the tick the one that needs least."""
    from matplotlib.patches import Patch

    layouts, base = result.layouts, result.one_device
    peaks = [layout.peak_bytes for layout in layouts]
    unit, name = byte_unit(peaks)
    with _rows("memory", "Peak memory per rank of every layout", layouts, extra_in=0.3) as drawing:
        axes, legend = drawing.figure.subplots(), Legend()
        _label_rows(axes, layouts, peaks)
        whole = base.peak_bytes if base else None
        for y, (layout, peak) in enumerate(zip(layouts, peaks)):
            if peak is None:
                continue
            least = min(layout.peak_memory_bytes)
            bar = axes.barh(y, peak / unit, 0.62, color=BAR)
            tip = f"{layout.layout}: {format_bytes(least)} to {format_bytes(peak)} a rank"
            drawing.tip(bar, tip)
            legend.setdefault("rank that needs most", bar)
            if least < peak:
                hatched: dict[str, Any] = {"facecolor": BAR, "edgecolor": SURFACE, "hatch": "////"}
                drawing.tip(axes.barh(y, least / unit, 0.62, lw=1.2, **hatched), tip)
                legend.setdefault("rank that needs least", Patch(lw=0, **hatched))
            times = f" · {peak / whole:.2f}×" if whole else ""
            _note(axes, peak / unit, y, f"{format_bytes(peak)}{times}")
        if whole:
            legend["one device"] = axes.axvline(whole / unit, color=INK, lw=1, ls=(0, (4, 3)))
        _scale(axes, [peak / unit for peak in peaks if peak is not None], f"{name} per rank")
        legend.draw(axes)
        return drawing.svg()


def communication(result: LabResult) -> str:
    """Bytes and seconds of communication per step, stacked by axis of the mesh."""
    layouts = result.layouts
    unit, name = byte_unit([sum(layout.comm_bytes_by_axis.values()) for layout in layouts])
    volumes, times = (
        [_positive(table) for table in tables]
        for tables in ([one.comm_bytes_by_axis for one in layouts], [one.comm_s_by_axis for one in layouts])
    )
    panels: list[tuple[str, float, str, list[dict[str, float]], Callable[[float], str]]] = [
        ("Volume", unit, f"{name} per step and rank", volumes, format_bytes),
        ("Time", 1.0, "seconds per step", times, format_seconds),
    ]
    with _rows("communication", "Communication per step by axis", layouts, extra_in=0.55) as drawing:
        both = drawing.figure.subplots(1, 2, sharey=True)
        seen = Legend()
        for axes, (title, size, label, tables, form) in zip(both, panels):
            _label_rows(axes, layouts, [one.step_time_s for one in layouts], named=axes is both[0])
            for y, (layout, table) in enumerate(zip(layouts, tables)):
                left = 0.0
                for axis in sorted(table, key=_axis_order):
                    bar = axes.barh(y, table[axis] / size, 0.62, left=left, color=_axis_colour(axis))
                    drawing.tip(bar, f"{layout.layout}, axis {axis}: {form(table[axis])}")
                    seen.setdefault(printable(axis), bar)
                    left += table[axis] / size
                if left or layout.step_time_s is not None:
                    _note(axes, left, y, form(left * size) if left else "none")
            totals = [sum(table.values()) / size for table in tables]
            _scale(axes, totals, label, format_seconds if form is format_seconds else None, room=1.35)
            axes.set_title(title)
        if seen:
            order = sorted(seen, key=_axis_order)
            handles = [seen[axis] for axis in order]
            drawing.figure.legend(handles, order, loc="outside upper left", ncols=len(order))
        return drawing.svg()


def bubble(result: LabResult) -> str:
    """Measured bubble against theory, pipelines only; empty text when there is none."""
    layouts = [one for one in result.layouts if one.pp > 1]
    if not layouts:
        return ""
    with _rows("bubble", "Pipeline bubble, measured and in theory", layouts, extra_in=0.3) as drawing:
        axes, legend = drawing.figure.subplots(), Legend()
        _label_rows(axes, layouts, [one.bubble_frac for one in layouts])
        for y, layout in enumerate(layouts):
            measured, theory = _finite(layout.bubble_frac), _finite(layout.bubble_theory)
            if measured is not None:
                bar = axes.barh(y, measured, 0.5, **_shade(PALETTE["pp"][0], layout))
                drawing.tip(bar, f"{layout.layout}: bubble {measured:.1%}")
                legend.setdefault("measured", bar)
            if theory is not None:
                (tick,) = axes.plot([theory] * 2, [y - 0.36, y + 0.36], color=INK, lw=2)
                legend.setdefault("theory (p-1)/(p-1+m)", tick)
            if measured is not None:
                split = f" · p = {layout.pp}, m = {layout.microbatches}" if layout.microbatches else ""
                text = f"{measured:.0%} against {show(theory, '{:.0%}'.format)}{split}"
                _note(axes, max(measured, theory or 0), y, text)
        values = [v for one in layouts for v in (one.bubble_frac, one.bubble_theory)]
        _scale(axes, values, "share of a step", "{:.0%}".format, room=1.45)
        legend.draw(axes)
        return drawing.svg()


def loss(result: LabResult) -> str:
    """All loss curves on top of each other and, below, how far each is from one device (log)."""
    layouts = [one for one in result.layouts if any(math.isfinite(v) for v in one.losses)]
    if not layouts:
        return ""
    base = next((one for one in layouts if one.ranks == 1), None)
    with Drawing("loss", "Loss curves of all layouts and their distance to one device", 5.6) as drawing:
        upper, lower = drawing.figure.subplots(2, 1, sharex=True, height_ratios=(1, 1.15))
        worst = BOUND
        for layout in layouts:
            kind = _kind(layout)
            look = _look(kind)
            steps = range(1, len(layout.losses) + 1)
            (curve,) = upper.plot(steps, layout.losses, **look)
            drawing.tip(curve, layout.layout)
            if base is None or layout is base:
                continue
            gaps = _distances(layout.losses, base.losses)
            worst = max([worst, *gaps])
            (curve,) = lower.plot(range(1, len(gaps) + 1), gaps, **look)
            drawing.tip(curve, layout.layout)
        upper.set_ylabel("loss")
        upper.grid(axis="y")
        _distance_axis(lower, worst)
        _kind_legend(upper, {_kind(one) for one in layouts})
        return drawing.svg()


def error(result: LabResult) -> str:
    """Relative error of the first step and of the judged losses, with the bound drawn (log)."""
    layouts = result.layouts
    values = [v for one in layouts for v in (one.max_rel_err, one.loss_max_rel_err) if v and math.isfinite(v)]
    low, high = min([1e-8, *values]) / 10, max([BOUND * 10, *values]) * 10
    with _rows(
        "error", "Relative error of every layout against one device", layouts, extra_in=0.3
    ) as drawing:
        axes, legend = drawing.figure.subplots(), Legend()
        axes.set_xscale("log")
        axes.set_xlim(low / 3, high * 30)  # room for the marks and their numbers
        axes.xaxis.set_major_formatter(lambda value, _: scientific(value, 0))
        axes.minorticks_off()
        _label_rows(axes, layouts, [one.worst_err for one in layouts])
        axes.axvspan(BOUND, high * 30, color=BAD, alpha=0.06, lw=0)
        legend[f"bound {scientific(BOUND, 0)}"] = axes.axvline(BOUND, color=BAD, lw=1.2, ls=(0, (4, 3)))
        marks = (
            ("first step", "max_rel_err", "o", None),
            (f"losses, steps 1-{JUDGED_STEPS}", "loss_max_rel_err", "D", SURFACE),
        )
        for what, _, mark, face in marks:
            (legend[what],) = axes.plot([], [], mark, ms=6, mfc=face or BAR, mec=BAR)
        for y, layout in enumerate(layouts):
            places = []
            for what, field, mark, face in marks:
                value = getattr(layout, field)
                if value is None:
                    continue
                colour = BAR if value <= BOUND else BAD
                place = min(max(value, low), high) if math.isfinite(value) else high
                places.append(place)
                (dot,) = axes.plot(place, y, mark, ms=6, mfc=face or colour, mec=colour, clip_on=False)
                drawing.tip(dot, f"{layout.layout}, {what}: {show(value, scientific)}")
            if places:
                text = "bit-equal" if layout.worst_err == 0 else show(layout.worst_err, scientific)
                _note(axes, max(places), y, text, gap=9)
        axes.set_xlabel("relative error against one device")
        axes.grid(axis="x")
        legend.draw(axes)
        return drawing.svg()


def _rows(name: str, alt: str, layouts: Sequence[LayoutResult], extra_in: float = 0.0) -> Drawing:
    return Drawing(name, alt, 0.85 + extra_in + 0.27 * max(len(layouts), 1))


def _label_rows(
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


def _scale(
    axes: Axes,
    values: Iterable[float | None],
    label: str,
    form: Callable[[float], str] | None = None,
    room: float = 1.2,
) -> None:
    """A linear axis from 0, with room for the numbers at the ends of the bars."""
    top = max([v for v in map(_finite, values) if v is not None], default=0.0)
    axes.set_xlim(0, top * room or 1)
    axes.set_xlabel(label)
    axes.grid(axis="x")
    axes.locator_params(axis="x", nbins=6)
    if form:
        axes.xaxis.set_major_formatter(lambda value, _: form(value) if value else "0")


def _note(axes: Axes, x: float, y: float, text: str, gap: int = 5) -> None:
    axes.annotate(text, (x, y), (gap, 0), textcoords="offset points", va="center", color=MUTED, fontsize=8)


def _distance_axis(axes: Axes, worst: float) -> None:
    """A log axis with the bound drawn over the steps that it judges."""
    from matplotlib.patches import Rectangle

    top = worst * 5
    axes.set_yscale("log", nonpositive="mask")
    axes.set_ylim(1e-9, top)
    axes.yaxis.set_major_formatter(lambda value, _: scientific(value, 0))
    axes.minorticks_off()
    axes.add_patch(Rectangle((1, BOUND), JUDGED_STEPS - 1, top - BOUND, color=BAD, alpha=0.08, lw=0))
    axes.plot([1, JUDGED_STEPS], [BOUND, BOUND], color=BAD, lw=1.4, ls=(0, (4, 3)))
    text = f"bound, steps 1-{JUDGED_STEPS}"
    axes.annotate(text, (1, BOUND), (4, 4), textcoords="offset points", color=BAD, fontsize=8)
    axes.set_ylabel("largest distance so far")
    axes.set_xlabel("step")
    axes.grid(axis="y")


def _kind(layout: LayoutResult) -> str:
    """Which axes a layout uses: `dp-tp`, or an empty text for one device."""
    return "-".join(axis for axis in ("dp", "tp", "pp") if getattr(layout, axis) > 1)


def _look(kind: str) -> dict[str, Any]:
    dashes = {0: "-", 1: "-", 2: (0, (5, 1.5)), 3: (0, (1.5, 1.2))}[len(kind.split("-")) if kind else 0]
    if not kind:
        return {"color": PALETTE["pale"][0], "lw": 5, "solid_capstyle": "round", "zorder": 1}
    return {"color": PALETTE[kind][0], "lw": 1.2, "ls": dashes, "zorder": 2}


def _kind_legend(axes: Axes, kinds: set[str]) -> None:
    from matplotlib.lines import Line2D

    order = [kind for kind in ("", *PALETTE) if kind in kinds]
    names = [kind.replace("-", " ") or "one device" for kind in order]
    axes.legend([Line2D([], [], **_look(kind)) for kind in order], names, loc="upper right", ncols=2)


def _shade(colour: str, layout: LayoutResult) -> dict[str, Any]:
    """Pale with an outline where ranks share cores."""
    from matplotlib.colors import to_rgba

    return {"facecolor": to_rgba(colour, 0.3 if layout.oversubscribed else 1), "edgecolor": colour, "lw": 1}


def _axis_order(axis: str) -> int:
    return AXES.index(axis) if axis in AXES else len(AXES)


def _axis_colour(axis: str) -> str:
    """`data` (dp x cp) has the colour of dp: with cp 1 it is the same axis."""
    return PALETTE[{"data": "dp"}.get(axis, axis if axis in AXES else "world")][0]


def byte_unit(sizes: Sequence[float | None]) -> tuple[float, str]:
    """The largest unit in which the largest of these is at least 1, and its name."""
    top = max([size for size in sizes if size is not None], default=0)
    return next(
        ((unit, name) for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")) if top >= unit),
        (1, "bytes"),
    )


def _positive(table: Mapping[str, float]) -> dict[str, float]:
    return {axis: value for axis, value in table.items() if math.isfinite(value) and value > 0}


def _distances(mine: Sequence[float], others: Sequence[float]) -> list[float]:
    """The largest relative distance up to each step, as it is judged; ends at a loss that is not finite."""
    worst, distances = 0.0, []
    for a, b in zip(mine, others):
        if not (math.isfinite(a) and math.isfinite(b)) or b == 0:
            break
        worst = max(worst, abs(a - b) / abs(b))
        distances.append(worst)
    return distances


def _mean(values: Sequence[float]) -> float | None:
    return _finite(sum(values) / len(values)) if values else None


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None

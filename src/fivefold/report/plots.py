"""The figures of the lab's report, one function each: a result in, an inline <svg> out."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fivefold.report.drawing import BAD, BAR, INK, PALETTE, SURFACE, Drawing, Legend
from fivefold.report.expert_plots import experts
from fivefold.report.lab_report import (
    JUDGED_STEPS,
    LabResult,
    LayoutResult,
    printable,
    scientific,
    show,
)
from fivefold.report.rows import byte_unit, finite, label_rows, mean, note, rows, scale
from fivefold.units import format_bytes, format_count, format_seconds

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
        "experts": experts,
    }
    drawn = {name: figure(result) for name, figure in figures.items()} if result.layouts else {}
    return {name: svg for name, svg in drawn.items() if svg}


def throughput(result: LabResult) -> str:
    """Tokens per second, one bar a layout; pale where ranks share cores."""
    layouts = result.layouts
    with rows("throughput", "Tokens per second of every layout", layouts) as drawing:
        axes = drawing.figure.subplots()
        label_rows(axes, layouts, [layout.tokens_per_s for layout in layouts])
        for y, layout in enumerate(layouts):
            value = finite(layout.tokens_per_s)
            if value is not None:
                shared = " · oversubscribed" if layout.oversubscribed else ""
                bar = axes.barh(y, value, 0.62, **_shade(BAR, layout))
                drawing.tip(bar, f"{layout.layout}: {format_count(value)} tokens/s")
                note(axes, value, y, f"{format_count(value)}{shared}")
        scale(axes, [layout.tokens_per_s for layout in layouts], "tokens per second", format_count)
        return drawing.svg()


def cpu(result: LabResult) -> str:
    """Seconds of CPU inside seconds of wall time, per rank and step: bars are means, dots are ranks."""
    layouts = result.layouts
    walls = [mean(layout.wall_s) for layout in layouts]
    with rows("cpu", "CPU time and wall time per rank", layouts, extra_in=0.3) as drawing:
        axes, legend = drawing.figure.subplots(), Legend()
        label_rows(axes, layouts, walls)
        for y, (layout, wall) in enumerate(zip(layouts, walls)):
            busy = mean(layout.cpu_s)
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
            note(axes, end, y, f"{busy / wall:.0%} busy" if wall > 0 else "")
        scale(
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
    with rows("memory", "Peak memory per rank of every layout", layouts, extra_in=0.3) as drawing:
        axes, legend = drawing.figure.subplots(), Legend()
        label_rows(axes, layouts, peaks)
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
            note(axes, peak / unit, y, f"{format_bytes(peak)}{times}")
        if whole:
            legend["one device"] = axes.axvline(whole / unit, color=INK, lw=1, ls=(0, (4, 3)))
        scale(axes, [peak / unit for peak in peaks if peak is not None], f"{name} per rank")
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
    with rows("communication", "Communication per step by axis", layouts, extra_in=0.55) as drawing:
        both = drawing.figure.subplots(1, 2, sharey=True)
        seen = Legend()
        for axes, (title, size, label, tables, form) in zip(both, panels):
            label_rows(axes, layouts, [one.step_time_s for one in layouts], named=axes is both[0])
            for y, (layout, table) in enumerate(zip(layouts, tables)):
                left = 0.0
                for axis in sorted(table, key=_axis_order):
                    bar = axes.barh(y, table[axis] / size, 0.62, left=left, color=_axis_colour(axis))
                    drawing.tip(bar, f"{layout.layout}, axis {axis}: {form(table[axis])}")
                    seen.setdefault(printable(axis), bar)
                    left += table[axis] / size
                if left or layout.step_time_s is not None:
                    note(axes, left, y, form(left * size) if left else "none")
            totals = [sum(table.values()) / size for table in tables]
            scale(axes, totals, label, format_seconds if form is format_seconds else None, room=1.35)
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
    with rows("bubble", "Pipeline bubble, measured and in theory", layouts, extra_in=0.3) as drawing:
        axes, legend = drawing.figure.subplots(), Legend()
        label_rows(axes, layouts, [one.bubble_frac for one in layouts])
        for y, layout in enumerate(layouts):
            measured, theory = finite(layout.bubble_frac), finite(layout.bubble_theory)
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
                note(axes, max(measured, theory or 0), y, text)
        values = [v for one in layouts for v in (one.bubble_frac, one.bubble_theory)]
        scale(axes, values, "share of a step", "{:.0%}".format, room=1.45)
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
        worst = result.bound
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
        _distance_axis(lower, worst, result)
        _kind_legend(upper, {_kind(one) for one in layouts})
        return drawing.svg()


def error(result: LabResult) -> str:
    """Relative error of the first step and of the judged losses, with the bound drawn (log)."""
    layouts = result.layouts
    values = [v for one in layouts for v in (one.max_rel_err, one.loss_max_rel_err) if v and math.isfinite(v)]
    bound = result.bound
    low, high = min([bound / 1000, *values]) / 10, max([bound * 10, *values]) * 10
    with rows("error", "Relative error of every layout against one device", layouts, extra_in=0.3) as drawing:
        axes, legend = drawing.figure.subplots(), Legend()
        axes.set_xscale("log")
        axes.set_xlim(low / 3, high * 30)  # room for the marks and their numbers
        axes.xaxis.set_major_formatter(lambda value, _: scientific(value, 0))
        axes.minorticks_off()
        label_rows(axes, layouts, [one.worst_err for one in layouts])
        axes.axvspan(bound, high * 30, color=BAD, alpha=0.06, lw=0)
        legend[f"bound {scientific(bound, 0)}"] = axes.axvline(bound, color=BAD, lw=1.2, ls=(0, (4, 3)))
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
                colour = BAR if value <= bound else BAD
                place = min(max(value, low), high) if math.isfinite(value) else high
                places.append(place)
                (dot,) = axes.plot(place, y, mark, ms=6, mfc=face or colour, mec=colour, clip_on=False)
                drawing.tip(dot, f"{layout.layout}, {what}: {show(value, scientific)}")
            if places:
                text = "bit-equal" if layout.worst_err == 0 else show(layout.worst_err, scientific)
                note(axes, max(places), y, text, gap=9)
        axes.set_xlabel("relative error against one device")
        axes.grid(axis="x")
        legend.draw(axes)
        return drawing.svg()


def _distance_axis(axes: Axes, worst: float, result: LabResult) -> None:
    """A log axis with the bound drawn over the steps that it judges."""
    from matplotlib.patches import Rectangle

    top, bound = worst * 5, result.bound
    axes.set_yscale("log", nonpositive="mask")
    axes.set_ylim(1e-17 if result.dtype == "float64" else 1e-9, top)
    axes.yaxis.set_major_formatter(lambda value, _: scientific(value, 0))
    axes.minorticks_off()
    axes.add_patch(Rectangle((1, bound), JUDGED_STEPS - 1, top - bound, color=BAD, alpha=0.08, lw=0))
    axes.plot([1, JUDGED_STEPS], [bound, bound], color=BAD, lw=1.4, ls=(0, (4, 3)))
    text = f"bound, steps 1-{JUDGED_STEPS}"
    axes.annotate(text, (1, bound), (4, 4), textcoords="offset points", color=BAD, fontsize=8)
    axes.set_ylabel("largest distance so far")
    axes.set_xlabel("step")
    axes.grid(axis="y")


def _kind(layout: LayoutResult) -> str:
    """Which axes a layout uses: `dp-tp`, or an empty text for one device."""
    return "-".join(axis for axis in ("dp", "tp", "pp", "cp", "ep") if getattr(layout, axis) > 1)


def _look(kind: str) -> dict[str, Any]:
    """Colour and dashes; with cp or ep the colour of the last axis, and other dashes for each company it has."""
    if not kind:
        return {"color": PALETTE["pale"][0], "lw": 5, "solid_capstyle": "round", "zorder": 1}
    axes = kind.split("-")
    dashes: Any = {1: "-", 2: (0, (5, 1.5)), 3: (0, (1.5, 1.2))}.get(len(axes))
    if kind not in PALETTE:
        company = sum(2 ** ("dp", "tp", "pp", "cp").index(axis) for axis in axes[:-1])
        dashes = (0, (1 + company, 1.3))
    return {"color": PALETTE.get(kind, PALETTE[axes[-1]])[0], "lw": 1.2, "ls": dashes, "zorder": 2}


def _kind_legend(axes: Axes, kinds: set[str]) -> None:
    from matplotlib.lines import Line2D

    order = sorted(kinds, key=lambda kind: (len(kind.split("-")) if kind else 0, kind))
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

"""The figures of a run's report, one function each: a report in, an inline <svg> out, or nothing without data."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fivefold.report.drawing import BAD, BAR, INK, PALETTE, Drawing, Legend
from fivefold.report.lab_report import printable, scientific
from fivefold.report.rows import byte_unit
from fivefold.report.run_results import PrecisionReport
from fivefold.units import format_count

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from fivefold.report.run_report import RunReport

MOST_POINTS = 600
"""Of a curve; beyond, each point is the mean of several steps."""
LOADS = (0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 3.0)
"""Choices of an expert over the mean of its layer: where one shade ends and the next begins."""
MOST_LABELS = 24
"""Names along an axis."""


def draw_all(report: RunReport) -> dict[str, str]:
    """Every figure by name; a figure without data is left out."""
    figures: dict[str, Callable[[RunReport], str]] = {
        "loss": loss,
        "speed": speed,
        "imbalance": imbalance,
        "load": load,
        "routing": routing,
        "dispatch": dispatch,
        "scale": scale,
        "norms": norms,
        "largest": largest,
    }
    drawn = {name: figure(report) for name, figure in figures.items()}
    return {name: svg for name, svg in drawn.items() if svg}


def loss(report: RunReport) -> str:
    """Loss, held-out loss and gradient norm by step."""
    return _panels(
        report,
        "loss",
        "Loss and gradient norm by step",
        [
            ("loss", {"training": ("loss", INK), "held-out text": ("validation_loss", _colour("dp"))}),
            ("gradient norm", {"gradient norm": ("grad_norm", BAR)}),
        ],
    )


def speed(report: RunReport) -> str:
    """Throughput by step."""
    lines = {"tokens per second": ("tokens_per_s", INK)}
    return _panels(report, "speed", "Tokens per second by step", [("tokens per second", lines)], format_count)


def imbalance(report: RunReport) -> str:
    """The busiest expert, and the busiest rank, over the mean of its layer, by step."""
    lines = {
        "busiest expert": ("expert_imbalance", _colour("ep")),
        "busiest rank": ("rank_imbalance", _colour("dp")),
    }
    return _panels(report, "imbalance", "Largest over mean load of experts by step", [("max / mean", lines)])


def routing(report: RunReport) -> str:
    """Choices beyond a capacity, the routers' entropy and their losses, by step."""
    dropped = report.series("dropped_choices")
    rows: list[tuple[str, dict[str, tuple[str, str]]]] = [
        ("dropped choices", {"dropped": ("dropped_choices", BAD)} if any(dropped.values()) else {}),
        ("entropy, nats", {"entropy": ("router_entropy", _colour("pp"))}),
        ("balance loss", {"balance": ("balance_loss", _colour("tp"))}),
        ("z-loss", {"z": ("z_loss", _colour("cp"))}),
    ]
    return _panels(report, "routing", "Dropped choices, entropy and losses of routers by step", rows)


def dispatch(report: RunReport) -> str:
    """Bytes of all-to-alls by step: the mean over ranks, and the rank that has most."""
    ranks = report.of_ranks("dispatch_bytes")
    if not ranks:
        return ""
    with Drawing("dispatch", "Bytes of dispatch and combine by step", 2.4) as drawing:
        axes, legend = drawing.figure.subplots(), Legend()
        unit, name = byte_unit([max(found) for found in ranks.values()])
        for what, colour, of in (("largest rank", BAR, max), ("mean of ranks", _colour("ep"), _mean)):
            values = {step: float(of(found)) / unit for step, found in ranks.items()}
            legend[what] = _line(axes, values, colour)
        _steps(axes, f"{name} a step")
        axes.set_ylim(bottom=0)
        legend.draw(axes)
        return drawing.svg()


def load(report: RunReport) -> str:
    """How often each expert of each layer was chosen: one square each, darker the busier it is."""
    experts = report.experts
    if experts is None or not experts.layers:
        return ""
    from matplotlib.patches import PathPatch

    widest = max(len(layer.chosen) for layer in experts.layers)
    rows = len(experts.layers)
    with Drawing("load", "Choices of each expert by layer", 1.1 + min(7.5, 0.3 * rows)) as drawing:
        axes, legend = drawing.figure.subplots(), Legend()
        cells: dict[int, list[tuple[int, int]]] = {}
        for y, layer in enumerate(experts.layers):
            mean = max(1.0, sum(layer.chosen) / len(layer.chosen))
            for x, chosen in enumerate(layer.chosen):
                cells.setdefault(_shade(chosen / mean), []).append((x, y))
        for shade in range(-1, len(LOADS) + 1):
            patch = PathPatch(_squares(cells.get(shade, [])), lw=0, **_look(shade))
            if shade in cells:
                drawing.tip(axes.add_patch(patch), f"{len(cells[shade])} experts: {_words(shade)}")
            if shade in (-1, 0, 3, 5, 7, 8) and (shade in cells or shade >= 0):
                legend[_words(shade)] = patch
        axes.set_xlim(-0.5, widest - 0.5)
        axes.set_ylim(rows - 0.5, -0.5)
        every = -(-rows // MOST_LABELS)
        axes.set_yticks(range(0, rows, every), [str(one.layer) for one in experts.layers[::every]])
        axes.locator_params(axis="x", integer=True)
        axes.set_ylabel("layer")
        axes.set_xlabel("expert")
        same = len({len(layer.chosen) for layer in experts.layers}) == 1
        if same and 1 < experts.ep <= 64 and not experts.moved:
            each = widest // experts.ep
            for edge in range(each, widest, each):
                axes.axvline(edge - 0.5, color=INK, lw=0.7)
        legend.draw(axes)
        return drawing.svg()


def scale(report: RunReport) -> str:
    """The loss scale by step, and the steps that overflowed."""
    precision = report.precision
    if precision is None or not precision.scales:
        return ""
    last = max([report.run.last_step or 1, *(step for step, _ in precision.scales)])
    with Drawing("scale", "Loss scale and overflows by step", 2.4) as drawing:
        axes, legend = drawing.figure.subplots(), Legend()
        steps = [*(step for step, _ in precision.scales), last + 1]
        values = [*(value for _, value in precision.scales), precision.scales[-1][1]]
        (legend["loss scale"],) = axes.step(steps, values, where="post", color=INK, lw=1.4)
        axes.set_yscale("log", base=2)
        if precision.overflow_steps:
            at = [_scale_at(precision, step) for step in precision.overflow_steps]
            (dots,) = axes.plot(precision.overflow_steps, at, "x", color=BAD, ms=6, mew=1.4)
            legend["step that overflowed and was skipped"] = dots
        _steps(axes, "loss scale", lambda value: f"{value:,.0f}")
        axes.minorticks_off()
        legend.draw(axes)
        return drawing.svg()


def norms(report: RunReport) -> str:
    """The gradient norm of each block over the looks (log)."""
    precision = report.precision
    if precision is None or not precision.looks:
        return ""
    from matplotlib.ticker import LogLocator

    with Drawing("norms", "Gradient norm of each block by step", 3.4) as drawing:
        axes, legend = drawing.figure.subplots(), Legend()
        axes.set_yscale("log", nonpositive="mask")
        layers = [block for block in precision.blocks if block.startswith("layers.")]
        for block in precision.blocks:
            values = {look.step: look.norms[block] for look in precision.looks if block in look.norms}
            deep = layers.index(block) / max(1, len(layers) - 1) if block in layers else 1.0
            colour = _colour({"embedding": "tp", "head": "dp"}.get(block, "pp"))
            curve = _line(axes, values, colour, alpha=0.3 + 0.7 * deep, points=len(precision.looks) <= 40)
            drawing.tip(curve, block)
            if block in (*layers[:1], *layers[-1:], "embedding", "head"):
                legend[printable(block)] = curve
            for step in (step for step, value in values.items() if not math.isfinite(value)):
                drawing.tip(
                    axes.plot(step, 0.97, "x", color=BAD, ms=6, transform=axes.get_xaxis_transform()),
                    f"{block}, step {step}: not finite",
                )
        _steps(axes, "gradient norm", lambda value: scientific(value, 0))
        seen = [n for look in precision.looks for n in look.norms.values() if 0 < n < math.inf]
        if seen and max(seen) < 100 * min(seen):
            axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.minorticks_off()
        legend.draw(axes)
        return drawing.svg()


def largest(report: RunReport) -> str:
    """The largest absolute output of each block over the looks (log), against the end of the format."""
    precision = report.precision
    rows = [row for row in precision.rows() if row.largest is not None] if precision else []
    if precision is None or not rows:
        return ""
    finite = [row.largest for row in rows if row.largest and math.isfinite(row.largest)]
    low, high = min(finite, default=1.0) / 4, max(finite, default=1.0) * 4
    near = precision.largest_number <= 1e6
    high = max(high, precision.largest_number * 4) if near else high
    with Drawing("largest", "Largest output of each block", 1.0 + min(7.0, 0.24 * len(rows))) as drawing:
        axes, legend = drawing.figure.subplots(), Legend()
        axes.set_xscale("log")
        axes.set_xlim(low, high)
        for y, row in enumerate(rows):
            value = row.largest if row.largest is not None and math.isfinite(row.largest) else high
            colour = BAR if row.largest is not None and math.isfinite(row.largest) else BAD
            bar = axes.barh(y, max(value, low), 0.62, color=colour)
            drawing.tip(bar, f"{row.block}: {row.largest:.4g} at step {row.step}, {row.module}")
        if near:
            end = axes.axvline(precision.largest_number, color=BAD, lw=1.2, ls=(0, (4, 3)))
            legend[f"largest number of {printable(precision.dtype)}"] = end
        every = -(-len(rows) // MOST_LABELS)
        axes.set_yticks(range(0, len(rows), every), [printable(row.block) for row in rows[::every]])
        axes.set_ylim(len(rows) - 0.4, -0.6)
        axes.xaxis.set_major_formatter(lambda value, _: scientific(value, 0))
        axes.minorticks_off()
        axes.set_xlabel("largest absolute output")
        axes.grid(axis="x")
        legend.draw(axes)
        return drawing.svg()


def _panels(
    report: RunReport,
    name: str,
    alt: str,
    panels: Sequence[tuple[str, Mapping[str, tuple[str, str]]]],
    form: Callable[[float], str] | None = None,
) -> str:
    """Panels one above the other, each of lines by step: label -> (name of the number, colour)."""
    found = []
    for label, lines in panels:
        series = {what: (_finite(report.series(key)), colour) for what, (key, colour) in lines.items()}
        series = {what: pair for what, pair in series.items() if pair[0]}
        if series:
            found.append((label, series))
    if not found:
        return ""
    with Drawing(name, alt, 0.6 + 1.6 * len(found)) as drawing:
        all_axes = drawing.figure.subplots(len(found), 1, sharex=True, squeeze=False)[:, 0]
        for axes, (label, series) in zip(all_axes, found):
            legend = Legend()
            for what, (values, colour) in series.items():
                legend[what] = _line(axes, values, colour, points=len(values) <= 40)
                drawing.tip(legend[what], what)
            _steps(axes, label, form, last=axes is all_axes[-1])
            if len(series) > 1:
                legend.draw(axes)
        return drawing.svg()


def _line(
    axes: Axes, values: Mapping[int, float], colour: str, *, alpha: float = 1.0, points: bool = False
) -> Any:
    steps, thin = _thinned(values)
    (curve,) = axes.plot(
        steps, thin, color=colour, lw=1.4, alpha=alpha, marker="o" if points else None, ms=3, mew=0
    )
    return curve


def _steps(axes: Axes, label: str, form: Callable[[float], str] | None = None, *, last: bool = True) -> None:
    axes.set_ylabel(label)
    axes.grid(axis="y")
    if form is not None:
        axes.yaxis.set_major_formatter(lambda value, _: form(value))
    axes.locator_params(axis="x", integer=True)
    if last:
        axes.set_xlabel("step")


def _thinned(values: Mapping[int, float]) -> tuple[list[float], list[float]]:
    """Steps and values, at most `MOST_POINTS` of them: means of as many neighbours each."""
    pairs = [(float(step), value) for step, value in values.items() if math.isfinite(value)]
    each = -(-len(pairs) // MOST_POINTS) or 1
    runs = [pairs[i : i + each] for i in range(0, len(pairs), each)]
    return [_mean([step for step, _ in run]) for run in runs], [_mean([v for _, v in run]) for run in runs]


def _squares(cells: Sequence[tuple[int, int]]) -> Any:
    """One path of a square around each (x, y), with a little room between them."""
    from matplotlib.path import Path

    half = 0.46
    corners = [
        (x + dx, y + dy)
        for x, y in cells
        for dx, dy in ((-half, -half), (half, -half), (half, half), (-half, half), (-half, -half))
    ]
    codes = [Path.MOVETO, Path.LINETO, Path.LINETO, Path.LINETO, Path.CLOSEPOLY] * len(cells)
    return Path(corners, codes) if cells else Path([(0.0, 0.0)], [Path.MOVETO])


def _shade(load: float) -> int:
    """-1: never chosen; else the number of bounds of `LOADS` that it has passed."""
    return -1 if load == 0 else sum(load >= bound for bound in LOADS)


def _look(shade: int) -> dict[str, Any]:
    if shade < 0:
        return {"facecolor": BAD, "alpha": 1.0}
    return {"facecolor": _colour("dp"), "alpha": (shade + 1) / (len(LOADS) + 1)}


def _words(shade: int) -> str:
    if shade < 0:
        return "never chosen"
    if shade == 0:
        return f"below {LOADS[0]:g}× mean"
    return (
        f"{LOADS[shade - 1]:g}× or more"
        if shade == len(LOADS)
        else f"{LOADS[shade - 1]:g}× to {LOADS[shade]:g}×"
    )


def _scale_at(precision: PrecisionReport, step: int) -> float:
    return [value for first, value in precision.scales if first <= step][-1:][0] if precision.scales else 1.0


def _colour(axis: str) -> str:
    return PALETTE[axis][0]


def _finite(values: Mapping[int, float]) -> dict[int, float]:
    return {step: value for step, value in values.items() if math.isfinite(value)}


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)

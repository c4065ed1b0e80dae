"""The figures of an explanation, one function each: its facts in, an inline <svg> out."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from fivefold.report.drawing import BAD, BAR, GRID, INK, MUTED, PALETTE, SURFACE, Drawing, Legend
from fivefold.report.lab_report import short
from fivefold.units import GIB, format_bytes, format_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ROW_IN = 0.27
TIME_COLOURS = {
    "at peak": "bar", "computed again": "muted", "below peak": "pale", "bubble": "tie", "optimizer": "etp",
    "fixed": "world",
}  # fmt: skip
"""Term of the waterfall -> name of its colour; axes have their own."""
MOST_ALIKE = 24


def draw_all(facts: dict[str, Any]) -> dict[str, str]:
    """Every figure by name."""
    figures = {
        "waterfall": waterfall, "memory": memory, "triangle": triangle, "steps": steps, "axes": axes, "alike": alike,
    }  # fmt: skip
    drawn = {name: figure(facts) for name, figure in figures.items()}
    return {name: svg for name, svg in drawn.items() if svg}


def waterfall(facts: dict[str, Any]) -> str:
    """Each term of the step begins where the one before ends; the last bar is the step with its interval."""
    rows, plan = [row for row in facts["waterfall"] if row["seconds"]], facts["plan"]
    with Drawing("waterfall", "Step time by term", 0.9 + ROW_IN * (len(rows) + 1)) as drawing:
        plot = drawing.figure.subplots()
        _rows(plot, [*(row["term"] for row in rows), "step"])
        for y, row in enumerate(rows):
            bar = plot.barh(y, row["seconds"], 0.62, left=row["from_s"], color=_colour(row["term"]))
            text = f"{format_seconds(row['seconds'])} · {row['share']:.1%}"
            drawing.tip(bar, f"{row['term']}: {text}")
            _note(plot, row["from_s"] + row["seconds"], y, text)
        y, step = len(rows), plan["step_time_s"]
        drawing.tip(plot.barh(y, step, 0.62, color=INK), f"step: {format_seconds(step)}")
        low, high = plan["step_time_p10_s"], plan["step_time_p90_s"]
        plot.plot([low, high], [y, y], color=BAD, lw=2)
        _note(plot, high, y, f"{format_seconds(step)} ({format_seconds(low)} to {format_seconds(high)})")
        _scale(plot, max(high, step) * 1.25, "seconds", format_seconds)
        return drawing.svg()


def memory(facts: dict[str, Any]) -> str:
    """Memory of the fullest rank, stacked term after term, with the limit of the device; below it every rank."""
    plan = facts["plan"]
    terms = {term: n for term, n in plan["memory"].items() if n}
    colours = ("bar", "pale", "dp", "tp", "pp", "cp", "ep", "etp", "tie", "world")
    ranks = plan["rank_memory_bytes"] if 1 < len(plan["rank_memory_bytes"]) <= 32 else []
    labels = [f"rank {plan['peak_rank']}", *(f"rank {rank}, in all" for rank in range(len(ranks)))]
    with Drawing("memory", "Memory by term", 1.25 + ROW_IN * len(labels)) as drawing:
        plot, legend, begun = drawing.figure.subplots(), Legend(), 0.0
        _rows(plot, labels)
        for (term, n), colour in zip(terms.items(), colours):
            bar = plot.barh(0, n / GIB, 0.62, left=begun, color=PALETTE[colour][0])
            drawing.tip(bar, f"{term}: {format_bytes(n)}")
            legend.setdefault(term, bar)
            begun += n / GIB
        _note(plot, begun, 0, format_bytes(plan["peak_memory_bytes"]))
        for y, n in enumerate(ranks, 1):
            drawing.tip(plot.barh(y, n / GIB, 0.62, color=BAR), format_bytes(n))
            _note(plot, n / GIB, y, format_bytes(n))
        have = plan["capacity_bytes"] / GIB
        plot.axvline(have, color=BAD, lw=1.2, ls=(0, (4, 3)))
        plot.axvspan(have / (1 + plan["band"]), have, color=BAD, alpha=0.06, lw=0)
        _scale(
            plot, max(have, begun) * 1.2, "GiB; dashed: what a program gets, shaded: the band of the estimate"
        )
        drawing.figure.legend(list(legend.values()), list(legend), loc="outside upper left", ncols=5)
        return drawing.svg()


def triangle(facts: dict[str, Any]) -> str:
    """The layout between its three costs: a corner is all memory, computation or communication."""
    corners = {"compute": (0.0, 0.0), "communication": (1.0, 0.0), "memory": (0.5, math.sqrt(3) / 2)}
    at = facts["triangle"]["at"]
    with Drawing("triangle", "Between memory, computation and communication", 3.6) as drawing:
        plot = drawing.figure.subplots()
        plot.set_aspect("equal")
        plot.axis("off")
        outline = [*corners.values(), next(iter(corners.values()))]
        plot.plot(*zip(*outline), color=GRID, lw=1.5)
        for name, (x, y) in corners.items():
            share = facts["triangle"][name]
            plot.annotate(
                f"{name} {share:.0%}", (x, y), (0, 8 if y else -14), textcoords="offset points", ha="center",
                color=INK,
            )  # fmt: skip
        x, y = (sum(at[name] * corners[name][i] for name in corners) for i in (0, 1))
        (dot,) = plot.plot(x, y, "o", ms=10, color=BAD)
        drawing.tip(dot, facts["triangle"]["text"])
        plot.set_xlim(-0.35, 1.35)
        plot.set_ylim(-0.12, 1.0)
        return drawing.svg()


def steps(facts: dict[str, Any]) -> str:
    """How much slower or faster every layout one step away is; pale where it does not surely fit."""
    rows = [row for row in facts["counterfactuals"] if row["legal"]]
    rows.sort(key=lambda row: float(row["step_time_ratio"]))
    if not rows:
        return ""
    with Drawing("steps", "Layouts one step away", 0.9 + ROW_IN * len(rows)) as drawing:
        plot = drawing.figure.subplots()
        _rows(plot, [short(row["change"]) for row in rows])
        changes = [row["step_time_ratio"] - 1 for row in rows]
        for y, (row, change) in enumerate(zip(rows, changes)):
            fits = row["fits"] == "yes"
            colour = PALETTE["pp" if change < 0 else "bar"][0]
            bar = plot.barh(
                y, change, 0.62, facecolor=colour if fits else SURFACE, edgecolor=colour, lw=1,
                hatch=None if fits else "////",
            )  # fmt: skip
            drawing.tip(bar, row["text"])
            left = change < 0
            text = f"{change:+.1%}{'' if fits else ' · ' + row['fits'].replace('no', 'does not fit')}"
            plot.annotate(
                text, (change, y), (-5 if left else 5, 0), textcoords="offset points", va="center",
                ha="right" if left else "left", color=MUTED, fontsize=8,
            )  # fmt: skip
        plot.axvline(0, color=INK, lw=1)
        low, high = min(0.0, *changes), max(0.0, *changes)
        room = 0.25 * (high - low or 1)
        plot.set_xlim(low - room, high + room)
        plot.set_xlabel("change of the step time; hatched: does not surely fit")
        plot.grid(axis="x")
        plot.xaxis.set_major_formatter(lambda value, _: f"{value:+.0%}" if value else "0")
        return drawing.svg()


def axes(facts: dict[str, Any]) -> str:
    """What each axis sends in a step, and how many seconds of that nothing hides."""
    rows = facts["axes"]
    with Drawing("axes", "Communication by axis", 0.9 + ROW_IN * len(rows)) as drawing:
        left, right = drawing.figure.subplots(1, 2, sharey=True)
        _rows(left, [f"{row['axis']}{row['degree']}" for row in rows])
        for y, row in enumerate(rows):
            for plot, value, form in (
                (left, row["sent_bytes"] / GIB, lambda x: format_bytes(x * GIB)),
                (right, row["exposed_s"], format_seconds),
            ):
                drawing.tip(
                    plot.barh(y, value, 0.62, color=_colour(row["axis"])), f"{row['axis']}: {form(value)}"
                )
                _note(plot, value, y, form(value) if value else "none")
        _scale(left, max(row["sent_bytes"] for row in rows) / GIB * 1.35, "GiB sent by a rank in a step")
        _scale(
            right, max(row["exposed_s"] for row in rows) * 1.35, "exposed seconds of a step", format_seconds
        )
        return drawing.svg()


def alike(facts: dict[str, Any]) -> str:
    """Intervals of this layout and of those that cannot be told from it."""
    plan, others = facts["plan"], facts["alike"][:MOST_ALIKE]
    if not others:
        return ""
    rows = [plan, *others]
    with Drawing("alike", "Layouts that cannot be told apart", 0.9 + ROW_IN * len(rows)) as drawing:
        plot = drawing.figure.subplots()
        _rows(plot, [short(row["layout"]) for row in rows])
        for y, row in enumerate(rows):
            (line,) = plot.plot(
                [row["step_time_p10_s"], row["step_time_p90_s"]],
                [y, y],
                color=BAR if y else INK,
                lw=4,
                alpha=0.5,
            )
            plot.plot(row["step_time_s"], y, "o", ms=5, color=BAR if y else INK)
            drawing.tip(line, f"{row['layout']}: {format_seconds(row['step_time_s'])}")
        plot.set_xlabel("seconds of a step, 10 to 90 %")
        plot.grid(axis="x")
        return drawing.svg()


def _colour(term: str) -> str:
    return PALETTE[TIME_COLOURS.get(term, term)][0]


def _rows(plot: Axes, labels: list[str]) -> None:
    """One row a label, the first on top."""
    plot.set_yticks(range(len(labels)), labels)
    plot.set_ylim(len(labels) - 0.4, -0.6)
    plot.tick_params(axis="y", length=0)
    plot.spines["left"].set_visible(False)


def _note(plot: Axes, x: float, y: float, text: str) -> None:
    plot.annotate(text, (x, y), (5, 0), textcoords="offset points", va="center", color=MUTED, fontsize=8)


def _scale(plot: Axes, top: float, label: str, form: Any = None) -> None:
    plot.set_xlim(0, top or 1)
    plot.set_xlabel(label)
    plot.grid(axis="x")
    plot.locator_params(axis="x", nbins=6)
    if form:
        plot.xaxis.set_major_formatter(lambda value, _: form(value) if value else "0")

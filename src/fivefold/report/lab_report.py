"""The lab's result as a value, as one HTML page that opens offline, and as a table for the terminal.

`lab.json` holds a `LabResult`; `report.html` is drawn from it and from nothing else, so a report can be drawn
again at any time. The page has no script and fetches nothing: figures are inline SVG, styles are inline CSS.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import ConfigDict, Field

from fivefold.core.value import Value
from fivefold.report.page import fill, write_files
from fivefold.units import format_bytes, format_count, format_seconds

if TYPE_CHECKING:
    from rich.table import Table

BOUND = 1e-5
"""A float32 layout is the same model as one device when every relative error stays below this (float64: 1e-10)."""
JUDGED_STEPS = 20
"""Losses are judged up to this step; later ones are drawn only (rounding grows without any fault)."""
NOTHING = "–"
LABEL_CHARS = 34


class _Measured(Value):
    """Measurements may be NaN or infinite (runs diverge); JSON holds them as `"NaN"` and `"Infinity"`."""

    model_config = ConfigDict(allow_inf_nan=True, ser_json_inf_nan="strings")


class LayoutResult(_Measured):
    """What one layout did. A layout that failed has `error` and may lack every measurement.

    Per-rank tuples are in rank order. Times are means over the timed steps. Relative errors are those of
    `verify`: max|a-b| / max(max|b|, 0.01 x the largest |b| of that quantity in its block).
    """

    layout: str
    ranks: int = Field(ge=1)
    tp: int = Field(default=1, ge=1)
    pp: int = Field(default=1, ge=1)
    dp: int = Field(default=1, ge=1)
    cp: int = Field(default=1, ge=1)
    ep: int = Field(default=1, ge=1)
    bound: float = BOUND
    passed: bool
    error: str | None = None
    oversubscribed: bool = False
    """More ranks than cores: the ranks take turns, so wall time says nothing about real devices."""
    microbatches: int | None = None

    tokens_per_s: float | None = None
    step_time_s: float | None = None
    cpu_time_s_per_step: float | None = None
    """CPU time of one step, summed over the ranks."""
    cpu_s: tuple[float, ...] = ()
    """CPU time of one step, per rank."""
    wall_s: tuple[float, ...] = ()
    """Wall time of one step, per rank."""
    peak_memory_bytes: tuple[int, ...] = ()
    """Per rank; the largest is the headline."""

    comm_frac: float | None = None
    """Share of a step spent in communication, waiting for slower ranks included."""
    comm_s_by_axis: Mapping[str, float] = Field(default_factory=dict)
    """Seconds per step, mean over ranks."""
    comm_bytes_by_axis: Mapping[str, float] = Field(default_factory=dict)
    """Bytes per step per rank."""
    events_match: bool | None = None
    """Recorded communication equals what the strategies predicted."""

    max_rel_err: float | None = None
    """Largest error of the first step (loss, logits, gradients, norm, weights) against one device."""
    loss_max_rel_err: float | None = None
    """Largest relative error of the losses of steps 1 to 20 against one device."""
    losses: tuple[float, ...] = ()
    bubble_frac: float | None = None
    bubble_theory: float | None = None
    """(p-1) / (p-1+m) for p equal stages and m microbatches (GPipe, Huang et al. 2019, section 2.3)."""
    expert_imbalance: float | None = None
    """Load of the busiest expert over the mean, in the layer where that is largest: mean over the timed steps."""
    rank_imbalance: float | None = None
    """The same of the ranks of ep."""
    dispatch_bytes: tuple[float, ...] = ()
    """Of all-to-alls over ep, per rank and step."""

    @property
    def peak_bytes(self) -> int | None:
        """The headline: the rank that needs most."""
        return max(self.peak_memory_bytes, default=None)

    @property
    def worst_err(self) -> float | None:
        """The larger of both errors; NaN when one of them is."""
        errors = [e for e in (self.max_rel_err, self.loss_max_rel_err) if e is not None]
        return next((e for e in errors if math.isnan(e)), max(errors, default=None))

    @property
    def reason(self) -> str | None:
        """Why this layout is not the same model as one device; None if it is."""
        if self.passed:
            return None
        if self.error:
            return self.error
        faults = [
            f"{what} differs: relative error {show(error, scientific)}, bound {scientific(self.bound, 0)}"
            for what, error in (
                ("first step", self.max_rel_err),
                (f"a loss of steps 1-{JUDGED_STEPS}", self.loss_max_rel_err),
            )
            if error is not None and not error <= self.bound
        ]
        if self.events_match is False:
            faults.append("recorded communication is not what was predicted")
        return "; ".join(faults) or "judged different, without a recorded reason"


class LabResult(_Measured):
    """Everything the report shows; saved as `lab.json` beside it."""

    model: str
    parameters: int = Field(ge=0)
    machine: Mapping[str, str | int | float | None] = Field(default_factory=dict)
    """Keys `cpu`, `cores`, `memory` (bytes or text), `device`."""
    steps: int = Field(ge=0)
    seq_len: int = Field(ge=1)
    global_batch: int = Field(ge=1)
    """In sequences."""
    lr: float
    dtype: str = "float32"
    bound: float = BOUND
    """Of every relative error that is judged."""
    versions: Mapping[str, str] = Field(default_factory=dict)
    load_at_start: float | None = None
    """Processes that wanted a core in the minute before the first layout, mean (the load average of the system)."""
    date: str = ""
    bubble_method: str = (
        "the share of the schedule's time, first action to last, that ranks spend outside forward and backward "
        "(waiting for tp collectives inside them counts as busy), mean over the ranks"
    )
    layouts: tuple[LayoutResult, ...] = ()

    @property
    def passed(self) -> bool:
        """True when there is a layout and all are the same model as one device."""
        return bool(self.layouts) and all(layout.passed for layout in self.layouts)

    @property
    def disturbed(self) -> tuple[LayoutResult, ...]:
        """Layouts that had cores enough for their ranks, but not beside what else ran here when the lab began."""
        cores = self.machine.get("cores")
        if not isinstance(cores, int) or self.load_at_start is None:
            return ()
        others = round(self.load_at_start)
        return tuple(
            one for one in self.layouts if not one.oversubscribed and one.ranks + others > cores and others
        )

    @property
    def one_device(self) -> LayoutResult | None:
        """The first layout on one rank: what the others are drawn against."""
        return next((layout for layout in self.layouts if layout.ranks == 1), None)


def verdict(result: LabResult) -> str:
    """The headline, one sentence."""
    total = len(result.layouts)
    if not total:
        return "No layout was run"
    bad = [short(layout.layout) for layout in result.layouts if not layout.passed]
    text = (
        f"{total - len(bad)} of {total} layout{'s are' if total > 1 else ' is'} the same model as one device"
    )
    if bad:
        more = f" and {len(bad) - 3} more" if len(bad) > 3 else ""
        return f"{text}; not the same: {', '.join(bad[:3])}{more}"
    errors = [e for layout in result.layouts if (e := layout.worst_err) is not None and math.isfinite(e)]
    return f"{text}; worst relative error {scientific(max(errors), 0)}" if errors else text


def load_line(result: LabResult) -> str:
    """How busy the machine was: `load 1.87 in the minute before, 2 cores, up to 8 ranks`."""
    load = NOTHING if result.load_at_start is None else f"{result.load_at_start:.2f}"
    ranks = max((layout.ranks for layout in result.layouts), default=0)
    return (
        f"load {load} in the minute before, {result.machine.get('cores') or 'few'} cores, up to {ranks} ranks"
    )


def render(result: LabResult) -> str:
    """The whole page as text: self-contained HTML, no script, nothing to fetch."""
    from fivefold.report.plots import draw_all

    return fill(
        "lab.html",
        draw_all(result),
        result=result,
        verdict=verdict(result),
        failures=[layout for layout in result.layouts if not layout.passed],
        rows=[_cells(layout, result.one_device) for layout in result.layouts],
        facts=_facts(result),
        oversubscribed=sum(layout.oversubscribed for layout in result.layouts),
        disturbed=[layout.layout for layout in result.disturbed],
        load=load_line(result),
        cores=result.machine.get("cores") or "few",
        not_finite=_not_finite(result),
        bound=scientific(result.bound, 0),
        routed=any(layout.expert_imbalance is not None for layout in result.layouts),
        used=[
            axis
            for axis in ("dp", "tp", "pp", "cp", "ep")
            if any(getattr(one, axis) > 1 for one in result.layouts)
        ],
        judged_steps=JUDGED_STEPS,
    )


def write_report(result: LabResult, folder: Path) -> Path:
    """Write `report.html` and `lab.json` into `folder` (made if missing); each appears whole or not at all.

    Returns:  the path of the page.
    Raises:   RecordError, one line, if the disk is full or the folder cannot be written.
    """
    texts = {"lab.json": result.model_dump_json(indent=1), "report.html": render(result)}
    write_files(folder, texts)
    return folder / "report.html"


def summary_table(result: LabResult) -> Table:
    """The same numbers for a terminal; failures and their reasons stand under the table."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(
        box=box.SIMPLE_HEAD, show_edge=False, padding=0, title_justify="left", caption_justify="left"
    )
    table.title = Text(verdict(result))
    table.add_column("layout", min_width=8, overflow="fold")  # broken where the terminal is narrow
    heads: tuple[str, ...] = (
        "ranks",
        "same\nmodel",
        "error",
        "tokens\n/s",
        "step",
        "CPU\n/step",
        "memory\n/rank",
        "comm",
    )
    keys: tuple[str, ...] = ("err", "tokens", "step", "cpu", "memory", "comm")
    if any(layout.pp > 1 for layout in result.layouts):
        heads += ("bubble",)
        keys += ("bubble",)
    if any(layout.expert_imbalance is not None for layout in result.layouts):
        heads += ("imbal.\nranks", "dispatch\n/rank")
        keys += ("rank_imbalance", "dispatch")
    for head in heads:
        table.add_column(head, justify="right", no_wrap=True)
    disturbed = result.disturbed
    for layout in result.layouts:
        cells = _cells(layout, result.one_device)
        mark = " *" if layout.oversubscribed else " ~" if layout in disturbed else ""
        table.add_row(
            Text(short(layout.layout)),
            Text(f"{layout.ranks}{mark}"),
            Text("yes" if layout.passed else "NO", style="green" if layout.passed else "bold red"),
            *(Text(cells[key]) for key in keys),
        )
    notes = [
        f"{printable(one.layout)}: {printable(one.reason or '')}" for one in result.layouts if not one.passed
    ]
    if any(layout.oversubscribed for layout in result.layouts):
        notes.append("* oversubscribed: more ranks than cores, wall time is not comparable")
    if disturbed:
        notes.append("~ doubtful times: the machine was busy when the lab began; run it again on an idle one")
    notes.append(f"machine: {load_line(result)}")
    table.caption = Text("\n".join(notes)) if notes else None
    return table


def show(value: float | None, form: Callable[[float], str]) -> str:
    """`form(value)`, a dash for a missing value, and the name of one that is not finite."""
    if value is None:
        return NOTHING
    return form(value) if math.isfinite(value) else ("NaN" if math.isnan(value) else "infinite")


def scientific(value: float, digits: int = 1) -> str:
    """`3.1e-07` -> `3.1e-7`; zero, and numbers of a readable size, without an exponent."""
    if value == 0 or 0.1 <= abs(value) < 1000:
        return f"{value:.3g}"
    mantissa, exponent = f"{value:.{digits}e}".split("e")
    return f"{mantissa}e{int(exponent)}"


def printable(text: str) -> str:
    """One line without control characters, which neither a terminal nor XML should see."""
    return "".join(c if c.isprintable() else " " for c in text).strip()


def short(text: str) -> str:
    """`printable`, and never longer than the label of a row may be."""
    line = printable(text)
    return line if len(line) <= LABEL_CHARS else line[: LABEL_CHARS - 1] + "…"


def _cells(layout: LayoutResult, base: LayoutResult | None) -> dict[str, str]:
    """The numbers of one layout as text; `_x` keys compare with one device."""

    def times(mine: float | None, other: float | None) -> str:
        return f"{mine / other:.2f}×" if mine is not None and other and math.isfinite(mine / other) else ""

    percent = "{:.0%}".format
    return {
        "layout": layout.layout,
        "ranks": str(layout.ranks),
        "err": show(layout.max_rel_err, scientific),
        "loss_err": show(layout.loss_max_rel_err, scientific),
        "tokens": show(layout.tokens_per_s, format_count),
        "step": show(layout.step_time_s, format_seconds),
        "cpu": show(layout.cpu_time_s_per_step, format_seconds),
        "cpu_x": times(layout.cpu_time_s_per_step, base.cpu_time_s_per_step if base else None),
        "memory": show(layout.peak_bytes, format_bytes),
        "memory_x": times(layout.peak_bytes, base.peak_bytes if base else None),
        "comm": show(layout.comm_frac, percent),
        "bubble": show(layout.bubble_frac, percent),
        "bubble_theory": show(layout.bubble_theory, percent),
        "imbalance": show(layout.expert_imbalance, "{:.2f}".format),
        "rank_imbalance": show(layout.rank_imbalance, "{:.2f}".format),
        "dispatch": show(max(layout.dispatch_bytes, default=None), format_bytes),
        "events": {True: "yes", False: "no", None: NOTHING}[layout.events_match],
    }


def _facts(result: LabResult) -> dict[str, str]:
    """What was run and where, for the head of the page."""
    known = ("device", "cpu", "cores", "memory")
    order = [*known, *sorted(set(result.machine) - set(known))]
    machine = {key: value for key in order if (value := result.machine.get(key)) is not None}
    memory = machine.get("memory")
    if isinstance(memory, int | float):
        machine["memory"] = format_bytes(memory)
    return {
        "model": f"{result.model}, {format_count(result.parameters)} parameters",
        "job": f"{result.steps} steps of {result.global_batch} × {result.seq_len} tokens, lr {result.lr:g}, "
        f"{result.dtype}",
        **{key: str(value) for key, value in machine.items()},
        "load": load_line(result),
        "versions": ", ".join(f"{name} {version}" for name, version in result.versions.items()) or NOTHING,
        "date": result.date or NOTHING,
    }


def _not_finite(result: LabResult) -> list[tuple[str, int]]:
    """Layouts whose loss is not finite, with the first such step (1-based): curves cannot show it."""
    first = [
        (layout.layout, next((i for i, loss in enumerate(layout.losses, 1) if not math.isfinite(loss)), 0))
        for layout in result.layouts
    ]
    return [(name, step) for name, step in first if step]

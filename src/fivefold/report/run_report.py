"""One recorded run as one HTML page that opens offline: learning, speed, experts, precision.

Drawn from the record alone. The page has no script and fetches nothing: figures are inline SVG, styles inline CSS.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from fivefold.records.store import MetricRow, RunRecord
from fivefold.report.lab_report import NOTHING, scientific, show
from fivefold.report.page import fill, write_files
from fivefold.report.run_results import ExpertsReport, PrecisionReport, experts_of, precision_of
from fivefold.units import format_bytes, format_count

Series = dict[int, float]
"""A number by step."""

MOST_LISTED = 12
"""Steps that are named one by one; of more, the first and the last."""


@dataclass(frozen=True)
class RunReport:
    """A run and all that is drawn of it."""

    run: RunRecord
    results: Mapping[str, Any]
    metrics: Sequence[MetricRow]

    def series(self, name: str) -> Series:
        """A number of the whole job, from the lowest rank that logged it; of a step taken again, the last."""
        found: dict[int, tuple[int, float]] = {}
        for row in self.metrics:
            if name in row.values and found.get(row.step, (row.rank,))[0] >= row.rank:
                found[row.step] = (row.rank, row.values[name])
        return {step: value for step, (_, value) in sorted(found.items())}

    def of_ranks(self, name: str) -> dict[int, list[float]]:
        """A number of each rank, by step."""
        found: dict[int, dict[int, float]] = {}
        for row in self.metrics:
            if name in row.values:
                found.setdefault(row.step, {})[row.rank] = row.values[name]
        return {step: list(ranks.values()) for step, ranks in sorted(found.items())}

    @cached_property
    def experts(self) -> ExpertsReport | None:
        """None for a model without experts."""
        return experts_of(self.results, where=f"run {self.run.id}")

    @cached_property
    def precision(self) -> PrecisionReport | None:
        """None for a run that was not asked for it and had no loss scale."""
        return precision_of(self.results, where=f"run {self.run.id}")


def render(report: RunReport) -> str:
    """The whole page as text. Raises: RecordError for a record that is damaged."""
    from fivefold.report.run_plots import draw_all

    return fill(
        "run.html",
        draw_all(report),
        run=report.run,
        facts=_facts(report),
        headline=_headline(report),
        experts=report.experts,
        expert_rows=_expert_rows(report.experts),
        precision=report.precision,
        precision_rows=_precision_rows(report.precision),
        overflows=_steps(report.precision.overflow_steps if report.precision else ()),
    )


def write_report(report: RunReport, path: Path) -> None:
    """Write the page to `path`, whole or not at all. Raises: RecordError, one line, if it cannot be written."""
    write_files(path.parent, {path.name: render(report)})


def _headline(report: RunReport) -> str:
    losses = list(report.series("loss").items())
    if not losses:
        return f"{report.run.status}, no step was logged"
    (_, first), (step, last) = losses[0], losses[-1]
    return f"{report.run.status} at step {step}: loss {show(first, '{:.4g}'.format)} to {show(last, '{:.4g}'.format)}"


def _facts(report: RunReport) -> dict[str, str]:
    """What was run and where, for the head of the page."""
    run = report.run
    speed = sorted(report.series("tokens_per_s").values())
    peaks = [row["peak_memory_bytes"] for row in report.results.get("profiled_step", ())]
    machine = {name: str(run.machine[name]) for name in ("device", "cpu", "cores") if run.machine.get(name)}
    versions = ", ".join(f"{name} {version}" for name, version in run.versions.items() if version)
    return {
        "run": run.id if run.name is None else f"{run.id}, {run.name}",
        "model": run.model,
        "layout": run.layout,
        "speed, median": f"{format_count(speed[len(speed) // 2])} tokens/s" if speed else NOTHING,
        "peak memory of a rank": format_bytes(max(peaks)) if peaks else NOTHING,
        **machine,
        "versions": versions or NOTHING,
        "started": datetime.fromtimestamp(run.started_at, UTC).strftime("%Y-%m-%d %H:%M UTC"),
    }


def _expert_rows(experts: ExpertsReport | None) -> list[list[str]]:
    """A row for each routed layer, as text."""
    if experts is None:
        return []
    return [
        [
            str(layer.layer), f"{layer.imbalance:.2f}", f"{layer.rank_imbalance:.2f}",
            f"{layer.busiest}, by {layer.busiest_frac:.1%} of tokens", str(layer.never),
            f"{layer.dropped_frac:.1%}", f"{layer.entropy:.3f} of {math.log(len(layer.chosen)):.3f}",
        ]
        for layer in experts.layers
    ]  # fmt: skip


def _precision_rows(precision: PrecisionReport | None) -> list[list[str]]:
    return [
        [
            row.block, show(row.first_norm, scientific), show(row.last_norm, scientific),
            NOTHING if row.largest is None else f"{show(row.largest, scientific)} at step {row.step}",
            show(row.largest_frac, "{:.1%}".format), row.module,
        ]
        for row in (precision.rows() if precision else ())
    ]  # fmt: skip


def _steps(steps: Sequence[int]) -> str:
    names = [str(step) for step in steps]
    if len(names) > MOST_LISTED:
        half = MOST_LISTED // 2
        names = [*names[:half], f"... {len(names) - 2 * half} more ...", *names[-half:]]
    return ", ".join(names) or "none"

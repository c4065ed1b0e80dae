"""What `fivefold runs show` prints of one run: its details, results and metrics as tables."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Any

from fivefold.cli.run_results import print_result
from fivefold.cli.tables import (
    ASCII_SPARKS,
    SPARKS,
    brief,
    clean,
    coloured,
    fits,
    local,
    make_console,
    make_table,
    sparkline,
)
from fivefold.records.store import MetricRow, RunRecord

if TYPE_CHECKING:
    from rich.console import Console


def print_run(run: RunRecord, results: dict[str, Any], metrics: list[MetricRow]) -> None:
    """Everything that the record has; a result as a table of its own, one that is a single value among the details."""
    console = make_console()
    details = make_table("", "", header=False)
    shown: dict[str, Any] = {
        "id": run.id,
        "kind": run.kind,
        "name": run.name,
        "model": run.model,
        "layout": run.layout,
        "error": run.error,
        "started": f"{local(run.started_at)} by process {run.pid} on {run.host}",
        "took": took(run),
        "last step": run.last_step,
        **run.machine,
        "versions": ", ".join(f"{name} {version}" for name, version in run.versions.items() if version),
        **{f"result {key}": value for key, value in results.items() if not isinstance(value, dict | list)},
    }
    details.add_row("status", coloured(run.status))
    for name, value in shown.items():
        if value not in (None, ""):
            details.add_row(clean(name), clean(brief(name, value)))
    console.print(details)
    for name, value in results.items():
        if isinstance(value, dict | list):
            print_result(console, name, value)
    _print_losses(console, losses(metrics))
    _print_ranks(console, last_rows(metrics))


def _print_losses(console: Console, loss: dict[int, float]) -> None:
    if not loss:
        return
    steps, values = list(loss), list(loss.values())
    ramp = SPARKS if console.encoding.lower().startswith("utf") else ASCII_SPARKS
    console.print(
        f"loss {sparkline(values, ramp=ramp)}  {values[0]:.4g} at step {steps[0]}, "
        f"{values[-1]:.4g} at step {steps[-1]}",
        markup=False,
        highlight=False,
    )


def _print_ranks(console: Console, newest: dict[int, MetricRow]) -> None:
    """A row for each rank; where that is too wide, a row for each metric, with as many ranks beside it as fit."""
    if not newest:
        return
    names = sorted({name for row in newest.values() for name in row.values}, key=lambda n: (n != "loss", n))
    cells = [
        [str(rank), str(row.step), *(brief(n, row.values[n]) if n in row.values else "" for n in names)]
        for rank, row in newest.items()
    ]
    heads = ["rank", "step", *names]
    table = make_table(*map(clean, heads))
    for row in cells:
        table.add_row(*row)
    if fits(console, table):
        console.print(table)
        return
    room = console.width - max(map(len, heads)) - 2
    beside = max(1, room // (max(len(cell) for row in cells for cell in row) + 3))
    for first in range(0, len(cells), beside):
        shown = cells[first : first + beside]
        table = make_table("rank", *(row[0] for row in shown))
        for i, head in enumerate(heads[1:], start=1):
            table.add_row(clean(head), *(row[i] for row in shown))
        console.print(table)


def losses(metrics: list[MetricRow]) -> dict[int, float]:
    """The loss of each step, from the lowest rank that logged one (with a pipeline not all ranks do)."""
    found: dict[int, float] = {}
    for row in metrics:
        if "loss" in row.values:
            found.setdefault(row.step, row.values["loss"])
    return found


def last_rows(metrics: list[MetricRow]) -> dict[int, MetricRow]:
    """The newest row of each rank, by rank; numbers logged in several calls for one step are joined."""
    newest: dict[int, MetricRow] = {}
    for row in metrics:
        before = newest.get(row.rank)
        joined = {**before.values, **row.values} if before and before.step == row.step else row.values
        newest[row.rank] = MetricRow(row.step, row.rank, joined)
    return dict(sorted(newest.items()))


def took(run: RunRecord) -> str:
    """Its duration; for a running run until now; of a lost one nobody knows."""
    if run.ended_at is None and run.status != "running":
        return "?"
    end = datetime.now().timestamp() if run.ended_at is None else run.ended_at
    seconds = max(0, round(end - run.started_at))
    return f"{seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02}"

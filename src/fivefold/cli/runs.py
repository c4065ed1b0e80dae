"""`fivefold runs`: what was run here, and what came of it."""

from __future__ import annotations

import csv
import json
import math
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fivefold.cli.output import print_json
from fivefold.core.json_text import strict
from fivefold.errors import RecordError
from fivefold.records.store import STATUSES, MetricRow, RunRecord, Store, default_path, store_exists

if TYPE_CHECKING:
    from rich.console import Console

COLOURS = {
    "running": "cyan",
    "finished": "green",
    "failed": "red",
    "interrupted": "yellow",
    "lost": "magenta",
}
SPARKS, ASCII_SPARKS = "▁▂▃▄▅▆▇█", "_.-=+*%#"
SPARK_WIDTH = 60
FOLLOWED = ("loss", "grad_norm", "lr", "tokens_per_s", "comm_frac")
FOLLOW_EVERY_S = 0.5
NARROW_LEAVES = ("name", "took", "kind", "steps")
"""Columns of the list that a terminal may have no room for, the first to leave first."""
PIPE_WIDTH = 200
"""Columns when the output is no terminal: a table in a file or a pipe should not lose its columns."""

_records = click.option(
    "--records",
    type=click.Path(path_type=Path),
    help="The store. Default: $FIVEFOLD_RECORDS, or .fivefold/records.sqlite under the current folder.",
)
_json = click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")


@click.group("runs")
def command() -> None:
    """List the runs recorded here, or show one of them."""


@command.command("list")
@click.option(
    "--limit", type=click.IntRange(1, 10**6), default=20, show_default=True, help="How many, newest first."
)
@click.option("--status", type=click.Choice(STATUSES), help="Only runs of this status.")
@_records
@_json
def list_runs(limit: int, status: str | None, records: Path | None, as_json: bool) -> None:
    """List runs, the newest first."""
    path = records or default_path()
    found: list[RunRecord] = []
    exists = store_exists(path)
    if exists:
        with Store.open(path, create=False) as store:
            found = store.runs(limit, status)
    if as_json:
        print_json({"records": str(path.absolute()), "runs": [_run_as_json(run) for run in found]})
    elif found:
        _print_list(found)
    elif status is not None and exists:
        click.echo(f"No {status} runs in {path}.")
    else:
        click.echo(f"No runs yet in {path}. `fivefold lab` makes some; so does `fivefold train CONFIG.yaml`.")


@command.command("show")
@click.argument("run_id", metavar="ID")
@click.option("--follow", is_flag=True, help="Print every step as it comes, until the run ends.")
@_records
@_json
def show_run(run_id: str, follow: bool, records: Path | None, as_json: bool) -> None:
    """Show one run: its details, results and metrics.

    ID is an id, the first characters of one, or `last` for the newest run.
    """
    if follow and as_json:
        raise click.UsageError("--follow prints as it goes, --json prints one object at the end: choose one")
    with Store.open(records, create=False) as store:
        if follow:
            _follow(store, store.run(run_id).id)
        run = store.run(run_id)
        results, metrics = store.results(run.id), store.metrics(run.id)
    if as_json:
        rows = [{"step": row.step, "rank": row.rank, "values": row.values} for row in metrics]
        print_json({**_run_as_json(run), "results": results, "metrics": rows})
    else:
        _print_run(run, results, metrics)


@command.command("compare")
@click.argument("first", metavar="A")
@click.argument("second", metavar="B")
@_records
@_json
def compare(first: str, second: str, records: Path | None, as_json: bool) -> None:
    """Compare two runs: the settings that differ, the losses step by step, the speed."""
    from fivefold.records.compare import compare_runs

    with Store.open(records, create=False) as store:
        a, b = store.run(first), store.run(second)
        result = compare_runs((a, store.metrics(a.id)), (b, store.metrics(b.id)))
    worst = result.largest_loss_difference
    if as_json:
        print_json(
            {
                "a": a.id,
                "b": b.id,
                "settings": {key: list(pair) for key, pair in result.settings.items()},
                "medians": {key: list(pair) for key, pair in result.medians.items()},
                "losses": {str(step): list(pair) for step, pair in result.losses.items()},
                "largest_loss_difference": None
                if worst is None
                else {"step": worst[0], "relative": worst[1]},
            }
        )
        return
    table = _table("", a.id, b.id)
    for key, (left, right) in [*result.settings.items(), *result.medians.items()]:
        name = key.rpartition(".")[2]
        median = "median " if key in result.medians else ""
        table.add_row(_clean(median + key), _clean(_brief(name, left)), _clean(_brief(name, right)))
    _console().print(table)
    if worst is None:
        click.echo("no step is in both runs")
    else:
        click.echo(
            f"{len(result.losses)} common steps; losses are furthest apart at step {worst[0]}: {worst[1]:.2e} relative"
        )


@command.command("export")
@click.argument("run_id", metavar="ID")
@click.option(
    "--out", type=click.Path(path_type=Path, dir_okay=False), required=True, help="FILE.jsonl or FILE.csv."
)
@_records
@_json
def export(run_id: str, out: Path, records: Path | None, as_json: bool) -> None:
    """Write the metrics of a run, one row for each step and rank, to a JSONL or CSV file."""
    with Store.open(records, create=False) as store:
        run = store.run(run_id)
        rows = [{"step": row.step, "rank": row.rank, **row.values} for row in store.metrics(run.id)]
    if out.suffix not in (".jsonl", ".csv"):
        raise RecordError(f"cannot export to {out}: the name must end in .jsonl or .csv")
    try:
        with out.open("w", encoding="utf-8", newline="") as file:
            if out.suffix == ".csv":
                names = list(dict.fromkeys(name for row in rows for name in row))
                writer = csv.DictWriter(file, names)
                writer.writeheader()
                writer.writerows(rows)
            else:
                file.writelines(json.dumps(strict(row)) + "\n" for row in rows)
    except OSError as error:
        raise RecordError(f"cannot write {out}: {error.strerror}") from None
    if as_json:
        print_json({"run": run.id, "rows": len(rows), "file": str(out)})
    else:
        click.echo(f"{len(rows)} rows of {run.id} written to {out}")


def _follow(store: Store, run_id: str) -> None:
    """Print the steps of rank 0 as they come, until the run has ended."""
    said = 0
    while True:
        running = store.run(run_id).status == "running"
        for row in store.metrics(run_id):
            if row.rank == 0 and row.step > said:
                said = row.step
                shown = [
                    f"{name} {_brief(name, row.values[name])}" for name in FOLLOWED if name in row.values
                ]
                click.echo(f"step {row.step}  {'  '.join(shown)}")
        if not running:
            return
        time.sleep(FOLLOW_EVERY_S)


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


def _print_list(found: list[RunRecord]) -> None:
    rows = [
        {
            "id": run.id,
            "kind": run.kind,
            "status": _coloured(run.status),
            "started": _local(run.started_at),
            "took": _took(run),
            "model": _clean(run.model),
            "layout": _clean(run.layout),
            "steps": "" if run.last_step is None else str(run.last_step),
            "name": _clean(run.name or ""),
        }
        for run in found
    ]
    console, names = _console(), list(rows[0])
    if not any(run.name for run in found):
        names.remove("name")
    table = _filled(names, rows)
    if not _fits(console, table):
        rows = [{**row, "started": row["started"][5:-3]} for row in rows]
        table = _filled(names, rows)
    for spare in NARROW_LEAVES:
        if _fits(console, table):
            break
        names = [name for name in names if name != spare]
        table = _filled(names, rows)
    console.print(table)


def _filled(names: list[str], rows: list[dict[str, Any]]) -> Any:
    table = _table(*names)
    for row in rows:
        table.add_row(*(row[name] for name in names))
    return table


def _print_run(run: RunRecord, results: dict[str, Any], metrics: list[MetricRow]) -> None:
    console = _console()
    details = _table("", "", header=False)
    shown: dict[str, Any] = {
        "id": run.id,
        "kind": run.kind,
        "name": run.name,
        "model": run.model,
        "layout": run.layout,
        "error": run.error,
        "started": f"{_local(run.started_at)} by process {run.pid} on {run.host}",
        "took": _took(run),
        "last step": run.last_step,
        **run.machine,
        "versions": ", ".join(f"{name} {version}" for name, version in run.versions.items() if version),
        **{f"result {key}": value for key, value in results.items()},
    }
    details.add_row("status", _coloured(run.status))
    for name, value in shown.items():
        if value not in (None, ""):
            details.add_row(_clean(name), _clean(_brief(name, value)))
    console.print(details)
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
        [str(rank), str(row.step), *(_brief(n, row.values[n]) if n in row.values else "" for n in names)]
        for rank, row in newest.items()
    ]
    heads = ["rank", "step", *names]
    table = _table(*map(_clean, heads))
    for row in cells:
        table.add_row(*row)
    if _fits(console, table):
        console.print(table)
        return
    room = console.width - max(map(len, heads)) - 2
    beside = max(1, room // (max(len(cell) for row in cells for cell in row) + 3))
    for first in range(0, len(cells), beside):
        shown = cells[first : first + beside]
        table = _table("rank", *(row[0] for row in shown))
        for i, head in enumerate(heads[1:], start=1):
            table.add_row(_clean(head), *(row[i] for row in shown))
        console.print(table)


def _fits(console: Console, table: Any) -> bool:
    return bool(console.measure(table, options=console.options.update(width=10**6)).maximum <= console.width)


def _brief(name: str, value: Any) -> str:
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


def _took(run: RunRecord) -> str:
    """Its duration; for a running run until now; of a lost one nobody knows."""
    if run.ended_at is None and run.status != "running":
        return "?"
    end = datetime.now().timestamp() if run.ended_at is None else run.ended_at
    seconds = max(0, round(end - run.started_at))
    return f"{seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02}"


def _run_as_json(run: RunRecord) -> dict[str, Any]:
    """All fields, with times in UTC (ISO 8601)."""
    from dataclasses import asdict

    times = {"started_at": _utc(run.started_at), "ended_at": run.ended_at and _utc(run.ended_at)}
    return {**asdict(run), **times}


def _clean(text: str) -> Any:
    """Recorded text as it is: no markup, and no control characters that would reach the terminal."""
    from rich.text import Text

    return Text("".join(c if c.isprintable() else "�" for c in text))


def _coloured(status: str) -> Any:
    from rich.text import Text

    return Text(status, style=COLOURS.get(status, ""))


def _table(*columns: Any, header: bool = True) -> Any:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE, show_header=header, pad_edge=False)
    for i, column in enumerate(columns):
        table.add_column(column, no_wrap=i == 0, overflow="fold")
    return table


def _console() -> Console:
    from rich.console import Console

    console = Console()
    return console if console.is_terminal else Console(width=PIPE_WIDTH)


def _local(moment: float) -> str:
    return datetime.fromtimestamp(moment).strftime("%Y-%m-%d %H:%M:%S")


def _utc(moment: float) -> str:
    return datetime.fromtimestamp(moment, UTC).isoformat(timespec="milliseconds")

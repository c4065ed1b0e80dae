"""`fivefold runs`: what was run here, and what came of it."""

from __future__ import annotations

import csv
import json
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click

from fivefold.cli.output import print_json
from fivefold.cli.run_details import print_run, took
from fivefold.cli.tables import brief, clean, coloured, fits, local, make_console, make_table
from fivefold.core.json_text import strict
from fivefold.errors import RecordError
from fivefold.records.store import STATUSES, RunRecord, Store, default_path, store_exists

FOLLOWED = ("loss", "grad_norm", "lr", "tokens_per_s", "comm_frac", "expert_imbalance")
FOLLOW_EVERY_S = 0.5
NARROW_LEAVES = ("name", "took", "kind", "steps")
"""Columns of the list that a terminal may have no room for, the first to leave first."""

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
        print_run(run, results, metrics)


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
    table = make_table("", a.id, b.id)
    for key, (left, right) in [*result.settings.items(), *result.medians.items()]:
        name = key.rpartition(".")[2]
        median = "median " if key in result.medians else ""
        table.add_row(clean(median + key), clean(brief(name, left)), clean(brief(name, right)))
    make_console().print(table)
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


@command.command("report")
@click.argument("run_id", metavar="ID")
@click.option(
    "--out", type=click.Path(path_type=Path, dir_okay=False), help="The page. Default: run-ID.html, here."
)
@_records
@_json
def report(run_id: str, out: Path | None, records: Path | None, as_json: bool) -> None:
    """Draw one run as an HTML page that opens offline: learning, speed, experts, precision.

    ID is an id, the first characters of one, or `last` for the newest run.
    """
    from fivefold.report.run_report import RunReport, write_report

    with Store.open(records, create=False) as store:
        run = store.run(run_id)
        drawn = RunReport(run, store.results(run.id), store.metrics(run.id))
    path = out or Path(f"run-{run.id}.html")
    write_report(drawn, path)
    if as_json:
        print_json({"run": run.id, "report": str(path)})
    else:
        click.echo(f"report: {path}")


def _follow(store: Store, run_id: str) -> None:
    """Print the steps of rank 0 as they come, until the run has ended."""
    said = 0
    while True:
        running = store.run(run_id).status == "running"
        for row in store.metrics(run_id):
            if row.rank == 0 and row.step > said:
                said = row.step
                shown = [f"{name} {brief(name, row.values[name])}" for name in FOLLOWED if name in row.values]
                click.echo(f"step {row.step}  {'  '.join(shown)}")
        if not running:
            return
        time.sleep(FOLLOW_EVERY_S)


def _print_list(found: list[RunRecord]) -> None:
    rows = [
        {
            "id": run.id,
            "kind": run.kind,
            "status": coloured(run.status),
            "started": local(run.started_at),
            "took": took(run),
            "model": clean(run.model),
            "layout": clean(run.layout),
            "steps": "" if run.last_step is None else str(run.last_step),
            "name": clean(run.name or ""),
        }
        for run in found
    ]
    console, names = make_console(), list(rows[0])
    if not any(run.name for run in found):
        names.remove("name")
    table = _filled(names, rows)
    if not fits(console, table):
        rows = [{**row, "started": row["started"][5:-3]} for row in rows]
        table = _filled(names, rows)
    for spare in NARROW_LEAVES:
        if fits(console, table):
            break
        names = [name for name in names if name != spare]
        table = _filled(names, rows)
    console.print(table)


def _filled(names: list[str], rows: list[dict[str, Any]]) -> Any:
    table = make_table(*names)
    for row in rows:
        table.add_row(*(row[name] for name in names))
    return table


def _run_as_json(run: RunRecord) -> dict[str, Any]:
    """All fields, with times in UTC (ISO 8601)."""
    from dataclasses import asdict

    times = {"started_at": _utc(run.started_at), "ended_at": run.ended_at and _utc(run.ended_at)}
    return {**asdict(run), **times}


def _utc(moment: float) -> str:
    return datetime.fromtimestamp(moment, UTC).isoformat(timespec="milliseconds")

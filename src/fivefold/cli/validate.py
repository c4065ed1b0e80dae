"""`fivefold validate`: parse, call, print."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from fivefold.plan.validate import Report

MOST_LISTED = 20
"""Skipped rows that are printed one by one; --json lists all."""


@click.command()
@click.argument("runs", type=click.Path(path_type=Path))
@click.option(
    "--calibration",
    "-c",
    type=click.Path(path_type=Path),
    help="A file of `fivefold calibrate`. Default: shipped.",
)
@click.option(
    "--folds", type=click.IntRange(2, 1000), metavar="N",
    help="Cut the runs into N parts and predict each from a calibration on the others.",
)  # fmt: skip
@click.option(
    "--by", type=click.Choice(["row", "model", "group", "source"]), default="row", show_default=True,
    help="With --folds: what is never in two parts. A group is a job whose runs differ in layout only.",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
def command(runs: Path, calibration: Path | None, folds: int | None, by: str, as_json: bool) -> None:
    """Say how wrong the predictions are on measured RUNS, a table in JSONL or CSV (docs/step_time.md).

    Runs that took part in a fit are not scored. Rows that cannot be priced are listed with the reason.

    \b
      fivefold validate runs.jsonl
      fivefold validate runs.csv --calibration mine.json
      fivefold validate runs.jsonl --folds 5 --by model
    """
    from fivefold.cli.output import print_json
    from fivefold.plan.calibration import load
    from fivefold.plan.runs_table import read_rows, unread_columns
    from fivefold.plan.validate import validate

    if folds and calibration:
        raise click.UsageError("--folds makes its own calibrations; leave out --calibration")
    if by != "row" and not folds:
        raise click.UsageError("--by goes with --folds N")
    rows = read_rows(runs)
    report = validate(
        rows,
        load(calibration) if calibration else None,
        folds=folds or 0,
        by=by,  # type: ignore[arg-type]
    )
    if as_json:
        print_json(report.summary())
    else:
        _print(report, unread_columns(rows))


def _print(report: Report, note: str | None) -> None:
    from rich import box
    from rich.table import Table

    from fivefold.cli.tables import make_console, say, skipped_lines

    summary = report.summary()
    table = Table(
        title="Predicted against measured, %",
        title_justify="left",
        box=box.SIMPLE,
        padding=(0, 1, 0, 0),
    )
    table.add_column("source", overflow="ellipsis", no_wrap=True)
    for name in ("runs", "mean", "median", "bias", "inside", "regret", "memory", "skipped"):
        table.add_column(name, justify="right", no_wrap=True, min_width=len(name))
    for source, part in [*summary["by_source"].items(), ("all", {**summary, "rows": len(report.rows)})]:
        time, memory, skipped = part["step_time"], part["memory"], part["skipped"]
        table.add_row(
            source, str(time["n"]), _share(time["mape"]), _share(time["median"]),
            _share(time["bias"], sign=True), _share(part["interval_coverage"], places=0),
            _share(part["ranking"]["mean_regret"]), _share(memory["mape"]),
            str(skipped if isinstance(skipped, int) else len(skipped)),
            end_section=source != "all" and source == list(summary["by_source"])[-1],
        )  # fmt: skip
    console = make_console()
    console.print(table)
    lines = [
        "mean, median: of the absolute error of step time; bias: the mean error, negative where predictions are too "
        "fast; inside: runs between their P10 and P90 (80 % is right); regret: how much slower the predicted best "
        "layout is than the measured best, 6 % or less counting as none; memory: mean error of the peak",
    ]
    if summary["in_sample"]:
        lines.append(
            "every run took part in the fit: this is how well they were fitted, and says nothing of others"
        )
    elif summary["fitted"]:
        lines.append(f"{summary['fitted']} runs took part in the fit and are not scored")
    lines += skipped_lines(report.skipped, MOST_LISTED, rest="--json lists all")
    for line in (*lines, *([note] if note else [])):
        say(console, line)


def _share(value: Any, *, places: int = 1, sign: bool = False) -> str:
    return "-" if value is None else f"{100 * value:{'+' if sign else ''}.{places}f}"

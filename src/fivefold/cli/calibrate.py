"""`fivefold calibrate`: parse, call, print."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

MOST_LISTED = 10
"""Skipped rows that are printed one by one."""

if TYPE_CHECKING:
    from fivefold.plan.calibration import Calibration
    from fivefold.plan.suggest import Suggestion


@click.command()
@click.argument("runs", type=click.Path(path_type=Path))
@click.option("--output", "-o", type=click.Path(path_type=Path), help="Where to write the calibration.")
@click.option(
    "--suggest", type=click.IntRange(1, 1000), metavar="N",
    help="Name the N rows of RUNS that would lower the error most, once measured.",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
def command(runs: Path, output: Path | None, suggest: int | None, as_json: bool) -> None:
    """Fit the planner to measured RUNS, a table in JSONL or CSV (docs/step_time.md has its columns and an example).

    With --suggest, rows without a measured time are those to choose from, and measured ones are known already; where
    all are measured, all are to choose from and none is looked at.

    \b
      fivefold calibrate runs.jsonl -o mine.json
      fivefold calibrate candidates.csv --suggest 30
    """
    from fivefold.cli.output import print_json
    from fivefold.cli.tables import skipped_lines
    from fivefold.plan.calibration import calibrate, save
    from fivefold.plan.priced import price
    from fivefold.plan.runs_table import read_rows, unread_columns
    from fivefold.plan.suggest import suggestions

    if output is None and suggest is None:
        raise click.UsageError("give -o FILE for a calibration, or --suggest N for runs to measure")
    rows = read_rows(runs)
    priced = price(rows)
    found: dict[str, object] = {"rows": len(rows), "skipped": len(priced.skipped)}
    if output is not None:
        calibration = calibrate(priced)
        save(calibration, output)
        found |= {"calibration": str(output), **calibration.facts()}
    chosen: list[Suggestion] = []
    if suggest is not None:
        chosen = suggestions(priced, suggest)
        found["suggest"] = [one.facts() for one in chosen]
    if as_json:
        print_json(found)
        return
    if output is not None:
        _print(calibration, output, len(priced.skipped))
    for one in chosen:
        click.echo(one.text)
    notes = skipped_lines(priced.skipped, MOST_LISTED, rest="`fivefold validate` lists them")
    for note in (*notes, unread_columns(rows)):
        if note:
            click.echo(note)


def _print(calibration: Calibration, output: Path, skipped: int) -> None:
    facts = calibration.facts()
    click.echo(
        f"fitted to {facts['runs']} runs ({skipped} rows skipped); half of them, each predicted "
        f"from the others, are within {100 * facts['left_out_median']:.1f} %; beside the noise of repeats, a run has "
        f"{100 * facts['noise']:.0f} % of its own"
    )
    moved = ", ".join(f"{name} x{factor:.2f}" for name, factor in facts["moved"].items())
    click.echo(f"coefficients that moved most: {moved or 'none'}")
    click.echo(f"written to {output}; use it with --calibration {output}")

"""`fivefold experts plan`: parse, call, print."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from fivefold.strategies.expert.placement import ExpertPlacement


@click.group()
def command() -> None:
    """Say where copies of experts should go, from how often each was chosen."""


@command.command("plan")
@click.argument("source", metavar="COUNTS|RUN")
@click.option(
    "--ranks", "-n", type=click.IntRange(2, 4096),
    help="Ranks that share the experts (ep). Default: as many as in RUN.",
)  # fmt: skip
@click.option(
    "--spare", type=click.IntRange(0, 4096), default=1, show_default=True, help="Spare slots of each rank."
)
@click.option(
    "--records", type=click.Path(path_type=Path), help="The store that has RUN. Default: as `fivefold runs`."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
def plan(source: str, ranks: int | None, spare: int, records: Path | None, as_json: bool) -> int:
    """Choose copies of hot experts so that the most loaded rank is least loaded.

    COUNTS is a JSON file: how often each expert was chosen, a list of numbers, or a list of such lists, one a layer.
    RUN is a recorded training run, whose steps are taken together: its id, the first characters of it, or `last`.

    \b
      fivefold experts plan counts.json --ranks 8 --spare 1
      fivefold experts plan last
    """
    from fivefold.cli.output import print_json
    from fivefold.strategies.expert.placement import contiguous, place_experts

    counts, ranks = _read(source, ranks, records)
    found = {
        number: (layer, contiguous(layer, ranks), place_experts(layer, ranks, spare))
        for number, layer in counts.items()
    }
    if as_json:
        layers = [
            {
                "layer": number,
                "imbalance_before": before.imbalance,
                "imbalance_after": after.imbalance,
                **_in_full(layer, after),
            }
            for number, (layer, before, after) in found.items()
        ]
        print_json({"ranks": ranks, "spare": spare, "layers": layers})
        return 0
    _print_table(found, ranks, spare)
    return 0


def _read(source: str, ranks: int | None, records: Path | None) -> tuple[dict[int, list[float]], int]:
    """Counts by layer, and the number of ranks. What is a file is read as one; anything else names a run."""
    from fivefold.errors import ConfigError, RecordError
    from fivefold.records.store import Store
    from fivefold.strategies.expert.counts_file import counts_of_run, read_counts

    if records is None and (Path(source).exists() or Path(source).suffix):
        counts, shared = dict(enumerate(read_counts(Path(source)))), 1
    else:
        try:
            with Store.open(records, create=False) as store:
                run = store.run(source)
                found = counts_of_run(store.results(run.id), where=f"run {run.id}")
        except RecordError as error:
            raise RecordError(f"{source!r} is no file, and {error}") from None
        counts, shared = found.layers, found.ep
    if ranks is None and shared < 2:
        raise ConfigError(f"{source} does not say how many ranks share the experts: add --ranks N")
    return counts, ranks or shared


def _in_full(layer: list[float], placement: ExpertPlacement) -> dict[str, Any]:
    return {
        "copies": placement.copies(len(layer)),
        "slots": placement.slots,
        "shares": placement.shares,
        "loads": placement.loads,
    }


def _print_table(
    found: dict[int, tuple[list[float], ExpertPlacement, ExpertPlacement]], ranks: int, spare: int
) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(
        title=f"tokens of the most loaded of {ranks} ranks over the mean, {spare} spare slot{'s' * (spare != 1)} a rank"
    )
    for name in ("layer", "experts", "as they are", "with copies", "experts with more than one copy"):
        table.add_column(name, justify="right" if name != "experts with more than one copy" else "left")
    for i, (layer, before, after) in found.items():
        several = [f"{e} ({n})" for e, n in enumerate(after.copies(len(layer))) if n > 1]
        more = f" and {len(several) - 8} more" if len(several) > 8 else ""
        table.add_row(
            str(i),
            str(len(layer)),
            f"{before.imbalance:.3f}",
            f"{after.imbalance:.3f}",
            ", ".join(several[:8]) + more,
        )
    Console().print(table)
    Console().print("which rank holds what, and what part of its tokens: --json")

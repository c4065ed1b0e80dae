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
@click.argument("counts", type=click.Path(path_type=Path))
@click.option(
    "--ranks", "-n", type=click.IntRange(2, 4096), required=True, help="Ranks that share the experts (ep)."
)
@click.option(
    "--spare", type=click.IntRange(0, 4096), default=1, show_default=True, help="Spare slots of each rank."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
def plan(counts: Path, ranks: int, spare: int, as_json: bool) -> int:
    """Choose copies of hot experts so that the most loaded rank is least loaded.

    COUNTS is a JSON file: how often each expert was chosen, a list of numbers, or a list of such lists, one a layer.

    \b
      fivefold experts plan counts.json --ranks 8 --spare 1
    """
    from fivefold.cli.output import print_json
    from fivefold.strategies.expert.counts_file import read_counts
    from fivefold.strategies.expert.placement import contiguous, place_experts

    found = [
        (layer, contiguous(layer, ranks), place_experts(layer, ranks, spare)) for layer in read_counts(counts)
    ]
    if as_json:
        layers = [
            {
                "imbalance_before": before.imbalance,
                "imbalance_after": after.imbalance,
                **_in_full(layer, after),
            }
            for layer, before, after in found
        ]
        print_json({"ranks": ranks, "spare": spare, "layers": layers})
        return 0
    _print_table(found, ranks, spare)
    return 0


def _in_full(layer: list[float], placement: ExpertPlacement) -> dict[str, Any]:
    return {
        "copies": placement.copies(len(layer)),
        "slots": placement.slots,
        "shares": placement.shares,
        "loads": placement.loads,
    }


def _print_table(
    found: list[tuple[list[float], ExpertPlacement, ExpertPlacement]], ranks: int, spare: int
) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(
        title=f"tokens of the most loaded of {ranks} ranks over the mean, {spare} spare slots a rank"
    )
    for name in ("layer", "experts", "as they are", "with copies", "experts with more than one copy"):
        table.add_column(name, justify="right" if name != "experts with more than one copy" else "left")
    for i, (layer, before, after) in enumerate(found):
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

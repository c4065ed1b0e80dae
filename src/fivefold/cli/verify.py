"""`fivefold verify`: parse, call, print."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

if TYPE_CHECKING:
    from fivefold.verify.verify import Verdict


@click.command()
@click.option("--model", "-m", required=True, help="A preset such as tiny-llama, or a path to a config.json.")
@click.option("--layout", "-l", help="The layout to judge, such as 'dp2 tp2 pp2'.")
@click.option("--against", default="dp1", show_default=True, help="The layout to compare with.")
@click.option(
    "--actions", type=click.Path(path_type=Path), help="File with the action list of a layout 'ppN:custom'."
)
@click.option(
    "--matrix",
    is_flag=True,
    help="Judge every shape and every pair of options that is legal, each against dp1.",
)
@click.option("--max-ranks", type=click.IntRange(2, 64), help="Of a layout in the matrix. Default: 4.")
@click.option(
    "--budget", help="Begin no layout of the matrix after this time: 90s, 10m, 2h. Default: no limit."
)
@click.option(
    "--results",
    type=click.Path(path_type=Path),
    help="File that gets every verdict of the matrix; the same command goes on where it was stopped.",
)
@click.option(
    "--dtype",
    type=click.Choice(["float64", "float32", "bfloat16", "float16"]),
    default="float64",
    show_default=True,
    help="Of everything; 16 bits are judged by the error that one device has itself.",
)
@click.option(
    "--steps", type=click.IntRange(1, 100), default=2, show_default=True, help="Training steps to compare."
)
@click.option(
    "--seed", type=click.IntRange(0, 2**63 - 1), default=0, show_default=True, help="Of weights and data."
)
@click.option(
    "--shrink", is_flag=True, help="Keep heads, layers and features of the model, make its widths small."
)
@click.option(
    "--documents", is_flag=True, help="Samples of several documents, each of which sees its own tokens only."
)
@click.option(
    "--overflow",
    is_flag=True,
    help="Under a loss scale, with a step that overflows on one rank of the layout.",
)
@click.option(
    "--recompute",
    default="none",
    show_default=True,
    help="What the layout computes again in backward, such as full.",
)
@click.option(
    "--rebalance",
    type=click.IntRange(1, 20),
    help="The layout places its experts anew after so many steps, with copies of busy ones.",
)
@click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda, ...")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
def command(
    model: str,
    layout: str | None,
    against: str,
    actions: Path | None,
    matrix: bool,
    max_ranks: int | None,
    budget: str | None,
    results: Path | None,
    dtype: Literal["float64", "float32", "bfloat16", "float16"],
    steps: int,
    seed: int,
    shrink: bool,
    documents: bool,
    overflow: bool,
    recompute: str,
    rebalance: int | None,
    device: str,
    as_json: bool,
) -> int:
    """Show that a layout is the same model as one device, or say what differs and why.

    Both layouts get the same weights and the same data. Loss, logits, every gradient, the gradient norm, the weights
    after SGD and AdamW steps and the moments are compared on every rank, and so is the communication of every step
    with what was predicted. What the comparison cannot show is told. Exit code 0 if all of it agrees, 1 if not.

    \b
      fivefold verify --model tiny-llama --layout "dp2 tp2 pp2"
      fivefold verify --model path/to/config.json --shrink --layout "tp8 pp4"
      fivefold verify --model tiny-llama --matrix --max-ranks 8 --budget 10m
    """
    from fivefold.catalog.models import resolve
    from fivefold.cli.output import print_json
    from fivefold.core.layout import Layout
    from fivefold.strategies.pipeline.actions import read_actions

    if matrix == (layout is not None):
        raise click.UsageError("give --layout for one layout, or --matrix for all")
    if not matrix and (max_ranks, budget, results) != (None, None, None):
        raise click.UsageError("--max-ranks, --budget and --results go with --matrix")
    spec = resolve(model)
    candidate, reference = Layout.parse(layout or "dp1"), Layout.parse(against)
    narrow = dtype in ("bfloat16", "float16")
    if matrix and (actions is not None or reference.world_size > 1 or narrow):
        raise click.UsageError(
            "--matrix compares with dp1 in float64 or float32, and has no custom schedules"
        )
    if (documents or overflow) and (matrix or narrow):
        option = "--documents" if documents else "--overflow"
        raise click.UsageError(f"{option} goes with --layout, in float64 or float32")
    if rebalance is not None and (matrix or narrow):
        raise click.UsageError("--rebalance goes with --layout, in float64 or float32")
    if matrix and recompute != "none":
        raise click.UsageError("--recompute goes with --layout; --matrix tries all of it")
    lines = None if actions is None else read_actions(actions)

    from fivefold.verify import verify as judge
    from fivefold.verify import workload

    if shrink:
        spec = workload.shrink(spec)
    if matrix:
        from fivefold.cli.matrix import run_matrix

        return run_matrix(
            spec, max_ranks or 4, dtype="float32" if dtype == "float32" else "float64", steps=steps, seed=seed,
            device=device, budget=budget, results=results, as_json=as_json,
        )  # fmt: skip
    ranks = max(candidate.world_size, reference.world_size)
    click.echo(
        f"verifying {spec.name} under {candidate} against {reference}, up to {ranks} ranks ...", err=True
    )
    if dtype == "bfloat16" or dtype == "float16":
        from fivefold.verify.rounding import verify_rounding

        if reference.world_size > 1:
            raise click.UsageError(f"{dtype} is compared with dp1 in float64; leave --against out")
        verdict = verify_rounding(
            spec,
            candidate,
            dtype=dtype,
            steps=steps,
            seed=seed,
            device=device,
            actions=lines,
            recompute=recompute,
        )
    else:
        verdict = judge.verify(
            spec, candidate, reference, dtype=dtype, steps=steps, seed=seed, device=device,
            actions=lines, documents=documents, overflow=overflow, recompute=recompute, rebalance=rebalance,
        )  # fmt: skip
    if as_json:
        print_json(verdict.model_dump(mode="json"))
    else:
        _print(verdict)
    return 0 if verdict.passed else 1


def _print(verdict: Verdict) -> None:
    from rich.console import Console
    from rich.table import Table

    from fivefold.cli.tables import say

    own = verdict.own_errors
    every = verdict.experts.rebalance_every
    case = f"{verdict.case}" + (f" experts.rebalance_every={every}" if every else "")
    title = f"{verdict.model}: {case} against {verdict.against}, {verdict.dtype}"
    if own:
        title = f"{verdict.model}: {verdict.case}, and one device, in {verdict.dtype} against float64"
    table = Table()
    errors = ("error", "one device's own") if own else ("relative error",)
    for name in ("quantity", *errors, ""):
        table.add_column(name, justify="right" if name in errors else "left")
    for quantity, error in verdict.quantities.items():
        if quantity == "loss_scale" and quantity in verdict.absent:
            continue
        if quantity in verdict.absent:
            cells = ["-", *(["-"] if own else []), "[dim]the model has none[/dim]"]
        elif quantity in verdict.not_judged:
            cells = [f"{error:.1e}", *_own(own, quantity), f"[dim]not judged in {verdict.dtype}[/dim]"]
        else:
            good = error <= (verdict.bounds or {}).get(quantity, verdict.bound)
            outcome = "[green]ok[/green]" if good else "[red]worse[/red]" if own else "[red]differs[/red]"
            cells = [f"{error:.1e}", *_own(own, quantity), outcome]
        table.add_row(quantity, *cells)
    agree = "[green]as predicted[/green]" if verdict.events_match else "[red]not as predicted[/red]"
    table.add_row("communication", *([""] if own else []), "", agree)
    console = Console(file=sys.stdout)
    say(console, title)  # not as the title of the table, which would be broken at its width
    console.print(table)
    steps = f"{verdict.steps} step{'s' if verdict.steps > 1 else ''}"
    found = f"worst error {verdict.max_rel_err:.1e}, bound {verdict.bound:.0e}, {steps}"
    if own:
        found = f"{_beside_its_own(verdict)}, {steps}"
    console.print(f"{_outcome(verdict)}: {found}")
    plain = [verdict.cause or "", *(f"  {line}" for line in verdict.event_differences[:10])]
    plain += [f"not shown: {limit}" for limit in verdict.limits]
    for line in filter(None, plain):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _beside_its_own(verdict: Verdict) -> str:
    """The quantity that is nearest to its bound, or furthest beyond it, in words."""
    own, bounds = verdict.own_errors or {}, verdict.bounds or {}
    worst = max(bounds, key=lambda quantity: verdict.quantities[quantity] / bounds[quantity])
    return (
        f"nearest to its bound is {worst}, error {verdict.quantities[worst]:.1e} against float64, one device's own "
        f"{own[worst]:.1e}, allowed {bounds[worst]:.1e}"
    )


def _own(own: dict[str, float] | None, quantity: str) -> list[str]:
    return [] if own is None else [f"{own[quantity]:.1e}"]


def _outcome(verdict: Verdict) -> str:
    if verdict.own_errors is not None:
        return (
            "[green]rounds no worse than one device[/green]"
            if verdict.passed
            else "[red]worse than one device[/red]"
        )
    if verdict.passed:
        return "[green]the same model[/green]"
    if not verdict.max_rel_err <= verdict.bound:
        return "[red]not the same model[/red]"
    if not verdict.events_match:
        return "[red]the same numbers, but not the communication that was predicted[/red]"
    return "[red]the same numbers, but the layout compared with is at fault[/red]"

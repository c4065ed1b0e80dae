"""`fivefold layouts`: parse, call, print."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from fivefold.core.layout import Layout
    from fivefold.core.plan import Plan

MANY_RANKS = 64
"""Beyond, so many combinations are tried that it is said beforehand."""

SEQUENCE = 1024
"""Tokens in a sample unless told otherwise: at least so many, and what the ranks divide."""


@click.command()
@click.option("--model", "-m", required=True, help="A preset such as tiny-llama, or a path to a config.json.")
@click.option("--ranks", "-n", type=click.IntRange(1, 4096), help="Ranks of the job.")
@click.option("--why", metavar="LAYOUT", help="Say which rule forbids this layout, or that it is legal.")
@click.option(
    "--actions", type=click.Path(path_type=Path), help="File with the action list of a layout 'ppN:custom'."
)
@click.option(
    "--seq-len", type=click.IntRange(2, 10**8),
    help="Tokens in a sample; default: about 1024, such that the ranks divide it.",
)  # fmt: skip
@click.option(
    "--micro-batch", type=click.IntRange(1, 10**6), default=1, show_default=True, help="Samples at a time."
)
@click.option(
    "--microbatches", type=click.IntRange(1, 10_000), help="In a step; default: 4 per pipeline stage."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
def command(
    model: str,
    ranks: int | None,
    why: str | None,
    actions: Path | None,
    seq_len: int | None,
    micro_batch: int,
    microbatches: int | None,
    as_json: bool,
) -> int:
    """List every legal layout of a model on so many ranks, or say why a layout is not.

    With --why, exit code 0 if the layout is legal, 1 if not, 2 if the text is no layout at all.

    \b
      fivefold layouts --model tiny-llama --ranks 8
      fivefold layouts --model llama-2-7b --why "tp3 pp4"
    """
    from fivefold.catalog.models import resolve
    from fivefold.cli.output import print_json
    from fivefold.core.cluster import Cluster
    from fivefold.core.execution import Execution
    from fivefold.core.layout import Layout
    from fivefold.core.plan import Plan
    from fivefold.core.workload import Workload
    from fivefold.errors import LayoutError
    from fivefold.strategies.legal import legal_layouts, why_not
    from fivefold.strategies.pipeline.actions import microbatches_of, read_actions

    if (ranks is None) == (why is None):
        raise click.UsageError("give --ranks N for a list, or --why LAYOUT for one layout")
    if actions is not None and (why is None or microbatches is not None):
        raise click.UsageError(
            "--actions goes with --why LAYOUT, and says itself how many --microbatches there are"
        )
    spec = resolve(model)
    try:
        asked = Layout.parse(why) if why is not None else None
    except LayoutError as error:
        if as_json:
            unknown = {"layout": why, "model": spec.name, "seq_len": seq_len}
            print_json({**unknown, "legal": False, "rule": str(error)})
        raise
    world = asked.world_size if asked is not None else ranks
    assert world is not None
    lines = None if actions is None else read_actions(actions)
    length = seq_len or _length(2 * world, spec.max_positions)
    cluster = Cluster.parse("cpu")

    def make(layout: Layout) -> Plan:
        told = microbatches if lines is None else microbatches_of(lines)
        count = told or (4 * layout.pp if layout.pp > 1 else 1)
        return Plan(
            model=spec,
            cluster=cluster,
            workload=Workload(seq_len=length, global_batch=layout.dp * micro_batch * count),
            layout=layout,
            execution=Execution(micro_batch=micro_batch, actions=lines),
        )

    if asked is not None:
        rule = why_not(asked, make)
        if as_json:
            print_json(
                {
                    "layout": str(asked),
                    "model": spec.name,
                    "seq_len": length,
                    "legal": rule is None,
                    "rule": rule,
                }
            )
        else:
            click.echo(rule or f"{asked} is legal for {spec.name} at sequence length {length}")
        return 0 if rule is None else 1
    if world > MANY_RANKS:
        click.echo(f"trying every option of every shape of {world} ranks; this takes a while ...", err=True)
    found = list(legal_layouts(spec, world, make))
    if not found:
        raise LayoutError(f"no layout of {world} ranks is legal: {why_not(Layout(dp=world), make)}")
    if as_json:
        names = [str(layout) for layout in found]
        print_json({"model": spec.name, "ranks": world, "seq_len": length, "layouts": names})
    else:
        _print(found, f"{spec.name} on {world} ranks, sequence length {length}")
    return 0


def _length(unit: int, most: int) -> int:
    """About `SEQUENCE` tokens: a multiple of what ranks may ask for, within the positions of the model."""
    return min(-(-SEQUENCE // unit) * unit, most // unit * unit or most)


def _print(layouts: list[Layout], title: str) -> None:
    """A row for each shape, with the options that are legal in it."""
    import sys

    from rich.console import Console
    from rich.table import Table

    shapes: dict[tuple[int, int, int, int], list[Layout]] = {}
    for layout in layouts:
        shapes.setdefault((layout.dp, layout.tp, layout.pp, layout.cp), []).append(layout)
    table = Table(title=title, title_justify="left")
    for name in ("shape", "layouts", "zero", "schedules", "cp methods", "sequence parallel"):
        table.add_column(name, justify="right" if name == "layouts" else "left", overflow="fold")
    for (dp, tp, pp, cp), members in shapes.items():
        shape = str(type(members[0])(dp=dp, tp=tp, pp=pp, cp=cp)).removesuffix(":ring")
        schedules = [
            layout.schedule
            + (f"*{layout.chunks}" if layout.chunks > 1 and layout.schedule in ("1f1b", "bfs") else "")
            for layout in members
            if layout.pp > 1
        ]
        methods = [
            f"ring{one.cp_ring}xulysses{one.cp_ulysses}" if one.cp_method == "ring_ulysses" else one.cp_method
            for one in members
            if one.cp > 1
        ]
        table.add_row(
            shape,
            str(len(members)),
            _listed(str(layout.zero) for layout in members),
            _listed(schedules),
            _listed(methods),
            _listed("yes" if layout.sp else "no" for layout in members if layout.tp > 1),
        )
    console = Console(file=sys.stdout)
    console.print(table)
    console.print(
        f"{len(layouts)} layouts; --json lists them, --why LAYOUT names the rule that forbids another",
        highlight=False,
        soft_wrap=True,
    )


def _listed(values: Iterable[str]) -> str:
    """Each once, in the order of the first."""
    return " ".join(dict.fromkeys(values)) or "-"

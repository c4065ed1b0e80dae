"""`fivefold model`: what a model is made of, and its checkpoints as Hugging Face folders."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fivefold.cli.output import print_json

if TYPE_CHECKING:
    from fivefold.core.model_counts import ParameterCounts
    from fivefold.core.model_spec import ModelSpec
    from fivefold.nn.hub_write import Written

WRITTEN = ("float32", "bfloat16", "float16")
"""What weights can be written as."""

SEQUENCE = 4096
"""Tokens in a sequence unless told otherwise."""


@click.group(name="model")
def command() -> None:
    """Sizes, parameters and FLOPs of a model; its checkpoint rewritten or exported."""


@command.command(name="show")
@click.argument("model", metavar="CONFIG_OR_PRESET")
@click.option(
    "--sequence", type=click.IntRange(1, 10**9),
    help="Tokens in a sequence. Default: 4096, or what the model can take if that is less.",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
def show(model: str, sequence: int | None, as_json: bool) -> None:
    """Count parameters and FLOPs of a preset, a Hugging Face config.json, or a folder that holds one."""
    from fivefold.catalog.models import resolve
    from fivefold.core.model_counts import parameter_counts

    spec = resolve(model)
    counts = parameter_counts(spec)
    sequence = sequence or min(SEQUENCE, spec.max_positions)
    if as_json:
        print_json(_facts(spec, counts, sequence))
    else:
        _print_tables(spec, counts, sequence)


@command.command(name="list")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
def list_presets(as_json: bool) -> None:
    """List the presets with their parameters and the source of their sizes."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from fivefold.catalog.models import names, preset, source
    from fivefold.core.model_counts import parameter_counts
    from fivefold.units import format_count

    rows = [(preset(name), source(name), parameter_counts(preset(name))) for name in names()]
    if as_json:
        models = [
            {
                "name": spec.name,
                "source": origin,
                "total_parameters": counts["total_parameters"],
                "active_parameters": counts["active_parameters"],
                "runs_here": (reason := _why_not(spec)) is None,
                "reason": reason,
            }
            for spec, origin, counts in rows
        ]
        print_json({"models": models})
        return
    table = Table("preset", "parameters", "active", "runs here", box=box.SIMPLE, pad_edge=False)
    table.add_column("source", overflow="fold")
    for spec, origin, counts in rows:
        total, active = format_count(counts["total_parameters"]), format_count(counts["active_parameters"])
        table.add_row(spec.name, total, active, "no" if _why_not(spec) else "yes", origin)
    Console().print(table)
    click.echo("runs here: whether this version can train it, memory aside; --json says why not")


def _why_not(spec: ModelSpec) -> str | None:
    """Why this version cannot train a model; None if it can."""
    from fivefold.core.cluster import Cluster
    from fivefold.core.execution import Execution
    from fivefold.core.layout import Layout
    from fivefold.core.plan import Plan
    from fivefold.core.workload import Workload
    from fivefold.errors import UserError
    from fivefold.strategies import compose

    workload = Workload(seq_len=min(spec.max_positions, 16), global_batch=1)
    here = Cluster.parse("cpu")
    try:
        compose.check(
            Plan(model=spec, cluster=here, workload=workload, layout=Layout(), execution=Execution())
        )
    except UserError as error:
        return str(error)
    return None


@command.command(name="convert")
@click.argument("source", metavar="SRC")
@click.argument("target", metavar="DST", type=click.Path(path_type=Path))
@click.option("--dtype", type=click.Choice(WRITTEN), help="Of all weights. Default: as they are in SRC.")
@click.option(
    "--shard-mib",
    type=click.IntRange(1, 10**6),
    default=5120,
    show_default=True,
    help="Most MiB of weights in one file.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
def convert(source: str, target: Path, dtype: str | None, shard_mib: int, as_json: bool) -> None:
    """Rewrite a Hugging Face checkpoint: other files, another dtype.

    SRC is a folder with config.json and safetensors, or a hub name owner/model; DST a folder that does not exist.
    """
    from fivefold.nn.hub import local_folder
    from fivefold.nn.hub_write import convert as rewrite
    from fivefold.units import MIB

    folder = local_folder(source)
    written = rewrite(folder, target, dtype=dtype, max_shard_bytes=shard_mib * MIB)
    _say_written(written, {"source": str(folder), "dtype": dtype}, as_json=as_json)


@command.command(name="export")
@click.argument("checkpoint", metavar="CHECKPOINT", type=click.Path(path_type=Path))
@click.argument("target", metavar="OUT", type=click.Path(path_type=Path))
@click.option("--dtype", type=click.Choice(WRITTEN), help="Of all weights. Default: that of the run.")
@click.option(
    "--shard-mib",
    type=click.IntRange(1, 10**6),
    default=5120,
    show_default=True,
    help="Most MiB of weights in one file.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
def export(checkpoint: Path, target: Path, dtype: str | None, shard_mib: int, as_json: bool) -> None:
    """Make a Hugging Face checkpoint of one that `fivefold train` saved.

    CHECKPOINT is a folder such as saves/step-00000100; OUT a folder that does not exist. Starts no ranks, and holds
    one parameter in memory at a time. The files are those that `export=` of the run writes.
    """
    from fivefold.train.export import export_checkpoint
    from fivefold.units import MIB

    written = export_checkpoint(checkpoint, target, dtype=dtype, max_shard_bytes=shard_mib * MIB)
    _say_written(written, {"source": str(checkpoint), "dtype": dtype}, as_json=as_json)


def _say_written(written: Written, facts: dict[str, Any], *, as_json: bool) -> None:
    from fivefold.units import format_bytes

    if as_json:
        files = {"files": list(written.files), "weight_bytes": written.bytes}
        print_json({**facts, "target": str(written.folder), **files})
    else:
        count = f"{len(written.files)} file{'s' if len(written.files) > 1 else ''}"
        click.echo(f"{written.folder}: {format_bytes(written.bytes)} of weights in {count}")


def _facts(spec: ModelSpec, counts: ParameterCounts, sequence: int) -> dict[str, Any]:
    from fivefold.core.model_counts import block_flops, forward_flops, head_flops, training_flops
    from fivefold.core.model_spec import beyond_plain_decoder

    return {
        "name": spec.name,
        "family": spec.family,
        "layers": spec.layers,
        "hidden": spec.hidden,
        "vocab": spec.vocab,
        "max_positions": spec.max_positions,
        "tied_embeddings": spec.tied_embeddings,
        **counts,
        "sequence_tokens": sequence,
        "forward_flops_per_token": forward_flops(spec, sequence),
        "training_flops_per_token": training_flops(spec, sequence),
        "head_flops_per_token": head_flops(spec),
        "blocks": [
            {"layers": n, **block.model_dump(), "forward_flops_per_token": block_flops(spec, block, sequence)}
            for n, block in _runs(spec)
        ],
        "beyond_plain_decoder": list(beyond_plain_decoder(spec)),
        "notes": list(spec.notes),
    }


def _runs(spec: ModelSpec) -> list[tuple[int, Any]]:
    """Equal layers in a row, joined: [(how many, the block)]."""
    return [(len(list(run)), block) for block, run in groupby(spec.blocks)]


def _print_tables(spec: ModelSpec, counts: ParameterCounts, sequence: int) -> None:
    from rich.console import Console
    from rich.table import Table

    from fivefold.core.model_counts import (
        block_flops,
        block_parameters,
        forward_flops,
        head_flops,
        training_flops,
    )
    from fivefold.core.model_spec import beyond_plain_decoder
    from fivefold.units import format_count

    console, total = Console(), counts["total_parameters"]
    tied = "tied" if spec.tied_embeddings else "untied"
    console.print(
        f"{spec.name} ({spec.family}): {format_count(total).strip()} parameters, {spec.layers} layers, "
        f"hidden {spec.hidden}, vocab {spec.vocab} ({tied}), positions {spec.max_positions}",
        markup=False,
        soft_wrap=True,
    )
    table = Table("component", "parameters", "share")
    for component, n in counts["by_component"].items():
        if n:
            table.add_row(component, f"{n:,}", f"{n / total:.1%}")
    table.add_section()
    for row, n in (("total", total), ("active per token", counts["active_parameters"])):
        table.add_row(row, f"{n:,}", f"{n / total:.1%}")
    console.print(table)

    table = Table("layers", "attention", "mlp", "parameters", "forward FLOPs/token")
    for n, block in _runs(spec):
        parameters = sum(block_parameters(spec, block).values())
        flops = format_count(block_flops(spec, block, sequence))
        table.add_row(
            str(n),
            _sizes(block.attention),
            _sizes(block.mlp),
            f"{n} x {format_count(parameters)}",
            f"{n} x {flops}",
        )
    table.add_row(
        "head", "", "", format_count(counts["by_component"]["head"]), format_count(head_flops(spec))
    )
    console.print(table)
    forward, training = forward_flops(spec, sequence), training_flops(spec, sequence)
    console.print(
        f"FLOPs per token at {sequence} tokens, causal: forward {format_count(forward).strip()}, "
        f"forward and backward {format_count(training).strip()}",
        highlight=False,
        soft_wrap=True,
    )
    for title, lines in (("beyond a plain decoder", beyond_plain_decoder(spec)), ("note", spec.notes)):
        for line in lines:
            console.print(f"{title}: {line}", markup=False, highlight=False)


def _sizes(part: Any) -> str:
    """`gqa heads 32 kv_heads 8 head_dim 128`: the fields that differ from their defaults."""
    fields = part.model_dump(exclude_defaults=True)
    words = [key if value is True else f"{key} {value}" for key, value in fields.items() if key != "kind"]
    return " ".join([part.kind, *words])

"""`fivefold data`: text to tokens, once, and what is in a prepared folder."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fivefold.cli.output import FiniteRange, print_json
from fivefold.cli.process import tell

if TYPE_CHECKING:
    from rich.progress import Progress as Bar
    from rich.progress import TaskID

    from fivefold.data.manifest import Manifest

PLAIN_EVERY_S = 5.0
"""Seconds between two lines of progress where there is no terminal."""

_json = click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")


@click.group("data")
def command() -> None:
    """Tokenise text once for training, and show what was tokenised."""


@command.command("prepare")
@click.argument("sources", nargs=-1, required=True, metavar="SOURCES...")
@click.option("--out", type=click.Path(path_type=Path), required=True, metavar="DIR", help="Folder to write.")
@click.option("--tokenizer", default="byte", show_default=True, help="byte, or the path of a tokenizer.json.")
@click.option("--bos-token", help="Token that begins a document. Default: the tokenizer's.")
@click.option("--eos-token", help="Token that ends a document. Default: the tokenizer's.")
@click.option("--text-column", default="text", show_default=True, help="Key or column that holds the text.")
@click.option(
    "--format",
    type=click.Choice(["auto", "text", "jsonl", "parquet", "chat"]),
    default="auto",
    show_default=True,
    help="auto: by the end of the name; JSON Lines of messages, or of prompt and completion, are chat.",
)
@click.option(
    "--validation-frac",
    type=FiniteRange(0, 1, max_open=True),
    default=0.01,
    show_default=True,
    help="Share of the documents kept for validation; 0: none.",
)
@click.option("--workers", type=click.IntRange(1, 1024), help="Processes. Default: one for each core.")
@click.option(
    "--shard-mib",
    type=FiniteRange(0, 4096, min_open=True),
    default=64.0,
    show_default=True,
    help="MiB of text in a shard, at most about.",
)
@click.option(
    "--on-error",
    type=click.Choice(["stop", "skip"]),
    default="stop",
    show_default=True,
    help="What to do with a broken record: stop at it, or leave it out and count it.",
)
@click.option(
    "--weights", metavar="W,W...", help="One for each source: train on a mixture with these shares."
)
@click.option("--restart", is_flag=True, help="Discard what an earlier preparation left in DIR.")
@_json
def prepare_data(
    sources: tuple[str, ...],
    out: Path,
    workers: int | None,
    weights: str | None,
    restart: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Turn text into tokens that training reads from disk.

    SOURCES are files, folders or globs of text, JSON Lines or Parquet, or 'builtin'. If it is stopped, the same
    command goes on from where it was.
    """
    from fivefold.data.prepare import PrepareOptions, prepare

    try:
        options["weights"] = None if weights is None else tuple(float(w) for w in weights.split(","))
    except ValueError:
        raise click.BadParameter(
            f"{weights!r} is no list of numbers such as 0.7,0.3", param_hint="--weights"
        ) from None
    checked = PrepareOptions.read(options, where="command line")
    progress = PrepareProgress()
    started = time.monotonic()
    try:
        manifest = prepare(sources, out, checked, workers=workers, restart=restart, progress=progress.update)
    finally:
        progress.stop()
    facts = _facts(out, manifest) | {"seconds": round(time.monotonic() - started, 3)}
    if as_json:
        print_json(facts)
        return
    _print(out, manifest)
    click.echo(f"Train on it with: data={out}")


@command.command("show")
@click.argument("folder", type=click.Path(path_type=Path), metavar="DIR")
@click.option("--verify", is_flag=True, help="Read every shard and compare it with its sha256.")
@click.option(
    "--document", type=click.IntRange(0, 10**12), help="Print one document; what counts in the loss is in «»."
)
@click.option("--split", type=click.Choice(["train", "validation"]), default="train", help="Of --document.")
@_json
def show_data(folder: Path, verify: bool, document: int | None, split: str, as_json: bool) -> None:
    """Show what a prepared folder holds."""
    from fivefold.data.manifest import check_sizes, check_sums, read_manifest

    manifest, _ = read_manifest(folder)
    (check_sums if verify else check_sizes)(folder, manifest.shards)
    text = None if document is None else _document(folder, manifest, document, split)
    if as_json:
        extra = {} if text is None else {"document": text}
        print_json({**_facts(folder, manifest), "verified": verify, **extra})
    elif text is not None:
        click.echo(text)
    else:
        _print(folder, manifest)
        if verify:
            click.echo("Every shard has the sha256 of the manifest.")


def _facts(folder: Path, manifest: Manifest) -> dict[str, Any]:
    from fivefold.data.manifest import SPLITS

    return {
        "folder": str(folder),
        "tokenizer": manifest.tokenizer.model_dump(mode="json"),
        "chat": manifest.chat,
        "splits": {
            split: {
                "documents": manifest.documents(split),
                "tokens": manifest.tokens(split),
                "loss_tokens": manifest.loss_tokens(split),
                "shards": len(manifest.of(split)),
            }
            for split in SPLITS
        },
        "sources": [source.model_dump(mode="json") for source in manifest.sources],
        "skipped": manifest.skipped,
        "skipped_examples": list(manifest.skipped_examples),
    }


def _print(folder: Path, manifest: Manifest) -> None:
    from fivefold.data.manifest import SPLITS
    from fivefold.data.prepared import size_text
    from fivefold.units import format_bytes, format_count

    tokenizer = manifest.tokenizer
    kind = "bytes" if tokenizer.kind == "byte" else f"tokenizer.json {tokenizer.sha256[:12]}"
    click.echo(f"{folder}: {size_text(manifest)}, {kind}, vocabulary {tokenizer.vocab}")
    for split in SPLITS:
        if shards := manifest.of(split):
            click.echo(
                f"  {split}: {manifest.documents(split)} documents, {format_count(manifest.tokens(split))} tokens "
                f"({format_count(manifest.loss_tokens(split))} count in the loss), {len(shards)} shards"
            )
    for source in manifest.sources:
        weight = "" if source.weight is None else f", weight {source.weight:g}"
        empty = f", {source.empty_documents} empty" if source.empty_documents else ""
        click.echo(
            f"  from {source.path}: {source.files} files, {format_bytes(source.bytes)}, "
            f"{source.documents} documents{empty}{weight}"
        )
    if manifest.skipped:
        click.echo(f"  skipped {manifest.skipped} broken records:", err=True)
        for example in manifest.skipped_examples[:5]:
            click.echo(f"    {example}", err=True)


def _document(folder: Path, manifest: Manifest, number: int, split: str) -> str:
    """A document as text, with what counts in the loss between « and »."""
    from fivefold.data.encode import load_encoder
    from fivefold.data.prepared import PreparedDataset

    encoder = load_encoder("byte" if manifest.tokenizer.kind == "byte" else str(folder))
    data = PreparedDataset(folder, 2, 0, "validation" if split == "validation" else "train", verify=False)
    tokens, counts = data.document_tokens(number)
    if not manifest.chat:
        return encoder.decode(tokens.tolist())
    text, start = "", 0
    for place in range(1, len(tokens) + 1):
        if place == len(tokens) or counts[place] != counts[start]:
            piece = encoder.decode(tokens[start:place].tolist())
            text += f"«{piece}»" if counts[start] else piece
            start = place
    return text


class PrepareProgress:
    """A bar on a terminal, a line now and then elsewhere; on standard error."""

    def __init__(self) -> None:
        self.bar: Bar | None = None
        self.task: TaskID | None = None
        self.started = self.said = time.monotonic()

    def update(self, done_bytes: int, total_bytes: int, units: int, all_units: int) -> None:
        """Called a few times a second, for the first time when all processes run."""
        done = min(done_bytes, total_bytes) if units < all_units else total_bytes
        if sys.stderr.isatty():
            self._draw(done, total_bytes)
        elif time.monotonic() - self.said > PLAIN_EVERY_S:
            from fivefold.units import format_bytes

            self.said = time.monotonic()
            speed = format_bytes(done / (self.said - self.started))
            sizes = f"{format_bytes(done)} of {format_bytes(total_bytes)}"
            tell(f"{sizes}, {speed}/s, {units}/{all_units} shards")

    def stop(self) -> None:
        if self.bar is not None:
            self.bar.stop()

    def _draw(self, done: int, total: int) -> None:
        if self.bar is None:
            from rich.console import Console
            from rich.progress import (
                BarColumn,
                DownloadColumn,
                Progress,
                TextColumn,
                TimeRemainingColumn,
                TransferSpeedColumn,
            )

            self.bar = Progress(
                TextColumn("tokenising"),
                BarColumn(),
                DownloadColumn(binary_units=True),
                TransferSpeedColumn(),
                TimeRemainingColumn(),
                console=Console(stderr=True),
            )
            self.bar.start()
            self.task = self.bar.add_task("", total=total)
        if self.task is not None:
            self.bar.update(self.task, completed=done, total=total)

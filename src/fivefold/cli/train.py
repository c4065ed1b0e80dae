"""`fivefold train`: parse, call, print."""

from __future__ import annotations

import dataclasses
import os
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from fivefold.train.outcome import Outcome


class Settings(click.Command):
    """Says how a setting is written where it was typed as an option: `--layout tp2`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            from fivefold.train.config import valid_keys

            key = error.option_name.lstrip("-").replace("-", "_")
            if key not in valid_keys():
                raise
            raise click.UsageError(
                f"no option {error.option_name}; a setting is written {key}=VALUE", ctx
            ) from None


@click.command(cls=Settings)
@click.argument("config", required=False)
@click.argument("overrides", nargs=-1)
@click.option(
    "--resume", help="auto (the newest checkpoint of checkpoint.folder, if any), or a checkpoint's folder."
)
@click.option(
    "--restarts", type=click.IntRange(0, 10**6), default=0, show_default=True,
    help="Start again from the newest checkpoint so many times when a rank dies.",
)  # fmt: skip
@click.option(
    "--ranks", type=click.IntRange(1, 10**6), help="Ranks to start here; must be those of the layout."
)
@click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda, ...")
@click.option(
    "--port", type=click.IntRange(1, 65535), help="Port for the ranks to meet at; default: a free one."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
def command(
    config: str | None,
    overrides: tuple[str, ...],
    resume: str | None,
    restarts: int,
    ranks: int | None,
    device: str,
    port: int | None,
    as_json: bool,
) -> int:
    """Train a model as CONFIG (a YAML file) and key=value OVERRIDES say.

    \b
      fivefold train examples/train.yaml
      fivefold train examples/train.yaml layout='dp2 tp2 pp2' steps=50 optimizer.lr=3e-4
      fivefold train model=tiny-llama layout=tp2
      torchrun --nproc-per-node 8 -m fivefold train examples/train.yaml layout='dp4 tp2'

    Without a launcher the ranks of the layout are started on this machine.
    """
    from fivefold.cli.output import print_json
    from fivefold.errors import LaunchError
    from fivefold.train.checks import check_cheaply
    from fivefold.train.config import load_config

    if (
        config is not None and "=" in config and not os.path.exists(config)
    ):  # a Path would refuse a name too long
        settings = load_config(None, (config, *overrides))
    else:
        settings = load_config(config, overrides)
    if ranks is not None and ranks != settings.layout.world_size:
        raise LaunchError(
            f"--ranks {ranks} is not the {settings.layout.world_size} ranks of layout {settings.layout}; "
            f"leave --ranks out, or change the layout"
        )
    check_cheaply(settings)

    from fivefold.cli.progress import TrainProgress
    from fivefold.train.run import train

    progress = TrainProgress()
    try:
        outcome = train(
            settings, device=device, port=port, resume=resume, restarts=restarts, progress=progress
        )
    finally:
        progress.leave()
    if outcome is None:
        return 0
    if as_json:
        print_json({"layout": str(settings.layout), **dataclasses.asdict(outcome)})
        return 0
    click.echo(_in_words(outcome))
    if outcome.run_id:
        click.echo(f"recorded as {outcome.run_id}; see: fivefold runs show {outcome.run_id}")
    return 0


def _in_words(outcome: Outcome) -> str:
    """One line; where a rank died after the last save, without what it alone knew."""
    from fivefold.units import format_bytes, format_count

    exported = f"the model is in {outcome.exported}" if outcome.exported else ""
    if outcome.steps == 0:
        return f"no step was left to take after step {outcome.resumed_at}; {exported or 'nothing was done'}"
    facts = []
    if outcome.first_loss is not None and outcome.last_loss is not None:
        facts.append(f"loss {outcome.first_loss:.4f} -> {outcome.last_loss:.4f}")
    if outcome.validation_loss is not None:
        facts[-1:] = [" ".join([*facts[-1:], f"(validation {outcome.validation_loss:.4f})"])]
    if outcome.tokens_per_s is not None:
        facts.append(f"{format_count(outcome.tokens_per_s)} tokens/s")
    if outcome.peak_memory_bytes is not None:
        facts.append(f"peak memory {format_bytes(outcome.peak_memory_bytes)} a rank")
    if outcome.comm_bytes is not None:
        facts.append(f"communication {format_bytes(outcome.comm_bytes)} a step")
    return f"{outcome.steps} steps: {', '.join([*facts, *([exported] if exported else [])]) or 'all taken'}"

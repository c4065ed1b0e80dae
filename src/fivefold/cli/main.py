"""The command line: an index of commands. A command's code, and what it needs, is imported only when it is called."""

from __future__ import annotations

import errno
import importlib
import os
import sys
from typing import Any

import click

from fivefold import __version__
from fivefold.errors import FivefoldError, RankFailure

COMMANDS = {
    "train": ("fivefold.cli.train", "Train a model under a layout, on this machine or under torchrun."),
    "verify": ("fivefold.cli.verify", "Show that a layout is the same model as one device, or why not."),
    "lab": ("fivefold.cli.lab", "Run a grid of layouts on real text, verify each, and write a report."),
    "model": ("fivefold.cli.model", "Show what a model is made of: parameters by component, FLOPs."),
    "data": ("fivefold.cli.data", "Tokenise text once for training, and show what was tokenised."),
    "runs": ("fivefold.cli.runs", "List and show recorded runs."),
}
"""Name -> (module that holds `command`, one line of help). `--help` imports none of the modules."""


class LazyGroup(click.Group):
    """Loads a command's module when the command is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        command: click.Command = importlib.import_module(COMMANDS[name][0]).command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        from fivefold.errors import nearest

        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            ctx.fail(f"no command {args[0]!r}{nearest(args[0], COMMANDS)}; commands: {', '.join(COMMANDS)}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in COMMANDS.items()])


@click.group(
    cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110}
)
@click.version_option(__version__, prog_name="fivefold")
def cli() -> None:
    """Fivefold: data, tensor, pipeline, context and expert parallelism for large language models.

    Plan, run, verify and understand a layout such as 'dp2 tp2 pp2'. Every command takes --json.
    """


def main() -> None:
    """Entry point. Exit code 0 only on success; one line for a user's mistake (2), the first cause of a failure (1)."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """Run one command line and return its exit code."""
    # When a rank fails, torch's C++ side prints a stack trace for every peer that notices; ours says it in one line.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    try:
        result: Any = cli.main(arguments, prog_name="fivefold", standalone_mode=False)
        return result if isinstance(result, int) else 0
    except click.exceptions.Exit as stop:
        return stop.exit_code
    except click.ClickException as error:
        error.show()
        return 2
    except (KeyboardInterrupt, click.Abort):
        return _say("interrupted", 130)
    except RankFailure as error:
        return _say(f"{error}\n{error.details}".strip(), error.exit_code)
    except FivefoldError as error:
        return _say(str(error), error.exit_code)
    except ModuleNotFoundError as error:
        if error.name not in ("torch", "numpy", "psutil"):
            raise
        return _say(f"this command needs {error.name}; install it with: pip install 'fivefold[train]'", 2)
    except BrokenPipeError:
        os.dup2(
            os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno()
        )  # the reader has gone: nothing more to say
        return 1
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        return _say(
            f"the disk is full: cannot write {error.filename or 'output'}; what was recorded before is kept",
            2,
        )


def _say(message: str, code: int) -> int:
    click.echo(f"fivefold: {message}", err=True)
    return code

"""The command line: an index of commands. A command's code, and what it needs, is imported only when it is called."""

from __future__ import annotations

import contextlib
import errno
import importlib
import os
import sys
from typing import Any

import click

from fivefold import __version__
from fivefold.cli import process
from fivefold.errors import FivefoldError, RankFailure

COMMANDS = {
    "train": ("fivefold.cli.train", "Train a model under a layout, on this machine or under torchrun."),
    "verify": ("fivefold.cli.verify", "Show that a layout is the same model as one device, or why not."),
    "calibrate": (
        "fivefold.cli.calibrate",
        "Fit the planner to measured runs, or say which runs to measure.",
    ),
    "validate": ("fivefold.cli.validate", "Say how wrong the planner is on measured runs."),
    "layouts": ("fivefold.cli.layouts", "List every legal layout of a model, or say which rule forbids one."),
    "plan": ("fivefold.cli.plan", "Search all layouts of a model on a cluster: what fits, what is fastest."),
    "explain": (
        "fivefold.cli.explain",
        "Say why a layout, and not another: what binds, and every step away.",
    ),
    "estimate": ("fivefold.cli.estimate", "Estimate memory and step time of one layout, without running it."),
    "experts": ("fivefold.cli.experts", "Say where copies of busy experts should go."),
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
    process.open_streams()
    if not process.launched():  # a launched rank has its own way: the main thread may wait for other ranks
        process.end_on_sigterm()
    code = run(sys.argv[1:])
    process.abandon_broken_streams()
    sys.exit(code)


def run(arguments: list[str]) -> int:
    """Run one command line and return its exit code."""
    # When a rank fails, torch's C++ side prints a stack trace for every peer that notices; ours says it in one line.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    # Looking through all installed packages for plugins of pydantic takes longer than reading a model.
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    try:
        result: Any = cli.main(arguments, prog_name="fivefold", standalone_mode=False)
        return result if isinstance(result, int) else 0
    except click.exceptions.Exit as stop:
        return stop.exit_code
    except click.exceptions.NoArgsIsHelpError as error:
        process.let_node_rank_0_speak()
        with contextlib.suppress(OSError):
            error.show()
        return 2
    except click.ClickException as error:
        process.let_node_rank_0_speak()
        return _say(_usage(error), 2)
    except (KeyboardInterrupt, click.Abort) as stop:
        if process.Terminated in (type(stop), type(stop.__cause__)):  # click makes an Abort of it
            return _say("terminated by SIGTERM; what was saved and recorded before is kept", 143)
        return 130 if process.launched() and os.environ["RANK"] != "0" else _say("interrupted", 130)
    except FivefoldError as error:
        return _tell(error)
    except ModuleNotFoundError as error:
        if error.name not in ("torch", "numpy", "psutil"):
            raise
        return _say(f"this command needs {error.name}; install it with: pip install 'fivefold[train]'", 2)
    except BrokenPipeError:
        return 1  # the reader has gone: nothing more to say
    except OSError as error:
        return _say(_os_fault(error), 2)


def _usage(error: click.ClickException) -> str:
    """click's complaint as one line, and where the options of the command are listed."""
    message = " ".join(error.format_message().split()).removesuffix(".")
    context = getattr(error, "ctx", None)
    return f"{message}; see: {'fivefold' if context is None else context.command_path} --help"


def _tell(error: FivefoldError) -> int:
    """One line, and the trace of a rank that failed; once for all ranks of a launched job."""
    if error.told:
        return error.exit_code
    if error.told is None:
        process.let_node_rank_0_speak()
    details = error.details if isinstance(error, RankFailure) else ""
    return _say(f"{error}\n{details}".strip(), error.exit_code)


def _os_fault(error: OSError) -> str:
    """What the system refused, as a line. Raises: the error, where it is about no file: then it is a fault of ours."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return (
            f"the disk is full: cannot write {error.filename or 'output'}; what was recorded before is kept"
        )
    reason = error.strerror or type(error).__name__
    if error.filename is not None:
        name = repr(error.filename)
        return f"cannot use {name if len(name) <= 200 else name[:200] + ' ...'}: {reason}"
    if error.errno in (errno.EIO, errno.EFBIG):
        return f"cannot write output: {reason}"
    raise error


def _say(message: str, code: int) -> int:
    process.tell(f"fivefold: {message}")
    return code

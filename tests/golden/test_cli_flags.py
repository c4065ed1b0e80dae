"""The command line is frozen: scripts rely on its commands, flags and defaults.

After a change that is meant:  python tests/golden/test_cli_flags.py
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from fivefold.cli.main import cli

GOLDEN = Path(__file__).with_name("cli_flags.txt")


def commands(command: click.Command, path: str = "fivefold") -> Iterator[tuple[str, click.Command]]:
    """Every command with its full name, groups before their members."""
    yield path, command
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            member = command.get_command(context, name)
            assert member is not None
            yield from commands(member, f"{path} {name}")


def describe(parameter: click.Parameter) -> str:
    """`--steps integer range 1..100 default 1`: all that a caller can rely on, but not the help text."""
    kind = parameter.type
    words = [", ".join(parameter.opts + parameter.secondary_opts)]
    if isinstance(parameter, click.Option) and parameter.is_flag:
        words.append("flag")
    elif isinstance(kind, click.Choice):
        words.append("|".join(map(str, kind.choices)))
    else:
        words.append(kind.name)
        if isinstance(kind, click.IntRange | click.FloatRange):
            words.append(f"{kind.min}.." if kind.max is None else f"{kind.min}..{kind.max}")
    if isinstance(parameter, click.Argument):
        words.insert(0, "argument")
    if parameter.nargs != 1:
        words.append("any number")
    default = parameter.to_info_dict()["default"]
    if parameter.required:
        words.append("required")
    elif isinstance(default, str | int | float) and not isinstance(default, bool):
        words.append(f"default {default}")
    return " ".join(words)


def frozen_text() -> str:
    lines = []
    for path, command in commands(cli):
        lines.append(path)
        lines += sorted(f"    {describe(parameter)}" for parameter in command.params)
    return "\n".join(lines) + "\n"


def test_the_command_line_is_as_written_down():
    written = GOLDEN.read_text(encoding="utf-8")
    assert frozen_text() == written, "if this is meant: python tests/golden/test_cli_flags.py"


LEAVES = [(path, command) for path, command in commands(cli) if not isinstance(command, click.Group)]


@pytest.mark.parametrize(("path", "command"), LEAVES, ids=[path for path, _ in LEAVES])
def test_every_command_prints_json_if_asked(path, command):
    flags = {flag for parameter in command.params for flag in parameter.opts}
    assert "--json" in flags


@pytest.mark.parametrize(("path", "command"), list(commands(cli)), ids=[path for path, _ in commands(cli)])
def test_every_command_and_option_explains_itself(path, command):
    assert command.help
    silent = [
        p.name for p in command.params if isinstance(p, click.Option) and not p.help and p.name != "help"
    ]
    assert not silent, f"{path}: no help for {', '.join(map(str, silent))}"


RANGES = [
    (f"{path} {parameter.opts[0]}", parameter)
    for path, command in LEAVES
    for parameter in command.params
    if isinstance(parameter.type, click.types.IntParamType | click.types.FloatParamType)
]


@pytest.mark.parametrize(("name", "parameter"), RANGES, ids=[name for name, _ in RANGES])
def test_every_number_has_two_bounds_and_is_a_number(name, parameter):
    kind = parameter.type
    assert isinstance(kind, click.IntRange | click.FloatRange), "has no bounds"
    assert None not in (kind.min, kind.max), "has one bound"
    for text in ("nan", "inf", "-inf", "1e300", "9" * 5000):
        with pytest.raises(click.BadParameter):
            kind.convert(text, parameter, None)


if __name__ == "__main__":
    GOLDEN.write_text(frozen_text(), encoding="utf-8")
    print(f"wrote {GOLDEN}")

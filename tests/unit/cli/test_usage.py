"""A command that is typed wrong: one line, which says where its options are listed."""

from __future__ import annotations

from pathlib import Path

import pytest

from fivefold.cli.main import run


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["runs", "list", "--limit", "0"],
            ["'--limit'", "0 is not in the range", "see: fivefold runs list --help"],
        ),
        (["runs", "show"], ["Missing argument 'ID'", "see: fivefold runs show --help"]),
        (
            ["model", "show", "tiny-llama", "--jsn"],
            ["No such option", "--jsn", "see: fivefold model show --help"],
        ),
        (["verfy"], ["no command 'verfy' (did you mean 'verify'?)", "see: fivefold --help"]),
        (["train", "--layout", "tp2"], ["a setting is written layout=VALUE", "see: fivefold train --help"]),
        (
            ["layouts", "-m", "tiny-llama"],
            ["give --ranks N for a list, or --why LAYOUT", "fivefold layouts --help"],
        ),
        (
            ["layouts", "-m", "tiny-llama", "-n", "2", "--actions", "x"],
            ["--actions goes with --why LAYOUT"],
        ),
    ],
)
def test_one_line(arguments: list[str], words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(arguments) == 2
    printed = capsys.readouterr()
    (line,) = printed.err.splitlines()
    assert printed.out == ""
    assert line.startswith("fivefold: ")
    for word in words:
        assert word in line


def test_a_group_alone_shows_its_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["runs"]) == 2
    printed = capsys.readouterr()
    assert "Commands:" in printed.out + printed.err


@pytest.mark.parametrize(
    ("layout", "actions", "code", "words"),
    [
        ("pp2:custom", "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n", 0, "pp2:custom is legal for tiny-llama"),
        ("pp2:custom", "0F0,0F1,0B0,0B1\n1F0,1B0,1F1\n", 1, "1B1"),
        ("pp2", "0F0,0B0\n1F0,1B0\n", 1, "pp2:custom"),
    ],
)
def test_a_custom_schedule_is_judged_by_its_actions(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], layout: str, actions: str, code: int, words: str
) -> None:
    path = tmp_path / "actions.csv"
    path.write_text(actions)
    assert run(["layouts", "-m", "tiny-llama", "--why", layout, "--actions", str(path)]) == code
    assert words in capsys.readouterr().out

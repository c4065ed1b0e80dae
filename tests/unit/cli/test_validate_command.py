"""`fivefold validate` and `fivefold calibrate`, from the command line on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fivefold.cli.main import run

RUNS = Path(__file__).parents[2] / "golden" / "runs.jsonl"


def told(capsys: pytest.CaptureFixture[str], *arguments: Any) -> tuple[int, str, str]:
    code = run([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    return code, out, err


def test_calibrate_then_validate(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    lines = [line for line in RUNS.read_text().splitlines() if "mosaicml" in line]
    seen, left, made = tmp_path / "seen.jsonl", tmp_path / "left.jsonl", tmp_path / "mine.json"
    seen.write_text("\n".join(lines[::2]))
    left.write_text("\n".join(lines[1::2]))
    code, out, _ = told(capsys, "calibrate", seen, "-o", made, "--json")
    assert code == 0
    assert json.loads(out)["runs"] == len(lines[::2])
    found = {}
    for name, options in (("shipped", []), ("mine", ["--calibration", made])):
        code, out, _ = told(capsys, "validate", left, *options, "--json")
        assert code == 0
        found[name] = json.loads(out)["step_time"]
    assert found["mine"]["n"] == found["shipped"]["n"] == len(lines[1::2])
    assert found["mine"]["mape"] < found["shipped"]["mape"]


def test_the_table_and_the_suggestions_can_be_read(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = told(capsys, "validate", RUNS)
    assert code == 0
    assert "regret" in out
    code, out, _ = told(capsys, "calibrate", RUNS, "--suggest", 3)
    assert code == 0
    assert [line.split(".")[0].strip() for line in out.splitlines()] == ["1", "2", "3"]
    assert all("line " in line for line in out.splitlines())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["validate", "none.jsonl"], "cannot read runs table none.jsonl"),
        (["validate", RUNS, "--by", "model"], "--by goes with --folds"),
        (["validate", RUNS, "--folds", "2", "-c", "x"], "leave out --calibration"),
        (["validate", RUNS, "-c", RUNS], "is not a calibration"),
        (["calibrate", RUNS], "give -o FILE"),
        (["calibrate", RUNS, "--suggest", "999"], "can be chosen from"),
        (["calibrate", RUNS, "-o", "/nowhere/x.json"], "cannot write calibration"),
    ],
)
def test_mistakes_are_one_line(capsys: pytest.CaptureFixture[str], arguments: list[Any], said: str) -> None:
    code, out, err = told(capsys, *arguments)
    assert (code, out) == (2, "")
    assert said in err
    assert "Traceback" not in err

"""The metrics file of a run that resumes: its own lines go on, those of anything else stay."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from fivefold.errors import RecordError
from fivefold.train.log import MetricsFile


def steps(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def write(path: Path, *numbers: int, rest: str = "") -> None:
    path.write_text("".join(json.dumps({"step": n, "loss": 1.0}) + "\n" for n in numbers) + rest)


@pytest.mark.parametrize(
    ("before", "rest", "keep", "kept"),
    [
        ((1, 2, 3, 4), "", 2, [1, 2]),
        ((2, 4, 6), "", 5, [2, 4]),
        ((1, 2), "", 9, [1, 2]),
        ((1, 2, 3), '{"step": 4, "lo', 3, [1, 2, 3]),
        ((1, 2), "", 0, []),
        ((), "", 3, []),
    ],
)
def test_lines_after_the_resumed_step_are_taken_back(
    tmp_path: Path, before: tuple[int, ...], rest: str, keep: int, kept: list[int]
) -> None:
    path = tmp_path / "m.jsonl"
    write(path, *before, rest=rest)
    file = MetricsFile(path, keep=keep)
    assert steps(path) == kept
    file.write({"step": keep + 1, "loss": 0.5})
    file.close()
    assert steps(path) == [*kept, keep + 1]


def test_a_step_without_finite_numbers_is_json_all_the_same(tmp_path: Path) -> None:
    """Python writes NaN and Infinity, which other readers of JSON refuse."""

    def no_json(constant: str) -> float:
        raise AssertionError(constant)

    file = MetricsFile(tmp_path / "m.jsonl")
    file.write({"step": 1, "loss": math.nan, "grad_norm": math.inf, "z_loss": -math.inf})
    file.close()
    line = json.loads((tmp_path / "m.jsonl").read_text(), parse_constant=no_json)
    assert line == {"step": 1, "loss": "nan", "grad_norm": "inf", "z_loss": "-inf"}
    assert math.isnan(float(line["loss"]))


@pytest.mark.parametrize("line", ["a note\n", "[1, 2]\n", '{"steps": 3}\n', '{"step": "x"}\n', "\n"])
@pytest.mark.parametrize("keep", [0, 1, 5])
def test_what_no_run_wrote_is_not_cut_off(tmp_path: Path, line: str, keep: int) -> None:
    path = tmp_path / "notes"
    write(path, 1, 2, rest=line + "more\n")
    before = path.read_text()
    with pytest.raises(RecordError, match=r"notes: line 3 is no step of a run; name another file"):
        MetricsFile(path, keep=keep)
    assert path.read_text() == before

"""`fivefold explain`: its keys, its page and its refusals."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from fivefold.cli.main import run

WORKED = ("-m", "llama-2-70b", "-c", "32xA100-80", "--global-batch", "128")


def ask(capsys: pytest.CaptureFixture[str], command: str, *arguments: str) -> dict[str, Any]:
    run([command, *arguments, "--json"])
    answer: dict[str, Any] = json.loads(capsys.readouterr().out)
    return answer


def test_the_worked_example(capsys: pytest.CaptureFixture[str]) -> None:
    """70B: TP8 PP4 keeps 35 GB of states; TP8 PP2 DP2 keeps 70 GB and is told the ZeRO that makes it fit."""
    first = ask(capsys, "explain", *WORKED, "-l", "tp8 pp4")
    second = ask(capsys, "explain", *WORKED, "-l", "tp8 pp2 dp2")
    assert first["plan"]["state_bytes"] == pytest.approx(35e9, rel=0.02)
    assert second["plan"]["state_bytes"] == pytest.approx(70e9, rel=0.02)
    assert (first["plan"]["fits"], second["plan"]["fits"]) == ("yes", "unsure")
    assert "nearest that fits: dp2 tp8 pp2 zero1" in second["plan"]["reasons"]
    step = next(row for row in second["counterfactuals"] if row["change"] == "zero 0 -> 1")
    assert step["fits"] == "yes"
    assert step["memory_change"]["term"] == "optimizer"
    away = next(row for row in first["counterfactuals"] if row["change"] == "pp 4 -> 2, dp 1 -> 2")
    assert away["layout"] == "dp2 tp8 pp2"
    assert away["peak_memory_bytes"] == second["plan"]["peak_memory_bytes"]
    assert away["step_time_s"] == pytest.approx(second["plan"]["step_time_s"])


def test_the_layout_is_that_of_estimate_and_the_best_that_of_plan(capsys: pytest.CaptureFixture[str]) -> None:
    alone = ask(capsys, "estimate", *WORKED, "-l", "tp8 pp4")
    given = ask(capsys, "explain", *WORKED, "-l", "tp8 pp4")
    for key in ("step_time_s", "peak_memory_bytes", "time", "memory", "mfu"):
        assert given["plan"][key] == alone[key]
    plan = ask(capsys, "plan", *WORKED, "--fix", "cp1", "--top", "1")["plans"][0]
    best = ask(capsys, "explain", *WORKED, "--fix", "cp1")
    assert best["plan"] == plan
    assert best["best"]["layout"] == plan["layout"]
    assert {
        "reasoning",
        "binding",
        "waterfall",
        "triangle",
        "axes",
        "counterfactuals",
        "alike",
        "runs",
    } <= best.keys()


def test_where_nothing_fits_it_tells_what_plan_tells(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("-m", "llama-3.1-70b", "-c", "8 A100-80")
    told = []
    for command in ("plan", "explain"):
        assert run([command, *arguments]) == 2
        told.append(capsys.readouterr().err)
    assert told[0] == told[1]
    assert re.search(r"1,129 GB .* 640 GiB in all; nearest: 16 A100-80GB", told[0])
    assert ask(capsys, "explain", *arguments)["refusal"] in told[0]


def test_tables(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["explain", "-m", "llama-3-8b", "-c", "8 H100", "-l", "dp8"]) == 1
    out = capsys.readouterr().out
    for text in (
        "1. one device: 8.03 G parameters x 16 bytes = 128 GB",
        "binding: ",
        "one step away:",
        "to settle it:",
    ):
        assert text in out
    assert "nearest that fits: dp8 zero" in out


def test_plan_says_the_short_form(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "-m", "llama-3-8b", "-c", "8 H100", "--fix", "cp1", "--micro-batch", "1"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"\n4. throughput: .*\nbinding: ", out)


def test_the_page_stands_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "why.html"
    facts = ask(capsys, "explain", *WORKED, "-l", "dp2 tp8 pp2 zero1", "--html", str(path))
    page = path.read_text(encoding="utf-8")
    assert not re.search(r"<script|https?://|<link|@import", page)
    figures = re.findall(r"<svg.*?</svg>", page, re.DOTALL)
    assert len(figures) >= 5
    for figure in figures:
        ElementTree.fromstring(figure)
    steps = sorted(facts["counterfactuals"], key=lambda row: float(row["step_time_ratio"]))
    places = [page.rindex(f"<li>{row['text'].replace('>', '&gt;')}") for row in steps]
    assert places == sorted(places)
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("-l", "tp8 pp2"), "takes 16 devices .* nearest: dp2 tp8 pp2"),
        (("-l", "tp8 pp4", "--fix", "tp8"), "--fix is for the best layout and --layout gives one"),
        (("-l", "tp8 gp4"), "unknown layout token 'gp4'"),
        (("-l", "tp8 pp4", "--micro-batch", "3"), "global batch 128 is not a multiple"),
        (("-l", "tp8 pp4", "--html", "absent/a.html"), "cannot write the page absent/a.html"),
    ],
)
def test_refused(arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["explain", *WORKED, *arguments]) == 2
    err = capsys.readouterr().err
    assert re.search(message, err), err
    assert err.count("\n") == 1

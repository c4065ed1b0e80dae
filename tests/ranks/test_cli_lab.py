"""`fivefold lab` as a user types it: report, JSON and records; a layout that fails does not end the others."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fivefold.core.layout import Layout
from fivefold.data.corpus import load_corpus
from fivefold.lab import lab as laboratory
from fivefold.report.lab_report import LabResult

from .command_line import ROUTED_CONFIG, CommandLine

V, D, F, KV, LAYERS = 259, 32, 48, 16, 2
"""Sizes of the model: vocabulary, hidden, ffn, key/value features, layers."""


def parameters(tp: int) -> int:
    """Parameters of one rank: matrices are cut, the vocabulary is padded to a multiple of tp, norms are whole."""
    vocabulary = 2 * D * -(-V // tp)
    layer = (2 * D * D + 2 * D * KV + 3 * D * F) // tp + 2 * D
    return vocabulary + LAYERS * layer + D


@pytest.fixture
def small(fivefold: CommandLine, monkeypatch: pytest.MonkeyPatch) -> CommandLine:
    """The lab on the test's own text, which is read faster."""
    monkeypatch.setattr(laboratory, "load_corpus", lambda **limits: load_corpus("corpus", **limits))
    return fivefold


def lab(fivefold: CommandLine, *arguments: str):
    return fivefold("lab", "--model", "config.json", "--out", "report", *arguments)


def only(monkeypatch: pytest.MonkeyPatch, *layouts: str) -> None:
    monkeypatch.setattr(laboratory, "grid", lambda *_: [Layout.parse(text) for text in layouts])


def replace_on(monkeypatch: pytest.MonkeyPatch, layout: str, action: Callable[[], object]) -> None:
    """The last rank of this layout does something else than to measure."""
    measure: Callable[..., Any] = laboratory.measure

    def replaced(rank, plan, *rest, **options):
        if str(plan.layout) == layout and rank.rank == plan.layout.world_size - 1:
            action()
        return measure(rank, plan, *rest, **options)

    monkeypatch.setattr(laboratory, "measure", replaced)


def fail() -> None:
    raise ZeroDivisionError("planted")


def test_two_ranks_on_the_built_in_text(fivefold: CommandLine) -> None:
    ended = lab(fivefold, "--max-ranks", "2", "--steps", "3", "--json")
    assert ended.code == 0, ended.err
    result = ended.json()
    assert result["passed"] is True
    by_layout = {one["layout"]: one for one in result["layouts"]}
    assert list(by_layout) == ["dp1", "dp2", "tp2", "pp2"]
    for one in result["layouts"]:
        assert {
            "layout", "passed", "tokens_per_s", "peak_memory_bytes", "comm_frac", "max_rel_err", "error",
        } <= set(one)  # fmt: skip
        assert (one["passed"], one["error"]) == (True, None)
        assert one["tokens_per_s"] > 0
        assert one["max_rel_err"] <= 1e-5
        assert f"{one['layout']}: the same model" in ended.err
    _check_costs(by_layout)

    page = Path("report/report.html").read_text()
    assert "4 of 4 layouts are the same model" in page
    saved = LabResult.model_validate_json(Path("report/lab.json").read_text())
    assert [one.layout for one in saved.layouts] == list(by_layout)
    assert all(len(one.losses) == 3 for one in saved.layouts)
    runs = fivefold("runs", "list", "--json").json()["runs"]
    assert {(run["kind"], run["status"], run["layout"]) for run in runs} == {
        ("lab", "finished", layout) for layout in by_layout
    }
    run = fivefold.last_run()  # the newest is the last layout
    assert [(row["step"], row["rank"]) for row in run["metrics"]] == [
        (s, r) for s in (1, 2, 3) for r in (0, 1)
    ]
    assert run["results"]["lab"]["layout"] == "pp2"


def test_experts_are_in_the_report(small: CommandLine) -> None:
    small.model(**ROUTED_CONFIG)
    ended = lab(small, "--axes", "cp,ep", "--max-ranks", "2", "--steps", "3", "--json")
    assert ended.code == 0, ended.err
    assert "3 steps each, on cpu, in float64: rounding would choose experts" in ended.err
    by_layout = {one["layout"]: one for one in ended.json()["layouts"]}
    assert list(by_layout) == ["dp1", "dp2 ep2", "cp2:ring", "cp2:ring ep2"]
    for text, one in by_layout.items():
        assert max(one["max_rel_err"], one["loss_max_rel_err"]) <= 1e-10
        assert one["expert_imbalance"] == pytest.approx(by_layout["dp1"]["expert_imbalance"])
        shared = text.endswith("ep2")
        assert (one["rank_imbalance"] is not None) == (one["dispatch_bytes"] is not None) == shared
    saved = LabResult.model_validate_json(Path("report/lab.json").read_text())
    assert (saved.dtype, saved.bound) == ("float64", 1e-10)
    for layout in saved.layouts:
        through_ep = layout.comm_bytes_by_axis.get("ep", 0.0)
        assert bool(through_ep) == bool(layout.dispatch_bytes)
    page = Path("report/report.html").read_text()
    assert 'id="experts"' in page
    assert "imbalance<br>(ranks)" in page


def _check_costs(by_layout: dict[str, dict[str, Any]]) -> None:
    """Communication is free on one device; memory holds at least weight, gradient and two moments in float32."""
    assert by_layout["dp1"]["comm_frac"] == 0
    assert all(0 < by_layout[cut]["comm_frac"] <= 1 for cut in ("dp2", "tp2", "pp2"))
    one, two = (by_layout[cut]["peak_memory_bytes"] for cut in ("dp1", "tp2"))
    assert one >= 16 * parameters(tp=1)
    assert two >= 16 * parameters(tp=2)
    assert two < one
    assert by_layout["pp2"]["peak_memory_bytes"] < one


def test_a_layout_that_fails_is_recorded_and_the_others_go_on(
    small: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    only(monkeypatch, "dp1", "tp2", "dp2")
    replace_on(monkeypatch, "tp2", fail)
    ended = lab(small, "--steps", "2", "--json")
    assert ended.code == 1
    result = ended.json()
    one, broken, other = result["layouts"]
    assert result["passed"] is False
    assert (one["passed"], other["passed"]) == (True, True)
    assert (broken["layout"], broken["passed"], broken["tokens_per_s"]) == ("tp2", False, None)
    assert broken["error"] == "rank 1 failed first: ZeroDivisionError: planted"
    assert "[2/3] tp2: FAILED: rank 1 failed first: ZeroDivisionError: planted" in ended.err
    assert "ZeroDivisionError: planted" in Path("report/report.html").read_text()
    failed = small("runs", "list", "--status", "failed", "--json").json()["runs"]
    assert [(run["layout"], run["error"]) for run in failed] == [("tp2", broken["error"])]


def test_without_one_device_nothing_is_judged(small: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    """dp2 must not silently become what the others are compared with."""
    only(monkeypatch, "dp1", "dp2")
    replace_on(monkeypatch, "dp1", fail)
    ended = lab(small, "--steps", "1", "--json")
    assert ended.code == 1
    assert [one["passed"] for one in ended.json()["layouts"]] == [False, False]
    assert "not judged: the run on one device" in ended.json()["layouts"][1]["error"]


def test_a_layout_that_the_model_does_not_allow_is_left_out(
    small: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    small.model(num_attention_heads=2)
    only(monkeypatch, "dp1", "tp4")
    ended = lab(small, "--steps", "1", "--json")
    assert ended.code == 0
    result = ended.json()
    assert [one["layout"] for one in result["layouts"]] == ["dp1"]
    assert "heads = 2 is not divisible by 4" in result["left_out"]["tp4"]
    assert f"left out tp4: {result['left_out']['tp4']}" in ended.err


def test_what_a_person_reads(small: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch, "dp1")
    ended = lab(small, "--steps", "1")
    assert ended.code == 0
    assert ended.out.count("the same model as one device") == 1
    assert ended.out.rstrip().endswith("report: report/report.html")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model", "gpt2"], ["gpt2 cannot be run yet", "learned positions"]),
        (["--model", "short.json"], ["sequence length 128 exceeds the 64 positions"]),
        (["--model", "odd.json"], ["vocabulary of 100", "at least 259"]),
        (["--model", "llama-3.1-70b"], ["llama-3.1-70b", "takes at least", "choose a smaller model"]),
        (["--device", "cuda:9"], ["device 'cuda:9' is not available here"]),
        (["--axes", "cp,dq"], ["no axis 'dq' in the lab (did you mean 'dp'?); it has dp, tp, pp, cp, ep"]),
        (
            ["--out", "train.yaml", "--steps", "1", "--max-ranks", "1"],
            ["cannot write the report to train.yaml"],
        ),
    ],
)
def test_a_mistake_is_one_line(small: CommandLine, arguments: list[str], words: list[str]) -> None:
    small.model("short.json", max_position_embeddings=64)
    small.model("odd.json", vocab_size=100)
    ended = lab(small, *arguments, "--json")
    assert (ended.code, ended.out) == (2, "")
    for word in words:
        assert word in ended.said()


def test_ctrl_c_keeps_what_was_measured(small: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch, "dp1", "dp2")
    replace_on(monkeypatch, "dp2", lambda: time.sleep(60))
    command = small.start("lab", "--model", "config.json", "--out", "report", "--steps", "1")
    command.wait_for("[1/2] dp1: the same model")
    time.sleep(0.2)  # into dp2
    began = time.monotonic()
    command.interrupt(whole_group=True)
    ended = command.ended()
    assert time.monotonic() - began < 5.0
    assert (ended.code, ended.out, ended.said()) == (130, "", "interrupted")
    assert command.alive() == []
    saved = json.loads(Path("report/lab.json").read_text())
    assert [one["layout"] for one in saved["layouts"]] == ["dp1"]
    runs = small("runs", "list", "--json").json()["runs"]
    assert [(run["layout"], run["status"]) for run in runs] == [("dp2", "interrupted"), ("dp1", "finished")]

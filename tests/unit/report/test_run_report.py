"""The page of one run: what stands in it for which record, and nothing where there is nothing."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from html_page import Page, check_alone, figures

from fivefold.cli.main import run as fivefold
from fivefold.errors import RecordError
from fivefold.records.store import MetricRow, RunRecord, Store
from fivefold.report.run_plots import MOST_POINTS
from fivefold.report.run_report import RunReport, render
from fivefold.report.run_results import experts_of, precision_of

HOSTILE = '</title></svg></style><script>alert(1)</script><img src="https://x.test/a"> $\\frac{ & \x00'

EXPERTS = {
    "ep": 2,
    "steps": 4,
    "moved": False,
    "layers": [
        {"layer": 1, "chosen": [8, 4, 0, 4], "chosen_last_step": [1, 1, 1, 1], "ranks": [9, 3], "tokens": 8,
         "dropped": 4, "entropy": 1.2},
        {"layer": 3, "chosen": [4, 4, 4, 4], "chosen_last_step": [1, 1, 1, 1], "ranks": [8, 8], "tokens": 8,
         "dropped": 0, "entropy": math.log(4)},
    ],
}  # fmt: skip

PRECISION = {
    "dtype": "float16",
    "largest_number": 65504.0,
    "scales": [[1, 65536], [3, 32768]],
    "overflow_steps": [2],
    "layers": [
        {"step": 2, "grad_norm": {"embedding": math.inf, "layers.0": 2.0, "head": 1.0},
         "largest": {"embedding": [0.5, "embedding"], "layers.0": [32752.0, "layers.0.mlp.up"], "head": [4.0, "norm"]}},
        {"step": 4, "grad_norm": {"embedding": 0.25, "layers.0": 0.5, "head": 1.0},
         "largest": {"embedding": [0.75, "embedding"], "layers.0": [3.0, "layers.0.mlp"], "head": [math.nan, "head"]}},
    ],
}  # fmt: skip


def record(**changes: Any) -> RunRecord:
    values: dict[str, Any] = {
        "id": "1abc", "kind": "train", "name": None, "layout": "dp2 ep2", "model": "tiny", "plan": {},
        "versions": {"torch": "2.13.0"}, "machine": {"cpu": "some cpu", "cores": 2, "device": "cpu"},
        "status": "finished", "error": None, "pid": 1, "host": "here", "started_at": 1e9, "ended_at": 1e9 + 5,
        "last_step": 4,
    }  # fmt: skip
    return RunRecord(**{**values, **changes})


def rows(steps: int = 4, **more: float) -> list[MetricRow]:
    return [
        MetricRow(step, rank, {"loss": 5 - 0.1 * step, "grad_norm": 2.0, "tokens_per_s": 1e3,
                               **{name: value * (1 + rank) for name, value in more.items()}})
        for step in range(1, steps + 1) for rank in (0, 1)
    ]  # fmt: skip


ROUTED = {
    "expert_imbalance": 2.0,
    "rank_imbalance": 1.5,
    "dropped_choices": 4,
    "router_entropy": 1.3,
    "dispatch_bytes": 2048,
}


@pytest.fixture(scope="module")
def html() -> str:
    return render(RunReport(record(), {"experts": EXPERTS, "precision": PRECISION}, rows(**ROUTED)))


def test_a_run_with_experts_and_precision_shows_all(html: str) -> None:
    check_alone(html)
    drawn = figures(html)
    assert list(drawn) == [
        "loss", "speed", "load", "imbalance", "routing", "dispatch", "scale", "norms", "largest",
    ]  # fmt: skip
    words = Page(html).words
    assert "finished at step 4: loss 4.9 to 4.6" in words
    assert "1 2.00 1.50 0, by 100.0% of tokens 1 25.0% 1.200 of 1.386" in words
    assert "3 1.00 1.00 0, by 50.0% of tokens 0 0.0% 1.386 of 1.386" in words
    assert "Steps that overflowed and changed nothing: 2." in words
    assert "embedding infinite 0.25 0.75 at step 4 0.0% embedding" in words
    assert "layers.0 2 0.5 3.3e4 at step 2 50.0% layers.0.mlp.up" in words
    assert "head 1 1 NaN at step 4 NaN head" in words


def test_figures_hold_the_numbers(html: str) -> None:
    drawn = figures(html)
    tips = re.findall(r"<title>(.*?)</title>", html)
    assert "1 experts: never chosen" in tips
    assert "6 experts: 1× to 1.25×" in tips
    assert "1 experts: 2× to 3×" in tips
    assert {"layer", "expert", "never chosen"} <= set(drawn["load"])
    assert {"busiest expert", "busiest rank"} <= set(drawn["imbalance"])
    assert {"dropped choices", "entropy, nats"} <= set(drawn["routing"])
    assert {"KiB a step", "largest rank", "mean of ranks"} <= set(drawn["dispatch"])
    assert "step that overflowed and was skipped" in drawn["scale"]
    assert "embedding, step 2: not finite" in tips
    assert "largest number of float16" in drawn["largest"]


def test_a_dense_run_shows_neither() -> None:
    html = render(RunReport(record(layout="dp2"), {}, rows()))
    check_alone(html)
    assert list(figures(html)) == ["loss", "speed"]
    words = Page(html).words.lower()
    assert "expert" not in words
    assert "precision" not in words


def test_one_rank_alone_has_no_ranks_to_compare_and_sends_nothing() -> None:
    layers = [{**layer, "ranks": [sum(layer["chosen"])]} for layer in EXPERTS["layers"]]  # type: ignore[attr-defined, index]
    alone = {**EXPERTS, "ep": 1, "layers": layers}
    numbers = {"expert_imbalance": 2.0, "dropped_choices": 0, "router_entropy": 1.3}
    html = render(RunReport(record(layout="dp1"), {"experts": alone}, rows(**numbers)))
    drawn = figures(html)
    assert "dispatch" not in drawn
    assert "busiest rank" not in drawn["imbalance"]
    assert "dropped choices" not in drawn["routing"]
    assert "imbalance of ranks" not in Page(html).words


def test_a_run_without_steps_or_with_an_error() -> None:
    failed = record(status="failed", error="ZeroDivisionError: planted", last_step=None)
    words = Page(render(RunReport(failed, {}, []))).words
    assert "failed, no step was logged" in words
    assert "ZeroDivisionError: planted" in words
    nan = [MetricRow(1, 0, {"loss": math.nan, "tokens_per_s": 5.0})]
    assert "loss NaN to NaN" in Page(render(RunReport(record(), {}, nan))).words


def test_hostile_text_stays_text() -> None:
    block = {"grad_norm": {HOSTILE: 1.0}, "largest": {HOSTILE: [1.0, HOSTILE]}, "step": 1}
    bad = {"precision": {**PRECISION, "dtype": HOSTILE, "layers": [block]}}
    run = record(model=HOSTILE, layout=HOSTILE, error=HOSTILE, name=HOSTILE, versions={HOSTILE: HOSTILE})
    page = Page(render(RunReport(run, bad, rows())))
    assert page.count("script") == page.count("img") == 0
    assert "<script>alert(1)</script>" in page.words


def test_a_step_taken_again_counts_once_and_long_runs_stay_small() -> None:
    again = [MetricRow(1, 0, {"loss": 1.0}), MetricRow(1, 0, {"loss": 2.0}), MetricRow(1, 1, {"loss": 3.0})]
    assert RunReport(record(), {}, again).series("loss") == {1: 2.0}
    many = [MetricRow(step, 0, {"loss": 1 / step, "expert_imbalance": 2.0}) for step in range(1, 9001)]
    html = render(RunReport(record(), {"experts": EXPERTS}, many))
    assert max(len(path.split()) for path in re.findall(r' d="(.*?)"', html, re.DOTALL)) < 5 * MOST_POINTS
    large = {"ep": 8, "steps": 1, "moved": True, "layers": [
        {"layer": i, "chosen": [i * e % 7 for e in range(256)], "chosen_last_step": [0] * 256, "ranks": [9] * 8,
         "tokens": 9, "dropped": 0, "entropy": 1.0} for i in range(58)
    ]}  # fmt: skip
    assert len(render(RunReport(record(), {"experts": large}, rows(**ROUTED)))) < 3_000_000


@pytest.mark.parametrize(
    "experts",
    [
        {"ep": 2, "steps": 1},
        {**EXPERTS, "ep": 3},
        {**EXPERTS, "layers": [{"layer": 0, "chosen": []}]},
        [1],
    ],
)
def test_a_damaged_record_is_one_line(experts: Any) -> None:
    with pytest.raises(RecordError, match=r"^run 1abc: what it says of its experts is damaged$"):
        experts_of({"experts": experts}, where="run 1abc")
    with pytest.raises(RecordError, match=r"^run 1abc: its precision report is damaged$"):
        precision_of({"precision": experts}, where="run 1abc")


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records, out = str(tmp_path / "records.sqlite"), tmp_path / "new" / "page.html"
    with Store.open(records) as store, store.start(kind="train", layout="dp1", model="m", plan={}) as run:
        run.log(1, 0, {"loss": 2.0})
    assert fivefold(["runs", "report", "last", "--records", records, "--out", str(out), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"run": run.id, "report": str(out)}
    assert "finished at step 1: loss 2 to 2" in Page(out.read_text(encoding="utf-8")).words
    taken = str(tmp_path / "records.sqlite" / "page.html")
    assert fivefold(["runs", "report", "last", "--records", records, "--out", taken]) == 2
    assert "cannot write the report to" in capsys.readouterr().err

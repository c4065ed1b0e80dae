"""`fivefold runs`: tables for people, one JSON object for programs, and a quick start."""

from __future__ import annotations

import io
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from rich.console import Console

from fivefold.cli import tables
from fivefold.cli.run_details import last_rows, losses
from fivefold.cli.run_results import print_result
from fivefold.cli.runs import command
from fivefold.cli.tables import sparkline
from fivefold.errors import RecordError
from fivefold.records.store import MetricRow, Store

Invoke = Callable[..., Result]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FIVEFOLD_RECORDS", raising=False)
    return tmp_path


@pytest.fixture
def store(folder: Path) -> Iterator[Store]:
    with Store.open() as opened:
        yield opened


@pytest.fixture
def invoke(folder: Path) -> Invoke:
    """Run the command and let errors through, as the root command would get them."""

    def run(*arguments: str) -> Result:
        return CliRunner().invoke(command, arguments, catch_exceptions=False)

    return run


def example(store: Store, name: str = "first", **changes: Any) -> str:
    run = store.start(
        **{
            "kind": "train",
            "layout": "dp2 tp2",
            "model": "tiny",
            "plan": {"steps": 9},
            "name": name,
            **changes,
        }
    )
    for step in range(1, 10):
        run.log(step, 0, {"memory_bytes": 3 * 2**30, "comm_s": 0.0021})
        run.log(step, 1, {"loss": 10.0 - step, "memory_bytes": 2**30})
    run.result("verdict", {"passed": True})
    run.finish()
    return run.id


def one_object(result: Result) -> dict[str, Any]:
    """Standard output is one JSON object, by the letter of the standard, and nothing else."""

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    assert result.exit_code == 0
    assert result.stderr == ""
    value = json.loads(result.stdout, parse_constant=refuse)
    assert isinstance(value, dict)
    return value


def test_no_store_yet(invoke: Invoke, folder: Path) -> None:
    result = invoke("list")
    assert result.exit_code == 0
    assert "No runs yet" in result.stdout
    assert "fivefold lab" in result.stdout
    assert one_object(invoke("list", "--json"))["runs"] == []
    assert list(folder.iterdir()) == []
    with pytest.raises(RecordError, match="no record store"):
        invoke("show", "last")
    assert list(folder.iterdir()) == []


def test_list_shows_every_run_whole(invoke: Invoke, store: Store) -> None:
    ids = [example(store, name=f"run {i}") for i in range(3)]
    lines = [line for line in invoke("list").stdout.splitlines() if "run " in line]
    assert [line.split()[0] for line in lines] == ids[::-1]  # newest first, no id cut short
    for word in ("train", "finished", "dp2 tp2", "tiny", " 9 "):
        assert word in lines[0]
    assert len([line for line in invoke("list", "--limit", "2").stdout.splitlines() if "run " in line]) == 2


def test_list_by_status_and_records(invoke: Invoke, store: Store, tmp_path: Path) -> None:
    example(store)
    assert "No failed runs" in invoke("list", "--status", "failed").stdout
    assert "first" in invoke("list", "--status", "finished").stdout
    assert invoke("list", "--status", "fine").exit_code == 2
    assert invoke("list", "--limit", "0").exit_code == 2
    with Store.open(tmp_path / "other.sqlite") as other:
        example(other, name="elsewhere")
    listed = one_object(invoke("list", "--records", "other.sqlite", "--json"))
    assert listed["records"] == str(tmp_path / "other.sqlite")
    assert [run["name"] for run in listed["runs"]] == ["elsewhere"]
    assert "elsewhere" in invoke("show", "last", "--records", "other.sqlite").stdout


def test_list_json(invoke: Invoke, store: Store) -> None:
    run_id = example(store)
    (run,) = one_object(invoke("list", "--json"))["runs"]
    assert (run["id"], run["status"], run["layout"], run["last_step"]) == (run_id, "finished", "dp2 tp2", 9)
    assert run["started_at"].endswith("+00:00")
    assert run["ended_at"] >= run["started_at"]


def test_show_tells_what_matters(invoke: Invoke, store: Store) -> None:
    run_id = example(store)
    text = invoke("show", run_id).stdout
    for word in (run_id, "finished", "dp2 tp2", f"process {os.getpid()}", "verdict", "passed"):
        assert word in text
    assert "█▇▆▅▅▄▃▂▁  9 at step 1, 1 at step 9" in text
    ranks = [line.split() for line in text.splitlines() if line.strip().startswith(("0 ", "1 "))]
    assert ranks == [["0", "9", "2.1", "ms", "3", "GiB"], ["1", "9", "1", "1", "GiB"]]


@pytest.mark.parametrize("ranks", [1, 8])
def test_a_narrow_terminal_breaks_no_cell(
    invoke: Invoke, store: Store, monkeypatch: pytest.MonkeyPatch, ranks: int
) -> None:
    monkeypatch.setattr(tables, "PIPE_WIDTH", 80)
    names = ["comm_data_s", "flops_per_s", "pipeline_s", "tokens_per_s", "valid_tokens", "validation_loss"]
    run = store.start(kind="train", layout="dp2 tp2 pp2:zbh1 zero1", model="tiny-llama", plan={})
    for rank in range(ranks):
        run.log(1, rank, {"loss": 5.5, **dict.fromkeys(names, 1234.5 + 10**rank)})
    listed = invoke("list").output
    assert {"dp2 tp2 pp2:zbh1 zero1", run.id, "running", "tiny-llama"} <= {
        word.strip() for word in re.split(r"  |\n", listed)
    }
    shown = invoke("show", run.id).output
    words = shown.split()
    assert {*names, *(f"{1234.5 + 10**rank:.5g}" for rank in range(ranks) if rank < 5)} <= set(words)
    assert max(map(len, [*listed.splitlines(), *shown.splitlines()])) <= 80


def test_show_json_is_strict_and_whole(invoke: Invoke, store: Store) -> None:
    run = store.start(kind="lab", layout="dp1", model="tiny", plan=None)
    run.log(1, 0, {"loss": math.nan, "norm": math.inf})
    run.result("worst", [-math.inf, 1.5])
    shown = one_object(invoke("show", "last", "--json"))
    assert shown["metrics"] == [{"step": 1, "rank": 0, "values": {"loss": "nan", "norm": "inf"}}]
    assert shown["results"] == {"worst": ["-inf", 1.5]}
    assert (shown["status"], shown["ended_at"], shown["plan"]) == ("running", None, None)
    assert "!  nan at step 1, nan at step 1" in invoke("show", "last").stdout


def test_show_a_run_that_failed_at_once(invoke: Invoke, store: Store) -> None:
    run = store.start(kind="train", layout="dp1", model="tiny", plan={})
    run.finish("failed", "LayoutError: tp3 does not divide 4 heads")
    assert "LayoutError: tp3 does not divide 4 heads" in invoke("show", run.id[:10]).stdout


def test_recorded_text_is_never_markup_or_control(invoke: Invoke, store: Store) -> None:
    example(store, name="[red]x[/red][/]", model="evil\x1b[2Jmodel")
    for text in (invoke("list").stdout, invoke("show", "last").stdout):
        assert "[red]x[/red][/]" in text
        assert "\x1b" not in text


def test_ambiguous_and_unknown_ids(invoke: Invoke, store: Store) -> None:
    first, second = sorted((example(store), example(store)))
    shared = next(i for i in range(13) if first[i] != second[i])
    with pytest.raises(RecordError, match=f"begins 2 run ids: {first}, {second}"):
        invoke("show", first[:shared])
    with pytest.raises(RecordError, match="no run 'zzz'"):
        invoke("show", "zzz")


def test_a_damaged_store_is_refused(invoke: Invoke, folder: Path) -> None:
    (folder / "x.sqlite").write_bytes(b"nonsense" * 2000)
    for arguments in (("list",), ("list", "--json"), ("show", "last")):
        with pytest.raises(RecordError, match="damaged"):
            invoke(*arguments, "--records", "x.sqlite")


def test_sparkline() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7]) == "▁▂▃▄▅▆▇█"
    assert sparkline([7.0, 0.0]) == "█▁"
    assert sparkline([3.0, 3.0]) == "▁▁"
    assert sparkline([]) == ""
    assert sparkline([math.nan]) == "!"
    assert sparkline([0.0, math.inf, 1.0], ramp="_#") == "_!#"
    assert sparkline([0.0] * 500 + [1.0] * 500, width=10) == "▁▁▁▁▁█████"
    assert len(sparkline([float(i) for i in range(61)])) == 60


def test_losses_and_last_rows() -> None:
    rows = [
        MetricRow(1, 0, {"memory": 1}),
        MetricRow(1, 2, {"loss": 5.0}),
        MetricRow(1, 3, {"loss": 6.0}),
        MetricRow(2, 0, {"memory": 2}),
        MetricRow(2, 0, {"time": 3}),
    ]
    assert losses(rows) == {1: 5.0}
    assert last_rows(rows) == {
        0: MetricRow(2, 0, {"memory": 2, "time": 3}),
        2: MetricRow(1, 2, {"loss": 5.0}),
        3: MetricRow(1, 3, {"loss": 6.0}),
    }


def run_python(code: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, **environment},
    )


START = "import sys; from fivefold.cli.runs import command; command(sys.argv[1:], standalone_mode=False)"
LOADED = START + "; print([m for m in ('torch', 'pydantic', 'matplotlib', 'rich') if m in sys.modules])"


def test_start_is_quick_and_light(store: Store) -> None:
    example(store)
    assert run_python(LOADED, "list").stdout.endswith("['rich']\n")
    assert run_python(LOADED, "list", "--json").stdout.endswith("[]\n")
    taken_s: list[float] = []
    while not taken_s or (min(taken_s) >= 0.4 and len(taken_s) < 6):  # CPU time: others share the cores
        before = os.times()
        run_python(START, "list")
        after = os.times()
        taken_s.append(
            after.children_user + after.children_system - before.children_user - before.children_system
        )
    assert min(taken_s) < 0.4


def test_a_terminal_without_unicode(store: Store) -> None:
    example(store)
    shown = run_python(START, "show", "last", PYTHONIOENCODING="ascii").stdout
    assert "loss #%*" in shown


def test_results_are_tables(invoke: Invoke, store: Store) -> None:
    """Settings that are no defaults, rows with their units, numbers in order; nothing in braces."""
    run = store.start(kind="train", layout="dp2", model="tiny", plan=None)
    run.result("config", {"model": "m", "steps": 7, "optimizer": {"lr": 1e-3, "name": "sgd"}, "later_key": 1})
    run.result("profiled_step", [{"rank": r, "peak_memory_bytes": 2048 + r * 1024} for r in range(14)])
    run.result("stage_seconds", [0.001, 0.25])
    run.result("score", 3.5)
    shown = invoke("show", "last").stdout
    lines = [" ".join(line.split()) for line in shown.splitlines()]
    for line in (
        "model m",
        "steps 7",
        "optimizer.name sgd",
        "later_key 1",
        "0 2 KiB",
        "1 250 ms",
        "result score 3.5",
    ):
        assert line in lines, (line, shown)
    assert "optimizer.lr" not in shown, "a default"
    assert "and 2 more; --json has all of them" in lines
    assert "{" not in shown


def test_the_precision_report(invoke: Invoke, store: Store) -> None:
    def look(step: int, norm: object, largest: object) -> dict[str, Any]:
        return {
            "step": step,
            "grad_norm": {"layers.0": norm},
            "largest": {"layers.0": [largest, "layers.0.mlp"]},
        }

    run = store.start(kind="train", layout="dp2", model="tiny", plan=None)
    report = {
        "dtype": "float16", "largest_number": 65504.0, "scales": [[1, 64], [3, 32]],
        "overflow_steps": list(range(2, 42)),
        "layers": [look(5, 0.5, 8.0), look(10, math.inf, 16376.0), look(15, 2, 9)],
    }  # fmt: skip
    run.result("precision", report)
    shown = invoke("show", "last").stdout
    for words in (
        "overflows: step 2, step 3, step 4, step 5, step 6, step 7, ... 28 more ..., step 36",
        "loss scale: 64 from step 1, 32 from step 3",
        "step 5", "step 15", "largest output", "in 3 looks",
    ):  # fmt: skip
        assert words in shown
    row = next(line.split() for line in shown.splitlines() if line.strip().startswith("layers.0"))
    assert row == ["layers.0", "0.5", "2", "16376,", "step", "10", "25.0%", "mlp"]


def test_experts_and_precision_fit_in_80_columns(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = {
        "layer": 31, "chosen": [100_000, *[1] * 255], "chosen_last_step": [9, *[0] * 255], "ranks": [1] * 64,
        "tokens": 100_000, "dropped": 3, "entropy": 5.0,
    }  # fmt: skip
    look = {
        "step": 5,
        "grad_norm": {"layers.31": 0.12345},
        "largest": {"layers.31": [1.2345, "layers.31.attention_norm"]},
    }
    precision = {"dtype": "bfloat16", "largest_number": 3e38, "scales": [], "overflow_steps": []}
    out = io.StringIO()
    console = Console(file=out, width=80, force_terminal=True, color_system=None)
    print_result(console, "experts", {"ep": 64, "steps": 5000, "moved": False, "layers": [layer]})
    print_result(console, "precision", {**precision, "layers": [look, {**look, "step": 5000}]})
    shown = out.getvalue()
    for words in (
        "5000 steps; imbalance", "0 of 256", "100.0%", "255 is all tokens", "0.12345", "1.2345, step 5",
        "attention_norm",
    ):  # fmt: skip
        assert words in shown
    assert max(map(len, shown.splitlines())) <= 80

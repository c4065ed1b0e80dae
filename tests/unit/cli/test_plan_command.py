"""`fivefold plan`: its keys, objectives and refusals."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from fivefold.cli.main import run


def ask(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    run(["plan", *arguments, "--json"])
    answer: dict[str, Any] = json.loads(capsys.readouterr().out)
    return answer


def test_keys(capsys: pytest.CaptureFixture[str]) -> None:
    facts = ask(capsys, "-m", "llama-3-8b", "-c", "16 H100", "--top", "3")
    assert {"plans", "evaluated", "elapsed_s"} <= facts.keys()
    assert len(facts["plans"]) == 3
    for plan in facts["plans"]:
        assert {
            "layout", "micro_batch", "recompute", "step_time_s", "step_time_p10_s", "step_time_p90_s",
            "tokens_per_s_per_gpu", "mfu", "peak_memory_bytes", "memory", "time", "reasons",
        } <= plan.keys()  # fmt: skip
        assert 0.1 < plan["mfu"] < 0.8
        assert sum(plan["time"].values()) == pytest.approx(plan["step_time_s"])
        tokens = facts["global_batch"] * facts["seq_len"]
        assert plan["tokens_per_s_per_gpu"] == pytest.approx(tokens / plan["step_time_s"] / 16)


def test_a_refusal_names_both_sizes_and_what_fits(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "-m", "llama-3.1-70b", "-c", "8 A100-80"]) == 2
    err = capsys.readouterr().err
    assert re.search(r"1,129 GB .* 640 GiB in all; nearest: 16 A100-80GB", err)
    assert err.count("\n") == 1
    facts = ask(capsys, "-m", "llama-3.1-70b", "-c", "8 A100-80")
    assert facts["plans"] == []
    assert len(facts["nearest"]) >= 3


def test_objectives(capsys: pytest.CaptureFixture[str]) -> None:
    def first(*arguments: str) -> tuple[dict[str, Any], dict[str, Any]]:
        facts = ask(
            capsys,
            "-m",
            "llama-3-8b",
            "-c",
            "16 H100",
            "--top",
            "1",
            "--recompute",
            "none",
            "--fix",
            "cp1",
            *arguments,
        )
        return facts, facts["plans"][0]

    _, fast = first()
    few, _ = first("--objective", "devices")
    assert few["cluster"].startswith("8 H100")
    cheap, plan = first("--objective", "cost")
    assert plan["tokens_per_s_per_gpu"] >= fast["tokens_per_s_per_gpu"]
    assert cheap["plans"]
    _, wide = first("--objective", "micro-batch")
    assert wide["micro_batch"] > fast["micro_batch"]
    long, _ = first("--objective", "sequence")
    assert long["seq_len"] > 4096


def test_table_and_price(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "ours.yaml"
    path.write_text("nodes: [{count: 2, devices_per_node: 8, device: H100, price_per_hour: 2.0}]")
    assert run(["plan", "-m", "llama-3-8b", "-c", str(path), "--fix", "tp2 zero1", "--micro-batch", "1"]) == 0
    assert "legal points fit" in capsys.readouterr().out
    plan = ask(capsys, "-m", "llama-3-8b", "-c", str(path), "--top", "1")["plans"][0]
    assert plan["price_per_million_tokens"] == pytest.approx(2e6 / 3600 / plan["tokens_per_s_per_gpu"])


def test_the_usual_batch_is_one_that_can_be_typed(capsys: pytest.CaptureFixture[str]) -> None:
    """However short the sequences: else `estimate` could not be asked about a plan."""
    question = ("-m", "tiny-llama", "-c", "1 H100", "--seq-len", "2")
    facts = ask(capsys, *question, "--top", "1")
    layout, size = facts["plans"][0]["layout"], str(facts["plans"][0]["micro_batch"])
    batch = str(facts["global_batch"])
    code = run(
        ["estimate", *question, "--global-batch", batch, "-l", layout, "--micro-batch", size, "--json"]
    )
    assert code == 0
    assert json.loads(capsys.readouterr().out)["step_time_s"] == facts["plans"][0]["step_time_s"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("-c", "8 H100", "--fix", "tp8 gp2"), "unknown layout token 'gp2'"),
        (("-c", "8 H100", "--fix", "pp4:gpipe"), "gpipe is not searched; 1f1b, zbh1, zbv and dualpipev are"),
        (("-c", "8 H100", "--fix", "zero3/4"), "zero group is not searched"),
        (("-c", "8 H100", "--fix", "tp3"), "heads = 32 is not divisible by 3; nearest legal tp: 2 or 4"),
        (("-c", "8 H100", "--fix", "tp4 cp4 pp1"), "takes 16 devices, and 8 are no multiple"),
        (("-c", "8 H100", "--fix", "ep2"), "llama-3-8b has no experts, which ep2 etp1 would cut"),
        (("-c", "8 H100", "--micro-batch", "3"), "global batch 1024 is not a multiple of dp1 x micro-batch 3"),
        (("-c", "8 H100", "--calibration", "absent.json"), "absent.json"),
        (("-c", "cpu",), "cpu has no stated memory"),
        (("-c", "8 H100", "--recompute", "al"), "unknown part 'al'"),
    ],
)  # fmt: skip
def test_refused(arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "-m", "llama-3-8b", *arguments]) == 2
    err = capsys.readouterr().err
    assert re.search(message, err), err
    assert err.count("\n") == 1

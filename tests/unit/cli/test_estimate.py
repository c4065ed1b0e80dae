"""`fivefold estimate`: its answers, keys and refusals."""

from __future__ import annotations

import json
from typing import Any

import pytest
from click.testing import CliRunner

from fivefold.cli.estimate import command
from fivefold.cli.main import run


def ask(*arguments: str) -> dict[str, Any]:
    result = CliRunner().invoke(
        command, [*arguments, "--json"], catch_exceptions=False, standalone_mode=False
    )
    answer: dict[str, Any] = json.loads(result.stdout)
    return answer


def test_the_worked_example() -> None:
    """70B on 32 A100-80: 35 GB of states over 32 model-parallel ranks; 70 GB over 16, and ZeRO-1 is said to fit."""
    first = ask("-m", "llama-2-70b", "-c", "32xA100-80", "-l", "tp8 pp4")
    second = ask("-m", "llama-2-70b", "-c", "32xA100-80", "-l", "tp8 pp2 dp2")
    assert first["state_bytes"] == pytest.approx(35e9, rel=0.02)
    assert second["state_bytes"] == pytest.approx(70e9, rel=0.02)
    assert (first["fits"], second["fits"]) == ("yes", "unsure")
    assert "nearest that fits: dp2 tp8 pp2 zero1" in second["reasons"]


def test_keys_and_sums() -> None:
    facts = ask("-m", "deepseek-v3", "-c", "2048 H800", "-l", "dp128 pp16 ep64 zero1", "--recompute", "full")
    assert {
        "layout",
        "micro_batch",
        "recompute",
        "peak_memory_bytes",
        "memory",
        "reasons",
        "fits",
    } <= facts.keys()
    assert sum(facts["memory"].values()) == pytest.approx(facts["peak_memory_bytes"])
    assert max(facts["rank_memory_bytes"]) == facts["peak_memory_bytes"]
    assert len(facts["rank_memory_bytes"]) == 16
    assert facts["layout"] == "dp128 pp16 ep64 zero1"
    assert {
        "step_time_s",
        "step_time_p10_s",
        "step_time_p90_s",
        "tokens_per_s_per_gpu",
        "mfu",
        "time",
    } <= facts.keys()
    assert sum(facts["time"].values()) == pytest.approx(facts["step_time_s"])


def test_every_recompute_is_told_beside_what_was_asked_for() -> None:
    question = ("-m", "deepseek-v3", "-c", "2048 H800", "-l", "dp128 pp16 ep64 zero1")
    facts = ask(*question)
    told = {one["recompute"]: one for one in facts["recompute_choices"]}
    assert list(told) == ["none", "attention", "moe+mlp", "attention+moe+mlp", "full/2", "full"]
    assert told["none"]["peak_memory_bytes"] == facts["peak_memory_bytes"]
    for text in ("full", "moe+mlp"):
        asked = ask(*question, "--recompute", text)
        assert told[text]["peak_memory_bytes"] == asked["peak_memory_bytes"] < facts["peak_memory_bytes"]
        assert told[text]["activations_bytes"] == asked["memory"]["activations"]
        assert told[text]["step_time_s"] == pytest.approx(asked["step_time_s"], rel=1e-12)
    other = ask("-m", "llama-3-8b", "-c", "8 H100", "-l", "dp8", "--recompute", "mlp/3")
    assert [one["recompute"] for one in other["recompute_choices"]][2:] == [
        "mlp",
        "attention+mlp",
        "full/2",
        "full",
        "mlp/3",
    ]


def test_options_act() -> None:
    base = ask("-m", "mixtral-8x7b", "-c", "8 H100", "-l", "dp8 ep8 zero1")

    def peak(*options: str) -> float:
        return float(
            ask("-m", "mixtral-8x7b", "-c", "8 H100", "-l", "dp8 ep8 zero1", *options)["peak_memory_bytes"]
        )

    here = base["peak_memory_bytes"]
    assert peak("--grad-dtype", "float32") > here
    assert peak("--optimizer", "sgd") < here
    assert peak("--offload") < here
    assert peak("--imbalance", "1.5") > here
    assert peak("--recompute", "moe") < here
    assert peak("--micro-batch", "2") > here
    assert peak("--seq-len", "8192") > here
    assert peak("--framework", "fsdp") != here


def test_what_the_step_time_does_not_know_is_said() -> None:
    reasons = ask("-m", "llama-3-8b", "-c", "16 H100", "-l", "dp16 zero3/8 order=dp-cp-tp-pp")["reasons"]
    assert any("zero3 over all 16 data ranks, not in groups of 8" in reason for reason in reasons)
    assert any("rank order tp-cp-dp-pp, not dp-cp-tp-pp" in reason for reason in reasons)


def test_table(capsys: pytest.CaptureFixture[str]) -> None:
    code = run(["estimate", "-m", "llama-2-70b", "-c", "8 A100-80", "-l", "tp8"])
    out = capsys.readouterr().out
    assert code == 1
    assert "does not fit: each rank needs" in out
    assert "attention+mlp" in out
    assert "states: 138 GB a device (without ZeRO); 16 bytes a parameter" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("-m", "llama-2-70b", "-c", "32xA100-80", "-l", "tp8 pp2"),
            "takes 16 devices .* nearest: dp2 tp8 pp2",
        ),
        (("-m", "llama-2-70b", "-c", "8 A100-80", "-l", "tp3"), "takes 3 devices .* nearest: dp2 tp4"),
        (("-m", "llama-2-70b", "-c", "32xA100-80", "-l", "dp5"), "takes 5 devices .* nearest: dp32"),
        (("-m", "llama-2-70b", "-c", "32xA100-80", "-l", "pp5 tp16"), "takes 80 devices .* nearest: tp8 pp4"),
        (("-m", "llama-2-70b", "-c", "24xA100-80", "-l", "tp3 dp8"), "tp3 does not fit llama-2-70b"),
        (("-m", "nope", "-c", "8 H100", "-l", "tp8"), "no preset 'nope'"),
        (("-m", "gpt2", "-c", "8 H10", "-l", "tp8"), "unknown device 'H10'"),
        (("-m", "gpt2", "-c", "cpu", "-l", "dp1"), "cpu has no stated memory"),
        (("-m", "gpt2", "-c", "8 H100 + 8 A100-80", "-l", "dp16"), "nodes of .* differ"),
        (("-m", "gpt2", "-c", "8 H100", "-l", "dp8", "--recompute", "ful"), "unknown part 'ful'"),
        (("-m", "gpt2", "-c", "8 H100", "-l", "dp8", "--framework", "x"), "unknown framework 'x'"),
        (
            ("-m", "gpt2", "-c", "8 H100", "-l", "dp8", "--global-batch", "12"),
            "global batch 12 is not a multiple",
        ),
        (("-m", "gpt2", "-c", "8 H100", "-l", "dp8 ep2"), "gpt2 has no experts"),
        (
            ("-m", "gpt2", "-c", "8 H100", "-l", "dp4 pp2:custom"),
            "actions of your own has no estimate; take 1f1b",
        ),
    ],
)
def test_refused(arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    import re

    assert run(["estimate", *arguments]) == 2
    err = capsys.readouterr().err
    assert re.search(message, err)
    assert err.count("\n") == 1

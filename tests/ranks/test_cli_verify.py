"""`fivefold verify` as a user types it: exit code, table and JSON of a pass and of a failure."""

from __future__ import annotations

import pytest
import torch

from fivefold.core.layout import Layout
from fivefold.engine.engine import Engine
from fivefold.strategies.data.apply import Replicated
from fivefold.strategies.pipeline.apply import Microbatch
from fivefold.verify import verify as judge

from .command_line import CommandLine

QUANTITIES = {
    "loss", "logits", "gradients", "grad_norm", "loss_scale", "buffers", "routed_experts", "routing", "weights_sgd",
    "weights_adamw", "moments",
}  # fmt: skip


def verify(fivefold: CommandLine, *arguments: str):
    return fivefold("verify", "--model", "config.json", *arguments)


def test_json_of_a_pass(fivefold: CommandLine) -> None:
    ended = verify(fivefold, "--layout", "dp2 tp2", "--against", "pp2", "--json")
    assert ended.code == 0
    verdict = ended.json()
    assert verdict["passed"] is True
    assert verdict["cause"] is None
    assert (verdict["layout"], verdict["against"]) == ("dp2 tp2", "pp2")
    assert set(verdict["quantities"]) == QUANTITIES
    assert verdict["max_rel_err"] == max(verdict["quantities"].values())
    assert 0 < verdict["max_rel_err"] <= 1e-10
    assert "verifying llama under dp2 tp2 against pp2, up to 4 ranks" in ended.err
    assert (verdict["steps"], verdict["against_faults"]) == (2, [])
    assert verdict["limits"] == ["a fault that dp2 tp2 and pp2 share does not show: neither is one device"]


def test_table_of_a_pass(fivefold: CommandLine) -> None:
    ended = verify(fivefold, "--layout", "tp2", "--dtype", "float32")
    assert ended.code == 0
    assert "the same model: worst error" in ended.out
    assert "not judged in float32" in ended.out
    assert ended.out.count("the model has none") == 3  # buffers, routed_experts, routing
    assert "as predicted" in ended.out
    assert "bound 1e-05, 2 steps" in ended.out
    assert "not shown: in float32 moments are judged after the first step only" in ended.out


def test_failure_prints_its_cause(fivefold: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients that are averaged over data ranks, not summed: half of what they should be at dp2."""
    wait = Replicated.wait

    def faulty(self: Replicated) -> None:
        wait(self)
        for bucket in self._all_buckets():
            bucket.flat /= self.axis.degree

    monkeypatch.setattr(Replicated, "wait", faulty)
    first = ["--steps", "1"]  # later losses follow weights that moved too little
    table = verify(fivefold, "--layout", "dp2", *first)
    assert table.code == 1
    assert "not the same model" in table.out
    for word in ("exactly 0.500x", "1 / dp", "axis dp"):
        assert word in table.out
    as_json = verify(fivefold, "--layout", "dp2", *first, "--json")
    assert as_json.code == 1
    verdict = as_json.json()
    assert verdict["passed"] is False
    assert "exactly 0.500x" in verdict["cause"]
    assert verdict["cause"] in table.out
    assert verdict["quantities"]["gradients"] == pytest.approx(0.5)
    assert verdict["quantities"]["loss"] <= 1e-12
    other_way = verify(fivefold, "--layout", "tp2", "--against", "dp2", *first, "--json").json()
    assert "exactly 2.000x" in other_way["cause"]
    assert "not axis tp" in other_way["cause"]


def test_failure_of_the_layout_compared_with(fivefold: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its numbers are right, its communication is not."""
    count = Engine.count_valid

    def faulty(self: Engine, batches: list[Microbatch]) -> torch.Tensor:
        self.mesh.phase = "metrics"
        self.mesh.axis("pp").all_reduce(torch.zeros(3))
        return count(self, batches)

    monkeypatch.setattr(Engine, "count_valid", faulty)
    ended = verify(fivefold, "--layout", "tp2", "--against", "pp2")
    assert ended.code == 1
    assert "the same numbers, but the layout compared with is at fault" in ended.out
    said = "its communication is not as predicted: every rank, every step: metrics pp all_reduce float32 12 B"
    assert f"the layout compared with, pp2, is itself at fault: {said}" in ended.out


def test_a_window_that_is_not_exercised_is_told(fivefold: CommandLine) -> None:
    model = fivefold.model(
        "mistral.json", model_type="mistral", sliding_window=4096, max_position_embeddings=8192
    )
    ended = fivefold("verify", "--model", model, "--layout", "tp2")
    assert ended.code == 0
    assert "not shown: the window of 4096 was not exercised: sequence 16" in ended.out


def test_what_is_not_finite_is_still_json(fivefold: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> judge.Verdict:
        return judge.Verdict(
            passed=False, max_rel_err=float("inf"), layout=Layout(dp=2), against=Layout(), model="m",
            dtype="float64", bound=1e-10, steps=1, seq_len=16, global_batch=12,
            quantities={"loss": float("nan"), "gradients": float("inf")}, absent=(), not_judged=(),
            events_match=True, cause="no rank holds all of embedding.weight",
        )  # fmt: skip

    monkeypatch.setattr(judge, "verify", broken)
    ended = verify(fivefold, "--layout", "dp2", "--json")
    assert ended.code == 1
    verdict = ended.json()
    assert float(verdict["max_rel_err"]) == float("inf")
    assert verdict["quantities"] == {"loss": "nan", "gradients": "inf"}


def test_a_large_model_can_be_shrunk(fivefold: CommandLine) -> None:
    refused = fivefold("verify", "--model", "llama-3.1-70b", "--layout", "tp2")
    assert refused.code == 2
    assert "use --shrink" in refused.said()
    fivefold.model("wide.json", hidden_size=16384, intermediate_size=65536, vocab_size=500_000)
    assert fivefold("verify", "--model", "wide.json", "--shrink", "--layout", "tp2").code == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--layout", "tp3"], ["tp3", "heads = 4", "nearest legal tp: 2 or 4"]),
        (["--layout", "dp2", "--against", "pp3"], ["pp3 has 3 pipeline stages", "2 layers"]),
        (["--layout", "tp2 tp2"], ["tp is given twice"]),
        (
            ["--layout", "tp2", "--overflow", "--dtype", "float16"],
            ["--overflow goes with --layout, in float64"],
        ),
        (["--layout", "dp2 ep2"], ["has no experts, which ep2 etp1 would cut"]),
    ],
)
def test_a_mistake_is_one_line(fivefold: CommandLine, arguments: list[str], words: list[str]) -> None:
    ended = verify(fivefold, *arguments, "--json")
    assert (ended.code, ended.out) == (2, "")
    for word in words:
        assert word in ended.said()


def test_parts_that_cannot_be_shrunk_are_refused(fivefold: CommandLine) -> None:
    """Phi rotates 32 of 80 dims of a head: more than a shrunk head has."""
    model = fivefold.model(
        "phi.json", model_type="phi", hidden_size=2560, num_attention_heads=32, num_key_value_heads=None,
        partial_rotary_factor=0.4,
    )  # fmt: skip
    ended = fivefold("verify", "--model", model, "--shrink", "--layout", "tp2")
    assert (ended.code, ended.out) == (2, "")
    assert "rotation of a part of the head" in ended.said()


@pytest.mark.parametrize("command", ["verify", "lab"])
def test_refused_under_a_launcher(
    fivefold: CommandLine, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    """Each process of the launcher would start all ranks again."""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    layout = ["--layout", "dp2"] if command == "verify" else []
    ended = fivefold(command, "--model", "config.json", *layout, "--json")
    assert (ended.code, ended.out) == (2, "")
    assert ended.said().startswith("this is rank 1 of 4 that a launcher started")


@pytest.mark.exhaustive
def test_an_overflow_under_a_loss_scale(fivefold: CommandLine) -> None:
    ended = verify(fivefold, "--layout", "pp2", "--overflow")
    assert ended.code == 0, ended.out
    assert "loss_scale" in ended.out
    assert "the same model" in ended.out
    assert "4 steps" in ended.out

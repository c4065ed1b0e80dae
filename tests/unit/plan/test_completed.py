"""What a row leaves out of its model and what follows from the rest."""

from __future__ import annotations

from typing import Any

import pytest

from fivefold.catalog.sizes import sizes_of
from fivefold.plan.completed import completed
from fivefold.plan.priced import price
from fivefold.plan.runs_table import Row

JOB = {"seq_len": 8192, "gpu": "GB300-288GB", "num_gpus": 8, "ep": 8, "micro_batch": 4, "global_batch": 512,
       "precision": "BF16", "iter_time_s": 13.0, "framework": "Megatron-Bridge"}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "billions"),
    [("Nemotron_3_Nano", 31.6), ("Nemotron V3 Super 120B (26.02)", 120), ("nemotron-3-ultra", 550)],
)
def test_a_hybrid_model_by_name_has_the_parameters_that_its_makers_state(name: str, billions: float) -> None:
    """Counted here: maps of attention, state space and experts, and the embedding and head."""
    found = sizes_of(name)
    assert found is not None
    D, heads = found["hidden"], found["heads"]
    inner = found["mamba_heads"] * found["mamba_head_dim"]
    mamba = (
        D * (2 * inner + 2 * found["mamba_groups"] * found["mamba_state"] + found["mamba_heads"]) + inner * D
    )
    attention = D * found["head_dim"] * 2 * (heads + found["kv_heads"])
    width = found.get("moe_latent") or D
    moe = (
        found["experts"] * (2 * width * found["moe_ffn_hidden"] + D)
        + 2 * D * found["shared_expert_ffn_hidden"]
    )
    moe += 2 * D * found.get("moe_latent", 0)
    routed = found["layers"] - found["attention_layers"] - found["mamba_layers"]
    total = found["mamba_layers"] * mamba + found["attention_layers"] * attention + routed * moe
    assert (total + 2 * found["vocab"] * D) / 1e9 == pytest.approx(billions, rel=0.02)


def test_a_row_that_names_a_hybrid_model_is_priced() -> None:
    priced = price([Row(1, {**JOB, "model_name": "Nemotron_3_Nano"})])
    assert not priced.skipped
    assert float(priced.jobs.layers[0]) == 52
    assert sum(float(block.count[0]) for block in priced.jobs.blocks if block.state[0]) == 23


def test_layers_follow_from_the_parameters() -> None:
    row: dict[str, Any] = {
        "hidden": 12288,
        "heads": 96,
        "vocab": 51200,
        "tied_embeddings": True,
        "params_total_b": 174.6,
    }
    assert completed(row)["layers"] == 96
    assert completed({**row, "layers": 80})["layers"] == 80
    assert "layers" not in completed({**row, "experts": 8})


def test_sizes_of_a_preset_and_of_an_unknown_model() -> None:
    known = completed({"model_name": "Llama 3.1 70B", "vocab": 5})
    assert (known["layers"], known["hidden"], known["vocab"]) == (80, 8192, 5)
    assert completed({"model_name": "unheard of"}) == {"model_name": "unheard of"}


def test_layers_that_do_not_add_up_are_named() -> None:
    row = Row(1, {**JOB, "layers": 4, "hidden": 64, "heads": 4, "attention_layers": 3, "mamba_layers": 3})
    ((_, reason),) = price([row, Row(2, {**JOB, "model_name": "Nemotron_3_Nano"})]).skipped
    assert reason == "4 layers cannot hold 3 of attention and 3 state-space ones"

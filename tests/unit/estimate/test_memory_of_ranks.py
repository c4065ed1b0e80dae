"""Memory by term: closed forms, worked examples, verdicts, and arrays against numbers."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from fivefold.catalog import models
from fivefold.catalog.clusters import resolve
from fivefold.core.layout import Layout
from fivefold.core.model_counts import parameter_counts
from fivefold.errors import ConfigError
from fivefold.estimate.memory import (
    TERMS,
    USABLE,
    Cut,
    Job,
    MemoryEstimate,
    RankMemory,
    estimate,
    kinds_of,
    numerics,
    rank_terms,
    stage_of,
)
from fivefold.estimate.recompute import Recompute
from fivefold.estimate.stacks import of_framework, stack, stacks
from fivefold.strategies.pipeline.placement import stage_layers

GB = 1e9
STATES = ("parameters", "gradients", "optimizer")


def job(layout: str, model: str = "llama-2-70b", **more: object) -> Job:
    spec = models.preset(model)
    return Job(
        spec=spec,
        layout=Layout.parse(layout),
        **{"seq_len": 4096, "micro_batch": 1, "microbatches": 16, **more},
    )  # type: ignore[arg-type]


def states(memory: RankMemory) -> float:
    return float(sum(memory.terms[term] for term in STATES))


def test_70b_on_32_devices() -> None:
    """16 bytes a parameter: 35 GB a device over 32 model-parallel ranks, 70 GB over 16; ZeRO-1 halves 12 of the 16."""
    all_32 = [states(rank) / GB for rank in estimate(job("tp8 pp4")).ranks]
    with_dp = [states(rank) / GB for rank in estimate(job("tp8 pp2 dp2")).ranks]
    zero = [states(rank) / GB for rank in estimate(job("tp8 pp2 dp2 zero1")).ranks]
    assert np.mean(all_32) == pytest.approx(35, rel=0.02)
    assert np.mean(with_dp) == pytest.approx(70, rel=0.02)
    assert np.mean(zero) == pytest.approx(70 * 10 / 16, rel=0.02)
    capacity = resolve("32xA100-80").nodes[0].memory_bytes
    assert capacity
    assert estimate(job("tp8 pp4")).fits(capacity * USABLE) == "yes"
    assert estimate(job("tp8 pp2 dp2")).fits(capacity * USABLE) != "yes"
    assert (
        estimate(job("tp8 pp2 dp2 zero1", recompute=Recompute.parse("full"))).fits(capacity * USABLE) == "yes"
    )


def test_70b_in_full_adam_needs_1120_gb() -> None:
    total = 8 * states(estimate(job("tp8")).peak)
    assert total == pytest.approx(1120 * GB, rel=0.02)
    assert total > 640 * GB


@pytest.mark.parametrize(
    ("options", "bytes_per_parameter"),
    [
        ({}, 16), ({"grad_dtype": "float32"}, 18), ({"precision": "float32"}, 16), ({"optimizer": "sgd"}, 8),
        ({"precision": "float16", "of": stack("megatron-deepspeed")}, 20), ({"of": stack("fsdp")}, 16),
        ({"grad_dtype": "float32", "of": stack("megatron-deepspeed")}, 20),
    ],
)  # fmt: skip
def test_bytes_per_parameter(options: dict[str, object], bytes_per_parameter: float) -> None:
    assert numerics(**options).states == bytes_per_parameter  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("zero", "parts"), [(0, (2, 2, 12)), (1, (2, 2, 3)), (2, (2, 0.5, 3)), (3, (0.5, 0.5, 3))]
)
def test_zero_stages(zero: int, parts: tuple[float, float, float]) -> None:
    """Rajbhandari et al. 2020, figure 1, with 4 data ranks."""
    memory = estimate(job(f"dp4 zero{zero}" if zero else "dp4", "llama-3-8b")).peak
    total = parameter_counts(models.preset("llama-3-8b"))["total_parameters"]
    for term, per_parameter in zip(STATES, parts):
        assert memory.terms[term] == pytest.approx(per_parameter * total, rel=1e-6)


def test_microbatches_in_flight_fall_along_a_pipeline() -> None:
    ranks = [rank.terms["activations"] for rank in estimate(job("pp8", "llama-3-8b")).ranks]
    assert all(a > b for a, b in pairwise(ranks[:-1]))
    assert ranks[0] / ranks[6] == pytest.approx(8 / 2)
    gpipe = estimate(job("pp8:gpipe", "llama-3-8b", microbatches=32)).ranks[0].terms["activations"]
    assert gpipe / ranks[0] == pytest.approx(32 / 8)
    zbv = estimate(job("pp8:zbv", "llama-3-8b", microbatches=32)).ranks
    assert {round(rank.terms["activations"] / ranks[0], 2) for rank in zbv[1:]} == {1.0}


def test_logits_are_on_the_last_stage_and_cut_by_tp() -> None:
    ranks = estimate(job("pp4 tp2", "llama-3-8b")).ranks
    assert [rank.terms["logits"] > 0 for rank in ranks] == [False, False, False, True]
    assert ranks[-1].terms["logits"] == 4096 * (128256 / 2 * 6 + 4096 * 2)


def test_sequence_and_context_parallelism_cut_activations() -> None:
    def kept(layout: str) -> float:
        return float(estimate(job(layout, "llama-3-8b")).peak.terms["activations"])

    assert kept("tp8") == pytest.approx(kept("dp1") / 8, rel=0.1)
    assert kept("tp8 nosp") > 2 * kept("tp8")
    assert kept("cp8") == pytest.approx(kept("dp1") / 8)


def test_offload_imbalance_and_recompute() -> None:
    plain = estimate(job("ep8 dp8", "mixtral-8x7b")).peak.terms
    assert estimate(job("ep8 dp8", "mixtral-8x7b", offload=True)).peak.terms["optimizer"] == 0
    assert (
        estimate(job("ep8 dp8", "mixtral-8x7b", imbalance=2.0)).peak.terms["activations"]
        > plain["activations"]
    )
    full = estimate(job("ep8 dp8", "mixtral-8x7b", recompute=Recompute.parse("full"))).peak.terms
    half = estimate(job("ep8 dp8", "mixtral-8x7b", recompute=Recompute.parse("full/2"))).peak.terms
    assert full["activations"] < half["activations"] < plain["activations"]
    assert half["activations"] == pytest.approx((full["activations"] + plain["activations"]) / 2)


@pytest.mark.parametrize("name", models.names())
def test_every_model_has_an_estimate(name: str) -> None:
    spec = models.preset(name)
    memory = estimate(job("dp2 pp2 zero1", name, seq_len=16))
    assert tuple(memory.peak.terms) == tuple(sorted(memory.peak.terms, key=TERMS.index))
    assert all(n >= 0 for n in memory.peak.terms.values())
    held = sum(rank.terms["parameters"] for rank in memory.ranks) / 2
    tied = spec.vocab * spec.hidden if spec.tied_embeddings else 0
    assert held == parameter_counts(spec)["total_parameters"] + tied


def test_arrays_of_layouts_give_what_single_layouts_give() -> None:
    one = job("dp1", "deepseek-v3")
    texts = ["dp64 tp8 ep64 zero1", "dp128 tp4 ep32 zero3", "dp512 ep64 nosp", "dp64 tp8 ep64 etp8 cp1"]
    layouts = [Layout.parse(text) for text in texts]
    cuts = [Cut.of(layout) for layout in layouts]
    names = Cut.__dataclass_fields__
    many = Cut(**{name: np.array([getattr(cut, name) for cut in cuts]) for name in names})
    layers = stage_layers(one.spec, one.layout, 4096)
    stage = stage_of(kinds_of(one.spec), (0,), layers, Recompute())
    terms = rank_terms(one, stage, many, np.array([1, 1, 1, 1]), np.array([4096] * 4))
    for i, layout in enumerate(layouts):
        single = estimate(job(str(layout), "deepseek-v3", microbatches=1)).peak.terms
        assert {term: float(np.broadcast_to(n, 4)[i]) for term, n in terms.items()} == pytest.approx(single)


def test_verdict_has_a_band() -> None:
    memory = MemoryEstimate((RankMemory({"parameters": 50.0}), RankMemory({"parameters": 100.0})))
    assert memory.peak_rank == 1
    assert [memory.fits(capacity) for capacity in (107, 106, 94, 93)] == ["yes", "yes", "unsure", "no"]


def test_stacks_by_framework() -> None:
    assert of_framework("Megatron-Core", "v0.11").name == "megatron-core"
    assert of_framework("Megatron-DeepSpeed").name == "megatron-deepspeed"
    assert of_framework("composer/FSDP1 (llm-foundry)").name == "fsdp"
    assert of_framework("something").name == "standard"
    assert all(len(one.source) > 20 for one in stacks().values())
    with pytest.raises(
        ConfigError, match=r"unknown framework 'megatron-cor' \(did you mean 'megatron-core'\?\)"
    ):
        stack("megatron-cor")
    with pytest.raises(ConfigError, match="unknown part 'fulll'"):
        Recompute.parse("fulll")
    assert str(Recompute.parse("attention+mlp/3")) == "attention+mlp/3"

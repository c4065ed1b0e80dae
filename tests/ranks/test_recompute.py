"""A step with recompute is the step without it: bit for bit, once in each backward, at every layout and schedule."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch

from fivefold.core.execution import DType
from fivefold.core.layout import Layout
from fivefold.core.model_spec import ModelSpec, MoESpec
from fivefold.core.plan import Plan
from fivefold.data.batches import SyntheticDataset
from fivefold.engine.engine import Engine
from fivefold.engine.feed import feed
from fivefold.runtime import recompute as runtime
from fivefold.runtime.launch import Rank, run_ranks
from fivefold.runtime.mesh import Mesh
from fivefold.strategies.legal import recompute_options
from fivefold.strategies.pipeline.placement import stage_layers
from fivefold.verify.verify import verify
from fivefold.verify.workload import common_plans

from .command_line import CommandLine
from .models import HARD, PLAIN

ROUTED = PLAIN.replace(
    name="routed",
    blocks=tuple(
        block.replace(mlp=MoESpec(experts=4, top_k=2, ffn=8, shared_ffn=8 * (i // 2))) if i % 2 else block
        for i, block in enumerate(PLAIN.blocks)
    ),
)
"""Layers 1 and 3 have experts, layer 3 shared ones too."""
MODELS = {spec.name: spec for spec in (HARD, PLAIN, ROUTED)}


def stepped(rank: Rank, plan: Plan, options: list[str]) -> dict[str, tuple[bool, int, int]]:
    """Option -> (whether loss and gradients are those without recompute, second runs, second runs expected)."""
    mesh = Mesh(plan.layout, rank.rank, rank.device)
    data = SyntheticDataset(plan.model.vocab, plan.workload.seq_len, 0)
    runs, run_again = [0], runtime._Run._run_again

    def counted(run: Any) -> Any:
        runs[0] += 1
        return run_again(run)

    runtime._Run._run_again = counted  # type: ignore[method-assign]
    found: dict[str, list[torch.Tensor]] = {}
    counts = {}
    for option in options:
        execution = plan.execution.replace(recompute=option)
        engine = Engine(plan.replace(execution=execution), mesh, seed=0, noise=0.1)
        kept: list[torch.Tensor] = []
        engine.after_backward = lambda pairs, kept=kept: kept.extend(g.clone() for _, g in pairs)
        runs[0] = 0
        losses = [engine.step(feed(data, plan, mesh, step), 1e-3).loss for step in range(2)]
        found[option] = [*kept, torch.tensor(losses, dtype=torch.float64)]
        counts[option] = runs[0], 2 * engine.microbatches * regions_here(plan, mesh, option)
    runtime._Run._run_again = run_again  # type: ignore[method-assign]
    plain = found["none"]
    return {
        option: (all(torch.equal(a, b) for a, b in zip(plain, values, strict=True)), *counts[option])
        for option, values in found.items()
    }


def regions_here(plan: Plan, mesh: Mesh, option: str) -> int:
    layers = stage_layers(plan.model, plan.layout, plan.workload.seq_len)
    recompute = plan.execution.replace(recompute=option).recomputed
    chunks = plan.layout.virtual_stages_of(mesh.coordinate["pp"])
    return sum(len(regions) for chunk in chunks for regions in recompute.of_layers(plan.model, layers[chunk]))


FAST = {
    ("plain", "tp2 pp2:zbh1", "float32"): ["none", "attention+mlp", "full/2"],
    ("tiny-uneven", "cp2 zero3", "float64"): ["none", "attention", "full"],
    ("routed", "tp2 ep2", "float32"): ["none", "moe", "full"],
}
"""With the options that are tried; the exhaustive cases have all of them."""
DENSE = (
    "dp1", "dp2", "dp2 zero2", "cp2 zero3", "tp2", "tp2 nosp", "cp2", "cp2:gather", "cp2:ulysses",
    "cp4:ring2xulysses2", "pp2", "pp2:gpipe", "pp2:zbh1", "tp2 pp2:zbh1", "tp2 pp2:zbh1 nosp", "dp2 tp2 pp2", "tp2 cp2",
)  # fmt: skip
CHUNKED = (
    "pp2:zbv",
    "pp2:dualpipev",
    "pp2*2",
    "pp2:bfs*2",
    "tp2 pp2:zbv",
    "cp2 pp2:dualpipev",
    "dp2 pp2 zero3",
)
EXPERTS = (
    "dp1", "dp2 ep2", "tp2 ep2", "tp2 etp2", "tp2 etp2 nosp", "cp2 ep2", "dp2 tp2 ep2 etp2", "dp2 ep2 zero3",
    "pp2:zbh1", "tp2 pp2:zbv ep2",
)  # fmt: skip
CASES = [
    *product(("plain", "tiny-uneven"), DENSE, ("float32", "float64", "bfloat16")),
    *product(("plain",), CHUNKED, ("float32",)),
    *product(("routed",), EXPERTS, ("float32", "float64")),
]


def is_right(name: str, text: str, dtype: DType, options: list[str]) -> None:
    plan, _ = common_plans(MODELS[name], Layout.parse(text), Layout(), dtype)
    for rank, found in enumerate(
        run_ranks(stepped, plan, options, ranks=plan.layout.world_size, device="cpu")
    ):
        for option, (same, runs, expected) in found.items():
            assert same, f"rank {rank}, recompute={option}: other numbers"
            assert runs == expected, f"rank {rank}, recompute={option}: {runs} second runs, not {expected}"
        assert list(found) == options


@pytest.mark.parametrize(("name", "text", "dtype"), FAST)
def test_bit_for_bit_and_once(name: str, text: str, dtype: DType) -> None:
    is_right(name, text, dtype, FAST[name, text, dtype])


@pytest.mark.exhaustive
@pytest.mark.parametrize(("name", "text", "dtype"), CASES)
def test_every_form_at_every_kind_of_layout(name: str, text: str, dtype: DType) -> None:
    is_right(name, text, dtype, recompute_options(MODELS[name]))


VERIFIED = [
    (name, text)
    for name, texts in {
        "plain": (
            "tp2 pp2:zbv",
            "dp2 cp2 tp2 zero1",
            "cp2 pp2:zbh1",
            "dp2 tp2 pp2 zero3",
            "cp2:ulysses pp2:dualpipev",
        ),
        "tiny-uneven": ("dp1", "tp2", "tp2 nosp", "dp2 cp2:ring zero2", "tp4 pp2", "cp2:gather pp2:zbh1"),
        "routed": (
            "dp2 ep2 zero1",
            "tp2 cp2 ep2",
            "tp2 pp2:zbh1 ep2 etp1",
            "dp2 tp2 etp2 ep2",
            "tp2 etp2 nosp",
        ),
    }.items()
    for text in texts
]


@pytest.mark.exhaustive
@pytest.mark.parametrize(("name", "text"), VERIFIED)
def test_verified_with_its_communication(name: str, text: str) -> None:
    spec: ModelSpec = MODELS[name]
    for option in recompute_options(spec):
        verdict = verify(spec, Layout.parse(text), recompute=option, device="cpu", find_axis=False)
        assert verdict.passed, f"{option}: {verdict.cause}"
        assert verdict.recompute == option


def test_the_command_takes_it(fivefold: CommandLine) -> None:
    asked = ("verify", "-m", "tiny-uneven", "-l", "tp2", "--steps", "1", "--json", "--recompute")
    ended = fivefold(*asked, "mlp+attention")
    assert ended.code == 0, ended.err
    assert ended.json()["recompute"] == "attention+mlp"
    for text, word in (("moe", "no layer of tiny-uneven"), ("all", "unknown part 'all'")):
        refused = fivefold(*asked, text)
        assert refused.code == 2
        assert word in refused.said()

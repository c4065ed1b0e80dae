"""Experts that are placed anew and have copies, against one device where they stay."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fivefold.core.cluster import Cluster
from fivefold.core.execution import Execution
from fivefold.core.experts import ExpertsConfig
from fivefold.core.layout import Layout
from fivefold.core.model_spec import AttentionSpec, BlockSpec, ModelSpec, MoESpec
from fivefold.core.optimizer import OptimizerConfig
from fivefold.core.plan import Plan
from fivefold.core.router import RouterConfig
from fivefold.core.sharding import ParameterRow
from fivefold.core.workload import Workload
from fivefold.data.batches import SyntheticDataset
from fivefold.engine.build import initial_value
from fivefold.engine.engine import Engine
from fivefold.engine.feed import feed
from fivefold.errors import ConfigError
from fivefold.runtime.launch import Rank, run_ranks
from fivefold.runtime.mesh import Mesh
from fivefold.strategies import compose
from fivefold.strategies.expert.placement import imbalance
from fivefold.verify.verify import Reference
from fivefold.verify.workload import ROUTERS, common_plans

from .models import PLAIN, ROUTED
from .resuming import Job, train, whole

Region = tuple[slice, ...]
LONG = pytest.mark.exhaustive

FAST = [("dp2 ep2 zero1", 0), ("tp2 ep2", 2), ("cp2 pp2:zbh1 ep2", 1)]
MORE = [
    ("dp2 ep2", 0), ("dp4 ep4", 2), ("dp4 ep2 zero2", 1), ("dp4 ep2 zero3", 2), ("dp4 ep2 zero1/2", 0),
    ("dp2 tp2 etp2 ep2 zero3", 0), ("dp2 tp2 nosp ep2 etp2", 2), ("cp2:ulysses ep2", 2), ("dp8 ep4 zero3/4", 0),
    ("pp2:zbh1 dp2 ep2", 1), ("pp3 tp2 ep2", 1), ("pp2:bfs@1+2 dp2 ep2", 0), ("dp2 tp2 pp2 ep2 zero1", 2),
]  # fmt: skip
ONCE = ExpertsConfig(rebalance_every=1)
STEPS = 3
"""The first has no copies; experts are placed anew before each of the others."""


def judged(text: str, router: int = 0, experts: ExpertsConfig = ONCE, **options: Any) -> None:
    plan, single = common_plans(
        ROUTED, Layout.parse(text), Layout(), "float64", router=ROUTERS[router], experts=experts, **options
    )
    verdict = Reference(single, seed=0, device="cpu", steps=STEPS).judge(plan)
    assert verdict.passed, verdict.cause
    assert verdict.max_rel_err > 0


@pytest.mark.parametrize(("text", "router"), [*FAST, *(pytest.param(*case, marks=LONG) for case in MORE)])
def test_training_is_that_of_one_device(text: str, router: int) -> None:
    """Everything that `verify` compares, and the communication of every step."""
    judged(text, router)


@LONG
@pytest.mark.parametrize("spare", [0, 2])
@pytest.mark.parametrize("recompute", ["full", "moe"])
def test_with_recompute_and_other_numbers_of_slots(spare: int, recompute: str) -> None:
    judged(
        "dp2 pp2 ep2 zero1",
        experts=ExpertsConfig(rebalance_every=1, spare_slots=spare),
        recompute=recompute,
    )


@LONG
@pytest.mark.parametrize("text", ["dp2 ep2", "tp2 ep2", "dp2 pp2 ep2 zero1"])
def test_a_step_that_overflows_places_experts_all_the_same(text: str) -> None:
    """Experts that have moved are saved at their first homes, and placed again where the run goes on."""
    plan, single = common_plans(ROUTED, Layout.parse(text), Layout(), "float64", experts=ONCE, overflow=True)
    verdict = Reference(single, seed=0, device="cpu", steps=4, overflow=True).judge(plan)
    assert verdict.passed, verdict.cause
    assert "loss_scale" not in verdict.absent


# Uneven routing

BUSY = ModelSpec(
    name="busy",
    hidden=16,
    vocab=97,
    blocks=(
        BlockSpec(
            attention=AttentionSpec(heads=4, kv_heads=4, head_dim=4),
            mlp=MoESpec(experts=64, top_k=4, ffn=4, router_bias=True),
        ),
    ),
)
"""Its router's bias, which `uneven` sets, sends twice the mean to the first of 8 ranks."""
TWICE_BIAS = 0.8


@dataclass
class Seen:
    """What one rank saw of a few steps."""

    losses: list[float]
    norms: list[float]
    loads: list[float]
    """Rows of the most loaded ep rank over the mean, in each step."""
    pieces: dict[str, list[tuple[Region, Tensor]]]
    """Weights at the end, by name, with the regions that they cover."""
    settled: dict[str, list[tuple[Region, Tensor]]]
    """The same after every expert has gone to its first home."""


def uneven(row: ParameterRow, layout: Layout, coordinate: Any, dtype: str) -> Tensor:
    """Initial values: those of the seed, but for a router that spreads its logits, and prefers the first 8 experts."""
    values = initial_value(row, layout, coordinate, dtype, seed=3)
    if row.name.endswith("router.weight"):
        return values * 25
    if row.name.endswith("router.bias"):
        return torch.where(torch.arange(len(values)) < len(values) // 8, TWICE_BIAS, 0.0).to(values.dtype)
    return values


def trained(text: str, experts: ExpertsConfig, steps: int = 3) -> list[Seen]:
    plan = Plan(
        model=BUSY,
        cluster=Cluster.parse("cpu"),
        workload=Workload(seq_len=128, global_batch=16),
        layout=Layout.parse(text),
        execution=Execution(micro_batch=2, dtype="float64", experts=experts),
    )
    return run_ranks(_train, plan, steps, ranks=plan.layout.world_size, device="cpu")


def _train(rank: Rank, plan: Plan, steps: int) -> Seen:
    mesh = Mesh(plan.layout, rank.rank, rank.device)
    engine = Engine(plan, mesh, seed=3, weights=uneven)
    data = SyntheticDataset(BUSY.vocab, plan.workload.seq_len, seed=5)
    results = [engine.step(feed(data, plan, mesh, step), 1e-3) for step in range(steps)]
    loads = [imbalance(result.routing[0].of_ranks(plan.layout.ep)) for result in results]
    pieces = _held(engine)
    engine.settle()
    return Seen([r.loss for r in results], [r.grad_norm for r in results], loads, pieces, _held(engine))


def _held(engine: Engine) -> dict[str, list[tuple[Region, Tensor]]]:
    layout, at = engine.plan.layout, engine.mesh.coordinate
    return {
        row.name: [(region, value[part].clone()) for part, region in row.pieces(layout, at)]
        for row, value in engine.data.weights()
    }


@LONG
@pytest.mark.parametrize("text", ["dp8 ep8", "dp2 tp2 ep4 zero1"])
def test_uneven_routing_becomes_even_and_changes_nothing(text: str) -> None:
    """Twice the mean on one of 8 ranks, one spare slot: at most 1.1 from the step on that follows the first counts."""
    placed, alone = trained(text, ONCE), trained("dp1", ExpertsConfig())[0]
    whole = {name: pieces[0][1] for name, pieces in alone.pieces.items()}
    for seen in placed:
        assert seen.losses == pytest.approx(alone.losses, rel=1e-10)
        assert seen.norms == pytest.approx(alone.norms, rel=1e-10)
        assert seen.loads == placed[0].loads
        for held in (seen.pieces, seen.settled):
            for name, pieces in held.items():
                for region, values in pieces:
                    error = (values - whole[name][region]).abs().max()
                    assert error <= 1e-10 * whole[name].abs().max(), name
    if text == "dp8 ep8":
        assert placed[0].loads[0] == pytest.approx(2.0, abs=0.1)
    assert max(placed[0].loads[1:]) <= 1.1


# Checkpoints

JOB = Job(
    ROUTED, OptimizerConfig(lr=1e-2, warmup_steps=0), 5, router=RouterConfig(bias_speed=0.1),
    experts=ExpertsConfig(rebalance_every=2),
)  # fmt: skip
COUNTS = ("counted", "placed")


@pytest.mark.parametrize(
    ("saved", "resumed"),
    [
        ("dp2 ep2 zero1", "dp2 ep2 zero1"),
        *(pytest.param(a, b, marks=LONG) for a, b in [
            ("dp4 ep2 zero3", "tp2 ep2"), ("dp2 pp2 ep2", "dp4 ep4 zero2"), ("tp2 ep2", "dp1"), ("dp1", "dp2 ep2"),
        ]),
    ],
)  # fmt: skip
def test_a_run_goes_on_with_its_experts_where_they_were(saved: str, resumed: str, tmp_path: Path) -> None:
    """Saved a step after experts were placed, and a step before they are again; bit for bit at the same layout.

    One device has nothing to place: a checkpoint need not say where experts are, and may.
    """
    jobs = {text: JOB if "ep" in text else replace(JOB, experts=ExpertsConfig()) for text in (saved, resumed)}
    straight = train(jobs[saved], saved, folder=tmp_path)
    ran = train(jobs[resumed], resumed, start=tmp_path / "step-00000003")
    expected, found = whole(straight), whole(ran)
    for key in (expected.keys() | found.keys()) - (expected.keys() & found.keys()):
        assert key.endswith(COUNTS)
    for key in expected.keys() & found.keys():
        if key.endswith(COUNTS) and "dp1" in (saved, resumed):
            continue
        if saved == resumed:
            assert torch.equal(found[key], expected[key]), key
        else:
            torch.testing.assert_close(found[key], expected[key], rtol=0, atol=1e-9)


# Bad input


@pytest.mark.parametrize(
    ("spec", "text", "changes", "message"),
    [
        (PLAIN, "dp2", {}, "rebalance_every=1 does nothing: plain has no experts; leave it out"),
        (ROUTED, "dp2", {}, "rebalance_every=1 does nothing with ep1: every rank has all experts"),
        (ROUTED, "dp2 ep2", {"router": ROUTERS[3]}, "does nothing with router.capacity=pad"),
        (ROUTED, "dp2 ep2", {"experts": ExpertsConfig(rebalance_every=1, spare_slots=3)},
         "spare_slots=3 beside the 2 experts of a rank make more than the 4 that routed has; at most 2"),
    ],
)  # fmt: skip
def test_user_mistakes(spec: ModelSpec, text: str, changes: dict[str, Any], message: str) -> None:
    plan, _ = common_plans(spec, Layout.parse(text), Layout(), "float64")
    execution = plan.execution.replace(**{"experts": ONCE, **changes})
    with pytest.raises(ConfigError, match=re.escape(message)) as caught:
        compose.check(plan.replace(execution=execution))
    assert len(str(caught.value).splitlines()) == 1

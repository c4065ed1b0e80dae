"""Experts on the ranks of a layout against one device: dispatch alone, whole training steps, checkpoints, bad input.

T tokens of a rank, K choices, E experts, D hidden.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fivefold.catalog.models import preset
from fivefold.core.events import total_bytes
from fivefold.core.layout import Layout
from fivefold.core.model_spec import MoESpec
from fivefold.core.optimizer import OptimizerConfig
from fivefold.core.router import RouterConfig
from fivefold.data.batches import SyntheticDataset
from fivefold.errors import ConfigError, LayoutError
from fivefold.nn.moe import Experts, MoE, Router
from fivefold.runtime.launch import Rank, run_ranks
from fivefold.runtime.mesh import Handle, Mesh
from fivefold.strategies import compose
from fivefold.strategies.expert.apply import apply
from fivefold.strategies.expert.dispatch import Cut, DispatchedExperts, Padding
from fivefold.strategies.expert.rules import same_tokens
from fivefold.train.experts import ExpertNumbers
from fivefold.train.trainer import StepMetrics, Trainer
from fivefold.verify.verify import Reference, verify
from fivefold.verify.workload import ROUTERS, common_plans

from .command_line import ROUTED_CONFIG, CommandLine
from .models import PLAIN, ROUTED
from .resuming import BATCH, SEQ_LEN, Job, train, whole

LONG = pytest.mark.exhaustive

# Dispatch alone

T, K, E, F, D = 6, 2, 4, 8, 5


def experts_of_all() -> Experts:
    torch.manual_seed(1)
    return Experts(D, MoESpec(experts=E, top_k=K, ffn=F)).double()


def tokens(seed: int, *, crowded: bool) -> tuple[Tensor, Tensor, Tensor]:
    """x [T, D], experts [T, K], weights [T, K] of one rank. Crowded: experts 0 and 1 only, so others get no row."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(T, D, generator=generator, dtype=torch.float64)
    scores = torch.rand(T, E, generator=generator) - (torch.arange(E) > 1).float() * crowded
    weights = torch.rand(T, K, generator=generator, dtype=torch.float64)
    return x, scores.topk(K).indices, weights


def outcome(run: Any, x: Tensor, experts: Tensor, weights: Tensor) -> list[Tensor]:
    """Output, and gradients of tokens and weights, of a loss that weighs every number otherwise."""
    x, weights = x.clone().requires_grad_(), weights.clone().requires_grad_()
    y = run(x, experts, weights)
    (y * torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)).sum().backward()
    assert x.grad is not None
    assert weights.grad is not None
    return [y.detach(), x.grad, weights.grad]


def dispatch(
    mesh: Mesh, crowded: bool, padded: bool
) -> tuple[list[Tensor], list[Tensor], list[tuple[slice, ...]]]:
    layout, whole_experts = mesh.layout, experts_of_all()
    place = layout.expert_place(mesh.coordinate)
    here, width = E // layout.ep, F // layout.etp
    rows = slice(place["ep"] * here, (place["ep"] + 1) * here)
    columns = slice(place["etp"] * width, (place["etp"] + 1) * width)
    regions = [(rows, columns), (rows, columns), (rows, slice(None), columns)]
    cut = Cut(
        mesh.axis("ep"), mesh.axis("etp"), same_tokens(layout), padded=Padding(T, T) if padded else None
    )
    module = DispatchedExperts(whole_experts, cut)
    for name, region in zip(("gate", "up", "down"), regions):
        setattr(module, name, nn.Parameter(getattr(whole_experts, name).detach()[region].clone()))
    seed = mesh.coordinate["dp"] if same_tokens(layout) else mesh.rank
    found = outcome(module, *tokens(seed, crowded=crowded))
    gradients = [p.grad for p in (module.gate, module.up, module.down)]
    assert all(g is not None and g.is_contiguous() for g in gradients)
    return found, gradients, regions  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("text", "crowded", "padded"),
    [
        ("dp2 ep2", True, False), ("dp4 ep2 etp2", False, False), ("dp2 tp2 nosp ep2 etp2", False, False),
        ("dp2 ep2", False, True),
        *(pytest.param(text, crowded, padded, marks=LONG) for text, crowded, padded in [
            ("dp4 ep4", True, False), ("dp4 ep4", False, True), ("dp2 etp2", False, False), ("dp4 ep2", True, True),
            ("dp4 ep2 etp2", True, True), ("tp4 ep2 etp2", False, False), ("tp2 nosp etp2", False, False),
        ]),
    ],
)  # fmt: skip
def test_dispatched_experts_against_the_plain_ones(
    on_mesh: Any, text: str, crowded: bool, padded: bool
) -> None:
    """Outputs, gradients of tokens and weights; expert gradients summed over the ranks that hold the same."""
    layout = Layout.parse(text)
    plain = experts_of_all()
    ranks = on_mesh(dispatch, text, crowded, padded)
    copies = layout.tp if same_tokens(layout) else 1  # ranks with the same tokens
    for rank, (found, _, _) in enumerate(ranks):
        seed = layout.coordinate(rank)["dp"] if same_tokens(layout) else rank
        alone = experts_of_all()
        expected = outcome(alone, *tokens(seed, crowded=crowded))
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-12)
        if rank % copies == 0:
            for mine, p in zip(plain.parameters(), alone.parameters(), strict=True):
                mine.grad = p.grad if mine.grad is None else mine.grad + p.grad  # type: ignore[operator]
    for name, index in (("gate", 0), ("up", 1), ("down", 2)):
        total = torch.zeros_like(getattr(plain, name))
        for _, gradients, regions in ranks:
            total[regions[index]] += gradients[index]
        torch.testing.assert_close(total, getattr(plain, name).grad, rtol=0, atol=1e-12)


def order_of_work(mesh: Mesh, recomputed: bool) -> tuple[list[str], list[Tensor], list[Tensor]]:
    """What a routed layer with shared experts does, in order; its output and gradients, and those without dispatch."""
    spec = MoESpec(experts=E, top_k=K, ffn=F, shared_ffn=4, shared_gate=True)
    torch.manual_seed(1)
    plain = MoE(D, spec).double()
    holder = nn.ModuleDict({"layers": nn.ModuleDict({"0": nn.ModuleDict({"mlp": copy.deepcopy(plain)})})})
    apply(
        holder,
        mesh,
        router=RouterConfig(),
        seq_len=T,
        shared_tokens=[(range(T),)],
        recomputed=lambda _: recomputed,
    )
    moe = holder.get_submodule("layers.0.mlp")
    ep, log = mesh.axis("ep"), []
    here = slice(ep.index * E // ep.degree, (ep.index + 1) * E // ep.degree)
    for name in ("gate", "up", "down"):
        setattr(moe.experts, name, nn.Parameter(getattr(plain.experts, name).detach()[here].clone()))
    start = ep.exchange_start

    def exchange_start(x: Tensor, sends: Any, receives: Any) -> Handle:
        what = "counts" if x.dtype == torch.int64 else "rows"
        handle = start(x, sends, receives)
        log.append(f"{what} start")
        wait = handle.wait
        handle.wait = lambda: (log.append(f"{what} here"), wait())[1]  # type: ignore[method-assign, func-returns-value]
        return handle

    ep.exchange_start = exchange_start  # type: ignore[method-assign]
    moe.shared.register_forward_hook(lambda *_: log.append("shared"))
    moe.shared.inputs.up.weight.register_hook(lambda _: log.append("shared gradient"))
    found = []
    for module in (moe, plain):
        torch.manual_seed(7 + mesh.rank)
        x = torch.randn(1, T, D, dtype=torch.float64, requires_grad=True)
        y = module(x)
        log.append("backward")
        y.square().sum().backward()
        own = [p.grad for name, p in module.named_parameters() if "experts." not in name]
        found.append([y.detach(), x.grad, *own])
    return log, *found  # type: ignore[return-value]


@pytest.mark.parametrize("recomputed", [False, True])
def test_shared_experts_compute_while_tokens_travel(on_mesh: Any, recomputed: bool) -> None:
    """Forward, and backward while the gradients of tokens travel; the same numbers."""
    rows = ["rows start", "rows here"]
    forward = [*rows, *rows, "shared"] if recomputed else ["rows start", "shared", "rows here", *rows]
    backward = (
        ["shared gradient", *rows, *rows]
        if recomputed
        else [*rows, "rows start", "shared gradient", "rows here"]
    )
    for log, found, expected in on_mesh(order_of_work, "dp2 ep2", recomputed):
        both = log[: log.index("backward", log.index("backward") + 1)]
        assert both == ["counts start", "counts here", *forward, "backward", *backward]
        for mine, other in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, other, rtol=0, atol=1e-12)


# Training steps

DEEP = ROUTED.replace(blocks=(*ROUTED.blocks, ROUTED.blocks[-1]))
"""As many layers as V-shaped schedules have stages at pp2."""
FAST = [("dp2 ep2 zero1", 0), ("tp2 ep2", 2), ("cp2 pp2:zbh1 ep2", 1)]
MORE = [
    ("dp2 ep2", 3), ("dp4 ep2 zero2", 1), ("dp4 ep2 zero3", 2), ("dp2 tp2 etp2 ep2 zero3", 0), ("tp2 nosp etp2", 1),
    ("dp2 tp2 nosp ep2 etp2", 2), ("tp2", 1), ("cp2:ulysses ep2", 2), ("cp2 tp2 ep4", 2), ("cp2:gather etp2", 3),
    ("pp2:zbv dp2 ep2", 1), ("pp2:dualpipev dp2 etp2", 2), ("pp3 tp2 ep2", 3), ("dp4 ep2 zero1/2", 0),
    ("dp2 cp2 tp2 ep4 etp2 order=cp-tp-dp-pp", 2), ("pp2:bfs@1+2 dp2 ep2", 0), ("tp2 zero3", 3),
    ("tp2 dp2 ep2 zero2", 0),
    ("dp2 tp2 pp2 ep2 zero1", 2), ("dp4 tp2 ep4", 1), ("dp8 ep4 zero3/4", 0),
]  # fmt: skip


@pytest.mark.parametrize(("text", "router"), [*FAST, *(pytest.param(*case, marks=LONG) for case in MORE)])
def test_training_is_that_of_one_device(text: str, router: int) -> None:
    """Everything that `verify` compares: routed experts, biases, the numbers of routers, and the communication."""
    layout = Layout.parse(text)
    model = ROUTED if layout.stages <= ROUTED.layers else DEEP
    plan, single = common_plans(model, layout, Layout(), "float64", router=ROUTERS[router])
    verdict = Reference(single, seed=0, device="cpu").judge(plan)
    assert verdict.passed, verdict.cause
    assert verdict.absent == ("loss_scale",)
    assert verdict.max_rel_err > 0


@pytest.mark.parametrize(
    "text", [pytest.param("dp2 tp2 ep2", marks=LONG), pytest.param("cp2 ep2", marks=LONG)]
)
def test_padding_is_routed_nowhere(text: str) -> None:
    verdict = verify(ROUTED, Layout.parse(text), device="cpu", documents=True)
    assert verdict.passed, verdict.cause


@LONG
@pytest.mark.parametrize("text", ["dp2 ep2", "tp2 pp2 ep2 zero1"])
def test_a_rank_that_no_token_goes_to(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its experts have gradients of zero, and its all-to-alls are of what it sends alone."""
    choose = Router.choose

    def first_half(self: Router, scores_TE: Tensor) -> Tensor:
        last = torch.arange(self.spec.experts) >= self.spec.experts // 2
        return choose(self, scores_TE.masked_fill(last, -torch.inf))

    monkeypatch.setattr(Router, "choose", first_half)
    plan, single = common_plans(ROUTED, Layout.parse(text), Layout(), "float64", router=ROUTERS[0])
    verdict = Reference(single, seed=0, device="cpu").judge(plan)
    assert verdict.passed, verdict.cause


@LONG
def test_float32_goes_to_the_experts_that_the_other_layout_chose() -> None:
    verdict = verify(ROUTED, Layout.parse("dp2 tp2 ep4"), dtype="float32", device="cpu")
    assert verdict.passed, verdict.cause
    assert any("rounding decides ties" in limit for limit in verdict.limits)


# Checkpoints

JOB = Job(
    ROUTED, OptimizerConfig(lr=1e-2, warmup_steps=0), 5,
    router=RouterConfig(balance="batch", balance_coefficient=0.05, bias_speed=0.1),
)  # fmt: skip


@pytest.mark.parametrize(
    ("saved", "resumed"),
    [
        ("dp2 ep2 zero1", "tp2 etp2"),
        *(pytest.param(a, b, marks=LONG) for a, b in [
            ("tp2 ep2", "dp1"), ("dp1", "dp4 ep4 zero3"), ("dp2 pp2 ep2", "cp2 ep2"), ("dp4 ep2 etp2 zero2", "dp2 ep2"),
        ]),
    ],
)  # fmt: skip
def test_a_run_goes_on_under_another_cut_of_its_experts(saved: str, resumed: str, tmp_path: Path) -> None:
    """Selection biases, and the load that the balance loss reads, are part of the state."""
    straight = train(JOB, saved, folder=tmp_path)
    ran = train(JOB, resumed, start=tmp_path / "step-00000003")
    expected, found = whole(straight), whole(ran)
    assert {key for key in found if key.startswith("buffers/")} == {
        "buffers/layers.1.mlp.router.load", "buffers/layers.2.mlp.router.load",
        "buffers/layers.2.mlp.router.selection_bias",
    }  # fmt: skip
    assert found["buffers/layers.2.mlp.router.selection_bias"].abs().max() > 0
    for key, values in expected.items():
        torch.testing.assert_close(found[key], values, rtol=0, atol=1e-9)


# Bad input


def test_user_mistakes() -> None:
    with pytest.raises(LayoutError, match="plain has no experts, which ep2 etp1 would cut"):
        verify(PLAIN, Layout.parse("dp2 ep2"), device="cpu")
    with pytest.raises(LayoutError, match="4 experts are not divisible by 8; nearest legal ep: 4"):
        verify(ROUTED, Layout.parse("dp8 ep8"), device="cpu")
    plan, _ = common_plans(preset("tiny-moe"), Layout.parse("dp2"), Layout(), "float64")
    plan = plan.replace(execution=plan.execution.replace(router=RouterConfig(bias_speed=0.1)))
    with pytest.raises(
        ConfigError, match=r"router.bias_speed does nothing: no router of tiny-moe has a selection"
    ):
        compose.check(plan)


# What a run says of its routers


def told(layout: str, recompute: str = "none") -> list[tuple[list[StepMetrics], dict[str, Any], int]]:
    """Of every rank: its steps, the counts that a record gets, and all-to-all bytes of the last step in the ledger."""

    def run(rank: Rank) -> tuple[list[StepMetrics], dict[str, Any], int]:
        router = RouterConfig(balance_coefficient=0.02, z_coefficient=0.01, capacity_factor=0.9)
        plan = Job(ROUTED, OptimizerConfig(lr=1e-2), 2, micro_batch=2, router=router).plan(layout)
        plan = plan.replace(execution=plan.execution.replace(recompute=recompute))
        trainer = Trainer(plan, rank, SyntheticDataset(plan.model.vocab, SEQ_LEN, seed=5), steps=2, seed=3)
        steps = list(trainer)
        assert trainer.profile is not None
        events = {e: n for e, n in trainer.profile.events.items() if e.op == "all_to_all"}
        return steps, trainer.experts.as_result(), total_bytes(Counter(events), axis="ep")

    return run_ranks(run, ranks=Layout.parse(layout).world_size, device="cpu")


@pytest.mark.parametrize(
    ("layout", "recompute"),
    [("dp2 pp2 ep2", "full"), pytest.param("cp2:ulysses tp2 ep4", "none", marks=LONG)],
)
def test_a_run_says_the_same_of_its_routers_at_every_layout(layout: str, recompute: str) -> None:
    ((alone, sums, nothing),), ep = told("dp1"), Layout.parse(layout).ep
    assert nothing == 0
    for steps, counts, dispatched in told(layout, recompute):
        assert counts == {**sums, "ep": ep, "layers": mostly(sums["layers"], ep)}
        for step, one in zip(steps, alone, strict=True):
            assert step.experts is not None
            same = replace(step.experts, rank_imbalance=None, dispatch_bytes=None)
            assert numbers(same) == pytest.approx(numbers(one.experts), rel=1e-9)
            assert step.experts.dropped_choices > 0
            assert step.experts.rank_imbalance is not None
            assert 1 <= step.experts.rank_imbalance <= step.experts.expert_imbalance
        assert dispatched == steps[-1].experts.dispatch_bytes > 0  # type: ignore[union-attr, operator]
    tokens = BATCH * SEQ_LEN
    assert [sum(layer["chosen_last_step"]) for layer in sums["layers"]] == [2 * tokens, 3 * tokens]
    assert [sum(layer["chosen"]) for layer in sums["layers"]] == [4 * tokens, 6 * tokens]


def numbers(experts: ExpertNumbers | None) -> dict[str, float]:
    assert experts is not None
    return {name: value for name, value in dataclasses.asdict(experts).items() if value is not None}


def mostly(layers: list[dict[str, Any]], ep: int) -> list[Any]:
    """The same, shared by `ep` ranks; the entropy is summed in another order."""
    found = []
    for layer in layers:
        each = len(layer["chosen"]) // ep
        ranks = [sum(layer["chosen"][rank * each : (rank + 1) * each]) for rank in range(ep)]
        found.append({**layer, "ranks": ranks, "entropy": pytest.approx(layer["entropy"], rel=1e-9)})
    return found


def test_a_recorded_run_has_its_experts(fivefold: CommandLine) -> None:
    fivefold.model(**ROUTED_CONFIG)
    assert fivefold("train", "train.yaml", "layout=dp2 ep2", "log.experts=true").code == 0
    run = fivefold.last_run()
    (layer,) = run["results"]["experts"]["layers"]
    assert run["results"]["experts"]["steps"] == 5
    assert sum(layer["chosen"]) == 5 * 8 * 32 * 2
    assert [line["dropped_choices"] for line in fivefold.metrics()] == [0] * 5
    each: list[list[int]] = [line["experts"][0]["chosen"] for line in fivefold.metrics()]  # type: ignore[index]
    assert [sum(column) for column in zip(*each)] == layer["chosen"]
    assert each[-1] == layer["chosen_last_step"]
    both = {(row["rank"], row["values"]["expert_imbalance"]) for row in run["metrics"] if row["step"] == 5}
    assert {rank for rank, _ in both} == {0, 1}
    assert len({value for _, value in both}) == 1
    shown = fivefold("runs", "show", "last").out
    assert "imbalance: the busiest over the mean" in shown
    assert "chosen_last_step" not in shown

    plan = fivefold("experts", "plan", "last", "--json").json()
    assert plan["ranks"] == 2
    assert [sum(one["loads"]) for one in plan["layers"]] == [pytest.approx(5 * 8 * 32 * 2)]
    assert plan["layers"][0]["imbalance_after"] <= plan["layers"][0]["imbalance_before"]

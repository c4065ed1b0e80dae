"""Seconds of computation and communication, against FLOP counts, rings and events that are worked out elsewhere.

An ideal device: every matrix product at its peak, all else free. Then seconds times peak are FLOPs.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fivefold.core.cluster import Cluster
from fivefold.core.execution import Execution
from fivefold.core.layout import Layout
from fivefold.core.model_counts import block_flops, block_parameters, head_flops
from fivefold.core.model_spec import AttentionSpec, BlockSpec, MLASpec, MLPSpec, ModelSpec, MoESpec
from fivefold.core.plan import Plan
from fivefold.core.workload import Workload
from fivefold.estimate import comm, compute
from fivefold.estimate.coefficients import Coefficients, beliefs
from fivefold.estimate.jobs import Blocks, Jobs
from fivefold.estimate.step import BUBBLE, layers_of, seconds_by_term, stage_layers, step_times
from fivefold.estimate.timeline import simulate
from fivefold.strategies.compose import predict_events
from fivefold.strategies.pipeline.schedules import rank_actions

S, D, PEAK = 256, 64, 1e12
GQA = AttentionSpec(heads=8, kv_heads=2, head_dim=16)
MLA = MLASpec(heads=8, q_rank=24, kv_rank=16, nope_dim=12, rope_dim=4, value_dim=10)
MOE = MoESpec(experts=8, top_k=2, ffn=48, shared_ffn=32)


def job(blocks: list[BlockSpec], *, vocab: int = 512, **columns: Any) -> Jobs:
    """One job of these layers; every degree 1 unless given."""
    kinds = list(dict.fromkeys(blocks))
    values: dict[str, Any] = {
        **dict.fromkeys(("tp", "pp", "dp", "cp", "ep", "etp", "chunks", "micro_batch", "microbatches"), 1),
        **dict.fromkeys(("zero", "scaling", "recompute", "overlap"), 0),
        **dict.fromkeys(("tied", "frozen", "sequence_parallel", "recompute_attention", "offload"), False),
        "fused_attention": True, "one_copy": False, "bubble": 1, "bits": 16, "grad_bytes": 4, "seq_len": S, "hidden": D,
        "vocab": vocab, "peak_flops_per_s": PEAK, "peak_low_flops_per_s": PEAK, "memory_bytes_per_s": 1e30,
        "link_bytes_per_s": 1e30, "nic_bytes_per_s": 1e30, "domain": 8, "hardware": "A100", "software": "other",
        "stack": "", "release": 2025,
    }  # fmt: skip
    arrays = {name: np.array([value]) for name, value in {**values, **columns}.items()}
    arrays = {k: v.astype(float) if v.dtype.kind == "i" else v for k, v in arrays.items()}
    return Jobs(blocks=tuple(_block(kind, blocks.count(kind)) for kind in kinds), **arrays)


def _block(block: BlockSpec, count: int) -> Blocks:
    a, m = block.attention, block.mlp
    latent = isinstance(a, MLASpec)
    sizes = {
        "count": count, "heads": a.heads, "window": S, "gated": 2 if m.gated else 1, "latent": 0, "state": 0,
        "kv_heads": a.heads if latent else a.kv_heads,
        "qk_dim": a.nope_dim + a.rope_dim if latent else a.head_dim, "v_dim": a.value_dim if latent else a.head_dim,
        "q_rank": a.q_rank or 0 if latent else 0, "kv_rank": a.kv_rank if latent else 0,
        "rope_dim": a.rope_dim if latent else 0,
        **({"ffn": m.ffn, "experts": 0, "top_k": 0, "moe_ffn": 0} if isinstance(m, MLPSpec) else
           {"ffn": m.shared_ffn, "experts": m.experts, "top_k": m.top_k, "moe_ffn": m.ffn}),
    }  # fmt: skip
    return Blocks(**{name: np.array([float(size)]) for name, size in sizes.items()})


def ideal(jobs: Jobs, **changes: float) -> dict[str, Any]:
    """Coefficients of a device that does matrix products at its peak and all else in no time."""
    c = {name: np.zeros(1) for name in beliefs()}
    for name in (
        "gemm_16bit",
        "gemm_8bit",
        "grouped",
        "attention",
        "memory",
        "link",
        "nic",
        "stack",
        "odd_head",
    ):
        c[name] = np.ones(1)
    return {**c, **{name: np.array([value]) for name, value in changes.items()}}


@pytest.mark.parametrize("attention", [GQA, MLA], ids=["gqa", "mla"])
@pytest.mark.parametrize(
    "mlp", [MLPSpec(ffn=96), MLPSpec(ffn=96, gated=False), MOE], ids=["gated", "plain", "experts"]
)
def test_an_ideal_device_takes_the_models_flops(attention: Any, mlp: Any) -> None:
    block = BlockSpec(attention=attention, mlp=mlp)
    spec = ModelSpec(name="m", hidden=D, vocab=512, blocks=(block,))
    jobs = job([block], micro_batch=4, seq_len=S)
    c = ideal(jobs)
    b = jobs.blocks[0]
    maps = [compute.linear(jobs.tokens, n, k, jobs, c).forward for n, k in compute.attention_maps(b, jobs)]
    feed = [
        compute.linear(jobs.tokens, b.ffn * b.gated, jobs.hidden, jobs, c).forward,
        compute.linear(jobs.tokens, jobs.hidden, b.ffn, jobs, c).forward,
        compute.experts(b, jobs, c).forward / (1 + 30 / (4 * S * MOE.top_k / MOE.experts)),
    ]
    wide = 1 + 0.35 * (128 / b.qk_dim - 1)  # narrow heads are slower; here only FLOPs count
    core = compute.attention_core(b, jobs, c).forward / wide
    router = 2 * D * MOE.experts if isinstance(mlp, MoESpec) else 0
    expected = (block_flops(spec, block, S) - router) * 4 * S
    # causal attention meets (S+1)/2 keys, counted as S/2
    assert float((sum(maps) + sum(feed) + core)[0]) * PEAK == pytest.approx(expected, rel=2e-3)
    assert float(compute.head(jobs, c).forward[0]) * PEAK == pytest.approx(head_flops(spec) * 4 * S)


def test_a_hybrid_model_is_its_parts() -> None:
    """A layer of attention alone and one of an MLP alone take what one layer of both takes."""
    jobs = job([BlockSpec(attention=GQA, mlp=MLPSpec(ffn=96))], tp=2, micro_batch=4)
    c = {**ideal(jobs, tp_exposed=1.0, passes_hidden=10.0), "launch": np.array([1e-12])}
    (whole,) = jobs.blocks
    none = np.zeros(1)
    attention = replace(whole, ffn=none)
    feed = replace(whole, heads=none, kv_heads=none, qk_dim=none, v_dim=none, window=np.ones(1))
    both, one, other = layers_of(replace(jobs, blocks=(whole, attention, feed)), c)
    for name in ("forward", "backward", "tp", "dense"):
        assert getattr(both, name) == pytest.approx(getattr(one, name) + getattr(other, name), rel=1e-3), name


def test_experts_in_a_latent_space() -> None:
    """As experts of a model of that width, between two maps."""
    jobs = job([BlockSpec(attention=GQA, mlp=MOE)], micro_batch=4)
    c = ideal(jobs)
    (block,) = jobs.blocks
    latent = compute.experts(replace(block, latent=np.array([16.0])), jobs, c).forward
    narrow = compute.experts(block, replace(jobs, hidden=np.array([16.0])), c).forward
    assert float((latent - narrow)[0]) * PEAK == pytest.approx(2 * 2 * 4 * S * D * 16)


def test_a_schedule_that_overlaps_hides_dispatch_behind_computation() -> None:
    jobs = job([BlockSpec(attention=GQA, mlp=MOE)], dp=4, ep=4, link_bytes_per_s=1e9)
    c = ideal(jobs, ep_exposed=1.0)
    plain = seconds_by_term(jobs, c)
    hidden = seconds_by_term(replace(jobs, overlap=np.array([0.5])), c)
    assert plain.total - hidden.total == pytest.approx(min(0.5 * plain.ep, plain.compute), rel=1e-2)
    assert plain.ep - hidden.ep == pytest.approx(plain.total - hidden.total)


@pytest.mark.parametrize("mlp", [MLPSpec(ffn=96), MOE], ids=["dense", "experts"])
def test_parameters_of_a_layer_are_those_of_the_model(mlp: Any) -> None:
    block = BlockSpec(attention=GQA, mlp=mlp)
    counts = block_parameters(ModelSpec(name="m", hidden=D, vocab=512, blocks=(block,)), block)
    dense, routed = compute.layer_parameters(_block(block, 1), job([block]))
    assert float(routed[0]) == counts["experts"]
    assert float(dense[0]) == sum(counts.values()) - counts["experts"] - counts["norm"]


def test_backward_is_twice_forward_and_once_where_the_base_is_frozen() -> None:
    block = BlockSpec(attention=GQA, mlp=MLPSpec(ffn=96))
    sizes = np.array([512.0]), np.array([128.0]), np.array([64.0])
    for frozen, times in ((False, 2), (True, 1)):
        jobs = job([block], frozen=frozen)
        one = compute.linear(*sizes, jobs, ideal(jobs))
        assert float(one.backward[0]) == pytest.approx(times * float(one.forward[0]))


def test_a_product_is_never_faster_than_its_limits() -> None:
    jobs = job([BlockSpec(attention=GQA, mlp=MLPSpec(ffn=96))], memory_bytes_per_s=1e9)
    c = {**ideal(jobs), "gemm_tile": np.array([0.2]), "gemm_depth": np.array([0.6])}
    for m, n, k in ((8, 8, 8), (4096, 16, 4096), (4096, 4096, 4096)):
        seconds = float(compute.gemm(*(np.array([float(x)]) for x in (m, n, k)), jobs, c)[0])
        assert seconds > max(2 * m * n * k / PEAK, 2 * (m * k + k * n + m * n) / 1e9)


def test_full_attention_costs_twice_causal_and_a_window_less() -> None:
    block = BlockSpec(attention=GQA, mlp=MLPSpec(ffn=96))
    jobs = job([block], seq_len=1024.0)
    c = ideal(jobs)
    whole = replace(jobs.blocks[0], window=np.array([1024.0]))
    causal = float(compute.attention_core(whole, jobs, c).forward[0])
    windowed = float(compute.attention_core(replace(whole, window=np.array([128.0])), jobs, c).forward[0])
    assert windowed / causal == pytest.approx((128 - 128**2 / 2048) / 512)
    unfused = replace(jobs, fused_attention=np.array([False]))
    wide = 1 + 0.35 * (128 / 16 - 1)
    assert float(compute.attention_core(whole, unfused, c).forward[0]) == pytest.approx(2 * causal / wide)


def events_of(layout: str, axis: str) -> tuple[float, Plan]:
    """Bytes that a ring of the axis moves for all predicted events of activations and parameters of one step."""
    attention = AttentionSpec(heads=8, kv_heads=8, head_dim=8)
    spec = ModelSpec(
        name="m", hidden=D, vocab=512, blocks=(BlockSpec(attention=attention, mlp=MLPSpec(ffn=96)),) * 4
    )
    plan = Plan(
        model=spec, cluster=Cluster.parse("cpu"), workload=Workload(seq_len=S, global_batch=8),
        layout=Layout.parse(layout), execution=Execution(dtype="bfloat16"),
    )  # fmt: skip
    n = plan.layout.degree(axis)  # type: ignore[arg-type]
    ring = {
        "all_reduce": 2 * (n - 1) / n,
        "all_gather": (n - 1) / n,
        "reduce_scatter": (n - 1) / n,
        "send": 1,
    }
    return sum(
        ring.get(event.op, 0) * event.bytes * count
        for event, count in predict_events(plan, 0).items()
        if event.axis == axis
        and event.phase in ("forward", "backward", "reduce", "optimizer")
        and event.bytes > S * 8
    ), plan


@pytest.mark.parametrize(
    ("layout", "axis", "tolerance"),
    [("tp4 nosp", "tp", 0.16), ("dp4", "data", 0.01), ("dp4 zero1", "data", 0.01), ("pp4", "pp", 1e-9)],
)
def test_bytes_priced_are_those_of_the_predicted_events(layout: str, axis: str, tolerance: float) -> None:
    """tp: the layers' alone are priced, not the embedding's and the head's."""
    moved, plan = events_of(layout, axis)
    cut = plan.layout
    jobs = job(
        list(plan.model.blocks), dp=cut.dp, tp=cut.tp, pp=cut.pp, zero=cut.zero, microbatches=8 // cut.dp,
        link_bytes_per_s=1.0, nic_bytes_per_s=1.0, peak_flops_per_s=1e30, sequence_parallel=cut.sequence_parallel,
    )  # fmt: skip
    c = {**ideal(jobs), **{f"{axis}_exposed": np.ones(1) for axis in ("tp", "dp", "pp", "cp")}}
    times = seconds_by_term(jobs, c)
    seconds = float({"tp": times.tp, "data": times.dp, "pp": times.pp}[axis][0])
    if axis == "pp":
        moved *= 2  # the first rank only sends forward and receives backward: a middle one does both
    assert seconds == pytest.approx(moved, rel=tolerance)


def test_a_group_that_leaves_the_domain_shares_the_network() -> None:
    jobs = job(
        [BlockSpec(attention=GQA, mlp=MLPSpec(ffn=96))],
        domain=8,
        link_bytes_per_s=300.0,
        nic_bytes_per_s=25.0,
    )
    c = ideal(jobs)

    def bus(degree: float, stride: float) -> float:
        return float(comm.bus(np.array([degree]), np.array([stride]), jobs, c)[0])

    assert bus(8, 1) == 300
    assert bus(16, 1) == 200  # 8 members in a node send together
    assert bus(16, 4) == 50
    assert bus(16, 8) == 25


@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8), (8, 8)])
def test_the_bubble_is_that_of_the_action_lists(p: int, m: int) -> None:
    """Equal stages, free communication: the closed form against the simulated timeline of the real lists."""
    block = BlockSpec(attention=GQA, mlp=MLPSpec(ffn=96))
    jobs = job([block] * 8, vocab=1, pp=p, microbatches=m)
    c = {**ideal(jobs), "bubble": np.ones(1)}
    times = seconds_by_term(jobs, c)
    layout = Layout.parse(f"pp{p}")
    lists = [rank_actions(layout, rank, m) for rank in range(p)]
    simulated = simulate(lists, layout.owner_of, lambda action: 2.0 if action.kind == "B" else 1.0)
    share = float((times.bubble / times.total)[0])
    assert share == pytest.approx(simulated.bubble_frac, rel=5e-3)  # the head of one word is not nothing


def test_terms_add_up_and_every_row_is_priced_alone() -> None:
    block = BlockSpec(attention=GQA, mlp=MOE)
    coefficients = Coefficients(beliefs())
    one = job([block] * 4, dp=4, ep=4, microbatches=8, link_bytes_per_s=3e11, nic_bytes_per_s=2e10)
    two = job([block] * 4, dp=4, zero=3, tp=2, sequence_parallel=True, memory_bytes_per_s=2e12)
    both = Jobs(
        blocks=(
            Blocks(**{k: np.concatenate([v, vars(two.blocks[0])[k]]) for k, v in vars(one.blocks[0]).items()}),
        ),
        **{k: np.concatenate([v, vars(two)[k]]) for k, v in vars(one).items() if k not in ("blocks", "placed")},
    )  # fmt: skip
    together = step_times(both, coefficients).total
    apart = [float(step_times(jobs, coefficients).total[0]) for jobs in (one, two)]
    assert together.tolist() == pytest.approx(apart, rel=1e-12)
    assert both.take(np.array([1])).devices.tolist() == [8.0]


@pytest.mark.parametrize(
    ("layers", "pp", "chunks", "expected"),
    [
        (32, 4, 2, (8, 8, 8)), (22, 8, 1, (2, 3, 2)), (70, 12, 1, (5, 6, 5)), (30, 4, 2, (7, 8, 7)),
        (7, 2, 1, (3.5, 3.5, 3.5)),
    ],
)  # fmt: skip
def test_layers_of_stages(layers: int, pp: int, chunks: int, expected: tuple[float, ...]) -> None:
    block = BlockSpec(attention=GQA, mlp=MLPSpec(ffn=96))
    found = stage_layers(job([block] * layers, pp=pp, chunks=chunks))
    assert tuple(float(x[0]) for x in found) == expected


def test_schedules_that_fill_the_bubble_leave_less_of_it() -> None:
    assert BUBBLE["zb2p"] < BUBBLE["zbv"] < BUBBLE["zb1p"] < BUBBLE["1f1b"] == 1

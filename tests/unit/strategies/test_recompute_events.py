"""What recompute adds to the communication of a step, counted by hand."""

from __future__ import annotations

from collections import Counter

import pytest

from fivefold.catalog.models import preset
from fivefold.core.cluster import Cluster
from fivefold.core.events import Event
from fivefold.core.execution import Execution
from fivefold.core.layout import Layout
from fivefold.core.model_spec import ModelSpec, MoESpec
from fivefold.core.plan import Plan
from fivefold.core.router import RouterConfig
from fivefold.core.workload import Workload
from fivefold.strategies import compose
from fivefold.strategies.expert.rules import routed_layers

LLAMA = preset("tiny-llama")
L, D, H, KV = 4, 64, 16, 2
b, S, M = 2, 48, 3
E, K = 8, 2


def moe(shared: int = 0, gate: bool = False) -> ModelSpec:
    """Layers 1 and 3 of 4 are routed."""
    routed = MoESpec(experts=E, top_k=K, ffn=16, shared_ffn=shared, shared_gate=gate)
    blocks = [block.replace(mlp=routed) if i % 2 else block for i, block in enumerate(LLAMA.blocks)]
    return LLAMA.replace(blocks=tuple(blocks))


ROUTER = RouterConfig(balance_coefficient=0.01, balance="sequence")


def predicted(spec: ModelSpec, text: str, recompute: str, rank: int = 0) -> Counter[Event]:
    layout = Layout.parse(text)
    plan = Plan(
        model=spec,
        cluster=Cluster.parse("cpu"),
        workload=Workload(seq_len=S, global_batch=b * M * layout.dp),
        layout=layout,
        execution=Execution(
            micro_batch=b,
            recompute=recompute,
            router=ROUTER if routed_layers(spec) else RouterConfig(),
        ),
    )
    return compose.predict_events(plan, rank)


def added(spec: ModelSpec, text: str, recompute: str, rank: int = 0) -> dict[tuple[str, str, str, int], int]:
    """(axis, op, dtype, bytes) -> how often it happens more than without recompute, all of it in backward."""
    plain, again = predicted(spec, text, "none", rank), predicted(spec, text, recompute, rank)
    assert not plain - again
    more = again - plain
    assert {event.phase for event in more} <= {"backward"}
    return {(e.axis, e.op, e.dtype, e.bytes): n for e, n in more.items()}


SIZE = b * S * D * 4
GATHER, SCATTER = ("tp", "all_gather", "float32", SIZE), ("tp", "reduce_scatter", "float32", SIZE)
REDUCE = ("tp", "all_reduce", "float32", SIZE)


@pytest.mark.parametrize(
    ("text", "recompute", "expected"),
    [
        ("tp2", "full", {GATHER: 2 * L * M, SCATTER: L * M}),
        ("tp2", "full/2", {GATHER: L * M, SCATTER: L * M // 2}),
        ("tp2", "full/3", {GATHER: 2 * 2 * M, SCATTER: 2 * M}),
        ("tp2", "attention", {GATHER: L * M}),
        ("tp2", "mlp", {GATHER: L * M}),
        ("tp2", "attention+mlp", {GATHER: 2 * L * M}),
        ("tp2 nosp", "full", {REDUCE: L * M}),
        ("tp2 nosp", "attention+mlp", {}),
        ("tp2 pp2", "full", {GATHER: L * M, SCATTER: L * M // 2}),
        ("tp2 pp2:zbh1", "full", {GATHER: L * M, SCATTER: L * M // 2}),
        ("tp2 pp4", "full/2", {GATHER: 2 * M, SCATTER: M}),
        ("dp2 zero3", "full", {}),
        ("dp2 pp2 zero1", "full", {}),
        ("cp2", "attention", {("cp", op, "float32", 2 * b * S // 2 * KV * H * 4): L * M for op in ("send", "recv")}),
        ("cp3", "full", {("cp", op, "float32", 2 * b * S // 3 * KV * H * 4): 2 * L * M for op in ("send", "recv")}),
        ("cp2", "mlp", {}),
        ("cp2:gather", "full/2", {("cp", "all_gather", "float32", 2 * b * S * KV * H * 4): L * M // 2}),
        (
            "cp2:ulysses",
            "attention",
            {("cp", "all_to_all", "float32", b * S // 2 * heads * H * 4): L * M for heads in (4 + 2 * KV, 4)},
        ),
    ],
)  # fmt: skip
def test_dense(text: str, recompute: str, expected: dict[tuple[str, str, str, int], int]) -> None:
    assert added(LLAMA, text, recompute) == expected


def test_every_k_th_layer_counts_over_the_model() -> None:
    """Layers 0 and 2 are on the first and the third stage, whatever stages have before them."""
    found = [bool(added(LLAMA, "tp2 pp4", "full/2", rank)) for rank in range(0, 8, 2)]
    assert found == [True, False, True, False]


ROWS = b * S // 2 * K
"""Rows of one microbatch that a rank with half of the tokens sends, evenly."""


@pytest.mark.parametrize("shared", [0, 32])
def test_experts_are_dispatched_again(shared: int) -> None:
    """Rows go and come back once more, with the counts of experts. cp: what a sequence's ranks counted as well."""
    rows = {
        ("ep", "all_to_all", "int64", 8 * E): 2 * M,
        ("ep", "all_to_all", "float32", ROWS * D * 4): 2 * 2 * M,
    }
    joined = {("cp", "all_reduce", "int64", 8 * b * (E + 1)): 2 * M}
    assert added(moe(shared), "cp2:ulysses ep2", "moe") == rows | joined
    assert added(moe(shared), "cp2:ulysses ep2", "mlp") == {}


@pytest.mark.parametrize(("shared", "gate"), [(0, False), (32, False), (32, True)])
@pytest.mark.parametrize("recompute", ["moe", "full"])
def test_a_sum_is_repeated_where_something_that_is_kept_comes_after_it(
    shared: int, gate: bool, recompute: str
) -> None:
    """tp2 etp2 without sequence parallelism: all-reduces of attention, of the experts and of the shared experts."""
    spec, routed = moe(shared, gate), 2 * M
    whole = recompute == "full"
    of_tp = whole * L * M + gate * routed
    found = added(spec, "tp2 etp2 nosp", recompute)
    assert found.pop(REDUCE, 0) == of_tp
    etp = ("etp", "all_reduce", "float32", SIZE)
    assert found.pop(etp, 0) == (routed if shared else 0)
    assert found == {}


def test_tokens_of_etp_ranks_are_gathered_again() -> None:
    """With sequence parallelism; without shared experts their sum is the last thing, and is not repeated."""
    half = b * S // 2
    found = added(moe(), "tp2 etp2", "moe")
    assert found == {
        ("etp", "all_gather", "float32", 2 * half * D * 4): 2 * M,
        ("etp", "all_gather", "float32", 2 * half * K * 4): 2 * M,
        ("etp", "all_gather", "int64", 2 * half * K * 8): 2 * M,
        ("tp", "all_reduce", "int64", 8 * b * (E + 1)): 2 * M,
    }

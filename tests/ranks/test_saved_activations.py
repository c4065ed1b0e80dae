"""What a layer keeps for backward, counted in a real step, is what the documented formula says: to the byte.

Counted twice: by what autograd is given to keep, and, which also sees what is kept without it, by the memory that is
there when the next layer begins.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise, product
from typing import Any

import pytest
import torch
from torch import Tensor

from fivefold.catalog.models import preset
from fivefold.core.cluster import Cluster
from fivefold.core.execution import DType, Execution
from fivefold.core.layout import Layout
from fivefold.core.model_spec import ModelSpec
from fivefold.core.plan import Plan
from fivefold.core.workload import Workload
from fivefold.data.batches import SyntheticDataset
from fivefold.engine.engine import Engine
from fivefold.engine.feed import feed
from fivefold.estimate import saved
from fivefold.estimate.recompute import Recompute, layer_kept
from fivefold.estimate.saved import Share, own_kernels
from fivefold.runtime.launch import Rank, run_ranks
from fivefold.runtime.memory import LiveBytes
from fivefold.runtime.mesh import Mesh

from .live_memory import settled

SEQ_LEN, ROWS, LAYER = 48, 2, "1"


def counted(rank: Rank, plan: Plan) -> int:
    """Bytes of the storages that layer 1 gives to autograd and that nothing outside it holds."""
    mesh = Mesh(plan.layout, rank.rank, rank.device)
    engine = Engine(plan, mesh, seed=0)
    layers = engine.chunks[0].get_submodule("layers")
    seen: dict[str, dict[int, int]] = {"0": {}, LAYER: {}}
    shared = {p.untyped_storage().data_ptr() for pairs in engine.parameters.values() for _, p in pairs}
    now: list[str] = []
    kept: list[Any] = []  # keeps storages alive, so that no address is used twice

    def pack(tensor: Tensor) -> Tensor:
        if now:
            storage = tensor.untyped_storage()
            seen[now[-1]][storage.data_ptr()] = storage.nbytes()
            kept.append(storage)
        return tensor

    for name in seen:
        layer = layers.get_submodule(name)
        layer.register_forward_pre_hook(lambda *_, name=name: now.append(name))
        layer.register_forward_hook(lambda *_: now.clear())
    data = SyntheticDataset(plan.model.vocab, SEQ_LEN, 0)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        engine.step(feed(data, plan, mesh, 0), 1e-3)
    both = seen["0"].keys() & seen[LAYER].keys()  # rotary angles
    return sum(size for at, size in seen[LAYER].items() if at not in both | shared)


def lives(rank: Rank, plan: Plan) -> list[int]:
    """Bytes by which live memory has grown from the beginning of each layer to that of the next.

    The hidden states are there at both moments, so this is what the layer keeps. Layer 0 begins with them alone; the
    last layer has no next.
    """
    mesh = Mesh(plan.layout, rank.rank, rank.device)
    engine = Engine(plan, mesh, seed=0)
    layers = engine.chunks[0].get_submodule("layers")
    load = feed(SyntheticDataset(plan.model.vocab, SEQ_LEN, 0), plan, mesh, 0)
    begun: list[int] = []
    with LiveBytes(engine.tensors()) as memory:
        for layer in layers.children():
            layer.register_forward_pre_hook(lambda *_: begun.append(settled(memory)))
        engine.step(load, 1e-3)
    return [after - before for before, after in pairwise(begun)]


def plan_of(spec: ModelSpec, text: str, dtype: DType, recompute: str = "none") -> Plan:
    return Plan(
        model=spec,
        cluster=Cluster.parse("cpu"),
        workload=Workload(seq_len=SEQ_LEN, global_batch=ROWS * Layout.parse(text).dp),
        layout=Layout.parse(text),
        execution=Execution(micro_batch=ROWS, dtype=dtype, recompute=recompute),
    )


def share_of(layout: Layout, rows: int, seq_len: int) -> Share:
    tokens = rows * seq_len
    mine = tokens // layout.tp if layout.sequence_parallel else tokens
    return Share(tokens=tokens, mine=mine, seq_len=seq_len, tp=layout.tp, etp=1, imbalance=1.0)


def formula(plan: Plan, layer: int) -> int:
    spec, again = plan.model, Recompute.parse(plan.execution.recompute)
    words = again.words if again.takes(layer) else ("none",)
    kernels = own_kernels(plan.execution.dtype)
    share = share_of(plan.layout, ROWS, SEQ_LEN)
    return int(layer_kept(spec.blocks[layer], spec.hidden, share, kernels, words).kept)


DTYPES: tuple[DType, ...] = ("float32", "float64", "bfloat16")
CUTS = ("dp1", "tp2", "tp2 nosp")


def some_of(cases: Iterable[tuple[Any, ...]], few: set[tuple[Any, ...]]) -> list[Any]:
    return [pytest.param(*case, marks=[] if case in few else pytest.mark.exhaustive) for case in cases]


@pytest.mark.parametrize(
    ("name", "text", "dtype"),
    some_of(
        product(["tiny-llama", "tiny-qwen3", "tiny-uneven"], CUTS, DTYPES),
        {
            ("tiny-llama", "tp2", "float32"),
            ("tiny-uneven", "tp2 nosp", "bfloat16"),
            ("tiny-qwen3", "dp1", "float64"),
        },
    ),
)
def test_formula_equals_what_autograd_keeps(name: str, text: str, dtype: DType) -> None:
    plan = plan_of(preset(name), text, dtype)
    found = run_ranks(counted, plan, ranks=plan.layout.world_size, device="cpu")
    assert found == [formula(plan, 1)] * plan.layout.world_size


MODES = ("none", "attention", "mlp", "attention+mlp", "full", "full/2", "mlp/2")


@pytest.mark.parametrize(
    ("recompute", "text", "dtype"),
    some_of(
        product(MODES, CUTS, DTYPES),
        {
            ("attention", "tp2", "float32"),
            ("mlp/2", "tp2 nosp", "bfloat16"),
            ("attention+mlp", "dp1", "bfloat16"),
            ("full/2", "dp1", "float64"),
        },
    ),
)
def test_formula_equals_what_lives(recompute: str, text: str, dtype: DType) -> None:
    """Every layer but the last, of a model with windows, biases and q/k norms in some of them."""
    plan = plan_of(preset("tiny-uneven"), text, dtype, recompute)
    expected = [formula(plan, layer) for layer in range(plan.model.layers - 1)]
    found = run_ranks(lives, plan, ranks=plan.layout.world_size, device="cpu")
    assert found == [expected] * plan.layout.world_size


@pytest.mark.parametrize(
    ("recompute", "text"),
    some_of(
        product(("moe", "attention+moe", "full"), ("tp2 ep2", "tp2 etp2 nosp", "dp2 ep2")),
        {("moe", "dp2 ep2")},
    ),
)
def test_a_recomputed_mixture_of_experts_keeps_its_input(recompute: str, text: str) -> None:
    """Where experts are dispatched: what they keep depends on the tokens that come."""
    plan = plan_of(preset("tiny-moe"), text, "float32", recompute)
    expected = [formula(plan, layer) for layer in range(plan.model.layers - 1)]
    found = run_ranks(lives, plan, ranks=plan.layout.world_size, device="cpu")
    assert found == [expected] * plan.layout.world_size


MIXTURES = ("tiny-moe", "tiny-qwen-moe", "tiny-mla-moe")
MIXTURE_MODES = ("none", "attention", "moe", "mlp", "attention+moe", "full", "full/2")


@pytest.mark.parametrize(
    ("name", "recompute", "text", "dtype"),
    some_of(
        product(MIXTURES, MIXTURE_MODES, ("dp1", "tp2"), DTYPES),
        {
            ("tiny-moe", "none", "dp1", "bfloat16"),
            ("tiny-qwen-moe", "none", "dp1", "float32"),
            ("tiny-mla-moe", "moe", "tp2", "float64"),
            ("tiny-mla-moe", "attention", "dp1", "bfloat16"),
        },
    ),
)  # fmt: skip
def test_every_form_of_recompute_of_a_mixture(name: str, recompute: str, text: str, dtype: DType) -> None:
    spec = preset(name)
    if recompute == "mlp" and spec.blocks[0].mlp.kind == "moe":
        pytest.skip("this model has no dense MLP")
    plan = plan_of(spec, text, dtype, recompute)
    expected = [formula(plan, layer) for layer in range(plan.model.layers - 1)]
    found = run_ranks(lives, plan, ranks=plan.layout.world_size, device="cpu")
    assert found == [expected] * plan.layout.world_size


def test_sequence_parallelism_keeps_less() -> None:
    """At Llama-2-7B's width under tp8, by the formula: what SP saves is 7/8 of norms and column inputs."""
    spec = preset("llama-2-7b")
    block, kernels = spec.blocks[0], own_kernels("bfloat16")
    whole, cut = [share_of(Layout.parse(text), 1, 4096) for text in ("tp8 nosp", "tp8")]
    kept, less = [saved.layer(block, spec.hidden, share, kernels) for share in (whole, cut)]
    column_inputs = [
        2 * (saved.norm(share, spec.hidden, kernels) + saved.column_input(share, spec.hidden, kernels))
        for share in (whole, cut)
    ]
    assert column_inputs[0] == 8 * column_inputs[1]
    assert kept.attention + kept.mlp - less.attention - less.mlp == column_inputs[0] - column_inputs[1]

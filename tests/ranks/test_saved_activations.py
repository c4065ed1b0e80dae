"""What a layer keeps for backward, counted in a real step, is what the documented formula says: to the byte."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from fivefold.catalog.models import preset
from fivefold.core.cluster import Cluster
from fivefold.core.execution import Execution
from fivefold.core.layout import Layout
from fivefold.core.plan import Plan
from fivefold.core.workload import Workload
from fivefold.data.batches import SyntheticDataset
from fivefold.engine.engine import Engine
from fivefold.engine.feed import feed
from fivefold.estimate.activations import layer_saved_bytes
from fivefold.runtime.launch import Rank, run_ranks
from fivefold.runtime.mesh import Mesh

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


FEW = {
    ("tiny-llama", "tp2", "float32"),
    ("tiny-uneven", "tp2 nosp", "bfloat16"),
    ("tiny-qwen3", "dp1", "float64"),
}
CASES = [
    pytest.param(*case, marks=[] if case in FEW else pytest.mark.exhaustive)
    for case in product(
        ["tiny-llama", "tiny-qwen3", "tiny-uneven"],
        ["dp1", "tp2", "tp2 nosp"],
        ["float32", "float64", "bfloat16"],
    )
]


@pytest.mark.parametrize(("name", "text", "dtype"), CASES)
def test_formula_equals_what_autograd_keeps(name: str, text: str, dtype: Any) -> None:
    spec, layout = preset(name), Layout.parse(text)
    plan = Plan(
        model=spec,
        cluster=Cluster.parse("cpu"),
        workload=Workload(seq_len=SEQ_LEN, global_batch=ROWS),
        layout=layout,
        execution=Execution(micro_batch=ROWS, dtype=dtype),
    )
    expected = layer_saved_bytes(
        spec.blocks[1], spec.hidden, layout, micro_batch=ROWS, seq_len=SEQ_LEN, dtype=dtype
    )
    found = run_ranks(counted, plan, ranks=layout.world_size, device="cpu")
    assert found == [expected.total] * layout.world_size


def test_sequence_parallelism_keeps_less() -> None:
    """At Llama-2-7B's width under tp8, by the formula: what SP saves is 7/8 of norms and column inputs."""
    spec = preset("llama-2-7b")
    parts = [
        layer_saved_bytes(
            spec.blocks[0], spec.hidden, Layout.parse(text), micro_batch=1, seq_len=4096, dtype="bfloat16"
        )
        for text in ("tp8", "tp8 nosp")
    ]
    with_sp, without = parts
    assert without.norms + without.projections == 8 * (with_sp.norms + with_sp.projections)
    assert (with_sp.attention, with_sp.mlp) == (without.attention, without.mlp)

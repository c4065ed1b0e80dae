"""The composed table and the predicted communication, against numbers worked out by hand.

b micro-batch, S sequence, D hidden, L layers, V vocabulary, m microbatches, x bytes of one element.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from fivefold.core.cluster import Cluster
from fivefold.core.events import Event, Events, total_bytes
from fivefold.core.execution import Execution
from fivefold.core.layout import Layout
from fivefold.core.model_spec import AttentionSpec, BlockSpec, MLPSpec, ModelSpec
from fivefold.core.plan import Plan
from fivefold.core.workload import Workload
from fivefold.errors import LayoutError, UserError, WorkloadError
from fivefold.strategies import compose

b, S, D, L, V, FFN, x = 2, 16, 32, 4, 52, 48, 4
LAYER = (
    2 * D + 4 * D * D + 3 * D * FFN
)  # two norms, q k v o of D x D (8 heads of 4, 8 KV heads), gate up down


def plan(text: str, *, tied: bool = False, global_batch: int = 16, **changes: Any) -> Plan:
    attention = AttentionSpec(heads=8, kv_heads=8, head_dim=4)
    block = BlockSpec(attention=attention, mlp=MLPSpec(ffn=FFN))
    spec = ModelSpec(name="tiny", hidden=D, vocab=V, blocks=(block,) * L, tied_embeddings=tied)
    values = {
        "model": spec,
        "cluster": Cluster.parse("cpu"),
        "workload": Workload(seq_len=S, global_batch=global_batch),
        "layout": Layout.parse(text),
        "execution": Execution(micro_batch=b),
    }
    return Plan(**{**values, **changes})


def events(text: str, rank: int = 0, **changes: Any) -> Events:
    return compose.predict_events(plan(text, **changes), rank)


def test_one_device_communicates_nothing() -> None:
    assert not events("dp1")


def test_data_parallel_reduces_each_parameter_once_however_many_microbatches() -> None:
    parameters = 2 * V * D + L * LAYER + D
    for global_batch in (8, 64):
        found = events("dp4", global_batch=global_batch)
        assert total_bytes(found, "data", "reduce") == parameters * x
        assert found[Event("metrics", "data", "all_reduce", "int64", 8)] == 1
        assert found[Event("metrics", "data", "all_reduce", "float64", 8)] == 1
        assert {event.axis for event in found} == {"data"}


def test_tensor_parallel_with_sequence_parallelism() -> None:
    """Per microbatch, 4 collectives a layer forward and 6 backward; embedding and head add 2 and 3."""
    m, size = 8, b * S * D * x
    expected = {
        Event("forward", "tp", "all_gather", "float32", size): m * (2 * L + 1),
        Event("forward", "tp", "reduce_scatter", "float32", size): m * (2 * L + 1),
        Event("backward", "tp", "all_gather", "float32", size): m * (4 * L + 2),
        Event("backward", "tp", "reduce_scatter", "float32", size): m * (2 * L + 1),
        Event("forward", "tp", "all_reduce", "float32", b * S * 4): m,
        Event("forward", "tp", "all_reduce", "float32", 2 * b * S * 4): m,
        Event("reduce", "tp", "all_reduce", "float32", (2 * L + 1) * D * x): 1,
        Event("norm", "tp", "all_reduce", "float64", 8): 1,
    }
    assert events("tp4") == Counter(expected)


def test_tensor_parallel_alone() -> None:
    """nosp: 2 all-reduces a layer each way; the norms see all tokens and need no sum."""
    m, size = 8, b * S * D * x
    expected = {
        Event("forward", "tp", "all_reduce", "float32", size): m * (2 * L + 1),
        Event("backward", "tp", "all_reduce", "float32", size): m * (2 * L + 1),
        Event("forward", "tp", "all_reduce", "float32", b * S * 4): m,
        Event("forward", "tp", "all_reduce", "float32", 2 * b * S * 4): m,
        Event("norm", "tp", "all_reduce", "float64", 8): 1,
    }
    assert events("tp2 nosp") == Counter(expected)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_pipeline_sends_one_message_a_microbatch_and_edge(schedule: str) -> None:
    m, size = 8, b * S * D * x
    ends = {
        Event("norm", "pp", "all_reduce", "float64", 8): 1,
        Event("metrics", "pp", "all_reduce", "float64", 8): 1,
    }
    send_f, recv_f = (
        Event("forward", "pp", "send", "float32", size),
        Event("forward", "pp", "recv", "float32", size),
    )
    send_b, recv_b = (
        Event("backward", "pp", "send", "float32", size),
        Event("backward", "pp", "recv", "float32", size),
    )
    assert events(f"pp4:{schedule}", 0) == Counter({send_f: m, recv_b: m, **ends})
    assert events(f"pp4:{schedule}", 1) == Counter({send_f: m, recv_f: m, send_b: m, recv_b: m, **ends})
    assert events(f"pp4:{schedule}", 3) == Counter({recv_f: m, send_b: m, **ends})


def test_messages_shrink_under_sequence_parallelism() -> None:
    whole, shard = events("tp2 pp2 nosp"), events("tp2 pp2")
    assert {e.bytes for e in whole if e.op == "send"} == {b * S * D * x}
    assert {e.bytes for e in shard if e.op == "send"} == {b * S * D * x // 2}


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_tied_embeddings_on_two_stages_add_one_sum(rank: int) -> None:
    found = {e: n for e, n in events("pp3", rank, tied=True).items() if e.axis == "tie"}
    tie = {Event("reduce", "tie", "all_reduce", "float32", V * D * x): 1}
    assert found == ({} if rank == 1 else tie)
    assert not [e for e in events("tp2", tied=True) if e.axis == "tie"]


def test_tied_copies_have_the_same_values_and_count_once() -> None:
    table = compose.parameter_table(plan("pp2", tied=True).model, Layout.parse("tp2 pp2"), S)
    copies = [row for row in table if row.role == "embedding"]
    assert [(row.name, row.stage, row.tied_to) for row in copies] == [
        ("embedding.weight", 0, None),
        ("head.weight", 1, "embedding.weight"),
    ]
    assert len({(row.init_name, row.shape, row.init_std) for row in copies}) == 1
    assert all("tie" in row.sums for row in copies)


def test_padding_is_counted() -> None:
    """V = 52 on 8 ranks: 7 rows each."""
    found = events("dp2 tp8")
    local = 2 * 7 * D + L * (2 * D + 4 * D * D // 8 + 3 * D * FFN // 8) + D
    assert total_bytes(found, "data", "reduce") == local * x


def test_every_layer_is_on_one_stage() -> None:
    layout = Layout.parse("pp3")
    table = compose.parameter_table(plan("pp3").model, layout, S)
    stages: dict[str, set[int]] = {}
    for row in table:
        stages.setdefault(row.block, set()).add(row.stage)
    assert stages == {
        "embedding": {0},
        "layers.0": {0},
        "layers.1": {0},
        "layers.2": {1},
        "layers.3": {2},
        "head": {2},
    }
    held = [row for pp in range(3) for rows in compose.rows_of(table, layout, pp).values() for row in rows]
    assert held == list(table)


@pytest.mark.parametrize(
    ("text", "changes", "error", "message"),
    [
        ("tp3", {}, LayoutError, "tp3 does not fit tiny: heads = 8"),
        ("pp5", {}, LayoutError, "5 pipeline stages but tiny has 4 layers"),
        ("dp2 ep2", {}, LayoutError, "tiny has no experts, which ep2 etp1 would cut"),
        ("pp3:1f1b*2", {}, LayoutError, "6 pipeline stages but tiny has 4 layers"),
        ("pp2:custom", {}, LayoutError, "needs its actions"),
        ("dp3", {}, WorkloadError, "global batch 16 is not a multiple of dp3 x micro-batch 2 = 6"),
        (
            "dp1",
            {"workload": Workload(seq_len=5000, global_batch=16)},
            LayoutError,
            "5000 exceeds the 4096 positions",
        ),
    ],
)
def test_refusals(text: str, changes: dict[str, Any], error: type[UserError], message: str) -> None:
    with pytest.raises(error, match=message) as caught:
        compose.check(plan(text, **changes))
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    "text", ["dp1", "dp2 tp2 pp2", "tp4 pp4:gpipe@1+1+1+1", "tp8 nosp", "dp4 tp2 pp2@flops"]
)
def test_what_can_be_run_is_accepted(text: str) -> None:
    compose.check(plan(text))

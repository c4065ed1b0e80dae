"""What ZeRO shards, against `torch.chunk`; what it communicates, against the closed forms; what it refuses."""

from __future__ import annotations

from collections import Counter
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fivefold.core.cluster import Cluster
from fivefold.core.events import Event, total_bytes
from fivefold.core.execution import Execution
from fivefold.core.layout import Layout
from fivefold.core.model_spec import AttentionSpec, BlockSpec, MLPSpec, ModelSpec
from fivefold.core.plan import Plan
from fivefold.core.sharding import ParameterRow, Shard, parameters
from fivefold.core.workload import Workload
from fivefold.errors import LayoutError
from fivefold.strategies import compose
from fivefold.strategies.data import rules

D, V, L, FFN, X = 32, 64, 4, 48, 4
LAYER = 2 * D + 4 * D * D + 3 * D * FFN


def plan(
    text: str, *, microbatches: int = 3, tied: bool = False, dtype: str = "float32", **changes: Any
) -> Plan:
    """Sizes that 2 and 4 ranks divide: no padding, so that volumes are those of the formulas."""
    block = BlockSpec(attention=AttentionSpec(heads=8, kv_heads=8, head_dim=4), mlp=MLPSpec(ffn=FFN))
    layout = Layout.parse(text)
    return Plan(
        model=ModelSpec(name="t", hidden=D, vocab=V, blocks=(block,) * L, tied_embeddings=tied),
        cluster=Cluster.parse("cpu"),
        workload=Workload(seq_len=16, global_batch=2 * microbatches * layout.dp),
        layout=layout,
        execution=Execution(micro_batch=2, dtype=dtype, **changes),  # type: ignore[arg-type]
    )


# What is held


@given(
    rows=st.integers(1, 40),
    n=st.sampled_from([2, 3, 4, 16]),
    tp=st.sampled_from([1, 2, 4]),
    dim=st.sampled_from([0, 1]),
)
def test_a_shard_is_a_chunk_of_the_local_part(rows: int, n: int, tp: int, dim: int) -> None:
    """The k-th data rank holds what `torch.chunk` would give it of its tp rank's padded part; the rest is padding."""
    layout = Layout.parse(f"dp{n} tp{tp} zero1")
    shape = (rows, 8)
    cut = {} if tp == 1 else {"tp": Shard(dim)}
    row = rules.place(ParameterRow("p", "up", shape, placement=cut), layout)  # type: ignore[arg-type]
    numbers = torch.arange(1, rows * 8 + 1).view(shape)
    for index, t in product(range(n), range(tp)):
        at = {"dp": index, "tp": t, "cp": 0, "pp": 0}
        local = torch.zeros(row.local_shape(layout), dtype=torch.long)
        mine = numbers[row.region(layout, at)]  # type: ignore[arg-type]
        local[: mine.shape[0], : mine.shape[1]] = mine
        chunks = local.chunk(n)
        expected = chunks[index] if index < len(chunks) else local[:0]
        held = numbers[row.held.region(layout, at)]  # type: ignore[arg-type]
        padded = torch.zeros(row.held.local_shape(layout), dtype=torch.long)
        padded[: held.shape[0], : held.shape[1]] = held
        assert padded.shape == chunks[0].shape
        assert torch.equal(padded[: expected.shape[0]], expected)
        assert not padded[expected.shape[0] :].any()


@pytest.mark.parametrize(
    "text",
    [
        "dp4 zero1",
        "dp3 tp2 zero2",
        "dp16 zero3",
        "dp4 zero3/2 tp2",
        "dp4 pp2 zero1/2",
        "dp4 tp2 zero1 order=dp-tp-cp-pp",
    ],
)
def test_every_element_is_held_and_written_once(text: str) -> None:
    """Held: by one rank of each sharding group (and each replica over tp). Written: by one rank of all."""
    layout = Layout.parse(text)
    spec = plan("dp1", tied=True).model.replace(vocab=53)
    table = compose.parameter_table(spec, layout, 16)
    for row in table:
        held, written = np.zeros(row.shape, dtype=int), np.zeros(row.shape, dtype=int)
        for rank in range(layout.world_size):
            at = layout.coordinate(rank)
            if at["pp"] == layout.owner_of(row.stage):
                held[row.held.region(layout, at)] += 1
                written[row.held.region(layout, at)] += row.held.written_here(layout, at)
        replicas = layout.tp if "tp" not in row.placement else 1
        assert (held == replicas * layout.data // layout.data_shards).all(), row.name
        assert (written == (0 if row.tied_to else 1)).all(), row.name
    assert {row.name for row in table} >= {row.name for row in parameters(spec)}


def test_groups_and_what_is_at_the_same_place_in_them() -> None:
    layout = Layout.parse("dp4 tp2 zero3/2")
    assert layout.groups("data", 2) == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert layout.groups("data", 2, across=True) == ((0, 4), (1, 5), (2, 6), (3, 7))
    for rank in range(8):
        index = layout.data_index(layout.coordinate(rank))
        assert layout.group_of("data", rank)[index] == rank
        assert layout.group_of("data", rank, 2)[index % 2] == rank


def test_held_and_whole_are_inverse() -> None:
    row = rules.place(ParameterRow("p", "up", (7, 3)), Layout.parse("dp2 zero2"))
    assert row.held.whole == row
    assert row.held.held == row.held
    plain = rules.place(ParameterRow("p", "up", (7, 3)), Layout.parse("dp2"))
    assert plain.held is plain.whole is plain


# What is communicated

P = 2 * V * D + L * LAYER + D


@pytest.mark.parametrize("m", [1, 3, 8])
@pytest.mark.parametrize(
    ("text", "times"),
    [
        ("dp4", lambda m: 1),  # an all-reduce moves each element twice
        ("dp4 zero1", lambda m: 2),
        ("dp4 zero2", lambda m: m + 1),
        ("dp4 zero3", None),
    ],
)
def test_volume_as_a_function_of_the_microbatches(text: str, times: Any, m: int) -> None:
    """ZeRO-3: 3 m P, less what backward need not gather again: the embedding (a lookup), and norm and head."""
    found = compose.predict_events(plan(text, microbatches=m), 0)
    moved = sum(event.bytes * n for event, n in found.items() if event.axis == "data" and event.bytes > 8)
    if times is None:
        assert moved == (3 * m * P - m * V * D - m * (D + V * D)) * X
    else:
        assert moved == times(m) * P * X


def test_zero3_gathers_once_a_step_if_asked() -> None:
    found = compose.predict_events(plan("dp4 zero3", microbatches=5, zero3_gather="step"), 0)
    assert total_bytes(found, "data", "forward") == P * X
    assert total_bytes(found, "data", "reduce") == P * X
    assert total_bytes(found, "data", "backward") == 0


@pytest.mark.parametrize("level", [1, 2, 3])
def test_groups_add_one_sum_of_shards(level: int) -> None:
    """zeroK/2 on 4 ranks: the volume of 2 ranks, then P/2 elements are all-reduced once, whatever the microbatches."""
    whole = compose.predict_events(plan(f"dp2 zero{level}"), 0)
    grouped = compose.predict_events(plan(f"dp4 zero{level}/2"), 0)
    extra = grouped - whole
    assert not whole - grouped
    assert {(e.phase, e.op) for e in extra} == {("reduce", "all_reduce")}
    assert total_bytes(extra) == P // 2 * X


def test_bfloat16_gathers_two_bytes_and_reduces_four() -> None:
    for level in (1, 2, 3):
        found = compose.predict_events(plan(f"dp2 zero{level}", dtype="bfloat16"), 0)
        dtypes = {(e.op, e.dtype) for e in found if e.axis == "data" and e.bytes > 8}
        assert dtypes == {("reduce_scatter", "float32"), ("all_gather", "bfloat16")}


def test_padding_travels() -> None:
    """A norm of 32 on 3 ranks: 11 elements each."""
    events = compose.predict_events(plan("dp3 zero3"), 0)
    norm_and_head = 3 * (11 + 22 * D) * X
    assert events[Event("reduce", "data", "reduce_scatter", "float32", norm_and_head)] == 3


def test_sums_over_tp_and_ties_are_of_shards() -> None:
    for text, axis, local in (("dp2 tp2 {}", "tp", (2 * L + 1) * D), ("dp2 pp2 {}", "tie", V * D)):
        whole = compose.predict_events(plan(text.format(""), tied=True), 0)
        cut = compose.predict_events(plan(text.format("zero1"), tied=True), 0)
        assert total_bytes(whole, axis, "reduce") == local * X  # type: ignore[arg-type]
        assert total_bytes(cut, axis, "reduce") == local * X // 2  # type: ignore[arg-type]


def test_one_rank_in_a_group_is_zero0() -> None:
    for text in ("dp1 zero3", "dp4 zero1/1", "dp4 zero3/1"):
        alone = text.split(" ", maxsplit=1)[0]
        assert compose.predict_events(plan(text), 0) == compose.predict_events(plan(alone), 0)


# When a unit is gathered


def names(kinds: str, *, once: bool = False, tied: bool = False) -> Counter[str]:
    """`F layers.0` -> how often, for a chunk that holds the whole of a two-layer model."""
    rows = [
        ParameterRow("embedding.weight", "embedding", (4, 4)),
        ParameterRow("layers.0.mlp.up.weight", "up", (4, 4)),
        ParameterRow("layers.1.mlp.up.weight", "up", (4, 4)),
        ParameterRow("norm.weight", "norm", (4,)),
    ]
    parts = rules.units(rows if tied else [*rows, ParameterRow("head.weight", "head", (4, 4))])
    found = rules.gathers(parts, kinds, once=once)
    return Counter({f"{phase[0].upper()} {parts[i].rows[0].block}": n for (phase, i), n in found.items()})


def test_one_microbatch() -> None:
    """The embedding's gradient reads no weight; norm and head are still whole when their backward begins."""
    assert names("FB") == Counter(
        {"F embedding": 1, "F layers.0": 1, "F layers.1": 1, "F head": 1, "B layers.0": 1, "B layers.1": 1}
    )


def test_a_tied_head_is_one_unit_with_the_embedding() -> None:
    assert names("FBFB", tied=True) == Counter(
        {"F embedding": 2, "F layers.0": 2, "F layers.1": 2, "B layers.0": 2, "B layers.1": 2}
    )


def test_all_forwards_first() -> None:
    """Norm and head stay whole until the first backward and are then gathered for each of the others."""
    found = names("FFFBBB")
    assert (found["F head"], found["B head"]) == (1, 2)
    assert (found["F layers.0"], found["B layers.0"]) == (3, 3)


def test_kept_gathered() -> None:
    assert names("FFBFBB", once=True) == Counter(
        {"F embedding": 1, "F layers.0": 1, "F layers.1": 1, "F head": 1}
    )


# What is refused


@pytest.mark.parametrize("schedule", ["zbh1", "zbv", "dualpipev"])
@pytest.mark.parametrize("level", [2, 3])
def test_apart_weight_gradients_are_refused(schedule: str, level: int) -> None:
    layout = Layout.parse(f"dp2 pp2:{schedule} zero{level}")
    with pytest.raises(
        LayoutError,
        match=rf"zero{level} .* pp2:{schedule} .*\(W\); nearest: zero1, or zero{level} with pp2:1f1b",
    ):
        rules.check_schedule(layout, {"F", "I", "W"})
    rules.check_schedule(layout, {"F", "B"})
    rules.check_schedule(layout.replace(zero=1), {"F", "I", "W"})
    rules.check_schedule(layout.replace(zero_group=1), {"F", "I", "W"})


def test_an_option_that_would_do_nothing_is_refused() -> None:
    with pytest.raises(LayoutError, match="zero3_gather=step does nothing with zero1"):
        compose.check(plan("dp2 zero1", zero3_gather="step"))

"""Context parallelism's rules: legal lengths and degrees by brute force, and the traffic against numbers by hand."""

from __future__ import annotations

from collections import Counter

import pytest

from fivefold.core.events import Event
from fivefold.core.layout import Layout
from fivefold.core.model_spec import AttentionSpec, BlockSpec, MLPSpec, ModelSpec
from fivefold.errors import LayoutError
from fivefold.strategies.context import rules

b, S, H, L = 2, 48, 4, 3


def model(heads: int = 8, kv_heads: int = 2) -> ModelSpec:
    attention = AttentionSpec(heads=heads, kv_heads=kv_heads, head_dim=H)
    return ModelSpec(
        name="tiny", hidden=16, vocab=31, blocks=(BlockSpec(attention=attention, mlp=MLPSpec(ffn=64)),) * L
    )


@pytest.mark.parametrize("kv_heads", [8, 2, 1])
def test_legal_ulysses_degrees(kv_heads: int) -> None:
    """Heads are cut evenly, and each rank's query heads find all their KV heads in its part, whole or repeated."""
    heads = 40
    for degree in range(1, heads + 1):
        group = heads // kv_heads
        legal = heads % degree == 0 and (kv_heads % degree == 0 or degree % kv_heads == 0)
        assert rules.legal_ulysses(heads, kv_heads, degree) == legal
        if legal:
            mine = heads // degree
            held = max(kv_heads, degree) // degree
            copies = max(1, degree // kv_heads)
            for rank in range(degree):
                needed = {head // group for head in range(rank * mine, (rank + 1) * mine)}
                there = {head // copies for head in range(rank * held, (rank + 1) * held)}
                assert needed == there
    assert [u for u in range(1, 41) if rules.legal_ulysses(40, 8, u)] == [1, 2, 4, 8, 40]


@pytest.mark.parametrize(
    ("text", "unit"),
    [
        ("cp2", 4), ("cp3", 6), ("cp2:gather", 4), ("cp2:ulysses", 2), ("cp4:ring2xulysses2", 4),
        ("cp6:ring3xulysses2", 6), ("tp2 cp2", 4), ("tp4 cp2", 8), ("tp4 cp2 nosp", 4), ("tp3 cp2:ulysses", 6),
    ],
)  # fmt: skip
def test_legal_lengths(text: str, unit: int) -> None:
    layout, spec = Layout.parse(text), model(24, 24)
    assert rules.length_unit(layout) == unit
    for length in range(1, 4 * unit):
        if length % unit == 0:
            rules.check(spec, layout, length)
            continue
        below, above = length // unit * unit, length // unit * unit + unit
        nearest = f"{below} or {above}" if below else f"{above}"
        if layout.sequence_parallel and length % rules.length_unit(layout.replace(sp=False)) == 0:
            nearest += ", or add 'nosp'"
        with pytest.raises(LayoutError, match=f"{length} is not a multiple of {unit}, .*nearest: {nearest}$"):
            rules.check(spec, layout, length)
    with pytest.raises(LayoutError, match=r"nearest: 4092$"):
        rules.check(model(24, 24), Layout.parse("cp3"), 4096)  # 4098 is more than the model has positions


@pytest.mark.parametrize(
    ("text", "spec", "message"),
    [
        (
            "cp3:ulysses",
            model(),
            "ulysses degree 3 .* the 8 heads, .* its 2 KV heads .*: 2 or 4, or cp3:ring",
        ),
        ("cp3:ulysses", model(12, 4), "the 12 heads, and divide its 4 KV heads .*: 2 or 4, or cp3:ring"),
        ("tp2 cp4:ulysses", model(12, 4), "the 6 heads of a tp2 rank, and divide its 2 KV heads.*: 2 or 6"),
        ("cp6:ring2xulysses3", model(), "ulysses degree 3"),
    ],
)
def test_a_refusal_names_the_heads_and_the_nearest_degrees(text: str, spec: ModelSpec, message: str) -> None:
    with pytest.raises(LayoutError, match=message) as caught:
        rules.check(spec, Layout.parse(text), 48)
    assert len(str(caught.value).splitlines()) == 1


def events(text: str, dtype: str = "float32", itemsize: int = 4, **heads: int) -> Counter[Event]:
    layout = Layout.parse(text)
    return rules.predict_chunk(
        model(**heads), layout, layers=range(1, L), tokens=b * S // layout.cp, dtype=dtype, itemsize=itemsize,
        recomputed=[()] * (L - 1),
    )  # fmt: skip


def test_traffic_by_hand() -> None:
    """Two layers of 8 heads and 2 KV heads of size 4."""
    gathered = 2 * b * S * 2 * H
    assert events("cp3:gather", "bfloat16", 2) == Counter(
        {
            Event("forward", "cp", "all_gather", "bfloat16", gathered * 2): 2,
            Event("backward", "cp", "reduce_scatter", "float32", gathered * 4): 2,
        }
    )
    block = 2 * b * (S // 3) * 2 * H
    ring = Counter[Event]()
    for op in ("send", "recv"):
        ring[Event("forward", "cp", op, "bfloat16", block * 2)] = 2 * 2
        ring[Event("backward", "cp", op, "bfloat16", block * 2)] = 2 * 2
        ring[Event("backward", "cp", op, "float32", block * 4)] = 2 * 2
    assert events("cp3", "bfloat16", 2) == ring
    own = b * S // 4 * H * 4  # 4 ranks; KV heads repeated from 2 to 4
    ulysses = Counter[Event]()
    for phase in ("forward", "backward"):
        ulysses[Event(phase, "cp", "all_to_all", "float32", own * (8 + 2 * 4))] = 2
        ulysses[Event(phase, "cp", "all_to_all", "float32", own * 8)] = 2
    assert events("cp4:ulysses") == ulysses
    both = events("cp4:ring2xulysses2")
    assert {(e.op, e.bytes) for e in both} == {
        ("all_to_all", own * (8 + 2 * 2)),
        ("all_to_all", own * 8),
        ("send", 2 * b * S // 2 * 1 * H * 4),  # half the tokens, one of two KV heads
        ("recv", 2 * b * S // 2 * 1 * H * 4),
    }
    assert both[Event("backward", "cp", "send", "float32", 2 * b * S // 2 * H * 4)] == 2 * 2


def test_tensor_parallel_ranks_send_their_own_heads() -> None:
    (whole,), (half,) = ({e.bytes for e in events(text)} for text in ("cp2", "cp2 tp2"))
    assert half * 2 == whole
    assert {e.bytes for e in events("cp2 tp4")} == {half}, "2 KV heads on 4 ranks: one each, repeated"


def test_degree_1_sends_nothing() -> None:
    rules.check(model(), Layout.parse("dp2 tp2"), 7)
    assert not events("dp2 tp2")

"""Tensor parallelism's rules: which degrees are legal, what is cut, and over whom gradients are summed."""

from __future__ import annotations

import pytest

from fivefold.core.layout import Layout
from fivefold.core.model_spec import AttentionSpec, BlockSpec, MLPSpec, ModelSpec
from fivefold.core.sharding import Shard, parameters
from fivefold.errors import LayoutError
from fivefold.strategies.tensor import rules


def model(heads: int = 8, kv: int = 2, ffn: int = 48) -> ModelSpec:
    attention = AttentionSpec(
        heads=heads, kv_heads=kv, head_dim=6, qkv_bias=True, output_bias=True, qk_norm=True
    )
    block = BlockSpec(attention=attention, mlp=MLPSpec(ffn=ffn, bias=True))
    return ModelSpec(name="tiny", hidden=20, vocab=53, blocks=(block, block))


@pytest.mark.parametrize(
    ("heads", "kv", "ffn"), [(8, 2, 48), (40, 8, 13824), (12, 12, 36), (6, 1, 30), (28, 4, 56)]
)
def test_legal_degrees(heads: int, kv: int, ffn: int) -> None:
    """heads and ffn divide by tp; kv heads divide by tp, or tp by kv heads."""
    spec = model(heads, kv, ffn)
    for tp in range(1, 65):
        legal = heads % tp == 0 and ffn % tp == 0 and (kv % tp == 0 or tp % kv == 0)
        layout = Layout.parse(f"tp{tp} nosp") if tp > 1 else Layout()
        if legal:
            rules.check(spec, layout, 7)
        else:
            with pytest.raises(LayoutError, match=f"^tp{tp} does not fit tiny: .* is not divisible by {tp}"):
                rules.check(spec, layout, 7)


@pytest.mark.parametrize(
    ("spec", "tp", "message"),
    [
        (model(), 3, "heads = 8 is not divisible by 3; nearest legal tp: 2 or 4"),
        (model(), 16, "heads = 8 is not divisible by 16; nearest legal tp: 8"),
        (
            model(40, 8, 40),
            5,
            r"kv_heads \(nor is tp a multiple of it\) = 8 is not divisible by 5; nearest legal tp: 4 or 8",
        ),
        (model(8, 8, 12), 8, "ffn = 12 is not divisible by 8; nearest legal tp: 4"),
    ],
)
def test_a_refusal_names_the_size_and_the_nearest_degrees(spec: ModelSpec, tp: int, message: str) -> None:
    with pytest.raises(LayoutError, match=message) as caught:
        rules.check(spec, Layout.parse(f"tp{tp}"), 16)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("text", "seq_len", "nearest"),
    [("tp4", 18, "16 or 20"), ("tp8", 5, "8")],
)
def test_sequence_parallelism_needs_a_sequence_that_divides(text: str, seq_len: int, nearest: str) -> None:
    layout = Layout.parse(text)
    message = (
        f"sequence length {seq_len} is not divisible by tp = {layout.tp}.*nearest: {nearest}, or add 'nosp'"
    )
    with pytest.raises(LayoutError, match=message):
        rules.check(model(), layout, seq_len)
    rules.check(model(), layout.replace(sp=False), seq_len)


@pytest.mark.parametrize(
    ("kv", "tp", "replicas"), [(2, 1, 1), (2, 2, 1), (2, 4, 2), (2, 8, 4), (1, 4, 4), (8, 2, 1)]
)
def test_kv_replicas(kv: int, tp: int, replicas: int) -> None:
    assert rules.kv_replicas(kv, tp) == replicas


CUT = {
    "embedding.weight": Shard(0), "head.weight": Shard(0),
    "q.weight": Shard(0), "q.bias": Shard(0),
    "k.weight": Shard(0, 2), "k.bias": Shard(0, 2), "v.weight": Shard(0, 2), "v.bias": Shard(0, 2),
    "gate.weight": Shard(0), "gate.bias": Shard(0), "up.weight": Shard(0), "up.bias": Shard(0),
    "output.weight": Shard(1), "down.weight": Shard(1),
}  # fmt: skip
"""What is cut at tp = 4 with 2 KV heads; all else is whole on every rank."""


@pytest.mark.parametrize("sp", [True, False])
def test_what_is_cut_and_summed(sp: bool) -> None:
    """Replicated parameters that see part of the tokens (SP) or of the heads need a sum, no others do."""
    layout = Layout(tp=4, sp=sp)
    for row in parameters(model()):
        placed = rules.place(row, model(), layout)
        short = ".".join(row.name.split(".")[-2:]) if "." in row.name.removesuffix(".weight") else row.name
        cut = CUT.get(short)
        assert placed.placement == ({} if cut is None else {"tp": cut}), row.name
        if cut is not None:
            assert placed.sums == ({"tp": 2} if cut.replicas == 2 else {}), row.name
        elif short in ("q_norm.weight", "k_norm.weight"):
            assert placed.sums == {"tp": None}, "heads are cut with and without SP"
        else:
            assert short in (
                "attention_norm.weight",
                "mlp_norm.weight",
                "norm.weight",
                "output.bias",
                "down.bias",
            )
            assert placed.sums == ({"tp": None} if sp else {}), row.name


def test_degree_1_changes_no_row() -> None:
    for row in parameters(model()):
        assert rules.place(row, model(), Layout.parse("dp2 pp2")) is row


def test_gradient_sums_go_by_size_of_run() -> None:
    layout = Layout.parse("tp4")
    rows = [rules.place(row, model(), layout) for row in parameters(model())]
    sums = rules.gradient_sums(rows)
    assert sums.keys() == {None, 2}
    assert {row.role for row in sums[2]} == {"k", "v"}
    events = rules.predict_gradient_sums(rows, layout, "float64", 8)
    kv_elements = 2 * 2 * (6 * 20 + 6)  # layers x (k, v) x (one head's weight and bias)
    whole = 2 * (2 * 20 + 2 * 6 + 20 + 20) + 20  # layers x (norms, head norms, row biases) + final norm
    assert sorted(event.bytes for event in events.elements()) == sorted([kv_elements * 8, whole * 8])

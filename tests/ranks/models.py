"""Models that make faults show, and the grid of layouts."""

from __future__ import annotations

from fivefold.catalog.models import preset
from fivefold.core.layout import Layout
from fivefold.core.model_spec import AttentionSpec, BlockSpec, MLPSpec, ModelSpec, MoESpec

HARD = preset("tiny-uneven")
"""Tied, windowed, biased, QK-normed, kv heads < tp; vocabulary, layers and head size that do not divide."""

PLAIN = ModelSpec(
    name="plain",
    hidden=32,
    vocab=50,
    blocks=(BlockSpec(attention=AttentionSpec(heads=4, kv_heads=4, head_dim=8), mlp=MLPSpec(ffn=24)),) * 4,
)
"""Llama-like with untied embeddings."""

ROUTED = ModelSpec(
    name="routed",
    hidden=16,
    vocab=29,
    blocks=tuple(
        BlockSpec(attention=AttentionSpec(heads=4, kv_heads=2, head_dim=4, qk_norm=True), mlp=mlp)
        for mlp in (
            MLPSpec(ffn=12),
            MoESpec(experts=4, top_k=2, ffn=12, shared_ffn=8, shared_gate=True, router_bias=True),
            MoESpec(experts=8, top_k=3, ffn=4, shared_ffn=8, scoring="sigmoid", groups=4, topk_groups=2,
                    group_score="best_two", routed_scaling=2.5, selection_bias=True),
        )
    ),
)  # fmt: skip
"""A dense layer; experts chosen by softmax, with a bias and a gated shared one; others by biased sigmoids in groups."""

SHAPES = [(tp, pp, dp) for tp in (1, 2, 4) for pp in (1, 2) for dp in (1, 2, 4)]


def layouts() -> list[Layout]:
    """TP 1/2/4 x PP 1/2 x DP 1/2/4 under each schedule: 18 shapes, 27 layouts, the smallest first."""
    found = []
    for tp, pp, dp in SHAPES:
        for schedule in ("1f1b", "gpipe") if pp > 1 else ("1f1b",):
            found.append(Layout(tp=tp, pp=pp, dp=dp, schedule=schedule))
    return sorted(found, key=lambda layout: layout.world_size)

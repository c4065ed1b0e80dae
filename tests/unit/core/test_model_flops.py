"""FLOPs against brute force and published closed forms; parameters of one block by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fivefold.catalog import models
from fivefold.core.model_counts import (
    attention_flops,
    block_flops,
    block_parameters,
    forward_flops,
    head_flops,
    mean_keys,
    parameter_counts,
    training_flops,
)
from fivefold.core.model_spec import AttentionSpec, BlockSpec, GatedDeltaSpec, MLASpec, MLPSpec, ModelSpec


@given(
    sequence=st.integers(1, 60),
    window=st.none() | st.integers(1, 70),
    chunk=st.none() | st.integers(1, 70),
)
def test_mean_keys_by_counting(sequence: int, window: int | None, chunk: int | None) -> None:
    def sees(query: int, key: int) -> bool:
        near = window is None or query - key < window
        same = chunk is None or query // chunk == key // chunk
        return key <= query and near and same

    pairs = sum(sees(q, k) for q in range(sequence) for k in range(sequence))
    assert mean_keys(sequence, window=window, chunk=chunk) * sequence == pytest.approx(pairs, rel=1e-12)


def gpt(hidden: int, layers: int, heads: int, vocab: int) -> ModelSpec:
    block = BlockSpec(
        attention=AttentionSpec(heads=heads, kv_heads=heads, head_dim=hidden // heads),
        mlp=MLPSpec(ffn=4 * hidden, gated=False),
    )
    return ModelSpec(name="gpt", hidden=hidden, vocab=vocab, blocks=(block,) * layers)


def test_gpt_equals_the_megatron_formula_with_causal_attention() -> None:
    """Narayanan et al. 2021, arXiv:2104.04473, eq. 3: 96 B s l h^2 (1 + s/(6h) + V/(16 l h)).

    That includes recompute; without it the layers have 72 B s l h^2. The s in s/(6h) is the keys per token,
    which are (s + 1)/2 under a causal mask.
    """
    h, layers, vocab, s = 1024, 24, 51200, 2048
    published = 72 * layers * h * h * (1 + ((s + 1) / 2) / (6 * h) + vocab / (12 * layers * h))
    assert training_flops(gpt(h, layers, 16, vocab), s) == pytest.approx(published, rel=1e-12)


def test_flops_at_one_token_are_two_per_weight_and_one_key() -> None:
    spec = models.preset("tiny-llama")
    norms = parameter_counts(spec)["by_component"]["norm"]
    weights = parameter_counts(spec)["total_parameters"] - norms - 259 * 64
    assert forward_flops(spec, 1) == 2 * weights + 4 * (4 * 4 * 16)


def test_active_experts_only() -> None:
    spec = models.preset("mixtral-8x7b")
    weights = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 8 * 4096 + 2 * 3 * 4096 * 14336
    assert block_flops(spec, spec.blocks[0], 1) == 2 * weights + 4 * 32 * 128


def test_window_stops_the_growth() -> None:
    full, window = (AttentionSpec(heads=4, kv_heads=2, head_dim=16, window=w) for w in (None, 32))
    assert attention_flops(window, 32) == attention_flops(full, 32)
    assert attention_flops(window, 10**6) < 4 * 4 * 16 * 32
    assert attention_flops(full, 10**6) == 4 * 4 * 16 * (10**6 + 1) / 2


def test_latent_attention_has_different_score_and_value_dims() -> None:
    mla = MLASpec(heads=16, kv_rank=512, nope_dim=128, rope_dim=64, value_dim=128)
    assert attention_flops(mla, 99) == 50 * 2 * 16 * (192 + 128)


def test_linear_attention_does_not_grow() -> None:
    delta = GatedDeltaSpec(key_heads=2, value_heads=4, key_dim=8, value_dim=6, conv_kernel=4)
    assert attention_flops(delta, 10) == attention_flops(delta, 10**6) == 6 * 4 * 8 * 6


def test_tied_head_costs_flops_but_no_parameters() -> None:
    spec = models.preset("tiny-qwen2")
    assert parameter_counts(spec)["by_component"]["head"] == 0
    assert head_flops(spec) == 2 * 64 * 259
    untied = spec.replace(tied_embeddings=False)
    assert (
        parameter_counts(untied)["total_parameters"] - parameter_counts(spec)["total_parameters"] == 64 * 259
    )


def test_block_with_biases_and_norms_by_hand() -> None:
    attention = AttentionSpec(heads=4, kv_heads=2, head_dim=32, qkv_bias=True, output_bias=True, qk_norm=True)
    block = BlockSpec(attention=attention, mlp=MLPSpec(ffn=176, bias=True))
    spec = ModelSpec(name="m", hidden=64, vocab=259, blocks=(block,))
    counts = block_parameters(spec, block)
    assert counts["attention"] == (64 * 128 + 128) + 2 * (64 * 64 + 64) + (128 * 64 + 64)
    assert counts["mlp"] == 2 * (64 * 176 + 176) + (176 * 64 + 64)
    assert counts["norm"] == 2 * 64 + 2 * 32


@pytest.mark.parametrize("name", models.names())
def test_blocks_embedding_norm_and_head_make_the_model(name: str) -> None:
    spec = models.preset(name)
    counts = parameter_counts(spec)
    blocks = sum(sum(block_parameters(spec, block).values()) for block in spec.blocks)
    final_norm = spec.hidden * (2 if spec.norm == "layer" else 1)
    outside = counts["by_component"]["embedding"] + counts["by_component"]["head"] + final_norm
    assert blocks + outside == counts["total_parameters"]

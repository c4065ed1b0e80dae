"""Dense model families: one function each, after the definitions in transformers 5.24."""

from __future__ import annotations

from fivefold.core.families.parts import activation, blocks, by_window, gqa, mlp, qwen_windows
from fivefold.core.model_config import Fields
from fivefold.core.model_spec import AttentionSpec, MLPSpec, ModelSpec


def llama(f: Fields) -> ModelSpec:
    bias = f.flag("attention_bias", False)
    attention = gqa(f, kv_default=True, qkv_bias=bias, output_bias=bias)
    return f.spec(blocks([attention] * f.layers, mlp(f, bias=f.flag("mlp_bias", False))))


def mistral(f: Fields) -> ModelSpec:
    if "sliding_window" not in f.data and "sliding_window_size" not in f.data:
        f.notes.append("sliding_window is absent: 4096, as in the model's definition (null would mean none)")
        window = 4096
    else:
        window = f.size("sliding_window", "sliding_window_size", default=0, least=0)
    attention = gqa(f, window=window or None)
    return f.spec(blocks([attention] * f.layers, mlp(f)))


def qwen2(f: Fields) -> ModelSpec:
    return f.spec(blocks(qwen_windows(f, gqa(f, qkv_bias=True)), mlp(f)))


def qwen3(f: Fields) -> ModelSpec:
    bias = f.flag("attention_bias", False)
    attention = gqa(f, derive_head_dim=False, qk_norm=True, qkv_bias=bias, output_bias=bias)
    return f.spec(blocks(qwen_windows(f, attention), mlp(f)))


def gemma(f: Fields) -> ModelSpec:
    bias = f.flag("attention_bias", False)
    f.features += ["embeddings scaled by sqrt(hidden)", "norm weights stored minus one"]
    attention = gqa(f, derive_head_dim=False, qkv_bias=bias, output_bias=bias)
    return f.spec(blocks([attention] * f.layers, mlp(f)), tied=True)


def gemma2(f: Fields, *, pattern: int = 2, qk_norm: bool = False) -> ModelSpec:
    """Gemma 2 and 3: norms before and after, every `pattern`-th layer without a window."""
    bias = f.flag("attention_bias", False)
    f.features += ["embeddings scaled by sqrt(hidden)", "norm weights stored minus one", "own query scale"]
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        if f.number(key, default=0.0):
            f.features.append(key.replace("_", " "))
    f.ignore("query_pre_attn_scalar")
    f.only("use_bidirectional_attention", False)
    types = ["full_attention" if (i + 1) % pattern == 0 else "sliding_attention" for i in range(f.layers)]
    attention = gqa(f, derive_head_dim=False, qkv_bias=bias, output_bias=bias, qk_norm=qk_norm)
    return f.spec(blocks(by_window(f, attention, types), mlp(f), norms="sandwich"), tied=True)


def gemma3(f: Fields) -> ModelSpec:
    f.features.append("a rotary base per kind of layer")
    f.ignore("rope_local_base_freq")
    return gemma2(
        f, pattern=f.size("sliding_window_pattern", "_sliding_window_pattern", default=6), qk_norm=True
    )


def phi3(f: Fields) -> ModelSpec:
    window = f.size("sliding_window", default=0, least=0) or None
    f.ignore("original_max_position_embeddings")
    attention = gqa(f, kv_default=True, window=window)
    return f.spec(blocks([attention] * f.layers, mlp(f)), scalings=())  # here 'yarn' means 'longrope'


def olmo2(f: Fields) -> ModelSpec:
    bias = f.flag("attention_bias", False)
    attention = gqa(
        f, kv_default=True, qkv_bias=bias, output_bias=bias, qk_norm=True, qk_norm_over="all_heads"
    )
    return f.spec(blocks([attention] * f.layers, mlp(f), norms="post"))


def granite(f: Fields) -> ModelSpec:
    for key in ("embedding_multiplier", "logits_scaling", "residual_multiplier", "attention_multiplier"):
        f.number(key, default=1.0)
    f.features.append("scaled embeddings, residuals, attention and logits")
    return llama(f)


def starcoder2(f: Fields) -> ModelSpec:
    bias = f.flag("use_bias", True)
    window = f.size("sliding_window", default=0, least=0) or None
    attention = gqa(f, qkv_bias=bias, output_bias=bias, window=window)
    feed = MLPSpec(ffn=f.size("intermediate_size"), gated=False, activation=activation(f), bias=bias)
    f.only("mlp_type", "default")
    f.only("norm_type", "layer_norm")
    return f.spec(blocks([attention] * f.layers, feed), tied=True, norm="layer")


def gpt_bigcode(f: Fields) -> ModelSpec:
    return gpt2(f, shared_head=f.flag("multi_query", True))


def gpt2(f: Fields, *, shared_head: bool = False) -> ModelSpec:
    """GPT-2, and GPT-BigCode, where all query heads may share one key/value head."""
    heads = f.size("n_head")
    kv_heads = 1 if shared_head else heads
    if f.hidden % heads:
        raise f.refuse("n_head", f"is {heads}, which does not divide n_embd {f.hidden}")
    f.only("add_cross_attention", False)
    f.only("num_key_value_heads", kv_heads)
    f.ignore("scale_attn_weights", "scale_attn_by_inverse_layer_idx")
    positions = f.size("n_positions")
    f.only("n_ctx", positions)
    attention = AttentionSpec(
        heads=heads,
        kv_heads=kv_heads,
        head_dim=f.hidden // heads,
        qkv_bias=True,
        output_bias=True,
        rope_dim=0,
    )
    feed = MLPSpec(
        ffn=f.size("n_inner", default=4 * f.hidden), gated=False, activation=activation(f), bias=True
    )
    return f.spec(blocks([attention] * f.layers, feed), tied=True, norm="layer", position_table=positions)


def gpt_neox(f: Fields) -> ModelSpec:
    bias = f.flag("attention_bias", True)
    attention = gqa(
        f, kv_default=True, rotary=f.number("rotary_pct", default=0.25), qkv_bias=bias, output_bias=bias
    )
    for key, only in (("num_key_value_heads", attention.heads), ("head_dim", f.hidden // attention.heads)):
        f.only(key, only)  # the definition does not read these: another value would not be obeyed
    if f.flag("use_parallel_residual", True):
        f.features.append("attention and MLP in parallel")
    feed = MLPSpec(ffn=f.size("intermediate_size"), gated=False, activation=activation(f), bias=True)
    return f.spec(blocks([attention] * f.layers, feed), norm="layer")


def phi(f: Fields) -> ModelSpec:
    """Phi-1/2; `phi-msft` is the authors' first release of the same model with GPT-2's field names."""
    heads = f.size("num_attention_heads", "n_head")
    if f.hidden % heads:
        raise f.refuse("num_attention_heads", f"is {heads}, which does not divide hidden_size {f.hidden}")
    head_dim = f.hidden // heads
    rope_dim = f.size("rotary_dim", default=f.rotated_dims(head_dim, default=0.5) or head_dim)
    f.only("qk_layernorm", False)
    attention = AttentionSpec(
        heads=heads,
        kv_heads=f.size("num_key_value_heads", "n_head_kv", default=heads),
        head_dim=head_dim,
        rope_dim=rope_dim,
        qkv_bias=True,
        output_bias=True,
    )
    feed = MLPSpec(
        ffn=f.size("intermediate_size", "n_inner", default=4 * f.hidden),
        gated=False,
        activation=activation(f),
        bias=True,
    )
    f.features.append("attention and MLP in parallel")
    return f.spec(blocks([attention] * f.layers, feed, norms="shared"), norm="layer", head_bias=True)

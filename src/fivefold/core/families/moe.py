"""Mixtures of experts, latent and linear attention: one function each.

They follow the definitions in transformers 5.24; `deepseek` follows the authors' own code.
"""

from __future__ import annotations

from typing import Any

from fivefold.core.families.parts import activation, by_window, gqa, mlp, moe_layers, note_mtp, qwen_windows
from fivefold.core.model_config import Fields
from fivefold.core.model_spec import BlockSpec, GatedDeltaSpec, MLASpec, MLPSpec, ModelSpec, MoESpec


def mixtral(f: Fields) -> ModelSpec:
    attention = gqa(f, window=f.size("sliding_window", default=0, least=0) or None)
    return f.spec([BlockSpec(attention=attention, mlp=_local_experts(f))] * f.layers, rope_theta=1e6)


def _local_experts(f: Fields, **more: Any) -> MoESpec:
    return MoESpec(
        experts=f.size("num_local_experts", "num_experts"),
        top_k=f.size("num_experts_per_tok", "experts_per_token"),
        ffn=f.size("intermediate_size"),
        activation=activation(f),
        **more,
    )


def qwen_moe(f: Fields, attentions: list[Any], *, shared: bool, norm: bool = False) -> ModelSpec:
    """Qwen's routed layers; `shared`: one shared expert behind a gate; `norm`: the default of norm_topk_prob."""
    routed = MoESpec(
        experts=f.size("num_experts", "num_local_experts"),
        top_k=f.size("num_experts_per_tok"),
        ffn=f.size("moe_intermediate_size"),
        activation=activation(f),
        shared_ffn=f.size("shared_expert_intermediate_size") if shared else 0,
        shared_gate=shared,
        norm_topk_prob=f.flag("norm_topk_prob", norm),
    )
    f.ignore("intermediate_size")
    use = moe_layers(f)
    dense = None if all(use) else mlp(f)
    return f.spec(
        [BlockSpec(attention=a, mlp=routed if r or dense is None else dense) for a, r in zip(attentions, use)]
    )


def qwen2_moe(f: Fields) -> ModelSpec:
    attention = gqa(f, qkv_bias=f.flag("qkv_bias", True))
    return qwen_moe(f, qwen_windows(f, attention), shared=True)


def qwen3_moe(f: Fields) -> ModelSpec:
    bias = f.flag("attention_bias", False)
    attention = gqa(f, derive_head_dim=False, qk_norm=True, qkv_bias=bias, output_bias=bias)
    return qwen_moe(f, qwen_windows(f, attention, first=0), shared=False)


def qwen3_next_attention(f: Fields) -> list[Any]:
    """Qwen3-Next and Qwen3.5: each `full_attention_interval`-th layer is attention, the others linear."""
    interval = f.size("full_attention_interval", default=4)
    types = f.layer_types(
        ["linear_attention" if (i + 1) % interval else "full_attention" for i in range(f.layers)]
    )
    bias = f.flag("attention_bias", False)
    full = gqa(
        f, derive_head_dim=False, rotary=0.25, qk_norm=True, output_gate=True, qkv_bias=bias, output_bias=bias
    )
    linear = GatedDeltaSpec(
        key_heads=f.size("linear_num_key_heads"),
        value_heads=f.size("linear_num_value_heads"),
        key_dim=f.size("linear_key_head_dim"),
        value_dim=f.size("linear_value_head_dim"),
        conv_kernel=f.size("linear_conv_kernel_dim"),
    )
    unknown = set(types) - {"linear_attention", "full_attention"}
    if unknown:
        raise f.refuse(
            "layer_types", f"names {min(unknown)!r}; supported: 'full_attention', 'linear_attention'"
        )
    f.features.append("norm weights stored minus one")
    f.only("attn_output_gate", True)
    f.only("use_sliding_window", False)
    f.ignore("mtp_use_dedicated_embeddings")
    note_mtp(f, "mtp_num_hidden_layers")
    return [full if word == "full_attention" else linear for word in types]


def qwen3_next(f: Fields) -> ModelSpec:
    return qwen_moe(f, qwen3_next_attention(f), shared=True, norm=True)


def qwen3_5(f: Fields) -> ModelSpec:
    if f.indices("mlp_only_layers"):
        raise f.refuse("mlp_only_layers", "must be empty in a dense model")
    feed = mlp(f)
    return f.spec([BlockSpec(attention=a, mlp=feed) for a in qwen3_next_attention(f)])


def deepseek(f: Fields) -> ModelSpec:
    """DeepSeekMoE 16B: Llama's attention; the first layers dense, the others routed with shared experts."""
    bias = f.flag("attention_bias", False)
    attention = gqa(f, kv_default=True, qkv_bias=bias, output_bias=bias)
    router = {"norm_topk_prob": f.flag("norm_topk_prob", False)}
    f.only("scoring_func", "softmax")
    return f.spec([BlockSpec(attention=attention, mlp=m) for m in _first_dense(f, router)])


def deepseek_v2(f: Fields) -> ModelSpec:
    return _latent(f, _softmax_router(f), interleaved=True)


def deepseek_v3(f: Fields) -> ModelSpec:
    """DeepSeek V3, Kimi K2."""
    router = _sigmoid_router(f, groups=8, topk_groups=4, scaling=2.5)
    return _latent(f, router, interleaved=f.flag("rope_interleave", True))


def _latent(f: Fields, router: dict[str, Any], *, interleaved: bool) -> ModelSpec:
    """Latent attention. KV heads in the config mean nothing here: each head expands its own."""
    if "q_lora_rank" not in f.data:
        f.notes.append("q_lora_rank is absent: read as null, queries are not compressed")
    rank = f.size("q_lora_rank", default=0)
    attention = MLASpec(
        heads=f.size("num_attention_heads"),
        q_rank=rank or None,
        kv_rank=f.size("kv_lora_rank"),
        nope_dim=f.size("qk_nope_head_dim"),
        rope_dim=f.size("qk_rope_head_dim"),
        value_dim=f.size("v_head_dim"),
        bias=f.flag("attention_bias", False),
        rope_interleaved=interleaved,
    )
    f.ignore("num_key_value_heads", "head_dim", "qk_head_dim", "rope_interleave")
    return f.spec(
        [BlockSpec(attention=attention, mlp=m) for m in _first_dense(f, router)], scalings=("yarn",)
    )


def _softmax_router(f: Fields) -> dict[str, Any]:
    """DeepSeek-V2's router (arXiv:2405.04434, section 2.2): softmax scores, perhaps within the best groups."""
    f.only("scoring_func", "softmax")
    method = f.text("topk_method", default="greedy")
    groups, chosen = f.size("n_group", default=1), f.size("topk_group", default=1)
    if method not in ("greedy", "group_limited_greedy"):
        raise f.refuse("topk_method", f"is {method!r}; supported: 'greedy', 'group_limited_greedy'")
    if f.flag(
        "norm_topk_prob", False
    ):  # the authors' code leaves the scaling out then, transformers the norm
        f.features.append("weights of experts that are normalised and not scaled")
    limited = {"groups": groups, "topk_groups": chosen} if method == "group_limited_greedy" else {}
    scaling = f.number("routed_scaling_factor", default=1.0)
    return {**limited, "norm_topk_prob": False, "routed_scaling": scaling}


def _sigmoid_router(
    f: Fields, *, groups: int = 1, topk_groups: int = 1, scaling: float = 1.0
) -> dict[str, Any]:
    """DeepSeek-V3's router (arXiv:2412.19437, section 2.1.2): sigmoid scores, a bias that only the choice sees.

    The arguments are the family's defaults.
    """
    f.only("scoring_func", "sigmoid")
    f.only("topk_method", "noaux_tc")
    return {
        "scoring": "sigmoid",
        "groups": f.size("n_group", default=groups),
        "topk_groups": f.size("topk_group", default=topk_groups),
        "group_score": "best_two",
        "norm_topk_prob": f.flag("norm_topk_prob", True),
        "routed_scaling": f.number("routed_scaling_factor", default=scaling),
        "selection_bias": True,
    }


def _first_dense(f: Fields, router: dict[str, Any]) -> list[MLPSpec | MoESpec]:
    """DeepSeek's rule: `first_k_dense_replace` dense layers, then routed ones (each `moe_layer_freq`-th)."""
    first, freq = f.size("first_k_dense_replace", default=0, least=0), f.size("moe_layer_freq", default=1)
    width = f.size("moe_intermediate_size")
    routed = MoESpec(
        experts=f.size("n_routed_experts"),
        top_k=f.size("num_experts_per_tok"),
        ffn=width,
        shared_ffn=width * f.size("n_shared_experts", default=0, least=0),
        activation=activation(f),
        **router,
    )
    f.only("mlp_bias", False)
    note_mtp(f, "num_nextn_predict_layers", "num_mtp_layers")
    dense = mlp(f)
    return [routed if i >= first and i % freq == 0 else dense for i in range(f.layers)]


def glm4_moe(f: Fields) -> ModelSpec:
    attention = gqa(
        f, rotary=0.5, qkv_bias=f.flag("attention_bias", False), qk_norm=f.flag("use_qk_norm", False)
    )
    return f.spec([BlockSpec(attention=attention, mlp=m) for m in _first_dense(f, _sigmoid_router(f))])


def gpt_oss(f: Fields) -> ModelSpec:
    bias = f.flag("attention_bias", True)
    attention = gqa(f, derive_head_dim=False, qkv_bias=bias, output_bias=bias, sinks=True)
    types = ["full_attention" if i % 2 else "sliding_attention" for i in range(f.layers)]
    f.features.append("clamped gated activation")
    f.ignore("swiglu_limit", "swiglu_alpha")
    feed = _local_experts(f, bias=True, router_bias=True)
    attentions = by_window(f, attention, types, default=128)
    return f.spec([BlockSpec(attention=a, mlp=feed) for a in attentions], rope_theta=150_000.0, scalings=())


def minimax_m2(f: Fields) -> ModelSpec:
    if not f.flag("use_qk_norm", True) or f.text("qk_norm_type", default="per_layer") != "per_layer":
        raise f.refuse("qk_norm_type", "is not supported; MiniMax-M2 has use_qk_norm with 'per_layer'")
    attention = gqa(f, derive_head_dim=False, qk_norm=True, qk_norm_over="all_heads")
    rotary = f.size("rotary_dim", default=attention.head_dim)
    f.only("shared_intermediate_size", 0)
    f.only("scoring_func", "sigmoid")
    f.ignore("use_routing_bias", "use_mtp", "mtp_transformer_layers")
    note_mtp(f, "num_mtp_modules")
    attention = attention.replace(rope_dim=rotary if rotary < attention.head_dim else None)
    routed = _local_experts(f, scoring="sigmoid", selection_bias=True)
    return f.spec([BlockSpec(attention=attention, mlp=routed)] * f.layers, rope_theta=5e6)


def llama4(f: Fields) -> ModelSpec:
    """Llama 4: routed and dense layers in turn; attention in chunks with rotation, or full without."""
    bias = f.flag("attention_bias", False)
    attention = gqa(f, derive_head_dim=False, qkv_bias=bias, output_bias=bias)
    width = f.size("intermediate_size")
    routed = _local_experts(f, shared_ffn=width, scoring="sigmoid", norm_topk_prob=False)
    dense = mlp(f, key="intermediate_size_mlp")
    step = f.size("interleave_moe_layer_step", default=1)
    use = f.indices("moe_layers") or list(range(step - 1, f.layers, step))
    interval = f.size("no_rope_layer_interval", default=4)
    rotated = f.raw("no_rope_layers") or [int((i + 1) % interval != 0) for i in range(f.layers)]  # 1: rotated
    if not isinstance(rotated, list) or len(rotated) != f.layers or not set(map(str, rotated)) <= {"0", "1"}:
        raise f.refuse("no_rope_layers", f"must hold {f.layers} numbers 0 or 1")
    chunk = f.size("attention_chunk_size", default=8192)
    types = f.layer_types(["chunked_attention" if r else "full_attention" for r in rotated])
    unknown = set(types) - {"chunked_attention", "full_attention"}
    if unknown:
        raise f.refuse(
            "layer_types", f"names {min(unknown)!r}; supported: 'chunked_attention', 'full_attention'"
        )
    kinds = {
        (word, r): attention.replace(
            chunk=chunk if word == "chunked_attention" else None, rope_dim=None if r else 0
        )
        for word, r in set(zip(types, rotated))
    }
    f.features.append("temperature-tuned attention")
    f.ignore("attn_temperature_tuning", "attn_scale", "floor_scale", "for_llm_compressor")
    if f.flag("use_qk_norm", True):
        f.features.append("query/key norm without weights")
    stack = [
        BlockSpec(attention=kinds[kind], mlp=routed if i in use else dense)
        for i, kind in enumerate(zip(types, rotated))
    ]
    return f.spec(stack, rope_theta=500_000.0)

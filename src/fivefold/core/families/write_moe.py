"""Fields of `config.json` for mixtures of experts and latent attention: the inverse of the readers in `moe.py`."""

from __future__ import annotations

from typing import Any

from fivefold.core.model_spec import MLASpec, MLPSpec, ModelSpec, MoESpec


def mixtral_fields(spec: ModelSpec) -> dict[str, Any]:
    routed = _routed(spec)
    return {
        "intermediate_size": routed.ffn,
        "num_local_experts": routed.experts,
        "num_experts_per_tok": routed.top_k,
        "output_router_logits": False,
    }


def qwen_moe_fields(spec: ModelSpec) -> dict[str, Any]:
    routed = _routed(spec)
    fields = {
        "intermediate_size": _dense_ffn(spec) or routed.ffn,
        "moe_intermediate_size": routed.ffn,
        "num_experts": routed.experts,
        "num_experts_per_tok": routed.top_k,
        "norm_topk_prob": routed.norm_topk_prob,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [i for i, block in enumerate(spec.blocks) if isinstance(block.mlp, MLPSpec)],
    }
    return {**fields, "shared_expert_intermediate_size": routed.shared_ffn} if routed.shared_ffn else fields


def mla_fields(attention: MLASpec, family: str) -> dict[str, Any]:
    fields = {
        "q_lora_rank": attention.q_rank,
        "kv_lora_rank": attention.kv_rank,
        "qk_nope_head_dim": attention.nope_dim,
        "qk_rope_head_dim": attention.rope_dim,
        "v_head_dim": attention.value_dim,
        "num_key_value_heads": attention.heads,
        "attention_bias": attention.bias,
    }
    return {**fields, "rope_interleave": attention.rope_interleaved} if family == "deepseek_v3" else fields


def deepseek_fields(spec: ModelSpec, family: str) -> dict[str, Any]:
    """Also of a model without experts: all its layers are the first dense ones then."""
    routed = _routed(spec)
    dense = [isinstance(block.mlp, MLPSpec) for block in spec.blocks]
    fields = {
        "intermediate_size": _dense_ffn(spec) or routed.ffn,
        "moe_intermediate_size": routed.ffn,
        "n_routed_experts": routed.experts,
        "num_experts_per_tok": routed.top_k,
        "n_shared_experts": routed.shared_ffn // routed.ffn,
        "first_k_dense_replace": dense.index(False) if False in dense else spec.layers,
        "n_group": routed.groups,
        "topk_group": routed.topk_groups,
        "norm_topk_prob": routed.norm_topk_prob,
        "routed_scaling_factor": routed.routed_scaling,
    }
    if family == "deepseek_v3":
        return {**fields, "scoring_func": "sigmoid", "topk_method": "noaux_tc", "num_nextn_predict_layers": 0}
    method = "group_limited_greedy" if routed.groups > 1 else "greedy"
    return {**fields, "scoring_func": "softmax", "topk_method": method}


def _routed(spec: ModelSpec) -> MoESpec:
    """The experts of the first layer that has any; a family has the same in all."""
    found = (block.mlp for block in spec.blocks if isinstance(block.mlp, MoESpec))
    return next(found, MoESpec(experts=2, top_k=1, ffn=1, norm_topk_prob=False))


def _dense_ffn(spec: ModelSpec) -> int | None:
    return next((block.mlp.ffn for block in spec.blocks if isinstance(block.mlp, MLPSpec)), None)

"""How Hugging Face checkpoints of Llama, Mistral, Qwen2 and Qwen3 name the parameters of our decoder."""

from __future__ import annotations

_OUTSIDE = {"embedding": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}

_IN_LAYER = {
    "attention_norm": "input_layernorm",
    "attention.qkv.q": "self_attn.q_proj",
    "attention.qkv.k": "self_attn.k_proj",
    "attention.qkv.v": "self_attn.v_proj",
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "attention.output": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "mlp.inputs.gate": "mlp.gate_proj",
    "mlp.inputs.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
}


def hf_name(name: str) -> str:
    """The Hugging Face name of our parameter: `layers.3.attention.qkv.q.weight` ->
    `model.layers.3.self_attn.q_proj.weight`. Shapes and layouts are the same, nothing is transposed.

    Raises: KeyError for a name that the decoder does not have.
    """
    module, _, leaf = name.rpartition(".")
    if not module.startswith("layers."):
        return f"{_OUTSIDE[module]}.{leaf}"
    _, layer, part = module.split(".", 2)
    return f"model.layers.{layer}.{_IN_LAYER[part]}.{leaf}"

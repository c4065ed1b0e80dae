"""What the modules of a model that is not ours can be, and the tables of model classes that are known.

embedding   the nn.Embedding of the tokens           positions   learned positions, added to the embedding
layer       one layer                                head        the nn.Linear that makes logits
norm        acts on every token alone                head_norm   acts on every head alone
whole       what is never cut, so tensor parallelism refuses it

attention   a block whose input is shared by         mlp         likewise for gate, up and down
            the linears q, k, v in it, and ends in attention_output
router      chooses experts for tokens               experts     computes with them: (x_TD, experts_TK, weights_TK)

For our own decoder, whose linears with a common input are one module, see `roles.py`.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from fivefold.errors import ModelError

BLOCK_ROLES = ("attention", "mlp")
LINEAR_ROLES = ("q", "k", "v", "attention_output", "gate", "up", "down")
OWN_ROLES = (
    "embedding", "positions", "layer", "norm", "head_norm", "head", *BLOCK_ROLES, *LINEAR_ROLES, "router", "experts",
    "whole",
)  # fmt: skip

_LLAMA = {
    "model.embed_tokens": "embedding",
    "model.layers.*": "layer",
    "model.layers.*.self_attn": "attention",
    "model.layers.*.self_attn.[qk]_norm": "head_norm",
    "model.layers.*.self_attn.q_proj": "q",
    "model.layers.*.self_attn.k_proj": "k",
    "model.layers.*.self_attn.v_proj": "v",
    "model.layers.*.self_attn.o_proj": "attention_output",
    "model.layers.*.*_layernorm": "norm",
    "model.layers.*.mlp": "mlp",
    "model.layers.*.mlp.gate_proj": "gate",
    "model.layers.*.mlp.up_proj": "up",
    "model.layers.*.mlp.down_proj": "down",
    "model.norm": "norm",
    "lm_head": "head",
}
_MOE = {**_LLAMA, "model.layers.*.mlp.gate": "router", "model.layers.*.mlp.experts": "experts"}

FAMILY_ROLES: Mapping[str, Mapping[str, str]] = {
    "LlamaForCausalLM": _LLAMA,
    "MistralForCausalLM": _LLAMA,
    "MixtralForCausalLM": _MOE,
    "Qwen2ForCausalLM": _LLAMA,
    "Qwen3ForCausalLM": _LLAMA,
    "Qwen3MoeForCausalLM": _MOE,
}
"""Tables for the model classes of transformers, by name: name pattern -> role; the first pattern that fits decides."""


def roles_for(model: nn.Module) -> Mapping[str, str]:
    """The table for a model class that is known. Raises: ModelError naming the classes that are."""
    name = type(model).__name__
    if name not in FAMILY_ROLES:
        raise ModelError(
            f"no table of roles is known for {name}; give one as roles={{pattern: role}}, "
            f"or use one of {', '.join(FAMILY_ROLES)}"
        )
    return FAMILY_ROLES[name]

"""Which module plays which role: how a strategy finds what it acts on without the model knowing.

embedding       token ids to vectors                     head            vectors to logits
column          linears with a common input (q/k/v)      row             the linear that ends a block
norm            acts on every token alone                head_norm       acts on every head alone
attention_core  softmax attention                        loss            logits and labels to a sum
layer           one decoder layer                        router          chooses experts for tokens
experts         the routed experts of a layer            latent          linears whose outputs all heads share
latent_column   from latents to heads (MLA)

In a module that is not ours, linears with a common input are not gathered in one module. There, the module that splits
its work over tensor-parallel ranks is named, and each linear in it:

attention       the block that q, k, v and attention_output are in      mlp     that of gate, up and down
positions       learned positions, added to the embedding               whole   parameters that are never cut, which
                                                                                tensor parallelism refuses
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase

from torch import nn

from fivefold.errors import ModelError, nearest

DECODER_ROLES: Mapping[str, str] = {
    "embedding": "embedding",
    "layers.*.attention.qkv": "column",
    "layers.*.attention.down": "latent",
    "layers.*.attention.up": "latent_column",
    "layers.*.attention.core": "attention_core",
    "layers.*.attention.output": "row",
    "layers.*.attention.[qk]_norm": "head_norm",
    "layers.*.attention.*_norm": "norm",
    "layers.*.mlp.inputs": "column",
    "layers.*.mlp.down": "row",
    "layers.*.mlp.router": "router",
    "layers.*.mlp.experts": "experts",
    "layers.*.mlp.shared.inputs": "column",
    "layers.*.mlp.shared.down": "row",
    "layers.*.*_norm": "norm",
    "layers.*": "layer",
    "norm": "norm",
    "head": "head",
    "loss": "loss",
}
"""Name pattern -> role; the first pattern that fits decides."""


BLOCK_ROLES = ("attention", "mlp")
LINEAR_ROLES = ("q", "k", "v", "attention_output", "gate", "up", "down")
OWN_ROLES = (
    "embedding",
    "positions",
    "layer",
    "norm",
    "head_norm",
    "head",
    *BLOCK_ROLES,
    *LINEAR_ROLES,
    "whole",
)
"""What a module that is not ours can be made of."""

_LLAMA: Mapping[str, str] = {
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

FAMILY_ROLES: Mapping[str, Mapping[str, str]] = {
    "LlamaForCausalLM": _LLAMA,
    "MistralForCausalLM": _LLAMA,
    "Qwen2ForCausalLM": _LLAMA,
    "Qwen3ForCausalLM": _LLAMA,
}
"""Tables for the model classes of transformers, by name."""


def roles_for(model: nn.Module) -> Mapping[str, str]:
    """The table for a model class that is known. Raises: ModelError naming the classes that are."""
    name = type(model).__name__
    if name not in FAMILY_ROLES:
        raise ModelError(
            f"no table of roles is known for {name}{nearest(name, FAMILY_ROLES)}; give one as roles={{pattern: role}}, "
            f"or use one of {', '.join(FAMILY_ROLES)}"
        )
    return FAMILY_ROLES[name]


def modules_with_role(
    model: nn.Module, role: str, roles: Mapping[str, str] = DECODER_ROLES
) -> Iterator[tuple[str, nn.Module]]:
    """The modules that play `role`, by name, in the order of the model."""
    for name, module in list(model.named_modules()):
        if name and role_of(name, roles) == role:
            yield name, module


def role_of(name: str, roles: Mapping[str, str] = DECODER_ROLES) -> str | None:
    """The role of the module called `name`."""
    return next((role for pattern, role in roles.items() if fits(name, pattern)), None)


def fits(name: str, pattern: str) -> bool:
    """Whether a module's name fits a pattern: part by part, so that a star stands for one part or a piece of one."""
    parts, patterns = name.split("."), pattern.split(".")
    return len(parts) == len(patterns) and all(map(fnmatchcase, parts, patterns))


def replace_module(model: nn.Module, name: str, new: nn.Module) -> None:
    """Put `new` where the module called `name` stands."""
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, new)

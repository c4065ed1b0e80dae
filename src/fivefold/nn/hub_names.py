"""Which tensors of a Hugging Face checkpoint hold our parameters. Nothing is transposed or permuted.

Most parameters are a tensor; a projection can be some rows of one (Phi-3); experts, which are stacked here, are one
tensor for each expert there.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from fivefold.core.families.write import WRITABLE
from fivefold.core.model_spec import MLASpec, ModelSpec
from fivefold.core.sharding import ParameterRow, stored
from fivefold.errors import ModelError

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

_PHI_3 = {
    "attention.qkv.q": "self_attn.qkv_proj",
    "attention.qkv.k": "self_attn.qkv_proj",
    "attention.qkv.v": "self_attn.qkv_proj",
    "mlp.inputs.gate": "mlp.gate_up_proj",
    "mlp.inputs.up": "mlp.gate_up_proj",
}
"""Projections that are rows of one tensor, in the order of our parameters."""

_MIXTRAL = {
    "mlp.router": "block_sparse_moe.gate",
    "mlp.experts.gate": "block_sparse_moe.experts.*.w1",
    "mlp.experts.up": "block_sparse_moe.experts.*.w3",
    "mlp.experts.down": "block_sparse_moe.experts.*.w2",
}

_QWEN_MOE = {
    "mlp.router": "mlp.gate",
    "mlp.experts.gate": "mlp.experts.*.gate_proj",
    "mlp.experts.up": "mlp.experts.*.up_proj",
    "mlp.experts.down": "mlp.experts.*.down_proj",
    "mlp.shared.inputs.gate": "mlp.shared_expert.gate_proj",
    "mlp.shared.inputs.up": "mlp.shared_expert.up_proj",
    "mlp.shared.down": "mlp.shared_expert.down_proj",
    "mlp.shared_gate": "mlp.shared_expert_gate",
}

_DEEPSEEK = {
    **_QWEN_MOE,
    "mlp.shared.inputs.gate": "mlp.shared_experts.gate_proj",
    "mlp.shared.inputs.up": "mlp.shared_experts.up_proj",
    "mlp.shared.down": "mlp.shared_experts.down_proj",
    "attention.down.q": "self_attn.q_a_proj",
    "attention.down.kv": "self_attn.kv_a_proj_with_mqa",
    "attention.query_norm": "self_attn.q_a_layernorm",
    "attention.latent_norm": "self_attn.kv_a_layernorm",
    "attention.up.q": "self_attn.q_b_proj",
    "attention.up.kv": "self_attn.kv_b_proj",
}

_OF_FAMILY = {
    "phi3": _PHI_3,
    "mixtral": _MIXTRAL,
    "qwen2_moe": _QWEN_MOE,
    "qwen3_moe": _QWEN_MOE,
    "deepseek_v2": _DEEPSEEK,
    "deepseek_v3": _DEEPSEEK,
}
"""Family -> the modules that it calls otherwise, or has beside the others; a star is the number of an expert."""


def hf_name(name: str, family: str = "llama") -> str:
    """The Hugging Face name of our parameter: `layers.3.attention.qkv.q.weight` ->
    `model.layers.3.self_attn.q_proj.weight`; with a star for the expert where those of all are stacked.

    Raises: KeyError for a name that the decoder does not have.
    """
    module, _, leaf = name.rpartition(".")
    if not module.startswith("layers."):
        return f"{_OUTSIDE[module]}.{leaf}"
    if leaf in ("gate", "up", "down"):  # stacked: the parameter itself
        module, leaf = name, "weight"
    leaf = "e_score_correction_bias" if leaf == "selection_bias" else leaf
    _, layer, part = module.split(".", 2)
    return f"model.layers.{layer}.{_OF_FAMILY.get(family, {}).get(part) or _IN_LAYER[part]}.{leaf}"


@dataclass(frozen=True, slots=True)
class Place:
    """A parameter, or one of the matrices stacked in it, is `rows` rows of a tensor, from `first` on."""

    tensor: str
    first: int
    rows: int


def places(spec: ModelSpec) -> dict[str, tuple[Place, ...]]:
    """Where a checkpoint of this family holds each parameter: one place, or one for each matrix of a stacked one.

    Raises: ModelError for a family whose names are not known, or a model that the decoder does not compute.
    """
    rows = stored(spec)
    if spec.family not in WRITABLE:
        raise ModelError(
            f"{spec.name}: weights of family {spec.family!r} cannot be read or written; can: {', '.join(WRITABLE)}"
        )
    found: dict[str, tuple[Place, ...]] = {}
    filled: dict[str, int] = {}
    for row in rows:
        names = _tensors_of(row, spec)
        size = row.shape[-2] if len(row.shape) > 1 else row.shape[0]
        found[row.name] = tuple(Place(tensor, filled.get(tensor, 0), size) for tensor in names)
        filled.update({tensor: filled.get(tensor, 0) + size for tensor in names})
    return found


def tensors(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """All tensors of a checkpoint with their shapes."""
    columns = {row.name: row.shape[-1:] if len(row.shape) > 1 else () for row in stored(spec)}
    return {
        place.tensor: (
            place.first + place.rows,
            *columns[name],
        )  # the last place in a tensor is where it ends
        for name, of_it in places(spec).items()
        for place in of_it
    }


def _tensors_of(row: ParameterRow, spec: ModelSpec) -> list[str]:
    name = hf_name(row.name, spec.family)
    if row.role == "latent_up":
        attention = spec.blocks[int(row.name.split(".")[1])].attention
        if isinstance(attention, MLASpec) and attention.q_rank is None:
            name = name.replace("q_b_proj", "q_proj")
    return [name.replace("*", str(e)) for e in range(row.shape[0])] if "*" in name else [name]


_EXPERT = re.compile(r"model\.layers\.(\d{1,5})\.\w+\.experts\.(\d{1,7})\.")
MATRICES = 3
"""Of an expert."""


def experts_among(names: Sequence[str]) -> str | None:
    """In words, whole experts that these tensors are; None where they are something else or parts of experts."""
    found: dict[tuple[int, int], int] = {}
    for name in names:
        match = _EXPERT.match(name)
        if match is None:
            return None
        place = int(match[1]), int(match[2])
        found[place] = found.get(place, 0) + 1
    if set(found.values()) != {MATRICES}:
        return None
    layer, first = min(found)
    here = sorted(expert for at, expert in found if at == layer)
    listed = f"expert {first}" if len(here) == 1 else f"{len(here)} experts, {first} to {here[-1]},"
    others = len({at for at, _ in found}) - 1
    return f"{listed} of layer {layer}" + (f" and others of {others} more layers" if others else "")

"""A `config.json` for a model that we train: the inverse of the readers of the families that a plain decoder runs.

What is written is read back and compared, so a model that no family can express is refused, never altered.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fivefold.core.families.table import FAMILIES
from fivefold.core.families.write_moe import deepseek_fields, mixtral_fields, mla_fields, qwen_moe_fields
from fivefold.core.model_spec import (
    AttentionSpec,
    Llama3Scaling,
    MLASpec,
    MLPSpec,
    ModelSpec,
    MoESpec,
    YarnScaling,
    require_plain_decoder,
)
from fivefold.errors import ModelError

DENSE = ("llama", "mistral", "qwen2", "qwen3", "phi3")
ROUTED = ("mixtral", "qwen2_moe", "qwen3_moe")
LATENT = ("deepseek_v2", "deepseek_v3")
WRITABLE = (*DENSE, *ROUTED, *LATENT)
"""Families whose config and weights can be written, in the order in which they are tried."""


def to_config(spec: ModelSpec) -> dict[str, Any]:
    """The config of `spec` in its own family or, where that one cannot say it, in the first that can.

    Raises: ModelError naming what the model has and its family lacks.
    """
    require_plain_decoder(spec)
    known = _candidates(spec)
    first = spec.family if spec.family in known else known[0]
    reasons = []
    for family in (first, *(name for name in known if name != first)):
        config = _config_of(spec, family)
        try:
            fault = difference(spec, ModelSpec.from_config(config, name=family))
        except ModelError as error:
            fault = str(error)
        if fault is None:
            return config
        reasons.append(f"{family}: {fault}")
    raise ModelError(
        f"{spec.name} cannot be written as a Hugging Face model of any family ({'; '.join(reasons)})"
    )


def _candidates(spec: ModelSpec) -> tuple[str, ...]:
    """The families that have this kind of layers."""
    if any(isinstance(block.attention, MLASpec) for block in spec.blocks):
        return LATENT
    return ROUTED if any(isinstance(block.mlp, MoESpec) for block in spec.blocks) else DENSE


def difference(spec: ModelSpec, other: ModelSpec) -> str | None:
    """What `other` has different from `spec`, names and notes apart; None: they compute the same."""
    for field in ModelSpec.model_fields:
        if field in ("name", "family", "notes", "blocks"):
            continue
        mine, theirs = getattr(spec, field), getattr(other, field)
        if mine != theirs:
            return f"{field} is {mine}, would be {theirs}"
    if spec.layers != other.layers:
        return f"{spec.layers} layers, would be {other.layers}"
    for layer, (mine, theirs) in enumerate(zip(spec.blocks, other.blocks)):
        if mine == theirs:
            continue
        for part in ("attention", "mlp"):
            a, b = getattr(mine, part).model_dump(), getattr(theirs, part).model_dump()
            for key in a:
                if a[key] != b.get(key):
                    return f"{key} of layer {layer} is {a[key]}, would be {b.get(key)}"
        return f"norms of layer {layer} are {mine.norms}, would be {theirs.norms}"
    return None


def _config_of(spec: ModelSpec, family: str) -> dict[str, Any]:
    """The fields that transformers reads; those of the first layer where a family has one for all layers."""
    attention, mlp = spec.blocks[0].attention, spec.blocks[0].mlp
    assert isinstance(attention, AttentionSpec | MLASpec)
    config: dict[str, Any] = {
        "architectures": [FAMILIES[family][1]],
        "model_type": family,
        "hidden_size": spec.hidden,
        "intermediate_size": mlp.ffn,
        "num_hidden_layers": spec.layers,
        "num_attention_heads": attention.heads,
        "vocab_size": spec.vocab,
        "max_position_embeddings": spec.max_positions,
        "hidden_act": mlp.activation,
        "rms_norm_eps": spec.norm_eps,
        "tie_word_embeddings": spec.tied_embeddings,
        "rope_theta": spec.rope_theta,
        # The classes have defaults that name tokens of their own vocabularies.
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    if spec.rope_scaling is not None:
        config["rope_scaling"] = _scaling(spec.rope_scaling)
    if isinstance(attention, MLASpec):
        return {**config, **mla_fields(attention, family), **deepseek_fields(spec, family)}
    assert isinstance(attention, AttentionSpec)
    config |= {"num_key_value_heads": attention.kv_heads, "head_dim": attention.head_dim}
    if family in ("llama", "qwen3", "qwen3_moe"):
        config["attention_bias"] = attention.qkv_bias
    if family == "qwen2_moe":
        config["qkv_bias"] = attention.qkv_bias
    if family == "llama":
        config["mlp_bias"] = isinstance(mlp, MLPSpec) and mlp.bias
    if family in ("mistral", "phi3", "mixtral"):
        config["sliding_window"] = attention.window
    if family.startswith("qwen"):
        config |= _qwen_windows(spec)
    if family == "phi3":
        config["original_max_position_embeddings"] = spec.max_positions
    if family == "mixtral":
        config |= mixtral_fields(spec)
    if family in ("qwen2_moe", "qwen3_moe"):
        config |= qwen_moe_fields(spec)
    return config


def _qwen_windows(spec: ModelSpec) -> Mapping[str, Any]:
    windows = [block.attention.window for block in spec.blocks if isinstance(block.attention, AttentionSpec)]
    size = next((window for window in windows if window is not None), None)
    if size is None:
        return {"use_sliding_window": False}
    return {
        "use_sliding_window": True,
        "sliding_window": size,
        "max_window_layers": windows.index(size),
        "layer_types": ["full_attention" if w is None else "sliding_attention" for w in windows],
    }


def _scaling(scaling: Llama3Scaling | YarnScaling) -> Mapping[str, Any]:
    names = {"kind": "rope_type", "original_max_positions": "original_max_position_embeddings"}
    fields = scaling.model_dump(exclude_none=True)
    return {names.get(key, key): value for key, value in fields.items()}

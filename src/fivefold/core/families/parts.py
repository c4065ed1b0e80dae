"""Parts that several model families share: attention, MLP, and which layer gets which."""

from __future__ import annotations

from typing import Any

from fivefold.core.model_config import Fields
from fivefold.core.model_spec import AttentionSpec, BlockSpec, MLPSpec


def gqa(
    f: Fields, *, kv_default: bool = False, derive_head_dim: bool = True, rotary: float = 1.0, **more: Any
) -> AttentionSpec:
    """Attention from the usual fields.

    `kv_default`: a field for KV heads that is absent means one per query head; otherwise it is required (null
    means one per query head in every family). `derive_head_dim`: an absent head_dim means hidden / heads.
    """
    heads = f.size("num_attention_heads", "n_head")
    kv_absent = "num_key_value_heads" not in f.data and not kv_default
    kv_heads = f.size("num_key_value_heads") if kv_absent else f.size("num_key_value_heads", default=heads)
    if f.raw("head_dim") is None and derive_head_dim:
        if f.hidden % heads:
            raise f.refuse(
                "head_dim", f"is missing and {f.hidden} hidden dims do not divide over {heads} heads"
            )
        head_dim = f.hidden // heads
    else:
        head_dim = f.size("head_dim")
    rope_dim = f.rotated_dims(head_dim, default=rotary)
    return AttentionSpec(heads=heads, kv_heads=kv_heads, head_dim=head_dim, rope_dim=rope_dim, **more)


def mlp(f: Fields, *, key: str = "intermediate_size", bias: bool = False) -> MLPSpec:
    return MLPSpec(ffn=f.size(key), activation=activation(f), bias=bias)


def activation(f: Fields) -> str:
    f.ignore("hidden_act", "activation_function")  # Gemma has both: hidden_activation corrects hidden_act
    return f.text("hidden_activation", "hidden_act", "activation_function", default="silu")


def by_window(
    f: Fields, attention: AttentionSpec, types: list[str], *, default: int | None = None
) -> list[AttentionSpec]:
    """One attention per layer: `sliding_attention` layers get the window, `full_attention` layers do not."""
    size = f.size("sliding_window", "sliding_window_size", default=default or 0, least=0)
    words = f.layer_types(types)
    unknown = set(words) - {"sliding_attention", "full_attention"}
    if unknown:
        raise f.refuse(
            "layer_types", f"names {min(unknown)!r}; supported: 'full_attention', 'sliding_attention'"
        )
    if not size and "sliding_attention" in words:
        raise f.refuse("sliding_window", "is missing, but layers are of type 'sliding_attention'")
    windowed = attention.replace(window=size or None)
    return [windowed if word == "sliding_attention" else attention for word in words]


def qwen_windows(f: Fields, attention: AttentionSpec, *, first: int | None = None) -> list[AttentionSpec]:
    """Qwen's rule: no window unless `use_sliding_window`, and then from layer `max_window_layers` upwards."""
    used = f.flag("use_sliding_window", False)
    start = f.size("max_window_layers", default=28, least=0) if first is None else first
    f.ignore("max_window_layers", "sliding_window")
    types = ["sliding_attention" if used and i >= start else "full_attention" for i in range(f.layers)]
    return by_window(f, attention, types)


def blocks(attentions: list[AttentionSpec], feed: MLPSpec, **more: Any) -> list[BlockSpec]:
    return [BlockSpec(attention=a, mlp=feed, **more) for a in attentions]


def moe_layers(f: Fields) -> list[bool]:
    """Qwen's rule: every `decoder_sparse_step`-th layer is routed, except those in `mlp_only_layers`."""
    step, dense = f.size("decoder_sparse_step", default=1), f.indices("mlp_only_layers")
    return [i not in dense and (i + 1) % step == 0 for i in range(f.layers)]


def note_mtp(f: Fields, key: str, *aliases: str) -> None:
    """Layers that predict further tokens stand beside the decoder; they are left out, and said to be."""
    n = f.size(key, *aliases, default=0, least=0)
    if n:
        f.notes.append(f"multi-token prediction ({key}: {n}) is not counted")

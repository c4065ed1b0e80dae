"""The attention core of a module that is not ours, replaced by one of our choice.

transformers    its models get their attention function from a public registry, by name: ours is registered there
others          a call of F.scaled_dot_product_attention inside the attention module's forward is ours

A core maps q_BNSH, k_BKSH, v_BKSH to [B, N, S, H], causal, with scores scaled by H**-0.5.
Shape letters: B batch, S sequence, N query heads, K KV heads, H head size.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fivefold.errors import ModelError

MakeCore = Callable[[int | None], nn.Module]
"""Window, or None -> the core."""

REGISTERED = "fivefold"
_ATTRIBUTE = "fivefold_core"


class Replaced:
    """The core of one attention module. `kv_heads`: how many KV heads it must be called with."""

    def __init__(self, name: str, make: MakeCore, kv_heads: int) -> None:
        self.name, self.make, self.kv_heads = name, make, kv_heads
        self.cores: dict[int | None, nn.Module] = {}
        self.calls = 0

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *, window: int | None, scale: float | None) -> Tensor:
        if k.shape[1] != self.kv_heads:
            raise ModelError(
                f"{self.name} attends with {k.shape[1]} KV heads where its weights make {self.kv_heads}; "
                f"call scaled_dot_product_attention with enable_gqa=True rather than repeat them"
            )
        if window not in self.cores:
            self.cores[window] = self.make(window)
        self.calls += 1
        own = q.shape[-1] ** -0.5
        q = q if scale is None or scale == own else q * (scale / own)
        return self.cores[window](q, k, v, None)  # type: ignore[no-any-return]

    def refuse(self, what: str) -> ModelError:
        return ModelError(
            f"{self.name} attends with {what}, which the cores of tensor and context parallelism lack; "
            f"they are causal and take nothing more"
        )


def _watch(module: nn.Module, core: Replaced, what: str, within: AbstractContextManager[Any]) -> None:
    """Run the module's forward within a context, and see that it attends with the core."""
    own = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        before = core.calls
        with within:
            out = own(*args, **kwargs)
        if core.calls != before + 1:
            raise ModelError(
                f"{core.name} called {what} {core.calls - before} times in its forward; tensor and context parallelism "
                f"replace one causal call of it, so let it attend by one"
            )
        return out

    module.forward = forward


# transformers


def is_transformers(model: nn.Module) -> bool:
    """Whether it is a model of transformers, which asks the registry for its attention function."""
    return any(
        cls.__name__ == "PreTrainedModel" and cls.__module__.startswith("transformers.")
        for cls in type(model).__mro__
    )


def replace_registered(model: Any, replaced: dict[nn.Module, Replaced]) -> None:
    """Let the attention modules of a transformers model call their cores."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(REGISTERED, _registered)
    AttentionMaskInterface.register(REGISTERED, _no_mask)
    model.set_attn_implementation(REGISTERED)
    for module, core in replaced.items():
        setattr(module, _ATTRIBUTE, core)
        _watch(module, core, "transformers' AttentionInterface", nullcontext())


def _no_mask(*_: Any, **__: Any) -> None:
    """What is hidden follows from the places of the tokens, which the core knows."""


def _registered(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """The attention function as transformers calls it. Shapes: -> [B, S, N, H]."""
    core: Replaced = getattr(module, _ATTRIBUTE)
    for present, what in (
        (attention_mask is not None, "a mask"),
        (dropout, "dropout"),
        (not getattr(module, "is_causal", True), "no causal mask"),
        (more.get("softcap") is not None, "soft-capped scores"),
        (more.get("s_aux") is not None, "sinks"),
        (more.get("position_bias") is not None, "a position bias"),
    ):
        if present:
            raise core.refuse(what)
    out = core(query, key, value, window=sliding_window, scale=scaling)
    return out.transpose(1, 2).contiguous(), None


# Others


def replace_called(module: nn.Module, core: Replaced) -> None:
    """Within the module's forward, F.scaled_dot_product_attention is the core."""
    _watch(module, core, "F.scaled_dot_product_attention", _Called(core))


class _Called(TorchFunctionMode):
    def __init__(self, core: Replaced) -> None:
        super().__init__()
        self.core = core

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # A mode is off inside its own handler: what the core calls is not replaced again.
        return (
            _as_core(self.core, *args, **kwargs)
            if func is F.scaled_dot_product_attention
            else func(*args, **kwargs)
        )


def _as_core(
    core: Replaced,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    for present, what in (
        (attn_mask is not None, "a mask"),
        (dropout_p, "dropout"),
        (not is_causal, "no causal mask"),
    ):
        if present:
            raise core.refuse(what)
    return core(query, key, value, window=None, scale=scale)

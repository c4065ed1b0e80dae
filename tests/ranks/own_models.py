"""Modules that are not ours, tiny: unmodified models of transformers, and the one of the example."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

COMMON = {
    "vocab_size": 53,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"tie_word_embeddings": False, "pad_token_id": 0}),
    "llama, biases": ("Llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "mistral": ("Mistral", {"sliding_window": 6}),
    "qwen2": ("Qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
    "qwen3 moe": (
        "Qwen3Moe",
        {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 16, "mlp_only_layers": [1]},
    ),
    "qwen3": ("Qwen3", {"tie_word_embeddings": True}),
}

DENSE = [name for name in FAMILIES if name not in ("mixtral", "qwen3 moe")]


def make(name: str, dtype: torch.dtype = torch.float32, **changes: Any) -> nn.Module:
    """A model of transformers as its class makes it, the same every time."""
    family, settings = FAMILIES[name]
    torch.manual_seed(sum(name.encode()))
    config = getattr(transformers, f"{family}Config")(**{**COMMON, **settings, **changes})
    return getattr(transformers, f"{family}ForCausalLM")(config).to(dtype)  # type: ignore[no-any-return]


def example() -> ModuleType:
    """`examples/parallelize_own_model.py` as a module."""
    path = Path(__file__).resolve().parents[2] / "examples" / "parallelize_own_model.py"
    spec = importlib.util.spec_from_file_location("parallelize_own_model", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@contextmanager
def without_casts() -> Iterator[None]:
    """transformers casts to float32 in norms, rotary angles and routers; here they stay in the model's dtype."""

    def norm(self: Any, x: Tensor) -> Tensor:
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * (x * scale)  # type: ignore[no-any-return]

    def rotary(self: Any, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        angles = position_ids[..., None] * self.inv_freq.to(x.dtype)
        both = torch.cat((angles, angles), -1)
        return both.cos() * self.attention_scaling, both.sin() * self.attention_scaling

    def route(self: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = F.linear(x.reshape(-1, self.hidden_dim), self.weight)
        values, chosen = logits.softmax(-1).topk(self.top_k, dim=-1)
        scaled = values / values.sum(-1, keepdim=True) if getattr(self, "norm_topk_prob", True) else values
        return logits, scaled, chosen

    with pytest.MonkeyPatch.context() as patch:
        for family in {family for family, _ in FAMILIES.values()}:
            folder = {"Qwen3Moe": "qwen3_moe"}.get(family, family.lower())
            name = f"transformers.models.{folder}.modeling_{folder}"
            module = importlib.import_module(name)
            patch.setattr(getattr(module, f"{family}RMSNorm"), "forward", norm)
            patch.setattr(getattr(module, f"{family}RotaryEmbedding"), "forward", rotary)
            if router := getattr(module, f"{family}TopKRouter", None):
                patch.setattr(router, "forward", route)
        yield

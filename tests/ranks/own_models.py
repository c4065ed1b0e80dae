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
    "qwen3": ("Qwen3", {"tie_word_embeddings": True}),
}


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
    """transformers casts to float32 in RMS norms and rotary angles; here they stay in the model's dtype."""

    def norm(self: Any, x: Tensor) -> Tensor:
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * (x * scale)  # type: ignore[no-any-return]

    def rotary(self: Any, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        angles = position_ids[..., None] * self.inv_freq.to(x.dtype)
        both = torch.cat((angles, angles), -1)
        return both.cos() * self.attention_scaling, both.sin() * self.attention_scaling

    with pytest.MonkeyPatch.context() as patch:
        for family in {family for family, _ in FAMILIES.values()}:
            name = f"transformers.models.{family.lower()}.modeling_{family.lower()}"
            module = importlib.import_module(name)
            patch.setattr(getattr(module, f"{family}RMSNorm"), "forward", norm)
            patch.setattr(getattr(module, f"{family}RotaryEmbedding"), "forward", rotary)
        yield

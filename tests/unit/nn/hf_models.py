"""Small models of transformers with random weights, saved as checkpoints: what the tests of the hub compare with."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from fivefold.core.layout import Layout
from fivefold.core.sharding import ParameterRow
from fivefold.nn.hub import HFCheckpoint
from fivefold.strategies import compose

COMMON = {
    "vocab_size": 61,
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 4,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA_3 = {
    "rope_type": "llama3",
    "rope_theta": 1000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"rope_parameters": LLAMA_3}),
    "llama, biases": ("Llama", {"attention_bias": True, "mlp_bias": True, "rope_parameters": YARN}),
    "mistral": ("Mistral", {"sliding_window": 6}),
    "qwen2": ("Qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2}),
    "qwen3": ("Qwen3", {"rope_parameters": YARN, "attention_bias": True}),
    "phi3": ("Phi3", {}),
}


def make(name: str, dtype: torch.dtype = torch.float32, **changes: Any) -> nn.Module:
    """A model with random weights of that dtype: norms are not 1, biases are not 0."""
    family, settings = FAMILIES[name]
    config = getattr(transformers, f"{family}Config")(**{**COMMON, **settings, **changes})
    generator = torch.Generator().manual_seed(sum(name.encode()))
    model = getattr(transformers, f"{family}ForCausalLM")(config).to(dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            values = torch.randn(parameter.shape, generator=generator) * 0.2
            parameter.copy_(values + 1 if parameter.ndim == 1 else values)
    return model


def save(model: nn.Module, folder: Path, shard: str = "50GB") -> Path:
    model.save_pretrained(folder, max_shard_size=shard)  # type: ignore[operator]
    return folder


def bits(tensor: Tensor) -> Tensor:
    """For comparing bit for bit, whatever the values."""
    return tensor.detach().contiguous().view(torch.uint8)


def rank_rows(spec: Any, layout: Layout) -> Iterator[tuple[int, ParameterRow]]:
    """(rank, row) of everything that each rank of one data replica holds."""
    table = compose.parameter_table(spec, layout, 32)
    for rank in range(layout.world_size):
        for rows in compose.rows_of(table, layout, layout.coordinate(rank)["pp"]).values():
            yield from ((rank, row) for row in rows)


def read_all(checkpoint: HFCheckpoint, layout: Layout, dtype: str) -> dict[str, Tensor]:
    """Every parameter put together from what every rank reads; padding must be zero, and nothing may be left out."""
    whole: dict[str, Tensor] = {}
    for rank, row in rank_rows(checkpoint.spec, layout):
        coordinate = layout.coordinate(rank)
        part = checkpoint.read(row, layout, coordinate, dtype)
        assert part.shape == row.local_shape(layout)
        region = row.region(layout, coordinate)
        inner = tuple(slice(0, cut.stop - cut.start) for cut in region)
        full = whole.setdefault(row.name, torch.full(row.shape, torch.nan, dtype=part.dtype))
        full[region] = part[inner]
        assert part.count_nonzero() == part[inner].count_nonzero(), f"{row.name}: padding is not zero"
    assert not [name for name, full in whole.items() if full.isnan().any()]
    return whole

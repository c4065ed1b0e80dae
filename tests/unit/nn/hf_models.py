"""Small models of transformers with random weights: what the tests of the hub, and of experts, compare with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from fivefold.core.layout import Layout
from fivefold.core.model_spec import ModelSpec
from fivefold.core.sharding import ParameterRow, buffers
from fivefold.nn.hub import HFCheckpoint
from fivefold.nn.hub_names import hf_name
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


_SMALL = {"num_hidden_layers": 3, "intermediate_size": 40}
_DEEPSEEK = {
    "moe_intermediate_size": 16, "n_routed_experts": 6, "num_experts_per_tok": 2, "n_shared_experts": 2,
    "first_k_dense_replace": 1, "kv_lora_rank": 12, "q_lora_rank": 14, "qk_nope_head_dim": 8, "qk_rope_head_dim": 6,
    "v_head_dim": 10, "num_key_value_heads": 12, "head_dim": 6,
}  # fmt: skip
_QWEN = {"moe_intermediate_size": 16, "num_experts": 6, "num_experts_per_tok": 2}
ROUTED: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("Mixtral", {**_SMALL, "num_local_experts": 6, "num_experts_per_tok": 2}),
    "qwen2_moe": (
        "Qwen2Moe",
        {**_SMALL, **_QWEN, "shared_expert_intermediate_size": 20, "mlp_only_layers": [1]},
    ),
    "qwen3_moe": ("Qwen3Moe", {**_SMALL, **_QWEN, "norm_topk_prob": True}),
    "deepseek_v2": ("DeepseekV2", {**_SMALL, **_DEEPSEEK, "q_lora_rank": None}),
    "deepseek_v3": (
        "DeepseekV3",
        {
            **_SMALL,
            **_DEEPSEEK,
            "n_group": 2,
            "topk_group": 1,
            "rope_parameters": {**YARN, "mscale_all_dim": 1.0},
        },
    ),
}
"""With experts, or latent attention."""


def in_memory(tensors: Mapping[str, Tensor | None], row: ParameterRow, spec: ModelSpec) -> Tensor:
    """The part of a loaded model's tensors that is our parameter: there, gate and up of all experts are one tensor."""
    prefix = "model." + row.name.rpartition(".")[0]
    if row.role in ("expert_gate", "expert_up"):
        both = tensors[f"{prefix}.gate_up_proj"]
        assert both is not None
        return both[:, : row.shape[1]] if row.role == "expert_gate" else both[:, row.shape[1] :]
    name = hf_name(row.name, spec.family).replace("block_sparse_moe.gate", "mlp.gate")
    if row.role == "expert_down":
        name = f"{prefix}.down_proj"
    if name not in tensors:
        name = name.replace("q_b_proj", "q_proj")
    found = tensors[name]
    assert found is not None, name
    return found


def make(name: str, dtype: torch.dtype = torch.float32, **changes: Any) -> nn.Module:
    """A model with random weights of that dtype: norms are not 1, biases are not 0."""
    family, settings = {**FAMILIES, **ROUTED}[name]
    config = getattr(transformers, f"{family}Config")(**{**COMMON, **settings, **changes})
    generator = torch.Generator().manual_seed(sum(name.encode()))
    model = getattr(transformers, f"{family}ForCausalLM")(config).to(dtype).eval()
    with torch.no_grad():
        biases = [buffer for key, buffer in model.named_buffers() if key.endswith("e_score_correction_bias")]
        for parameter in [*model.parameters(), *biases]:
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
        yield from ((rank, row) for row in buffers(spec))


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

"""Every family of the reader against the model class of transformers, in tiny shapes on the meta device."""

from __future__ import annotations

import json
from typing import Any

import pytest

from fivefold.core.families.table import FAMILIES
from fivefold.core.model_counts import parameter_counts
from fivefold.core.model_spec import ModelSpec

transformers = pytest.importorskip("transformers", reason="compares with transformers")
torch = pytest.importorskip("torch", reason="builds models on the meta device")

SHAPE: dict[str, Any] = {
    "hidden_size": 48, "num_hidden_layers": 6, "num_attention_heads": 6, "num_key_value_heads": 2,
    "intermediate_size": 100, "vocab_size": 97, "max_position_embeddings": 64,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
GPT2 = {"n_embd": 48, "n_layer": 3, "n_head": 6, "n_positions": 64, "bos_token_id": 1, "eos_token_id": 2}
LOCAL = {"num_local_experts": 6, "num_experts_per_tok": 2}
QWEN = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
SHARED = {**QWEN, "shared_expert_intermediate_size": 36}
DEEPSEEK = {
    "n_routed_experts": 6, "n_shared_experts": 2, "first_k_dense_replace": 2, "num_experts_per_tok": 2,
    "moe_intermediate_size": 20, "n_group": 1, "topk_group": 1,
}  # fmt: skip
MLA = {
    **DEEPSEEK, "kv_lora_rank": 12, "q_lora_rank": 14, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4,
    "v_head_dim": 10,
}  # fmt: skip
LINEAR = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 6,
    "linear_value_head_dim": 5, "linear_conv_kernel_dim": 3, "full_attention_interval": 3, "head_dim": 8,
}  # fmt: skip
BIASED = {"attention_bias": True}
WIDE = {"head_dim": 12}

CASES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama", {**WIDE, **BIASED, "mlp_bias": True, "tie_word_embeddings": True}),
    ("mistral", WIDE),
    ("qwen2", {"use_sliding_window": True, "max_window_layers": 3, "tie_word_embeddings": True}),
    ("qwen3", {**WIDE, **BIASED}),
    ("gemma", WIDE),
    ("gemma2", {**WIDE, **BIASED, "sliding_window": 8}),
    ("gemma3_text", {**WIDE, "sliding_window": 8}),
    ("phi", {"partial_rotary_factor": 0.5}),
    ("phi3", {"sliding_window": 8}),
    ("olmo2", BIASED),
    ("granite", {**BIASED, "mlp_bias": True}),
    ("starcoder2", {}),
    ("starcoder2", {"use_bias": False}),
    ("gpt2", {"n_inner": 90}),
    ("gpt2", {"tie_word_embeddings": False}),
    ("gpt_bigcode", {}),
    ("gpt_bigcode", {"multi_query": False}),
    ("gpt_neox", {"attention_bias": False}),
    ("mixtral", LOCAL),
    ("qwen2_moe", SHARED),
    ("qwen2_moe", {**SHARED, "decoder_sparse_step": 2, "mlp_only_layers": [3], "qkv_bias": False}),
    ("qwen3_moe", {**QWEN, **WIDE, **BIASED, "decoder_sparse_step": 3}),
    ("qwen3_next", {**SHARED, **LINEAR, **BIASED, "mlp_only_layers": [0]}),
    ("qwen3_5_text", LINEAR),
    ("deepseek_v2", MLA),
    ("deepseek_v2", {**MLA, **BIASED, "q_lora_rank": None}),
    ("deepseek_v3", {**MLA, **BIASED}),
    ("glm4_moe", {**DEEPSEEK, **BIASED, "use_qk_norm": True}),
    ("gpt_oss", {**LOCAL, "head_dim": 8}),
    ("gpt_oss", {**LOCAL, **WIDE, "attention_bias": False}),
    (
        "llama4_text",
        {**LOCAL, **BIASED, "head_dim": 8, "intermediate_size_mlp": 60, "interleave_moe_layer_step": 2},
    ),
    ("minimax_m2", {**LOCAL, **WIDE}),
]


@pytest.mark.parametrize(("family", "changes"), CASES, ids=[f"{f}-{i}" for i, (f, _) in enumerate(CASES)])
def test_total_equals_the_model_class(family: str, changes: dict[str, Any]) -> None:
    shape = {**GPT2, "vocab_size": 97} if family in ("gpt2", "gpt_bigcode") else SHAPE
    if family == "gpt_neox":
        shape = {key: value for key, value in SHAPE.items() if key != "num_key_value_heads"}
    config = transformers.AutoConfig.for_model(family, **shape, **changes)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    expected = sum(parameter.numel() for parameter in model.parameters())
    saved = json.loads(config.to_json_string())
    assert parameter_counts(ModelSpec.from_config(saved))["total_parameters"] == expected


def test_every_family_with_a_class_is_compared() -> None:
    without_class = {"deepseek"}  # the authors' own code; covered by the published count of DeepSeek-MoE-16B
    assert {family for family, _ in CASES} == set(FAMILIES) - without_class

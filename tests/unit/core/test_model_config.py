"""The reader of config.json: traps that give a wrong model, and files that must be refused in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fivefold.core.model_counts import parameter_counts
from fivefold.core.model_spec import AttentionSpec, Llama3Scaling, MLASpec, ModelSpec, MoESpec
from fivefold.errors import ModelError

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 48,
    "num_hidden_layers": 6,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "intermediate_size": 100,
    "vocab_size": 97,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
}


def of(model_type: str, **changes: Any) -> dict[str, Any]:
    return {**{k: v for k, v in LLAMA.items() if k != "architectures"}, "model_type": model_type, **changes}


DEEPSEEK = of(
    "deepseek_v2",
    kv_lora_rank=12,
    qk_nope_head_dim=8,
    qk_rope_head_dim=4,
    v_head_dim=10,
    n_routed_experts=6,
    n_shared_experts=2,
    num_experts_per_tok=2,
    moe_intermediate_size=20,
    first_k_dense_replace=2,
)


def windows(config: dict[str, Any]) -> list[int | None]:
    return [block.attention.window for block in ModelSpec.from_config(config).blocks]


def test_llama_fields() -> None:
    spec = ModelSpec.from_config(
        {**LLAMA, "rope_theta": 5e5, "tie_word_embeddings": True, "torch_dtype": "bfloat16"}
    )
    attention = spec.blocks[0].attention
    assert isinstance(attention, AttentionSpec)
    assert (attention.heads, attention.kv_heads, attention.head_dim) == (6, 2, 8)
    assert (spec.layers, spec.hidden, spec.vocab, spec.max_positions) == (6, 48, 97, 64)
    assert (spec.family, spec.tied_embeddings, spec.norm_eps, spec.rope_theta) == ("llama", True, 1e-5, 5e5)
    assert spec.notes == ()


def test_explicit_head_dim_wins_over_hidden_by_heads() -> None:
    assert ModelSpec.from_config({**LLAMA, "head_dim": 12}).blocks[0].attention.head_dim == 12


def test_absent_kv_heads_mean_one_per_head_only_where_the_family_says_so() -> None:
    config = {k: v for k, v in LLAMA.items() if k != "num_key_value_heads"}
    assert ModelSpec.from_config(config).blocks[0].attention.kv_heads == 6
    with pytest.raises(ModelError, match="'num_key_value_heads' is missing"):
        ModelSpec.from_config({**config, "model_type": "mistral", "architectures": ["MistralForCausalLM"]})


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_llama3_rope(key: str) -> None:
    rope = {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    spec = ModelSpec.from_config({**LLAMA, key: {"rope_type": "llama3", **rope}, "rope_theta": 5e5})
    assert spec.rope_scaling == Llama3Scaling(
        factor=8, low_freq_factor=1, high_freq_factor=4, original_max_positions=32
    )
    assert spec.rope_theta == 5e5


def test_rope_theta_inside_rope_parameters() -> None:
    spec = ModelSpec.from_config({**LLAMA, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}})
    assert (spec.rope_theta, spec.features) == (1e6, ())


def test_other_rope_scaling_is_named_not_dropped() -> None:
    spec = ModelSpec.from_config({**LLAMA, "rope_scaling": {"type": "dynamic", "factor": 4.0}})
    assert spec.features == ("rope scaling 'dynamic'",)


def test_mistral_window_null_and_absent() -> None:
    assert windows(of("mistral", sliding_window=16)) == [16] * 6
    assert windows(of("mistral", sliding_window=None)) == [None] * 6
    absent = ModelSpec.from_config(of("mistral"))
    assert absent.blocks[0].attention.window == 4096
    assert "sliding_window is absent" in absent.notes[0]


def test_qwen2_window_only_when_used_and_from_its_layer() -> None:
    config = of("qwen2", sliding_window=16, max_window_layers=4)
    assert windows(config) == [None] * 6
    assert windows({**config, "use_sliding_window": True}) == [None] * 4 + [16] * 2


def test_gemma_patterns() -> None:
    gemma = {"head_dim": 8, "sliding_window": 16}
    assert windows(of("gemma2", **gemma)) == [16, None] * 3
    assert windows(of("gemma3_text", **gemma)) == [16] * 5 + [None]
    types = ["full_attention"] * 2 + ["sliding_attention"] * 4
    assert windows(of("gemma3_text", layer_types=types, **gemma)) == [None] * 2 + [16] * 4


def test_absent_query_rank_is_no_compression() -> None:
    absent, null = ModelSpec.from_config(DEEPSEEK), ModelSpec.from_config({**DEEPSEEK, "q_lora_rank": None})
    assert absent.blocks == null.blocks
    assert isinstance(absent.blocks[0].attention, MLASpec)
    assert absent.blocks[0].attention.q_rank is None
    assert absent.notes == ("q_lora_rank is absent: read as null, queries are not compressed",)


def test_first_dense_layers_and_shared_experts() -> None:
    spec = ModelSpec.from_config(DEEPSEEK)
    assert [block.mlp.kind for block in spec.blocks] == ["dense"] * 2 + ["moe"] * 4
    routed = spec.blocks[2].mlp
    assert isinstance(routed, MoESpec)
    assert (routed.experts, routed.top_k, routed.ffn, routed.shared_ffn) == (6, 2, 20, 40)


def test_sparse_step_and_dense_list() -> None:
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 20, "head_dim": 8}
    spec = ModelSpec.from_config(of("qwen3_moe", decoder_sparse_step=2, mlp_only_layers=[3], **sizes))
    assert [block.mlp.kind for block in spec.blocks] == ["dense", "moe", "dense", "dense", "dense", "moe"]


def test_nested_text_config() -> None:
    nested = {
        "architectures": ["LlavaForConditionalGeneration"],
        "model_type": "llava",
        "tie_word_embeddings": True,
        "vision_config": {"hidden_size": 1024},
        "text_config": of("llama"),
    }
    spec = ModelSpec.from_config(nested)
    assert (spec.hidden, spec.tied_embeddings) == (48, True)
    assert "text model only" in spec.notes[0]


def test_architecture_decides_over_model_type() -> None:
    glm = of(
        "glm",
        architectures=["Glm4MoeForCausalLM"],
        **{k: DEEPSEEK[k] for k in ("n_routed_experts", "moe_intermediate_size", "num_experts_per_tok")},
    )
    assert ModelSpec.from_config(glm).family == "glm4_moe"
    other = ModelSpec.from_config({**LLAMA, "model_type": "qwen2"})
    assert (other.family, other.blocks[0].attention.qkv_bias) == ("llama", False)
    assert other.notes == ("read as llama, by its architecture, though model_type says qwen2",)


def test_multi_token_prediction_is_left_out_and_said() -> None:
    with_mtp = ModelSpec.from_config({**DEEPSEEK, "q_lora_rank": 4, "num_nextn_predict_layers": 1})
    without = ModelSpec.from_config({**DEEPSEEK, "q_lora_rank": 4})
    assert parameter_counts(with_mtp) == parameter_counts(without)
    assert with_mtp.notes == ("multi-token prediction (num_nextn_predict_layers: 1) is not counted",)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": "48"}, "'hidden_size' must be a whole number"),
        ({"hidden_size": True}, "'hidden_size' must be a whole number"),
        ({"hidden_size": -1}, "'hidden_size'.*got -1"),
        ({"hidden_size": 50}, "50 hidden dims do not divide over 6 heads"),
        ({"vocab_size": None}, "'vocab_size' is missing"),
        ({"num_hidden_layers": 10**6}, "'num_hidden_layers'.*1 to 10000"),
        ({"vocab_size": 10**9}, "'vocab_size'.*got 1000000000"),
        ({"num_key_value_heads": 4}, "6 % 4 != 0.*3 or 6"),
        ({"attention_bias": "yes"}, "'attention_bias' must be true or false"),
        ({"rms_norm_eps": -1.0}, "'rms_norm_eps'"),
        ({"rms_norm_eps": 0}, "norm_eps"),
        ({"rope_theta": 0}, "'rope_theta' must be a positive"),
        ({"rope_scaling": [1]}, "'rope_scaling' must be an object"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor"),
        ({"partial_rotary_factor": 2}, "'partial_rotary_factor'"),
        ({"hidden_act": 7}, r"'hidden_activation' must be a short text, got 7"),
        ({"adapter_dim": 16}, r"'adapter_dim' \(16\) is not known"),
        ({"num_kv_heads": 2}, "'num_kv_heads'.*did you mean 'num_key_value_heads'"),
        ({"num_experts": 8}, "'num_experts'"),
        ({"architectures": ["LlamaForCausalLMs"]}, "did you mean 'LlamaForCausalLM'"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        ({"architectures": None, "model_type": "lama"}, "model_type 'lama'.*did you mean 'llama'"),
        ({"architectures": [], "model_type": 3}, "model_type missing"),
        ({"text_config": 3}, "'text_config' must be an object"),
    ],
)
def test_damaged_or_unknown_fields(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        ModelSpec.from_config({**LLAMA, **changes})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("value", [None, False, 0, "", [], {}])
def test_unknown_fields_that_are_off_are_harmless(value: Any) -> None:
    assert ModelSpec.from_config({**LLAMA, "adapter_dim": value}).notes == ()


def test_ignored_fields_are_named() -> None:
    assert ModelSpec.from_config({**LLAMA, "flavour": "x"}).notes == (
        "fields ignored, not known to change counts: flavour",
    )


def test_contradicting_names_of_one_field() -> None:
    with pytest.raises(ModelError, match=r"'num_experts'.*contradicts 'num_local_experts'"):
        ModelSpec.from_config(of("mixtral", num_local_experts=8, num_experts=4, num_experts_per_tok=2))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[1, 2]", "must hold a JSON object"),
        (b"{", "not valid JSON"),
        (b"\xff\xfe\x00", "is not UTF-8 text"),
        (b"[" * 100_000, "not valid JSON: nested too deeply"),
        (b" " * (4 * 2**20 + 1), "at most 4 MiB are read"),
        (b'{"model_type": "llama", "hidden_size": 1' + b"0" * 5000 + b"}", "not valid JSON"),
    ],
)
def test_damaged_files(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=message):
        ModelSpec.from_config(path)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="No such file"):
        ModelSpec.from_config(tmp_path / "none.json")


def test_file_and_folder_give_the_same_model_with_a_name(tmp_path: Path) -> None:
    folder = tmp_path / "my-model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))
    from_folder = ModelSpec.from_config(folder)
    assert from_folder == ModelSpec.from_config(str(folder / "config.json"))
    assert from_folder.name == "my-model"


def test_a_field_that_the_definition_would_not_obey_is_refused() -> None:
    with pytest.raises(ModelError, match="'num_key_value_heads' is 2; supported: 6"):
        ModelSpec.from_config(of("gpt_neox"))


GEMMA2 = of("gemma2", head_dim=8, sliding_window=8)
ODD = [None, "x", -1, 0, 1.5, True, [], [1], {"a": 1}, 10**30, float("nan"), float("inf"), {"rope_type": {}}]
PLACES = [
    "rope_parameters",
    "rope_scaling",
    "layer_types",
    "text_config",
    "architectures",
    "partial_rotary_factor",
]


@pytest.mark.parametrize("config", [LLAMA, DEEPSEEK, GEMMA2], ids=["llama", "deepseek", "gemma2"])
def test_no_odd_value_gives_anything_but_a_model_or_one_line(config: dict[str, Any]) -> None:
    for key in [*config, *PLACES]:
        for value in ODD:
            assert "\n" not in outcome({**config, key: value})


def outcome(config: dict[str, Any]) -> str:
    """The model's name, or the message of its refusal; any other exception is a fault of the reader."""
    try:
        return ModelSpec.from_config(config).name
    except ModelError as error:
        return str(error)

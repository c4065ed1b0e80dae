"""Presets and `resolve`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fivefold.catalog import models
from fivefold.core.model_spec import AttentionSpec, ModelSpec
from fivefold.errors import ModelError


def attention(name: str) -> AttentionSpec:
    found = models.preset(name).blocks[0].attention
    assert isinstance(found, AttentionSpec)
    return found


@pytest.mark.parametrize("name", models.names())
def test_every_preset_is_a_model_with_a_source(name: str) -> None:
    assert models.preset(name).name == name
    assert len(models.source(name)) > 5


@pytest.mark.parametrize("name", ["tiny-llama", "small-llama", "tiny-mistral", "tiny-qwen2", "tiny-qwen3"])
def test_laptop_presets(name: str) -> None:
    spec = models.preset(name)
    assert (spec.layers, spec.vocab, spec.max_positions) == (4, 259, 2048)
    assert spec.hidden == (128 if name == "small-llama" else 64)


def test_laptop_presets_differ_in_what_they_are_for() -> None:
    small = models.preset("small-llama").blocks[0]
    assert small.attention == AttentionSpec(heads=8, kv_heads=4, head_dim=16)
    assert small.mlp.ffn == 352
    assert models.preset("tiny-llama").blocks[0].attention == AttentionSpec(heads=4, kv_heads=2, head_dim=16)
    assert attention("tiny-mistral").window is not None
    assert attention("tiny-qwen2").qkv_bias
    assert models.preset("tiny-qwen2").tied_embeddings
    qwen3 = attention("tiny-qwen3")
    assert qwen3.qk_norm
    assert qwen3.head_dim != 64 // qwen3.heads


def test_resolve_preset_file_and_folder(tmp_path: Path) -> None:
    assert models.resolve(" Tiny-Llama ") == models.preset("tiny-llama")
    config = {
        "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 2, "intermediate_size": 176, "vocab_size": 259,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    expected = models.preset("tiny-llama").replace(name=tmp_path.name)
    assert models.resolve(str(tmp_path)) == expected
    assert models.resolve(str(tmp_path / "config.json")) == expected
    assert isinstance(expected, ModelSpec)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lama-2-7b", "no preset 'lama-2-7b' .did you mean 'llama-2-7b'.*path of a config.json"),
        ("meta-llama/Llama-3.1-8B", "did you mean 'llama-3.1-8b'"),
        ("./nothing/config.json", "no model config at ./nothing/config.json"),
        ("x" * 5000, "no preset"),
        ("a\0b", "no preset"),
        ("", "no preset"),
    ],
)
def test_unknown_model(text: str, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        models.resolve(text)


def test_folder_without_config(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json: No such file"):
        models.resolve(str(tmp_path))

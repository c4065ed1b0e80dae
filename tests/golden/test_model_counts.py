"""Parameters of published models (`model_counts.yaml`), against the counts of the model classes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from fivefold.catalog import models
from fivefold.core.model_counts import COMPONENTS, parameter_counts
from fivefold.core.model_spec import ModelSpec

SHORT = {
    "type": "model_type",
    "D": "hidden_size",
    "L": "num_hidden_layers",
    "N": "num_attention_heads",
    "KV": "num_key_value_heads",
    "H": "head_dim",
    "F": "intermediate_size",
    "V": "vocab_size",
    "P": "max_position_embeddings",
    "eps": "rms_norm_eps",
    "theta": "rope_theta",
    "tied": "tie_word_embeddings",
}
ROWS: dict[str, dict[str, Any]] = yaml.safe_load(Path(__file__).with_name("model_counts.yaml").read_text())


def config(name: str) -> dict[str, Any]:
    sizes = {SHORT.get(key, key): value for key, value in ROWS[name].items() if key != "counts"}
    return {"rms_norm_eps": 1e-5, **sizes}


@pytest.mark.parametrize("name", ROWS)
def test_counts_equal_the_model_class(name: str) -> None:
    counts = parameter_counts(ModelSpec.from_config(config(name)))
    experts = counts["by_component"]["experts"]
    assert [counts["total_parameters"], counts["active_parameters"], experts] == ROWS[name]["counts"]


@pytest.mark.parametrize("name", ROWS)
def test_components_sum_to_the_total(name: str) -> None:
    counts = parameter_counts(ModelSpec.from_config(config(name)))
    assert tuple(counts["by_component"]) == COMPONENTS
    assert sum(counts["by_component"].values()) == counts["total_parameters"]


PUBLISHED_PRESETS = [n for n in models.names() if not n.startswith(("tiny-", "small-"))]


@pytest.mark.parametrize("name", PUBLISHED_PRESETS)
def test_preset_is_the_model_that_the_config_describes(name: str) -> None:
    read = ModelSpec.from_config(config(name), name=name)
    assert models.preset(name).replace(notes=()) == read.replace(notes=())


def test_components_of_mixtral_by_hand() -> None:
    """Jiang et al. 2024, arXiv:2401.04088, table 1: 32 layers, 32/8 heads of 128, 8 experts of 14336."""
    counts = parameter_counts(models.preset("mixtral-8x7b"))["by_component"]
    assert counts == {
        "embedding": 32000 * 4096,
        "attention": 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024),
        "mlp": 0,
        "router": 32 * 8 * 4096,
        "experts": 32 * 8 * 3 * 4096 * 14336,
        "shared_experts": 0,
        "norm": (2 * 32 + 1) * 4096,
        "head": 32000 * 4096,
    }


def test_components_of_deepseek_v3_by_hand() -> None:
    """DeepSeek-V3, arXiv:2412.19437, section 4.2: 61 layers, 3 of them dense, 256 experts and 1 shared."""
    counts = parameter_counts(models.preset("deepseek-v3"))["by_component"]
    queries = 7168 * 1536 + 1536 * 128 * (128 + 64)
    keys_values = 7168 * (512 + 64) + 512 * 128 * (128 + 128)
    assert counts["attention"] == 61 * (queries + keys_values + 128 * 128 * 7168)
    assert counts["mlp"] == 3 * 3 * 7168 * 18432
    assert counts["router"] == 58 * 256 * 7168
    assert counts["shared_experts"] == 58 * 3 * 7168 * 2048
    assert counts["norm"] == 61 * (2 * 7168 + 1536 + 512) + 7168

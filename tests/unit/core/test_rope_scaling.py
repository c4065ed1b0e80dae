"""YaRN in a config: its defaults, the places of its fields, and what is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest

from fivefold.core.model_spec import Llama3Scaling, ModelSpec, YarnScaling
from fivefold.errors import ModelError

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "intermediate_size": 100,
    "vocab_size": 97,
    "max_position_embeddings": 64,
}


def scaling(key: str = "rope_scaling", flat: dict[str, Any] | None = None, **fields: Any) -> Any:
    config = {**LLAMA, **(flat or {}), key: {"rope_type": "yarn", **fields}}
    return ModelSpec.from_config(config).rope_scaling


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_defaults(key: str) -> None:
    found = scaling(key, factor=4.0, original_max_position_embeddings=16)
    assert found == YarnScaling(factor=4, original_max_positions=16, beta_fast=32, beta_slow=1, truncate=True)
    assert found.amplitude == pytest.approx(0.1 * math.log(4) + 1)


def test_the_old_name_of_the_kind_and_zero_betas() -> None:
    config = {**LLAMA, "rope_scaling": {"type": "yarn", "factor": 2, "beta_fast": 0, "beta_slow": None}}
    found = ModelSpec.from_config(config).rope_scaling
    assert found == YarnScaling(factor=2, original_max_positions=64)


def test_a_factor_left_out_is_the_ratio_of_positions() -> None:
    assert scaling(original_max_position_embeddings=16) == YarnScaling(factor=4, original_max_positions=16)


def test_amplitudes() -> None:
    """DeepSeek's pair: 1 where both are equal; a factor of at most 1 scales nothing; one's own goes first."""
    yarn = YarnScaling(factor=40, original_max_positions=4096)
    assert yarn.replace(mscale=0.7, mscale_all_dim=0.7).amplitude == 1.0
    assert yarn.replace(mscale=1.0).amplitude == yarn.amplitude == pytest.approx(1.3688879)
    assert yarn.replace(factor=0.5).amplitude == 1.0
    assert yarn.replace(attention_factor=0.3, mscale=1.0, mscale_all_dim=2.0).amplitude == 0.3


def test_original_positions_in_two_places() -> None:
    key = "original_max_position_embeddings"
    assert scaling(flat={key: 16}, factor=4).original_max_positions == 16
    assert scaling(flat={key: 16}, factor=4, **{key: 16}).original_max_positions == 16
    with pytest.raises(ModelError, match=f"'{key}' is 16, but 32 inside the rope scaling"):
        scaling(flat={key: 16}, factor=4, **{key: 32})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"factor": 0}, "factor"),
        ({"factor": "4x"}, "factor"),
        (
            {"factor": 4, "original_max_position_embeddings": 0},
            "original_max_position_embeddings.*at least 1",
        ),
        ({"factor": 4, "original_max_position_embeddings": 1.5}, "original_max_position_embeddings"),
        ({"factor": 4, "beta_fast": 1, "beta_slow": 32}, "beta_fast 1.0 is below beta_slow 32.0"),
        ({"factor": 4, "attention_factor": -1}, "attention_factor"),
        ({"factor": 4, "truncate": "perhaps"}, "truncate"),
        ({"factor": 4, "rope_theta": 1}, "'rope_theta' must be above 1 for rope scaling 'yarn'"),
    ],
)
def test_damaged_fields(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        scaling(**fields)
    assert "\n" not in str(caught.value)


def test_in_phi3_the_word_means_another_scaling() -> None:
    config = {
        **LLAMA,
        "model_type": "phi3",
        "rope_scaling": {"rope_type": "yarn", "short_factor": [1.0], "long_factor": [2.0]},
    }
    spec = ModelSpec.from_config(config)
    assert (spec.rope_scaling, spec.features) == (None, ("rope scaling 'yarn'",))


def test_the_kind_decides_when_a_plan_is_read_back() -> None:
    for one in (
        YarnScaling(factor=4, original_max_positions=16, mscale=0.5),
        Llama3Scaling(factor=8, low_freq_factor=1, high_freq_factor=4, original_max_positions=32),
    ):
        spec = ModelSpec.from_config(LLAMA).replace(rope_scaling=one)
        assert ModelSpec.read(spec.model_dump(mode="json"), where="here") == spec

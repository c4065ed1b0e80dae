"""ModelSpec: what it accepts, what it says of itself, and that it survives JSON."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from fivefold.catalog import models
from fivefold.core.model_spec import (
    AttentionSpec,
    BlockSpec,
    MLPSpec,
    ModelSpec,
    MoESpec,
    beyond_plain_decoder,
)


def spec(**changes: object) -> ModelSpec:
    block = BlockSpec(attention=AttentionSpec(heads=4, kv_heads=2, head_dim=16), mlp=MLPSpec(ffn=176))
    return ModelSpec(**{"name": "m", "hidden": 64, "vocab": 259, "blocks": (block,) * 3, **changes})


def test_layers_counts_blocks() -> None:
    assert spec().layers == 3


@pytest.mark.parametrize(
    ("heads", "kv_heads", "nearest"), [(32, 5, "4 or 8"), (40, 12, "10 or 20"), (4, 8, "4"), (6, 4, "3 or 6")]
)
def test_heads_that_do_not_share_evenly(heads: int, kv_heads: int, nearest: str) -> None:
    with pytest.raises(ValidationError, match=f"{heads} % {kv_heads} != 0.*key/value heads: {nearest}"):
        AttentionSpec(heads=heads, kv_heads=kv_heads, head_dim=8)


@pytest.mark.parametrize("rope_dim", [3, 18])
def test_rotated_part_must_fit_the_head(rope_dim: int) -> None:
    with pytest.raises(ValidationError, match=f"cannot rotate {rope_dim} of 16"):
        AttentionSpec(heads=4, kv_heads=2, head_dim=16, rope_dim=rope_dim)


def test_top_k_within_experts() -> None:
    with pytest.raises(ValidationError, match="top_k 9 is more than the 8 experts"):
        MoESpec(experts=8, top_k=9, ffn=4)


@pytest.mark.parametrize("changes", [{"hidden": 0}, {"vocab": 10**8}, {"blocks": ()}, {"norm": "batch"}])
def test_implausible_values_are_refused(changes: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        spec(**changes)


@pytest.mark.parametrize("name", models.names())
def test_json_gives_the_same_spec_back(name: str) -> None:
    original = models.preset(name)
    assert ModelSpec.model_validate_json(original.model_dump_json()) == original


@pytest.mark.parametrize(
    "name", ["tiny-llama", "tiny-mistral", "tiny-qwen2", "tiny-qwen3", "mixtral-8x7b", "deepseek-v3"]
)
def test_plain_decoders_need_nothing_more(name: str) -> None:
    assert beyond_plain_decoder(models.preset(name)) == ()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("gpt2", "learned positions"),
        ("gpt-oss-20b", "attention sinks"),
        ("qwen3-next-80b-a3b", "linear attention"),
        ("gpt-oss-20b", "biases in experts"),
        ("gpt-oss-20b", "rope scaling 'yarn'"),
    ],
)
def test_what_a_plain_decoder_lacks_is_named(name: str, expected: str) -> None:
    assert expected in beyond_plain_decoder(models.preset(name))


@pytest.mark.parametrize(
    "change",
    [{"norm": "layer"}, {"position_table": 8}, {"head_bias": True}, {"features": ("soft-capped logits",)}],
)
def test_every_field_outside_the_plain_decoder_counts(change: dict[str, object]) -> None:
    assert len(beyond_plain_decoder(spec(**change))) == 1


@pytest.mark.parametrize(
    "change",
    [
        {"qk_norm": True, "qk_norm_over": "all_heads"},
        {"chunk": 8},
        {"rope_dim": 8},
        {"output_gate": True},
        {"sinks": True},
    ],
)
def test_every_attention_outside_the_plain_decoder_counts(change: dict[str, object]) -> None:
    base = spec()
    attention = base.blocks[0].attention.replace(**change)
    odd = base.blocks[0].replace(attention=attention)
    assert len(beyond_plain_decoder(base.replace(blocks=(base.blocks[0], odd)))) == 1

"""The decoder as a whole: its parameters against the table, its parts as pipeline stages, and what it refuses."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fivefold.catalog import models
from fivefold.core.model_spec import (
    AttentionSpec,
    BlockSpec,
    MLASpec,
    MLPSpec,
    ModelSpec,
    MoESpec,
    beyond_plain_decoder,
)
from fivefold.core.sharding import buffers, parameters
from fivefold.errors import ModelError
from fivefold.nn.decoder import Decoder

ATTENTION = AttentionSpec(heads=4, kv_heads=2, head_dim=6)
EVERYTHING = AttentionSpec(
    heads=4, kv_heads=1, head_dim=10, qkv_bias=True, output_bias=True, qk_norm=True, window=3
)
PLAIN = [name for name in models.names() if not beyond_plain_decoder(models.preset(name))]
BEYOND = [name for name in models.names() if beyond_plain_decoder(models.preset(name))]


def spec_of(*blocks: BlockSpec, tied: bool = False) -> ModelSpec:
    return ModelSpec(name="tiny", hidden=16, vocab=31, blocks=blocks, tied_embeddings=tied)


OWN = {
    "everything": spec_of(*[BlockSpec(attention=EVERYTHING, mlp=MLPSpec(ffn=9, bias=True))] * 2, tied=True),
    "not gated": spec_of(BlockSpec(attention=ATTENTION, mlp=MLPSpec(ffn=9, gated=False, bias=True))),
    "unlike layers": spec_of(
        BlockSpec(attention=ATTENTION, mlp=MLPSpec(ffn=9)),
        BlockSpec(attention=ATTENTION.replace(kv_heads=4, window=2), mlp=MLPSpec(ffn=20)),
    ),
}


@pytest.mark.parametrize("name", [*PLAIN, *OWN])
def test_table_lists_the_parameters_of_the_module(name: str) -> None:
    """Names, shapes, order, and which are one and the same."""
    spec = OWN[name] if name in OWN else models.preset(name)
    with torch.device("meta"):
        model = Decoder(spec)
    got = [(name, tuple(p.shape)) for name, p in model.named_parameters()]
    assert got == [(row.name, row.shape) for row in parameters(spec)]
    everything = dict(model.named_parameters(remove_duplicate=False))
    assert (everything["head.weight"] is everything["embedding.weight"]) == spec.tied_embeddings
    held = [(name, tuple(b.shape)) for name, b in model.named_buffers()]
    assert held == [(row.name, row.shape) for row in buffers(spec)]
    norms = [row.name for row in parameters(spec) if row.init_mean == 1.0]
    assert norms == [name for name, _ in got if "norm" in name]
    assert [row.name for row in parameters(spec) if row.is_bias] == [n for n, _ in got if n.endswith("bias")]


def test_presets_of_both_kinds_exist() -> None:
    assert len(PLAIN) >= 5
    assert len(BEYOND) >= 1


@pytest.mark.parametrize("name", BEYOND)
def test_presets_that_cannot_be_trained_are_refused(name: str) -> None:
    spec = models.preset(name)
    with pytest.raises(ModelError, match=beyond_plain_decoder(spec)[0].split("(")[0]):
        Decoder(spec)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"norm": "layer"}, "layer norm"),
        ({"position_table": 64}, "learned positions"),
        ({"head_bias": True}, "bias on the head"),
        ({"features": ("soft-capped logits",)}, "soft-capped logits"),
        ({"blocks": (BlockSpec(attention=ATTENTION.replace(sinks=True), mlp=MLPSpec(ffn=9)),)}, "sinks"),
        ({"blocks": (BlockSpec(attention=ATTENTION.replace(rope_dim=2), mlp=MLPSpec(ffn=9)),)}, "rotation"),
        ({"blocks": (BlockSpec(attention=ATTENTION, mlp=MLPSpec(ffn=9), norms="post"),)}, "norms placed 'post'"),
        ({"blocks": (BlockSpec(attention=ATTENTION, mlp=MoESpec(experts=4, top_k=2, ffn=9, bias=True)),)}, "biases in"),
        (
            {
                "blocks": (
                    BlockSpec(
                        attention=MLASpec(heads=2, kv_rank=4, nope_dim=4, rope_dim=2, value_dim=7),
                        mlp=MLPSpec(ffn=9),
                    ),
                )
            },
            "values wider than keys",
        ),
    ],
)  # fmt: skip
def test_what_it_does_not_compute_is_refused(change: dict[str, object], word: str) -> None:
    with pytest.raises(ModelError, match=word):
        Decoder(OWN["everything"].replace(**change))


def test_parts_one_after_another_compute_the_whole() -> None:
    """Three stages with some parts taken out, as the pipeline makes them; layers keep their names."""
    torch.manual_seed(0)
    spec = spec_of(*[BlockSpec(attention=EVERYTHING, mlp=MLPSpec(ffn=9))] * 4)
    whole = Decoder(spec).double()
    tokens, positions = torch.randint(31, (2, 7)), torch.arange(7)[None]
    x = tokens
    for kept in (["0"], ["1", "2"], ["3"]):
        part = Decoder(spec).double()
        part.load_state_dict(whole.state_dict())
        for name in set(part.layers) - set(kept):
            del part.layers[name]
        if kept != ["0"]:
            part.embedding = None
        if kept != ["3"]:
            part.norm = part.head = None
        assert {name for name, _ in part.named_parameters()} <= {name for name, _ in whole.named_parameters()}
        x = part(x, positions)
    torch.testing.assert_close(x, whole(tokens, positions), rtol=1e-12, atol=1e-12)


def test_positions_shared_by_all_rows_or_given_for_each() -> None:
    torch.manual_seed(0)
    model = Decoder(OWN["unlike layers"]).double()
    tokens, positions = torch.randint(31, (3, 6)), torch.arange(6)
    shared = model(tokens, positions[None])
    torch.testing.assert_close(model(tokens, positions.expand(3, -1)), shared, rtol=1e-12, atol=1e-12)
    moved = model(tokens, positions + torch.tensor([[0], [5], [0]]))
    torch.testing.assert_close(moved, shared, rtol=1e-9, atol=1e-9)  # rotary scores see distances only
    assert not torch.allclose(model(tokens, positions[None] * 2), shared)


def test_a_token_does_not_depend_on_later_ones() -> None:
    torch.manual_seed(0)
    model = Decoder(OWN["everything"]).double()
    tokens, positions = torch.randint(31, (1, 8)), torch.arange(8)[None]
    changed = tokens.clone()
    changed[0, 5] = (changed[0, 5] + 1) % 31
    difference = (model(tokens, positions) - model(changed, positions)).abs().amax(-1)[0]
    assert (difference[:5] == 0).all()
    assert (difference[5:] > 0).all()


def test_it_is_a_plain_module() -> None:
    """Nothing of torch.distributed: it runs without a process group, and can be copied and saved."""
    model = Decoder(OWN["everything"])
    assert isinstance(model, nn.Module)
    assert not torch.distributed.is_initialized()
    again = Decoder(OWN["everything"])
    again.load_state_dict(model.state_dict())
    tokens, positions = torch.arange(6)[None], torch.arange(6)[None]
    assert torch.equal(again(tokens, positions), model(tokens, positions))

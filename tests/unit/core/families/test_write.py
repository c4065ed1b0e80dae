"""Configs made from a spec: read back they give the same model, whichever family says it."""

from __future__ import annotations

import json

import pytest

from fivefold.catalog import models
from fivefold.core.families.write import WRITABLE, difference, to_config
from fivefold.core.model_spec import ModelSpec, beyond_plain_decoder
from fivefold.errors import ModelError

PLAIN = [name for name in models.names() if not beyond_plain_decoder(models.preset(name))]


DENSE = [name for name in PLAIN if models.preset(name).blocks[0].mlp.kind == "dense"]


@pytest.mark.parametrize("name", [name for name in DENSE if name != "tiny-uneven"])
def test_every_preset_that_can_be_run_can_be_written(name: str) -> None:
    spec = models.preset(name)
    config = json.loads(json.dumps(to_config(spec), allow_nan=False))
    read = ModelSpec.from_config(config, name=name)
    assert read.replace(notes=()) == spec.replace(notes=(), family=read.family)
    assert read.family == spec.family or spec.family not in WRITABLE


def test_the_difference_is_named() -> None:
    spec = models.preset("llama-2-7b")
    first, rest = spec.blocks[0], spec.blocks[1:]
    changed = {
        "norm_eps is 1e-05, would be 0.001": spec.replace(norm_eps=1e-3),
        "32 layers, would be 31": spec.replace(blocks=rest),
        "window of layer 31 is None, would be 3": spec.replace(
            blocks=(*rest, first.replace(attention=first.attention.replace(window=3)))
        ),
        "activation of layer 0 is silu, would be gelu": spec.replace(
            blocks=(first.replace(mlp=first.mlp.replace(activation="gelu")), *rest)
        ),
        "norms of layer 0 are pre, would be post": spec.replace(blocks=(first.replace(norms="post"), *rest)),
    }
    assert {difference(spec, other): other for other in changed.values()} == changed
    assert difference(spec, spec.replace(name="x", notes=("y",), family="mistral")) is None


def test_what_cannot_be_run_is_not_written() -> None:
    with pytest.raises(ModelError, match="gpt2 cannot be run yet"):
        to_config(models.preset("gpt2"))

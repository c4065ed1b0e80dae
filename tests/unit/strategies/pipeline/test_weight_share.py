"""What zero bubble puts off is a fair part of backward: the gradients of all linear maps."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from fivefold.catalog.models import preset
from fivefold.core.layout import Layout
from fivefold.nn.decoder import Decoder
from fivefold.runtime.deferred import DeferredGradients
from fivefold.runtime.device import Device
from fivefold.runtime.mesh import Mesh
from fivefold.strategies.tensor import apply as tensor


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-uneven", "tiny-qwen2"])
def test_at_least_a_quarter_of_the_backward_flops_is_in_w(name: str) -> None:
    spec, length = preset(name), 128
    model, deferred = Decoder(spec), DeferredGradients()
    tensor.apply(model, Mesh(Layout(), 0, Device(torch.device("cpu"))), spec.vocab, deferred=deferred)
    tokens = torch.arange(2 * length).view(2, length) % spec.vocab
    logits = model(tokens, torch.arange(length)[None])
    with FlopCounterMode(display=False) as backward, deferred.collect("w"):
        logits.sum().backward()
    with FlopCounterMode(display=False) as weights:
        deferred.run("w")
    share = weights.get_total_flops() / (weights.get_total_flops() + backward.get_total_flops())
    assert 0.25 <= share <= 0.5, share
    assert all(p.grad is not None for p in model.parameters()), "none is forgotten"

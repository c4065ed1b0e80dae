"""Recompute acts on a finished model: regions of its layers keep only their inputs for backward."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from fivefold.core.model_spec import ModelSpec
from fivefold.core.recompute import Recompute, Region
from fivefold.nn.roles import DECODER_ROLES, modules_with_role
from fivefold.runtime.recompute import recomputed

METHODS: Mapping[Region, str] = {
    "layer": "forward",
    "attention": "attend",
    "mlp": "feed",
    "moe": "feed",
}
"""Region -> what of a decoder layer computes it. The layer's own hooks stay outside: they run once."""


def apply(
    model: nn.Module, spec: ModelSpec, recompute: Recompute, roles: Mapping[str, str] = DECODER_ROLES
) -> None:
    """Let the layers of this stage compute their regions again. Where none is recomputed nothing is touched."""
    for name, layer in modules_with_role(model, "layer", roles):
        index = int(name.rpartition(".")[2])
        for region in recompute.of(index, spec.blocks[index]):
            method = METHODS[region]
            setattr(layer, method, recomputed(getattr(layer, method)))

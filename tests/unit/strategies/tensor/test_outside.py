"""What tensor parallelism does to single modules that are not ours."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from fivefold.errors import ModelError
from fivefold.strategies.tensor import outside


@pytest.mark.parametrize("shape", [(8, 6), (1, 8, 6), (3, 8, 6)])
def test_positions_are_cut_by_tokens_with_and_without_a_dim_of_sequences(shape: tuple[int, ...]) -> None:
    out = torch.arange(torch.Size(shape).numel()).view(shape)
    cut: Any = SimpleNamespace(axis=SimpleNamespace(degree=2, index=1))
    assert torch.equal(outside._own_places(cut, nn.Module(), (), out), out[..., 4:, :])


def test_heads_counted_from_the_start_are_named() -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x.view(2, 3, 4)

    whole, half = torch.zeros(2, 12), torch.zeros(2, 6)
    assert outside._with_fewer_features(forward, "h.0.attn", 2, whole).shape == (2, 3, 4)
    with pytest.raises(ModelError, match=r"h\.0\.attn: shape '\[2, 3, 4\]' .* under tp2 .* \(-1\)"):
        outside._with_fewer_features(forward, "h.0.attn", 2, half)
    with pytest.raises(RuntimeError, match="another"):
        outside._with_fewer_features(raising, "h.0.attn", 2, half)


def raising(x: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("another fault")

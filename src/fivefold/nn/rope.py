"""Rotary position embedding (Su et al. 2021, eq. 34; rotate-half order as in Llama), with Llama-3 scaling."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from fivefold.core.model_spec import ModelSpec, RopeScaling, plain_parts
from fivefold.errors import ModelError, nearest_numbers


class Rope(nn.Module):
    """Cosines and sines of the rotary angles, as `rotate` takes them.

    Shapes: positions [B or 1, S] (int) -> cos, sin, each [B or 1, S, 1, H], in at least float32; the first half of
            the sines is negated.
    Angles are computed in the dtype that is asked for, so that float64 stays float64 throughout.
    Raises: ModelError where heads differ in size between layers, or their size is odd.
    """

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.head_dim = _head_dim(spec)
        self.theta = spec.rope_theta
        self.scaling = spec.rope_scaling
        self._frequencies: dict[tuple[torch.dtype, torch.device], Tensor] = {}

    def forward(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        dtype = torch.promote_types(dtype, torch.float32)
        key = (dtype, positions.device)
        if key not in self._frequencies:
            frequencies = inverse_frequencies(self.head_dim, self.theta, self.scaling)
            # cos(-a) = cos(a) and sin(-a) = -sin(a): negated frequencies give the signs that a rotation needs.
            signed = torch.cat((-frequencies, frequencies))
            self._frequencies[key] = signed.to(device=positions.device, dtype=dtype)
        angles = positions[:, :, None, None].to(dtype) * self._frequencies[key]
        return angles.cos(), angles.sin()


def _head_dim(spec: ModelSpec) -> int:
    sizes = sorted({plain_parts(block)[0].head_dim for block in dict.fromkeys(spec.blocks)})
    if len(sizes) > 1:
        raise ModelError(
            f"{spec.name}: heads of sizes {sizes} in different layers; one table of angles needs one size"
        )
    if sizes[0] % 2:
        raise ModelError(
            f"{spec.name}: a head of {sizes[0]} dims cannot be rotated in pairs; "
            f"nearest: {nearest_numbers(sizes[0], range(2, sizes[0] + 2, 2))}"
        )
    return sizes[0]


def inverse_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None) -> Tensor:
    """Inverse frequencies [H/2] in float64.

    Formula: f_i = theta^(-2i/H). With scaling, waves longer than original/low_freq are divided by `factor`, waves
             shorter than original/high_freq are kept, and those between are blended linearly.
    Source:  Su et al. 2021, section 3.2.2; Llama 3.1 reference code (`apply_scaling`).
    """
    frequencies = theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    if scaling is None:
        return frequencies
    waves = 2 * math.pi / frequencies
    turns = scaling.original_max_positions / waves
    smooth = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    smooth = smooth.clamp(0.0, 1.0)
    return (1 - smooth) * frequencies / scaling.factor + smooth * frequencies


def rotate(x_BSNH: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each head by its position's angles; result in x's dtype.

    Formula: with x = (a, b), both halves of a head: (a cos - b sin, b cos + a sin).
    """
    swapped = x_BSNH.roll(x_BSNH.shape[-1] // 2, dims=-1)
    return torch.addcmul(x_BSNH * cos, swapped, sin).to(x_BSNH.dtype)

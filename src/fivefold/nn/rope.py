"""Rotary position embedding (Su et al. 2021, eq. 34; rotate-half order as in Llama), Llama-3 and YaRN scaling."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from fivefold.core.model_spec import Attention, AttentionSpec, Llama3Scaling, MLASpec, ModelSpec, YarnScaling
from fivefold.errors import ModelError, nearest_numbers


class Rope(nn.Module):
    """Cosines and sines of the rotary angles, as `rotate` takes them.

    Shapes: positions [B or 1, S] (int) -> cos, sin, each [B or 1, S, 1, H], in at least float32; the first half of
            the sines is negated. Under YaRN both are multiplied by its amplitude.
    Angles are computed in the dtype that is asked for, so that float64 stays float64 throughout.
    Raises: ModelError where heads differ in size between layers, or their size is odd.
    """

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.head_dim = _head_dim(spec)
        self.theta = spec.rope_theta
        self.scaling = spec.rope_scaling
        self.amplitude = self.scaling.amplitude if isinstance(self.scaling, YarnScaling) else 1.0
        self._frequencies: dict[tuple[torch.dtype, torch.device], Tensor] = {}

    def forward(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        dtype = torch.promote_types(dtype, torch.float32)
        key = (dtype, positions.device)
        if key not in self._frequencies:
            frequencies = inverse_frequencies(self.head_dim, self.theta, self.scaling)
            # cos(-a) = cos(a) and sin(-a) = -sin(a): negated frequencies give the signs that a rotation needs.
            signed = torch.cat((-frequencies, frequencies))
            self._frequencies[key] = signed.to(device=positions.device, dtype=dtype)
        angles = positions[..., None, None] * self._frequencies[key]
        cos, sin = angles.cos(), angles.sin()
        return (cos, sin) if self.amplitude == 1.0 else (cos * self.amplitude, sin * self.amplitude)


def _head_dim(spec: ModelSpec) -> int:
    sizes = sorted({_rotated(block.attention) for block in dict.fromkeys(spec.blocks)})
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


def _rotated(attention: Attention) -> int:
    """How many dims of a head rotate, in a model that the decoder computes."""
    assert isinstance(attention, AttentionSpec | MLASpec)
    return attention.head_dim if isinstance(attention, AttentionSpec) else attention.rope_dim


def inverse_frequencies(head_dim: int, theta: float, scaling: Llama3Scaling | YarnScaling | None) -> Tensor:
    """Inverse frequencies [H/2] in float64.

    Formula: f_i = theta^(-2i/H); with scaling, k_i f_i + (1 - k_i) f_i / factor, where k_i is how much of the
             frequency is kept: from 1 for short waves to 0 for long ones.
    Source:  Su et al. 2021, section 3.2.2; for k, `_kept_by_llama3` and `_kept_by_yarn`.
    """
    frequencies = theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    if scaling is None:
        return frequencies
    if isinstance(scaling, YarnScaling):
        kept = _kept_by_yarn(head_dim, theta, scaling)
    else:
        kept = _kept_by_llama3(frequencies, scaling)
    return (1 - kept) * frequencies / scaling.factor + kept * frequencies


def _kept_by_llama3(frequencies: Tensor, scaling: Llama3Scaling) -> Tensor:
    """Linear in the turns within the original positions: 0 at low_freq_factor turns, 1 at high_freq_factor.

    Source: Llama 3.1 reference code (`apply_scaling`).
    """
    turns = scaling.original_max_positions * frequencies / (2 * math.pi)
    kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    return kept.clamp(0.0, 1.0)


def _kept_by_yarn(head_dim: int, theta: float, scaling: YarnScaling) -> Tensor:
    """Linear in the index i: 1 up to the pair that turns beta_fast times, 0 from the one that turns beta_slow times.

    Formula: pair i turns n times within L positions at i = H ln(L / (2 pi n)) / (2 ln theta).
    Source:  Peng et al. 2023, equations 17 to 20, and their code, where the ramp runs over i rather than turns; the
             bound H - 1 (not H/2 - 1) and the 0.001 between equal ends are the code's.
    """

    def pair_of(turns: float) -> float:
        return (
            head_dim
            * math.log(scaling.original_max_positions / (2 * math.pi * turns))
            / (2 * math.log(theta))
        )

    first, last = pair_of(scaling.beta_fast), pair_of(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    if first == last:
        last += 0.001
    ramp = (torch.arange(head_dim // 2, dtype=torch.float64) - first) / (last - first)
    return 1 - ramp.clamp(0.0, 1.0)


def rotate(x_BSNH: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each head by its position's angles; result in x's dtype.

    Formula: with x = (a, b), both halves of a head: (a cos - b sin, b cos + a sin).
    """
    swapped = x_BSNH.roll(x_BSNH.shape[-1] // 2, dims=-1)
    return torch.addcmul(x_BSNH * cos, swapped, sin).to(x_BSNH.dtype)

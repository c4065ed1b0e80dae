"""The rotary embedding against complex numbers and against Llama 3's own rule for scaled frequencies."""

from __future__ import annotations

import cmath
import math

import pytest
import torch

from fivefold.core.model_spec import AttentionSpec, BlockSpec, Llama3Scaling, MLPSpec, ModelSpec
from fivefold.errors import ModelError
from fivefold.nn.rope import Rope, inverse_frequencies, rotate

LLAMA_3 = Llama3Scaling(factor=8, low_freq_factor=1, high_freq_factor=4, original_max_positions=8192)


def spec(*head_dims: int, theta: float = 10_000.0, scaling: Llama3Scaling | None = None) -> ModelSpec:
    blocks = tuple(
        BlockSpec(attention=AttentionSpec(heads=2, kv_heads=1, head_dim=size), mlp=MLPSpec(ffn=8))
        for size in head_dims
    )
    return ModelSpec(name="tiny", hidden=16, vocab=7, blocks=blocks, rope_theta=theta, rope_scaling=scaling)


def llama_3_frequency(frequency: float) -> float:
    """One frequency, case by case, after `apply_scaling` of Meta's Llama 3.1 code."""
    wave = 2 * math.pi / frequency
    if wave < 8192 / 4:
        return frequency
    if wave > 8192 / 1:
        return frequency / 8
    smooth = (8192 / wave - 1) / (4 - 1)
    return (1 - smooth) * frequency / 8 + smooth * frequency


@pytest.mark.parametrize(("head_dim", "theta"), [(2, 10_000.0), (16, 10_000.0), (10, 500.0), (64, 1e6)])
@pytest.mark.parametrize("scaled", [False, True])
def test_rotation_is_multiplication_by_a_unit_complex_number(
    head_dim: int, theta: float, scaled: bool
) -> None:
    """Pair (x_i, x_{i+H/2}) is the complex number x_i + i x_{i+H/2}; position p multiplies it by exp(i p f_i)."""
    positions = torch.tensor([[0, 1, 2, 3], [7, 100, 5000, 131071]])
    half = head_dim // 2
    x = torch.randn(2, 4, 3, head_dim, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    rope = Rope(spec(head_dim, theta=theta, scaling=LLAMA_3 if scaled else None))
    out = rotate(x, *rope(positions, torch.float64))
    for b, s, n, i in [
        (b, s, n, i) for b in range(2) for s in range(4) for n in range(3) for i in range(half)
    ]:
        frequency = 1.0 / theta ** (2 * i / head_dim)
        angle = positions[b, s].item() * (llama_3_frequency(frequency) if scaled else frequency)
        want = complex(x[b, s, n, i], x[b, s, n, i + half]) * cmath.exp(1j * angle)
        assert abs(complex(out[b, s, n, i], out[b, s, n, i + half]) - want) < 1e-10


def test_scaling_has_its_three_regimes() -> None:
    """At Llama 3.1's sizes: kept, blended and divided frequencies all occur."""
    plain, scaled = inverse_frequencies(128, 500_000.0, None), inverse_frequencies(128, 500_000.0, LLAMA_3)
    ratio = (plain / scaled).tolist()
    assert sum(r == 1 for r in ratio) > 10
    assert sum(1 < r < 7.999 for r in ratio) > 3
    assert sum(abs(r - 8) < 1e-12 for r in ratio) > 10
    want = [llama_3_frequency(f) for f in plain.tolist()]
    torch.testing.assert_close(scaled, torch.tensor(want, dtype=torch.float64), rtol=1e-13, atol=0)


def test_scores_depend_on_the_distance_only() -> None:
    rope = Rope(spec(8))
    q, k = torch.randn(2, 1, 1, 1, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def score(i: int, j: int) -> float:
        at = [rope(torch.tensor([[p]]), torch.float64) for p in (i, j)]
        return float((rotate(q, *at[0]) * rotate(k, *at[1])).sum())

    assert score(3, 1) == pytest.approx(score(1002, 1000), rel=1e-9)
    assert score(3, 1) != pytest.approx(score(3, 2), rel=1e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_precision(dtype: torch.dtype) -> None:
    """The result has x's dtype; angles have at least float32: at position 4000, bfloat16 angles would be off by 8."""
    rope, positions = Rope(spec(16)), torch.tensor([[4000]])
    cos, sin = rope(positions, dtype)
    assert cos.dtype == sin.dtype == torch.promote_types(dtype, torch.float32)
    x = torch.randn(1, 1, 1, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).to(dtype)
    out = rotate(x, cos, sin)
    assert out.dtype == dtype
    exact = rotate(x.double(), *rope(positions, torch.float64))
    bound = {torch.bfloat16: 1e-2, torch.float32: 1e-3, torch.float64: 0.0}[dtype]
    assert float((out.double() - exact).abs().max()) <= bound


def test_gradient() -> None:
    table = Rope(spec(6))(torch.tensor([[5, 9]]), torch.float64)
    x = torch.randn(2, 2, 3, 6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: rotate(x, *table), (x,))


def test_heads_that_cannot_be_rotated() -> None:
    with pytest.raises(ModelError, match=r"head of 5 dims cannot be rotated in pairs; nearest: 4 or 6"):
        Rope(spec(5))
    with pytest.raises(ModelError, match=r"sizes \[6, 8\]"):
        Rope(spec(8, 6))

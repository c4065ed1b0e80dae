"""Norm, projections and loss against their formulas."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from fivefold.core.model_spec import MLPSpec
from fivefold.errors import ModelError
from fivefold.nn.layers import Projections, RMSNorm, TokenLoss
from fivefold.nn.mlp import ACTIVATIONS, MLP


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape", [(7,), (2, 3, 8), (2, 3, 4, 6)])
def test_norm_and_its_gradients(shape: tuple[int, ...]) -> None:
    norm = RMSNorm(shape[-1], 1e-3).double()
    norm.weight.data = 1 + random(shape[-1], seed=1)
    x = random(*shape).requires_grad_()
    want = x / (x.pow(2).mean(-1, keepdim=True) + 1e-3).sqrt() * norm.weight
    torch.testing.assert_close(norm(x), want, rtol=1e-13, atol=1e-13)
    assert torch.autograd.gradcheck(lambda x, _: norm(x), (x, norm.weight))


def test_norm_of_a_view_that_is_not_contiguous() -> None:
    norm, x = RMSNorm(6, 1e-5).double(), random(2, 6, 3).transpose(1, 2).requires_grad_()
    torch.testing.assert_close(norm(x), F.rms_norm(x, (6,), norm.weight, 1e-5), rtol=1e-13, atol=1e-13)
    assert torch.autograd.gradcheck(norm, (x,))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norm_in_low_precision_rounds_once(dtype: torch.dtype) -> None:
    """Sums are in float32: with 4096 ones and bfloat16 sums the mean would be wrong by a factor."""
    norm = RMSNorm(4096, 1e-6).to(dtype)
    norm.weight.data = (1 + 0.1 * random(4096)).to(dtype)
    x = (3 + random(2, 4096, seed=1)).to(dtype).requires_grad_()
    grad = random(2, 4096, seed=2).to(dtype)
    norm(x).backward(grad)
    wide = x.detach().double().requires_grad_()
    weight = norm.weight.detach().double().requires_grad_()
    want = F.rms_norm(wide, (4096,), weight, 1e-6)
    want.backward(grad.double())
    assert x.grad is not None
    assert norm.weight.grad is not None
    for got, exact in ((norm(x), want), (x.grad, wide.grad), (norm.weight.grad, weight.grad)):
        assert got.dtype == dtype
        assert exact is not None
        assert (got.double() - exact).abs().max() <= 2 * torch.finfo(dtype).eps * exact.abs().max()


def test_projections_are_separate_linears() -> None:
    projections = Projections(5, {"q": 4, "k": 2}, bias=True).double()
    assert [name for name, _ in projections.named_parameters()] == [
        "q.weight",
        "q.bias",
        "k.weight",
        "k.bias",
    ]
    x = random(2, 3, 5)
    q, k = projections(x)
    assert torch.equal(q, F.linear(x, projections.q.weight, projections.q.bias))  # type: ignore[arg-type, union-attr]
    assert torch.equal(k, F.linear(x, projections.k.weight, projections.k.bias))  # type: ignore[arg-type, union-attr]


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_mlp(activation: str, gated: bool) -> None:
    mlp = MLP(5, MLPSpec(ffn=7, gated=gated, activation=activation, bias=True)).double()
    w = dict(mlp.named_parameters())
    x = random(2, 3, 5)

    def act(t: torch.Tensor) -> torch.Tensor:
        inner = math.sqrt(2 / math.pi) * (t + 0.044715 * t**3)
        return {
            "silu": t / (1 + (-t).exp()),
            "relu": t * (t > 0),
            "gelu": t * 0.5 * (1 + torch.erf(t / math.sqrt(2))),
            "gelu_tanh": 0.5 * t * (1 + inner.tanh()),
        }[activation]

    up = x @ w["inputs.up.weight"].T + w["inputs.up.bias"]
    hidden = act(x @ w["inputs.gate.weight"].T + w["inputs.gate.bias"]) * up if gated else act(up)
    want = hidden @ w["down.weight"].T + w["down.bias"]
    torch.testing.assert_close(mlp(x), want, rtol=1e-12, atol=1e-12)


def test_unknown_activation() -> None:
    with pytest.raises(ModelError, match=r"'sillu' is not supported \(did you mean 'silu'\?\)"):
        MLP(5, MLPSpec(ffn=7, activation="sillu"))


def test_loss_is_the_sum_over_counted_tokens() -> None:
    logits, labels = random(2, 4, 9).requires_grad_(), torch.tensor([[0, 8, 3, 3], [1, 1, 1, 1]])
    mask = torch.tensor([[True, False, True, True], [False, False, False, True]])
    loss = TokenLoss()(logits, labels, mask)
    want = sum(
        math.log(sum(math.exp(z) for z in logits[b, s].tolist())) - float(logits[b, s, labels[b, s]].detach())
        for b, s in mask.nonzero().tolist()
    )
    assert float(loss.detach()) == pytest.approx(want, rel=1e-12)
    loss.backward()
    assert logits.grad is not None
    assert (logits.grad[~mask] == 0).all()
    assert (logits.grad[mask] != 0).all()


def test_loss_of_no_token_is_zero() -> None:
    logits = random(1, 3, 5).requires_grad_()
    nothing = torch.zeros(1, 3, dtype=torch.bool)
    loss = TokenLoss()(logits, torch.zeros(1, 3, dtype=torch.long), nothing)
    loss.backward()
    assert float(loss.detach()) == 0.0
    assert logits.grad is not None
    assert (logits.grad == 0).all()


def test_loss_is_at_least_float32() -> None:
    logits = random(1, 3, 5).to(torch.bfloat16)
    mask = torch.ones(1, 3, dtype=torch.bool)
    loss = TokenLoss()(logits, torch.zeros(1, 3, dtype=torch.long), mask)
    assert loss.dtype == torch.float32
    want = F.cross_entropy(logits.double()[0], torch.zeros(3, dtype=torch.long), reduction="sum")
    assert float(loss) == pytest.approx(float(want), rel=1e-6)

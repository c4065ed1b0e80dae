"""Experts that are not ours: what they are called with, and a rank whose experts nobody chose.

T tokens, K choices of a token, E experts, D hidden, F width of an expert.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fivefold.errors import ModelError
from fivefold.nn.moe import NOWHERE, chosen
from fivefold.strategies.expert import dispatch, outside

T, K, E, D, FFN = 5, 2, 4, 6, 8


class Pair:
    """An axis of two ranks, of which this one is the second and gets nothing, or as much as it sends."""

    degree, index = 2, 1

    def __init__(self, comes: bool) -> None:
        self.comes = comes

    def exchange(self, x: Tensor, sends: Any, receives: Any) -> Tensor:
        if x.dtype == torch.int64:  # counts of the experts here
            return torch.cat((x[E // 2 :], x[E // 2 :])) * self.comes
        return x.new_ones(sum(receives), D) * x.sum()


class OwnExperts(nn.Module):
    """As Mixtral's were once: three stacks, the one that is read last is named in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = E
        self.w1, self.w2, self.w3 = (
            nn.Parameter(torch.randn(E, *shape)) for shape in ((FFN, D), (D, FFN), (FFN, D))
        )

    def forward(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(hidden)
        for expert in chosen.unique().tolist():
            token, k = torch.where(chosen == expert)
            inner = F.silu(hidden[token] @ self.w1[expert].t()) * (hidden[token] @ self.w3[expert].t())
            out = out.index_add(0, token, (inner @ self.w2[expert].t()) * weights[token, k, None])
        return out


def dispatching(comes: bool) -> OwnExperts:
    """The experts of the second of two ranks."""
    module = OwnExperts()
    axis = Pair(comes)
    stage = nn.ModuleDict({"experts": module})
    stage.roles = {"experts": "experts"}  # type: ignore[assignment]
    outside.apply(stage, SimpleNamespace(axis=lambda name: axis))  # type: ignore[arg-type]
    for name in ("w1", "w2", "w3"):
        setattr(module, name, nn.Parameter(getattr(module, name).detach()[E // 2 :]))
    return module


def run(module: OwnExperts) -> tuple[list[str], Tensor]:
    """The order in which the weights get their gradients, and that of the tokens."""
    order: list[str] = []
    for name, parameter in module.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: order.append(name))
    x_TD = torch.randn(T, D, requires_grad=True)
    experts_TK = torch.tensor([[2, 3], [3, NOWHERE], [0, 2], [1, 0], [2, 1]])
    module(weights=torch.rand(T, K), hidden=x_TD, chosen=experts_TK).sum().backward()
    assert x_TD.grad is not None
    return order, x_TD.grad


@pytest.fixture(autouse=True)
def _without_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exchanges are differentiable, and do what the pretended axis does."""
    monkeypatch.setattr(
        dispatch, "exchange", lambda x, axis, sends, receives: axis.exchange(x, sends, receives)
    )


def test_gradients_come_in_the_same_order_where_nobody_chose() -> None:
    """Buckets of gradients are summed as they fill: another order would add up those of different weights."""
    some, none = dispatching(comes=True), dispatching(comes=False)
    order, _ = run(some)
    assert run(none)[0] == order == ["w2", "w3", "w1"]
    assert all((p.grad == 0).all() for p in none.parameters())
    assert all((p.grad != 0).any() for p in some.parameters())


def test_choices_of_any_integer_type() -> None:
    module, x_TD, weights_TK = dispatching(comes=True), torch.randn(T, D), torch.rand(T, K)
    experts_TK = torch.randint(E, (T, K))
    want = module(x_TD, experts_TK, weights_TK)
    for integer in (torch.int32, torch.uint8):
        given = experts_TK.to(integer)
        assert torch.equal(module(x_TD, given, weights_TK), want)
        for args, named in (((x_TD, given, weights_TK), {}), ((), {"weights": weights_TK, "chosen": given})):
            assert torch.equal(chosen(args, named), experts_TK)
    with pytest.raises(ModelError, match=r"without those that were chosen: a tensor \[T, K\] of torch.int64"):
        chosen((x_TD, x_TD > 0), {"weights": weights_TK})


def test_experts_that_cannot_be_called_so() -> None:
    module = dispatching(comes=True)
    with pytest.raises(
        ModelError, match=r"experts is called with 3 arguments \(Tensor, int, Tensor\); experts that"
    ):
        module(torch.zeros(1, D), 3, torch.zeros(1, 1))

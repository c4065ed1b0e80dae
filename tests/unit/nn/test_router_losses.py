"""Router losses against their equations, and that they enter the step once, at the same strength however it is cut."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fivefold.core.model_spec import MoESpec
from fivefold.core.router import RouterConfig
from fivefold.nn.moe import MoE, Routing
from fivefold.nn.router_losses import RouterLosses, attach_loss, load, updated_bias

D, S = 16, 6
TIGHT = {"rtol": 1e-12, "atol": 1e-13}
SPECS = {
    "softmax": MoESpec(experts=7, top_k=3, ffn=8),
    "sigmoid": MoESpec(experts=7, top_k=3, ffn=8, scoring="sigmoid", selection_bias=True),
}
VALID_BS = torch.arange(S) < torch.tensor([[S], [4], [0], [1]])


def made(kind: str) -> tuple[MoE, Tensor]:
    torch.manual_seed(1)
    moe = MoE(D, SPECS[kind]).double()
    with torch.no_grad():
        for parameter in moe.parameters():
            parameter.normal_(std=0.5)
    return moe, torch.randn(4, S, D, dtype=torch.float64)


def by_equation(kind: str, routing: Routing, balance: str, load_E: Tensor) -> tuple[Tensor, Tensor]:
    """Balance and z-loss of a global batch of these sequences, as the papers write them."""
    logits = routing.logits_TE.unflatten(0, (-1, S))
    scores = logits.softmax(-1) if kind == "softmax" else logits.sigmoid() / logits.sigmoid().sum(-1, True)
    K, E = 3, 7
    sequences, z = [], torch.zeros((), dtype=torch.float64)
    mean = torch.zeros((), dtype=torch.float64)
    for b, row in enumerate(routing.experts_TK.unflatten(0, (-1, S))):
        T = int(VALID_BS[b].sum())
        z = z + logits[b, :T].exp().sum(-1).log().pow(2).sum()
        mean = mean + (scores[b, :T] * load_E).sum()
        if T:
            f = torch.tensor(
                [E / (K * T) * (row[:T] == e).sum().item() for e in range(E)], dtype=torch.float64
            )
            sequences.append((f * scores[b, :T].mean(0)).sum())
    tokens = VALID_BS.sum()
    return (sum(sequences) / 4 if balance == "sequence" else mean / tokens), z / tokens  # type: ignore[return-value]


def run(
    moe: MoE, x: Tensor, config: RouterConfig, cut: int, load_E: Tensor
) -> tuple[Any, list[Tensor], Routing]:
    """Loss values and gradients when the batch comes in microbatches of `cut` sequences."""
    losses = moe.router.losses = RouterLosses(config)
    losses.per_sequence, losses.per_token, losses.load_E = 1 / 4, 1 / int(VALID_BS.sum()), load_E
    moe.zero_grad()
    for rows, valid in zip(x.split(cut), VALID_BS.split(cut)):
        moe(rows, valid).sum().backward()
    moe.router.losses = None
    gradients = [p.grad.clone() for p in moe.parameters() if p.grad is not None]
    return losses, gradients, moe.router(x, VALID_BS)


@pytest.mark.parametrize("kind", SPECS)
@pytest.mark.parametrize("balance", ["sequence", "batch"])
@pytest.mark.parametrize("cut", [4, 2, 1])
def test_values_and_gradients_are_those_of_the_equations(kind: str, balance: str, cut: int) -> None:
    moe, x = made(kind)
    load_E = torch.rand(7, dtype=torch.float64)
    config = RouterConfig(balance=balance, balance_coefficient=0.3, z_coefficient=0.05)  # type: ignore[arg-type]
    losses, gradients, routing = run(moe, x, config, cut, load_E)
    wanted = by_equation(kind, routing, balance, load_E)
    torch.testing.assert_close((losses.balance, losses.z), tuple(w.detach() for w in wanted), **TIGHT)
    moe.zero_grad()
    (moe(x, VALID_BS).sum() + 0.3 * wanted[0] + 0.05 * wanted[1]).backward()
    for mine, parameter in zip(gradients, moe.parameters(), strict=True):
        torch.testing.assert_close(mine, parameter.grad, **TIGHT)


def test_no_loss_leaves_everything_as_it_is() -> None:
    moe, x = made("softmax")
    _, off, _ = run(moe, x, RouterConfig(), 4, torch.ones(7))
    moe.zero_grad()
    moe(x, VALID_BS).sum().backward()
    assert all(torch.equal(a, p.grad) for a, p in zip(off, moe.parameters(), strict=True))  # type: ignore[arg-type]


def test_an_even_load_has_no_gradient_under_batch() -> None:
    """Before the first step nothing is known, and the sum of a token's scores is 1 whatever it chose."""
    moe, x = made("sigmoid")
    config = RouterConfig(balance="batch", balance_coefficient=10.0)
    losses, on, _ = run(moe, x, config, 4, torch.ones(7, dtype=torch.float64))
    _, off, _ = run(moe, x, RouterConfig(), 4, torch.ones(7))
    assert losses.balance == pytest.approx(1.0)
    for a, b in zip(on, off, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_counts_of_other_ranks_join_before_the_loss() -> None:
    """A sequence cut in two, each half with the counts of both: values and gradients add up to the whole."""
    moe, x = made("softmax")
    config = RouterConfig(balance_coefficient=1.0)
    whole, gradients, _ = run(moe, x, config, 4, torch.ones(7))
    halves = [moe.router(x[:, half], VALID_BS[:, half]) for half in (slice(0, 3), slice(3, S))]
    joined = sum(torch.cat((one.counts_BE, one.tokens_B[:, None]), 1) for one in halves)
    moe.zero_grad()
    losses = moe.router.losses = RouterLosses(config)
    losses.per_sequence, losses.join = 1 / 4, lambda _: joined  # type: ignore[assignment,return-value]
    for half in (slice(0, 3), slice(3, S)):
        moe(x[:, half], VALID_BS[:, half]).sum().backward()
    torch.testing.assert_close(losses.balance, whole.balance, **TIGHT)
    for mine, parameter in zip(gradients, moe.parameters(), strict=True):
        torch.testing.assert_close(mine, parameter.grad, **TIGHT)


def test_a_second_forward_is_not_counted() -> None:
    moe, x = made("softmax")
    losses = moe.router.losses = RouterLosses(RouterConfig(balance_coefficient=1.0, z_coefficient=1.0))
    moe(x)
    once = losses.balance, losses.z
    moe.router.first_time = False
    moe(x)
    assert (losses.balance, losses.z) == once
    losses.reset()
    assert (losses.balance, losses.z) == (0.0, 0.0)


def test_the_gradient_of_an_attached_loss_follows_its_scale() -> None:
    x, y = (torch.ones(2, requires_grad=True) for _ in range(2))
    out = attach_loss(x, (3 * y).sum(), torch.tensor(8.0))
    (5 * out).sum().backward()
    assert x.grad is not None
    assert y.grad is not None
    assert x.grad.tolist() == [5, 5]
    assert y.grad.tolist() == [24, 24]


def test_biases_move_against_the_load() -> None:
    bias = torch.tensor([0.5, 0.5, 0.5, 0.5], dtype=torch.float64)
    assert updated_bias(bias, torch.tensor([4, 0, 2, 2]), 0.1).tolist() == [0.4, 0.6, 0.5, 0.5]
    assert updated_bias(bias, torch.tensor([0, 0, 0, 0]), 0.1).tolist() == bias.tolist()
    huge = 2**40
    assert updated_bias(bias, torch.tensor([huge, huge, huge, huge + 1]), 0.1).tolist() == [
        0.6,
        0.6,
        0.6,
        0.4,
    ]


def test_load_is_one_where_it_is_even() -> None:
    assert load(torch.tensor([3, 3, 3]), torch.float64).tolist() == [1, 1, 1]
    assert load(torch.tensor([6, 0, 0]), torch.float64).tolist() == [3, 0, 0]
    assert load(torch.tensor([0, 0, 0]), torch.float64).tolist() == [0, 0, 0]

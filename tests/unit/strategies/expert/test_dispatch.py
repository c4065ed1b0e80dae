"""Dispatch on one rank against the experts that it stands for; which rows travel, on paper.

T tokens, K choices, E experts, D hidden.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fivefold.core.layout import Layout
from fivefold.core.model_spec import MoESpec
from fivefold.nn.moe import NOWHERE, Experts
from fivefold.runtime.deferred import DeferredGradients
from fivefold.strategies.expert import rules
from fivefold.strategies.expert.dispatch import Cut, DispatchedExperts, find_route, padded_route

T, K, E, D = 9, 2, 4, 6
ALONE: Any = SimpleNamespace(degree=1, all_gather=lambda x, dim: x, exchange=lambda x, sends, receives: x)


def choices() -> torch.Tensor:
    experts = torch.rand(T, E, generator=torch.Generator().manual_seed(5)).topk(K).indices
    experts[2] = NOWHERE
    experts[4, 1] = NOWHERE
    return experts


@pytest.mark.parametrize("collect", [False, True])
def test_one_rank_with_deferred_weights_is_the_plain_module(collect: bool) -> None:
    """Zero bubble puts it even where nothing is cut: the same output and gradients, now or later."""
    torch.manual_seed(0)
    plain = Experts(D, MoESpec(experts=E, top_k=K, ffn=5)).double()
    deferred = DeferredGradients()
    module = DispatchedExperts(plain, Cut(ALONE, ALONE, same_tokens=False, deferred=deferred))
    experts = choices()

    def gradients(run: Any) -> list[torch.Tensor]:
        torch.manual_seed(1)
        x = torch.randn(T, D, dtype=torch.float64, requires_grad=True)
        weights = torch.rand(T, K, dtype=torch.float64, requires_grad=True)
        plain.zero_grad()
        y = run(x, experts, weights)
        loss = (y * torch.linspace(-1, 1, T * D, dtype=torch.float64).view(T, D)).sum()
        if collect and run is module:
            with deferred.collect("j"):
                loss.backward()
            assert all(p.grad is None for p in plain.parameters())
            deferred.run("j")
        else:
            loss.backward()
        return [y.detach(), x.grad, weights.grad, *(p.grad for p in plain.parameters())]  # type: ignore[list-item]

    expected, found = gradients(plain), gradients(module)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-13)
    assert found[0][2].abs().max() == 0, "a token that goes nowhere"


def test_the_rows_that_leave() -> None:
    experts = choices()
    route = find_route(experts, E, ALONE)
    went = [(int(e), i // K) for i, e in enumerate(experts.flatten()) if e != NOWHERE]
    assert [(int(experts.flatten()[i]), int(i) // K) for i in route.order_R] == sorted(went)
    assert route.counts_E.tolist() == [sum(e == i for e, _ in went) for i in range(E)]
    assert route.sends == route.receives == [len(went)]


def test_padded_rows_have_places_of_their_own() -> None:
    """Two ranks of two experts: expert i has the rows i*8 .. i*8 + 7, filled from the front."""
    two: Any = SimpleNamespace(degree=2)
    route = padded_route(choices(), 2, two, rows=8)
    counts = find_route(choices(), E, ALONE).counts_E.tolist()
    assert route.sends == route.receives == [16, 16]
    assert route.slots_R is not None
    assert route.slots_R.tolist() == [8 * i + n for i, count in enumerate(counts) for n in range(count)]
    # What comes is, for each sender, expert 0 then expert 1; for the product all of expert 0 comes first.
    assert route.by_expert_R is not None
    assert route.by_expert_R.tolist() == [*range(8), *range(16, 24), *range(8, 16), *range(24, 32)]


def test_rows_of_a_rank_from_everyones_choices() -> None:
    """4 ranks: 0 and 1 hold experts 0 and 1, cut by etp; 2 and 3 the others. Rank r chose expert e r + 10 e times."""
    layout = Layout.parse("dp4 ep2 etp2")

    def counts(rank: int, layer: int, microbatch: int) -> list[int]:
        return [rank + 10 * e for e in range(4)]

    # Tokens of etp neighbours are gathered: 0 and 1 together chose (0+1) + 20 e, 2 and 3 together (2+3) + 20 e.
    assert rules.dispatched(layout, 0, 0, 0, counts) == rules.Rows(4 * 1 + 120, 2 * 1 + 20 + 2 * 5 + 20)
    assert rules.dispatched(layout, 1, 0, 0, counts) == rules.dispatched(layout, 0, 0, 0, counts)
    assert rules.dispatched(layout, 3, 0, 0, counts) == rules.Rows(4 * 5 + 120, 2 * 1 + 100 + 2 * 5 + 100)
    # Without sequence parallelism the tp ranks have the same tokens: each sends its own.
    alike = Layout.parse("dp2 tp2 nosp ep2 etp2")
    assert rules.dispatched(alike, 0, 0, 0, counts) == rules.Rows(60, 10 + 2 * 2 + 10)

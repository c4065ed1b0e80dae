"""Routing and experts against plain loops over tokens, in numbers that can be checked by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fivefold.core.model_spec import MoESpec
from fivefold.nn import grouped
from fivefold.nn.moe import NOWHERE, Experts, MoE, Router, sort_by_expert

D, F_ = 16, 24
SPECS = {
    "mixtral": MoESpec(experts=6, top_k=2, ffn=F_),
    "one expert per token": MoESpec(experts=5, top_k=1, ffn=F_),
    "qwen": MoESpec(experts=6, top_k=3, ffn=F_, norm_topk_prob=False, shared_ffn=20, shared_gate=True),
    "deepseek-v2": MoESpec(
        experts=8, top_k=3, ffn=F_, norm_topk_prob=False, routed_scaling=16.0, groups=4, topk_groups=2, shared_ffn=12
    ),
    "deepseek-v3": MoESpec(
        experts=8, top_k=3, ffn=F_, scoring="sigmoid", groups=4, topk_groups=2, group_score="best_two",
        routed_scaling=2.5, selection_bias=True, shared_ffn=12,
    ),
    "router bias": MoESpec(experts=4, top_k=2, ffn=F_, router_bias=True),
}  # fmt: skip


def made(name: str) -> MoE:
    torch.manual_seed(len(name))
    moe = MoE(D, SPECS[name]).double()
    with torch.no_grad():
        for parameter in moe.parameters():
            parameter.normal_(std=0.5)
        for buffer in moe.buffers():
            buffer.normal_(std=0.3)
    return moe


def by_hand(moe: MoE, x_BSD: Tensor, valid_BS: Tensor | None = None) -> Tensor:
    """One token and one expert at a time; experts are found by sorting, groups by listing them."""
    spec, out = moe.router.spec, torch.zeros_like(x_BSD)
    size = spec.experts // spec.groups
    for b in range(x_BSD.shape[0]):
        for s in range(x_BSD.shape[1]):
            x = x_BSD[b, s]
            shared = 0.0
            if moe.shared is not None:
                shared = moe.shared(x[None, None])[0, 0]
                shared = shared * torch.sigmoid(moe.shared_gate(x)) if moe.shared_gate is not None else shared
            out[b, s] += shared
            if valid_BS is not None and not valid_BS[b, s]:
                continue
            logits = moe.router.weight @ x + (0.0 if moe.router.bias is None else moe.router.bias)
            scores = (
                logits.exp() / logits.exp().sum() if spec.scoring == "softmax" else 1 / (1 + (-logits).exp())
            )
            chosen_by = (
                scores + (0.0 if moe.router.selection_bias is None else moe.router.selection_bias)
            ).tolist()
            groups = [list(range(g * size, (g + 1) * size)) for g in range(spec.groups)]
            number = 1 if spec.group_score == "best" else 2

            def worth(group: list[int], chosen_by: list[float] = chosen_by, number: int = number) -> float:
                return sum(sorted((chosen_by[e] for e in group), reverse=True)[:number])

            open_ = sorted(groups, key=worth, reverse=True)[: spec.topk_groups]
            best = sorted((e for group in open_ for e in group), key=lambda e: chosen_by[e], reverse=True)[
                : spec.top_k
            ]
            weights = [scores[e] for e in best]
            total = sum(weights) if spec.norm_topk_prob else 1.0
            for e, weight in zip(best, weights):
                up, gate = moe.experts.up[e] @ x, moe.experts.gate[e] @ x
                made_here = moe.experts.down[e] @ (gate * torch.sigmoid(gate) * up)
                out[b, s] += weight / total * spec.routed_scaling * made_here
    return out


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("padded", [False, True])
def test_output_and_every_gradient_are_those_of_a_loop(name: str, padded: bool) -> None:
    moe = made(name)
    x_BSD = torch.randn(2, 7, D, dtype=torch.float64, requires_grad=True)
    valid_BS = torch.arange(7) < torch.tensor([[5], [7]]) if padded else None
    weigh = torch.randn(2, 7, D, dtype=torch.float64)
    mine, theirs = moe(x_BSD, valid_BS), by_hand(moe, x_BSD, valid_BS)
    torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)
    inputs = [x_BSD, *moe.parameters()]
    for a, b in zip(
        torch.autograd.grad((mine * weigh).sum(), inputs),
        torch.autograd.grad((theirs * weigh).sum(), inputs, allow_unused=True, materialize_grads=True),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)
        assert a.is_contiguous()


def test_padding_is_routed_nowhere_and_counted_nowhere() -> None:
    router = made("mixtral").router
    x_BSD = torch.randn(3, 4, D, dtype=torch.float64)
    valid_BS = torch.tensor([[True] * 4, [True, False, True, False], [False] * 4])
    routing, all_of_them = router(x_BSD, valid_BS), router(x_BSD)
    hidden = ~valid_BS.flatten()
    assert (routing.experts_TK[hidden] == NOWHERE).all()
    assert (routing.weights_TK[hidden] == 0).all()
    assert torch.equal(routing.experts_TK[~hidden], all_of_them.experts_TK[~hidden])
    assert routing.counts_BE.sum(1).tolist() == [8, 4, 0]
    assert routing.tokens_B.tolist() == [4, 2, 0]
    assert all_of_them.counts_E.sum() == 3 * 4 * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", [(16, 24), (10, 14)], ids=["grouped kernel", "sizes it refuses"])
def test_grouped_products_against_a_float64_loop(dtype: torch.dtype, sizes: tuple[int, int]) -> None:
    """Also for an expert without rows, first, last and between."""
    generator = torch.Generator().manual_seed(3)
    counts = torch.tensor([0, 5, 0, 0, 7, 1, 0])

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype).requires_grad_()

    x, weight, grad = random(13, sizes[0]), random(7, sizes[1], sizes[0]), random(13, sizes[1]).detach()
    mine = torch.autograd.grad(grouped.grouped_matmul(x, weight, counts), (x, weight), grad)
    found = (grouped.grouped_matmul(x, weight, counts), *mine)
    wide = x.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    rows = wide[0].split(counts.tolist())
    y = torch.cat([part @ one.t() for part, one in zip(rows, wide[1])])
    exact = (y, *torch.autograd.grad(y, wide, grad.double()))
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 5e-2}[dtype]
    for a, b in zip(found, exact, strict=True):
        assert a.dtype == dtype
        assert a.is_contiguous()
        torch.testing.assert_close(a.double(), b, rtol=tolerance, atol=tolerance)
    assert (mine[1][counts == 0] == 0).all()


def test_float32_takes_the_grouped_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[torch.dtype] = []
    real = grouped.grouped_mm

    def watched(a: Tensor, b: Tensor, counts: Tensor) -> Tensor:
        calls.append(a.dtype)
        return real(a, b, counts)

    monkeypatch.setattr(grouped, "grouped_mm", watched)
    moe = made("mixtral")
    x = torch.randn(2, 5, D, dtype=torch.float64, requires_grad=True)
    exact = moe(x)
    assert calls == []
    single = moe.float()(x.detach().float().requires_grad_())
    single.sum().backward()
    assert calls == [torch.float32] * 9  # three products, each with two in its backward
    torch.testing.assert_close(single.double(), exact, rtol=1e-4, atol=1e-4)


def test_no_rows_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grouped, "grouped_mm", None)  # a kernel need not take an empty tensor
    experts = Experts(D, SPECS["mixtral"])
    x = torch.zeros(3, D, requires_grad=True)
    nowhere = torch.full((3, 2), NOWHERE)
    out = experts(x, nowhere, torch.zeros(3, 2))
    out.sum().backward()
    assert (out == 0).all()
    assert all(p.grad is not None and (p.grad == 0).all() for p in experts.parameters())


def test_rows_of_one_expert_keep_the_order_of_tokens() -> None:
    order, counts = sort_by_expert(torch.tensor([[2, 0], [0, NOWHERE], [2, 1]]), 4)
    assert order.tolist() == [1, 2, 5, 0, 4]
    assert counts.tolist() == [2, 1, 2, 0]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"groups": 4}, "6 experts are not 4 groups.*nearest legal number: 3 or 6"),
        ({"groups": 3, "topk_groups": 1, "top_k": 3}, "groups to choose from must be 2 to 3"),
        ({"groups": 2, "topk_groups": 3}, "groups to choose from must be 1 to 2"),
        ({"groups": 6, "topk_groups": 3, "group_score": "best_two"}, "no two best; at most 3 groups"),
    ],
)
def test_groups_that_cannot_be(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        SPECS["mixtral"].replace(**change)


def test_bfloat16_is_routed_in_float32() -> None:
    router = Router(D, SPECS["deepseek-v3"]).bfloat16()
    routing = router(torch.randn(1, 3, D).bfloat16())
    assert routing.weights_TK.dtype == routing.logits_TE.dtype == torch.float32
    logits = F.linear(torch.ones(1, D), router.weight.float())
    torch.testing.assert_close(router(torch.ones(1, 1, D).bfloat16()).logits_TE, logits)

"""Data parallelism alone: when it reduces, what it reduces, and that one rank pays nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fivefold.core.layout import Layout
from fivefold.core.sharding import ParameterRow
from fivefold.errors import ModelError
from fivefold.runtime.device import Device
from fivefold.runtime.ledger import Ledger
from fivefold.runtime.mesh import Mesh
from fivefold.strategies.data import rules
from fivefold.strategies.data.apply import Replicated

DEPTH, WIDTH, BATCH, LR = 6, 5, 3, 0.1
Pairs = list[tuple[ParameterRow, nn.Parameter]]


def model() -> tuple[nn.Sequential, Pairs]:
    """The same on every rank: linears with biases, and their rows in the order of the model."""
    torch.manual_seed(0)
    layers = [
        layer for _ in range(DEPTH) for layer in (nn.Linear(WIDTH, WIDTH, dtype=torch.float64), nn.Tanh())
    ]
    module = nn.Sequential(*layers)
    pairs = [(ParameterRow(name, "up", tuple(p.shape)), p) for name, p in module.named_parameters()]
    return module, pairs


def inputs(rank: int, step: int, microbatch: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + 10 * step + microbatch)
    return torch.randn(BATCH, WIDTH, generator=generator, dtype=torch.float64)


def replicated(mesh: Mesh, pairs: Pairs, bucket_bytes: int = 10**9) -> Replicated:
    def sgd(given: Pairs) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for _, p in given], lr=1.0, momentum=0.9)

    return Replicated({0: pairs}, mesh, sgd, bucket_bytes=bucket_bytes)


class AtTheEndOfBackward(torch.autograd.Function):
    """Identity; its backward is the last one to run, and calls back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, call: Callable[[], None]) -> Tensor:
        ctx.call = call
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        ctx.call()
        return grad, None


def one_process(ranks: int, steps: int, microbatches: int) -> tuple[list[list[Tensor]], list[Tensor]]:
    """Gradients of every step, and the final weights, of one process that sees all samples."""
    module, pairs = model()
    optimizer = torch.optim.SGD(module.parameters(), lr=LR, momentum=0.9)
    gradients = []
    for step in range(steps):
        for rank in range(ranks):
            for j in range(microbatches):
                module(inputs(rank, step, j)).sum().backward()
        gradients.append([p.grad.clone() for _, p in pairs if p.grad is not None])
        optimizer.step()
        optimizer.zero_grad()
    return gradients, [p.detach() for _, p in pairs]


def train(mesh: Mesh, watch: bool, bucket_bytes: int) -> dict[str, Any]:
    """Two steps of three microbatches; how many reductions had begun at which moment."""
    module, pairs = model()
    data = replicated(mesh, pairs, bucket_bytes)
    seen: dict[str, Any] = {"gradients": [], "before_last": [], "at_end_of_backward": [], "in_all": []}
    for step in range(2):
        with Ledger(mesh) as ledger:
            for j in range(3):
                x = inputs(mesh.rank, step, j).requires_grad_()
                last = j == 2
                if last:
                    seen["before_last"].append(len(ledger.order))
                    if watch:
                        data.watch(0)
                moment = (
                    (lambda: seen["at_end_of_backward"].append(len(ledger.order))) if last else (lambda: None)
                )
                mesh.phase = "backward"
                module(AtTheEndOfBackward.apply(x, moment)).sum().backward()
            mesh.phase = "reduce"
            data.reduce(0)
            data.wait()
        seen["in_all"].append(len(ledger.order))
        assert {(e.axis, e.op) for e in ledger.order} == {("data", "all_reduce")}
        seen["phases"] = {e.phase for e in ledger.order}
        seen["bytes"] = sorted(e.bytes for e in ledger.order)
        local = data.local_gradients()
        assert [row.name for row, _ in local] == [row.name for row, _ in pairs]
        seen["gradients"].append([gradient.clone() for _, gradient in local])
        data.step(LR)
    seen["weights"] = [p.detach() for _, p in pairs]
    seen["momentum"] = [data.state()[row.name]["momentum_buffer"].shape == p.shape for row, p in pairs]
    return seen


@pytest.mark.parametrize("watch", [True, False])
def test_two_steps_equal_one_process(on_mesh: Callable[..., Any], watch: bool) -> None:
    gradients, weights = one_process(2, steps=2, microbatches=3)
    _, pairs = model()
    parameter_bytes = sum(p.numel() * p.itemsize for _, p in pairs)
    for seen in on_mesh(train, "dp2", watch, 10**9):
        for got, expected in zip(seen["gradients"], gradients, strict=True):
            for a, b in zip(got, expected, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
        for a, b in zip(seen["weights"], weights, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
        assert seen["before_last"] == [0, 0], "microbatches accumulate without a word"
        assert sum(seen["bytes"]) == parameter_bytes, "each gradient is reduced once a step"
        assert len(seen["bytes"]) == len(rules.buckets([row for row, _ in pairs], Layout(dp=2), 10**9, 8))
        assert seen["phases"] == {"reduce"}
        assert all(seen["momentum"])
        if watch:
            assert all(n >= 3 for n in seen["at_end_of_backward"]), "most buckets travel before backward ends"
        else:
            assert seen["at_end_of_backward"] == [0, 0], "the schedule decides"


def test_small_buckets(on_mesh: Callable[..., Any]) -> None:
    """One bucket for each parameter: the same gradients."""
    gradients, _ = one_process(3, steps=2, microbatches=3)
    for seen in on_mesh(train, "dp3", True, 1):
        assert len(seen["bytes"]) == 2 * DEPTH
        for a, b in zip(seen["gradients"][1], gradients[1], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_one_data_rank_adds_no_hook_no_buffer_no_view() -> None:
    mesh = Mesh(Layout(), 0, Device(torch.device("cpu")))
    module, pairs = model()
    data = replicated(mesh, pairs)
    assert not any(data.buckets.values())
    assert all(not p._post_accumulate_grad_hooks and p.grad is None for _, p in pairs)
    data.watch(0)
    module(inputs(0, 0, 0)).sum().backward()
    with Ledger(mesh) as ledger:
        data.reduce(0)
        data.wait()
        assert [g for _, g in data.local_gradients()] == [p.grad for _, p in pairs]
    assert not ledger.events
    data.step(LR)
    assert all(p.grad is None for _, p in pairs), "gradients are let go of"


def test_a_parameter_without_gradient_is_named() -> None:
    _, pairs = model()
    data = replicated(Mesh(Layout(), 0, Device(torch.device("cpu"))), pairs)
    with pytest.raises(
        ModelError, match=r"0\.weight has no gradient: nothing that the loss depends on reads it"
    ):
        data.local_gradients()

"""Buckets are summed in the same order on every rank, in whatever order gradients come, and if some do not come."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fivefold.core.layout import Layout
from fivefold.core.optimizer import OptimizerConfig
from fivefold.core.sharding import ParameterRow, Role
from fivefold.engine.optimizer import make_optimizer
from fivefold.errors import ModelError
from fivefold.strategies.data import rules
from fivefold.strategies.data.replicated import Replicated
from fivefold.strategies.data.zero import Sharded, shard_optimizer

SIZES = [2, 4, 6, 8]
"""Of four parameters; in small buckets each has its own, the last one the first."""


class FakeAxis:
    """Two ranks, of which only this one is there; it writes down what is begun."""

    def __init__(self, begun: list[int]) -> None:
        self.degree, self.index, self.begun = 2, 0, begun

    def _handle(self, begun: int, result: Tensor) -> Any:
        self.begun.append(begun)
        return SimpleNamespace(wait=lambda: result)

    def all_reduce_start(self, x: Tensor) -> Any:
        return self._handle(x.numel(), x)

    def reduce_scatter_start(self, x: Tensor, dim: int) -> Any:
        return self._handle(x.numel(), x[: x.numel() // 2])


def made(
    text: str, bucket_bytes: int = 4, role: Role = "up"
) -> tuple[Replicated | Sharded, list[nn.Parameter], list[int]]:
    """Data parallelism over two ranks, its parameters, and the elements of each bucket that is begun."""
    layout, begun = Layout.parse(text), []
    axes = {2: FakeAxis(begun) if layout.dp == 2 else SimpleNamespace(degree=1), 1: SimpleNamespace(degree=1)}
    mesh: Any = SimpleNamespace(
        layout=layout, phase="backward", coordinate=layout.coordinate(0),
        axis=lambda name, size=2, across=False: axes[1 if across else size],
    )  # fmt: skip
    rows = [rules.place(ParameterRow(f"p{i}", role, (n,)), layout) for i, n in enumerate(SIZES)]
    parameters = [nn.Parameter(torch.ones(n)) for n in SIZES]
    make = OptimizerConfig(name="sgd")
    form = Replicated if layout.zero == 0 else shard_optimizer
    pairs = {0: list(zip(rows, parameters))}
    data = form(pairs, mesh, lambda pairs: make_optimizer(make, pairs), bucket_bytes=bucket_bytes)
    return data, parameters, begun


def backward(parameters: list[nn.Parameter], order: list[int]) -> None:
    for i in order:
        (parameters[i] * 3).sum().backward()


@pytest.mark.parametrize("text", ["dp2", "dp2 zero1"])
@pytest.mark.parametrize("order", [[3, 2, 1, 0], [0, 1, 2, 3], [2, 3, 0, 1]])
def test_the_order_is_that_of_the_buckets(text: str, order: list[int]) -> None:
    data, parameters, begun = made(text)
    data.watch(0)
    backward(parameters, order)
    assert begun == [8, 6, 4, 2]
    data.reduce(0)
    assert begun == [8, 6, 4, 2]


def test_what_does_not_come_is_zero_and_keeps_the_order() -> None:
    data, parameters, begun = made("dp2")
    data.watch(0)
    backward(parameters, [3, 0, 1])
    assert begun == [8]
    data.reduce(0)
    assert begun == [8, 6, 4, 2]
    data.wait()
    assert [float(g.sum()) for _, g in data.local_gradients()] == [6, 12, 0, 24]


@pytest.mark.parametrize("text", ["dp2 zero1", "dp1"])
def test_what_a_module_may_skip_is_zero(text: str) -> None:
    """As of experts in a list of modules, of which a step chooses some."""
    data, parameters, _ = made(text, role="whole")

    def step(order: list[int]) -> list[float]:
        data.watch(0)
        backward(parameters, order)
        data.reduce(0)
        data.wait()
        sums = [float(g.sum()) for _, g in data.local_gradients()]
        data.forget_gradients()
        return sums

    some = step([3, 1])
    whole = step([3, 2, 1, 0])
    assert all(whole)
    assert some == [0, whole[1], 0, whole[3]] == step([1, 3])


@pytest.mark.parametrize("text", ["dp2 zero1", "dp1"])
def test_what_no_module_skips_is_named(text: str) -> None:
    data, parameters, _ = made(text)

    def reduced() -> None:
        data.reduce(0)
        data.wait()
        data.local_gradients()

    backward(parameters, [3, 1, 0])
    with pytest.raises(ModelError, match="p2 has no gradient: nothing that the loss depends on"):
        reduced()


@pytest.mark.parametrize("last", [True, False])
def test_zero2_says_what_does_not_come(last: bool) -> None:
    """The first two parameters share a bucket."""
    data, parameters, begun = made("dp2 zero2", bucket_bytes=10**9)
    backward(parameters, [3, 2, 1])
    assert begun == [8, 6]
    with pytest.raises(ModelError, match="p0 has no gradient in a microbatch, of which zero2 and zero3"):
        data.wait() if last else backward(parameters, [3, 2, 1])

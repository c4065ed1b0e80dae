"""A recomputed function: the same gradients bit for bit, run once more and no further than needed; inputs are kept."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fivefold.compat import TorchDispatchMode
from fivefold.runtime.memory import LiveBytes
from fivefold.runtime.recompute import recomputed, remaining


class Counted(torch.autograd.Function):
    """Twice its input; counts its runs, and keeps its input for backward if asked."""

    runs = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor, keeps: bool) -> Tensor:
        Counted.runs += 1
        if keeps:
            ctx.save_for_backward(x)
        return 2 * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return 2 * grad, None


def network(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 4, 24, dropout=0.0, batch_first=True, norm_first=True)
    return layer.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_gradients_are_those_of_one_run_bit_for_bit(dtype: torch.dtype) -> None:
    found = []
    for again in (False, True):
        model = network(dtype)
        if again:
            model.forward = recomputed(model.forward)
        x = torch.randn(3, 5, 16, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_()
        out = model(model(x))
        out.square().sum().backward()
        found.append([out, x.grad, *(p.grad for p in model.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_it_runs_twice_in_all_and_stops_at_the_last_tensor_that_is_needed() -> None:
    def function(x: Tensor) -> Tensor:
        x = Counted.apply(x.square(), True)
        x = Counted.apply(x.exp(), False)
        return Counted.apply(x, False)

    Counted.runs = 0
    x = torch.ones(3, requires_grad=True)
    out = recomputed(function)(x)
    assert Counted.runs == 3
    out.sum().backward()
    assert Counted.runs == 3 + 1, "what exp keeps is its output: nothing after it runs again"
    expected = torch.ones(3, requires_grad=True)
    function(expected).sum().backward()
    assert torch.equal(x.grad, expected.grad)  # type: ignore[arg-type]


def test_a_map_at_the_end_is_not_computed_again() -> None:
    """torch keeps the inputs of a product before it multiplies."""
    products = []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            products.append(func.overloadpacket is torch.ops.aten.mm)
            return func(*args, **(kwargs or {}))

    weights = [torch.randn(4, 4, requires_grad=True) for _ in range(3)]

    def function(x: Tensor) -> Tensor:
        for weight in weights:
            x = F.linear(x, weight)
        return x

    x = torch.randn(2, 4, requires_grad=True)
    out = recomputed(function)(x)
    with Mode():
        out.sum().backward()
    assert sum(products) == 3 * 2 + 2


def test_only_inputs_are_kept_and_memory_is_free_after_backward() -> None:
    size = 1000

    def function(x: Tensor, scale: Tensor) -> Tensor:
        return (x * scale).exp().sin().tanh().sum()

    x, scale = torch.ones(size, requires_grad=True), torch.ones(size)
    gc.collect()
    with LiveBytes([x, scale]) as memory:
        before = memory.live_bytes
        plain = function(x * 1, scale)
        whole = memory.live_bytes - before
        del plain
        out = recomputed(function)(x * 1, scale)
        kept = memory.live_bytes - before
        out.backward()
        del out
        gc.collect()
        after = memory.live_bytes - before
    scalar = 4
    assert whole == 2 * size * 4 + scalar, "what exp makes, which sin reads, and what tanh makes"
    assert kept == size * 4 + scalar, "x * 1"
    assert after == size * 4, "the gradient of x"


def test_nothing_is_kept_where_no_gradient_is_asked_for() -> None:
    x = torch.ones(3, requires_grad=True)
    with torch.no_grad():
        assert recomputed(torch.exp)(x).grad_fn is None


def test_an_input_by_name_and_one_without_a_gradient() -> None:
    table = torch.arange(12.0).view(4, 3).requires_grad_()

    def function(index: Tensor, *, table: Tensor, power: int) -> Tensor:
        return table[index].pow(power)

    index = torch.tensor([1, 1, 3])
    recomputed(function)(index, table=table, power=3).sum().backward()
    rows = torch.tensor([0.0, 2.0, 0.0, 1.0])[:, None]
    assert torch.equal(table.grad, 3 * table.detach().square() * rows)  # type: ignore[arg-type]


def test_what_remains_is_known_in_the_second_run_only() -> None:
    seen: list[int | None] = []

    def function(x: Tensor) -> Tensor:
        for _ in range(3):
            seen.append(remaining())
            x = x.sin()
        return x

    out = recomputed(function)(torch.ones(2, requires_grad=True))
    assert seen == [None] * 3
    out.sum().backward()
    assert seen[3:] == [3, 2, 1]
    assert remaining() is None


def test_a_function_that_does_something_else_the_second_time_is_told() -> None:
    times = iter(range(9))

    def function(x: Tensor) -> Tensor:
        return x.sin() if next(times) else x.sin().sin()

    out = recomputed(function)(torch.ones(2, requires_grad=True))
    with pytest.raises(AssertionError, match="the second run kept 1 tensors, the first one 2"):
        out.sum().backward()
    assert remaining() is None


def test_backward_twice_is_told() -> None:
    out = recomputed(torch.sin)(torch.ones(2, requires_grad=True))
    out.sum().backward(retain_graph=True)
    with pytest.raises(AssertionError, match="backward went twice"):
        out.sum().backward()


def test_one_recomputed_function_in_another() -> None:
    inner = recomputed(lambda x: x.sin().exp())
    outer = recomputed(lambda x: inner(x * 2).square())
    x, y = (torch.ones(3, dtype=torch.float64, requires_grad=True) for _ in range(2))
    outer(x).sum().backward()
    (y * 2).sin().exp().square().sum().backward()
    assert torch.equal(x.grad, y.grad)  # type: ignore[arg-type]

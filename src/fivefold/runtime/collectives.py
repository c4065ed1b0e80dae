"""Differentiable collectives along one axis of the mesh. Each one's backward is its mathematical transpose.

    forward            backward
    all_gather         reduce_scatter
    reduce_scatter     all_gather
    all_reduce         identity          (each rank's output feeds the same computation)
    all_to_all         all_to_all        (the other way round)
    exchange           exchange          (rows go back to where they came from; also in two halves, `Exchange`)
    broadcast_input    all_reduce        (identity forward: the same input feeds every rank's part)

At degree 1 each returns its input and adds nothing to the graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fivefold.runtime.mesh import Axis, Handle


def all_gather(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """Join shards along `dim`. Comm: all-gather; larger buffer: the result. Backward: reduce-scatter, same bytes."""
    return x if axis.degree == 1 else _AllGather.apply(x, axis, dim)


def reduce_scatter(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """Sum over the axis, keep this rank's part of `dim`. Comm: reduce-scatter. Backward: all-gather, same bytes."""
    return x if axis.degree == 1 else _ReduceScatter.apply(x, axis, dim)


def all_reduce(x: Tensor, axis: Axis) -> Tensor:
    """Sum over the axis, not in place. Comm: all-reduce of x. Backward: identity."""
    return x if axis.degree == 1 else _AllReduce.apply(x, axis)


def all_reduce_(x: Tensor, axis: Axis) -> Tensor:
    """`all_reduce` in place, for what no backward reads."""
    return x if axis.degree == 1 else _AllReduceInPlace.apply(x, axis)


def all_to_all(x: Tensor, axis: Axis, cut: int, join: int) -> Tensor:
    """Part i along `cut` to member i, joined along `join`. Comm: all-to-all of x. Backward: the reverse, same bytes."""
    return x if axis.degree == 1 else _AllToAll.apply(x, axis, cut, join)


def exchange(x: Tensor, axis: Axis, sends: Sequence[int], receives: Sequence[int]) -> Tensor:
    """`sends[i]` rows of x to member i, `receives[i]` from it. Comm: all-to-all. Backward: the reverse, same bytes."""
    return x if axis.degree == 1 else _Exchange.apply(x, axis, sends, receives)


def broadcast_input(x: Tensor, axis: Axis) -> Tensor:
    """The same input to every rank's part of a computation: identity. Backward: all-reduce of x's gradient."""
    return x if axis.degree == 1 else _BroadcastInput.apply(x, axis)


class Exchange:
    """`exchange` in two halves, between which a rank computes what does not depend on it, forward and backward.

    Comm: that of `exchange`. `start` begins it forward and `wait` ends it; backward `wait` begins it, `start` ends it.
    """

    def __init__(self, axis: Axis, sends: Sequence[int], receives: Sequence[int]) -> None:
        self.axis, self.sends, self.receives = axis, sends, receives
        self.under_way: Handle | None = None

    def start(self, x: Tensor) -> Tensor:
        """What to give to `wait`, and to nothing else."""
        return _ExchangeStart.apply(x, self)  # type: ignore[no-any-return]

    def wait(self, started: Tensor) -> Tensor:
        return _ExchangeWait.apply(started, self)  # type: ignore[no-any-return]

    def begin(self, x: Tensor, *, back: bool) -> Tensor:
        sends, receives = (self.receives, self.sends) if back else (self.sends, self.receives)
        self.under_way = self.axis.exchange_start(x, sends, receives)
        return self.under_way.buffer

    def end(self) -> Tensor:
        assert self.under_way is not None, "nothing is under way"
        handle, self.under_way = self.under_way, None
        return handle.wait()


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, dim: int) -> Tensor:
        ctx.axis, ctx.dim = axis, dim
        return axis.all_gather(x, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.axis.reduce_scatter(grad, ctx.dim), None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, dim: int) -> Tensor:
        ctx.axis, ctx.dim = axis, dim
        return axis.reduce_scatter(x, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.axis.all_gather(grad, ctx.dim), None, None


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        return axis.all_reduce(x.clone(memory_format=torch.contiguous_format))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _AllReduceInPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.mark_dirty(x)
        return axis.all_reduce(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, cut: int, join: int) -> Tensor:
        ctx.axis, ctx.cut, ctx.join = axis, cut, join
        return axis.all_to_all(x, cut, join)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.axis.all_to_all(grad, ctx.join, ctx.cut), None, None, None


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, sends: Sequence[int], receives: Sequence[int]) -> Tensor:
        ctx.axis, ctx.sends, ctx.receives = axis, sends, receives
        return axis.exchange(x, sends, receives)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.axis.exchange(grad, ctx.receives, ctx.sends), None, None, None


class _ExchangeStart(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: Exchange) -> Tensor:
        ctx.exchange = exchange
        exchange.begin(x, back=False)
        return x.view_as(x)  # of the shape of the gradient that comes back

    @staticmethod
    def backward(ctx: Any, _grad: Tensor) -> tuple[Tensor, None]:
        return ctx.exchange.end(), None


class _ExchangeWait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, _started: Tensor, exchange: Exchange) -> Tensor:
        ctx.exchange = exchange
        return exchange.end()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.exchange.begin(grad, back=True), None  # nobody reads it before `end`


class _BroadcastInput(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.axis.all_reduce(grad.clone(memory_format=torch.contiguous_format)), None

"""Column- and row-parallel linear maps, as one autograd function each.

    column (q/k/v, gate/up, head)              row (attention output, down)
      forward   all-gather x over S      [SP]    forward   reduce-scatter y over S   [SP] or all-reduce
      backward  all-gather x again       [SP]    backward  all-gather dy over S      [SP] or nothing
                reduce-scatter dx        [SP] or all-reduce dx

What overlaps in a column's backward: x is gathered while dx is computed, dx travels while the weight gradients are
computed. The gathered input is never kept: only this rank's S/tp tokens are saved (Korthikanti et al. 2022, 4.2.2).
The weight gradients are a callable of their own: where a schedule collects them (`runtime/deferred.py`) it runs later
than the input gradient, and the gather of x with it. A row keeps its gathered dy for it, rather than gather it twice.
At degree 1 nothing is communicated: zero-bubble schedules use the same modules then.

Shape letters: B batch, S sequence, D input features, O output features; a local sequence is S/tp under SP.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fivefold.nn.layers import Projections
from fivefold.runtime import recompute
from fivefold.runtime.collectives import all_reduce_, reduce_scatter
from fivefold.runtime.deferred import DeferredGradients
from fivefold.runtime.mesh import Axis, Handle

SEQUENCE_DIM = 1


@dataclass(frozen=True)
class Cut:
    """Over which ranks linear maps are cut, and what becomes of their weight gradients."""

    axis: Axis
    sequence_parallel: bool
    deferred: DeferredGradients | None = None
    """Where a schedule collects weight gradients; None: they are computed in backward."""

    @property
    def defers(self) -> bool:
        """Whether weight gradients are being collected now."""
        return self.deferred is not None and self.deferred.collecting


class ColumnParallel(nn.Module):
    """Several linears with a common input, each cut by output features.

    Shapes: x [B, S/tp, D] (SP) or [B, S, D] -> one [B, S, O_i/tp] per linear.
    """

    def __init__(self, projections: nn.Module, cut: Cut) -> None:
        super().__init__()
        assert isinstance(projections, Projections)
        for name, child in projections.named_children():
            self.add_module(name, child)
        self._cut = cut

    def forward(self, x_BSD: Tensor) -> tuple[Tensor, ...]:
        linears = list(self.children())
        weights = [linear.weight for linear in linears]
        biases = [linear.bias for linear in linears]
        return column_linear(x_BSD, weights, biases, self._cut)  # type: ignore[arg-type]


class RowParallel(nn.Module):
    """A linear cut by input features; the bias is added once, after the sum.

    Shapes: x [B, S, D/tp] -> [B, S/tp, O] (SP) or [B, S, O].
    """

    def __init__(self, linear: nn.Module, cut: Cut) -> None:
        super().__init__()
        assert isinstance(linear, nn.Linear)
        self.weight, self.bias = linear.weight, linear.bias
        self._cut = cut

    def forward(self, x_BSD: Tensor) -> Tensor:
        return row_linear(x_BSD, self.weight, self.bias, self._cut)


def column_linear(
    x_BSD: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], cut: Cut
) -> tuple[Tensor, ...]:
    """Apply every (weight, bias) to the same gathered input. Comm and shapes: see the head of this file."""
    return _ColumnLinear.apply(x_BSD, cut, len(weights), *weights, *biases)  # type: ignore[no-any-return]


def row_linear(x_BSD: Tensor, weight: Tensor, bias: Tensor | None, cut: Cut) -> Tensor:
    """Apply a weight cut by input features and sum over the axis. Comm and shapes: see the head of this file."""
    defers = cut.deferred is not None
    y_BSO = sum_partial(_RowLinear.apply(x_BSD, weight, cut) if defers else F.linear(x_BSD, weight), cut)
    return y_BSO if bias is None else y_BSO + bias


class _ColumnLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cut: Cut, n: int, *parameters: Tensor | None) -> tuple[Tensor, ...]:
        weights, biases = parameters[:n], parameters[n:]
        full = cut.axis.all_gather(x, SEQUENCE_DIM) if cut.sequence_parallel else x
        ctx.cut, ctx.parameters = cut, parameters
        ctx.save_for_backward(x, *weights)
        return tuple([F.linear(full, w, b) for w, b in zip(weights, biases)])  # type: ignore[arg-type]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        x, *weights = ctx.saved_tensors
        cut, biases = ctx.cut, ctx.parameters[len(weights) :]
        axis, later = cut.axis, cut.defers
        gathering = axis.all_gather_start(x, SEQUENCE_DIM) if cut.sequence_parallel and not later else None
        dx = grads[0] @ weights[0]
        for grad, weight in zip(grads[1:], weights[1:]):
            dx = dx + grad @ weight
        reducing = sum_start(dx, cut)

        def weight_gradients() -> list[Tensor | None]:
            if gathering is not None:
                full = gathering.wait()
            else:
                full = axis.all_gather(x, SEQUENCE_DIM) if cut.sequence_parallel else x
            dw: list[Tensor | None] = [weight_gradient(grad, full) for grad in grads]
            db = [None if bias is None else grad.flatten(0, -2).sum(0) for grad, bias in zip(grads, biases)]
            return dw + db

        if later:
            cut.deferred.keep(ctx.parameters, weight_gradients)
            parameter_grads: list[Tensor | None] = [None] * len(ctx.parameters)
        else:
            parameter_grads = weight_gradients()
        return dx if reducing is None else reducing.wait(), None, None, *parameter_grads


def sum_start(dx: Tensor, cut: Cut) -> Handle | None:
    """Begin to sum the input gradient over the axis; None at degree 1."""
    if cut.axis.degree == 1:
        return None
    return (
        cut.axis.reduce_scatter_start(dx, SEQUENCE_DIM)
        if cut.sequence_parallel
        else cut.axis.all_reduce_start(dx)
    )


def sum_partial(partial_BSO: Tensor, cut: Cut) -> Tensor:
    """The sum of the ranks' parts of a row map, in place where that is possible: nobody else reads `partial_BSO`.

    Shapes:   [B, S, O] -> [B, S/tp, O] (SP) or [B, S, O].
    Comm:     one reduce-scatter (SP) or all-reduce of B*S*O elements. Backward: all-gather (SP) or none.
    It is no part of the map itself, so that a recompute that needs no more than what the map keeps ends before it.
    """
    if cut.sequence_parallel:
        return reduce_scatter(partial_BSO, cut.axis, SEQUENCE_DIM)
    return all_reduce_(partial_BSO, cut.axis)


class _RowLinear(torch.autograd.Function):
    """This rank's part of a row map, for schedules that defer weight gradients; else `F.linear` is the same."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, cut: Cut) -> Tensor:
        ctx.cut, ctx.weight = cut, weight
        ctx.save_for_backward(x, weight)
        if recompute.remaining() == len((x, weight)):
            return x.new_empty(
                0
            )  # what is kept now is all that a recompute is for: it ends before anybody reads this
        return F.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        cut = ctx.cut
        dx = grad @ weight
        if not cut.defers:
            return dx, weight_gradient(grad, x), None
        cut.deferred.keep([ctx.weight], lambda: [weight_gradient(grad, x)])
        return dx, None, None


def weight_gradient(grad: Tensor, x: Tensor) -> Tensor:
    """dW [O, D] = sum over tokens of grad [.., O] x [.., D]."""
    return grad.flatten(0, -2).t() @ x.flatten(0, -2)

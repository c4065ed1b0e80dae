"""Column- and row-parallel linear maps, as one autograd function each.

    column (q/k/v, gate/up, head)              row (attention output, down)
      forward   all-gather x over S      [SP]    forward   reduce-scatter y over S   [SP] or all-reduce
      backward  all-gather x again       [SP]    backward  all-gather dy over S      [SP] or nothing
                reduce-scatter dx        [SP] or all-reduce dx

What overlaps in a column's backward: x is gathered while dx is computed, dx travels while the weight gradients are
computed. The gathered input is never kept: only this rank's S/tp tokens are saved (Korthikanti et al. 2022, 4.2.2).
The weight gradients are a callable of their own, so that a schedule may run them later than the input gradient.

Shape letters: B batch, S sequence, D input features, O output features; a local sequence is S/tp under SP.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fivefold.nn.layers import Projections
from fivefold.runtime.mesh import Axis

SEQUENCE_DIM = 1


class ColumnParallel(nn.Module):
    """Several linears with a common input, each cut by output features.

    Shapes: x [B, S/tp, D] (SP) or [B, S, D] -> one [B, S, O_i/tp] per linear.
    """

    def __init__(self, projections: nn.Module, axis: Axis, *, sequence_parallel: bool) -> None:
        super().__init__()
        assert isinstance(projections, Projections)
        for name, child in projections.named_children():
            self.add_module(name, child)
        self._axis, self._sp = axis, sequence_parallel

    def forward(self, x_BSD: Tensor) -> tuple[Tensor, ...]:
        linears = list(self.children())
        weights = [linear.weight for linear in linears]
        biases = [linear.bias for linear in linears]
        return column_linear(x_BSD, weights, biases, self._axis, self._sp)  # type: ignore[arg-type]


class RowParallel(nn.Module):
    """A linear cut by input features; the bias is added once, after the sum.

    Shapes: x [B, S, D/tp] -> [B, S/tp, O] (SP) or [B, S, O].
    """

    def __init__(self, linear: nn.Module, axis: Axis, *, sequence_parallel: bool) -> None:
        super().__init__()
        assert isinstance(linear, nn.Linear)
        self.weight, self.bias = linear.weight, linear.bias
        self._axis, self._sp = axis, sequence_parallel

    def forward(self, x_BSD: Tensor) -> Tensor:
        y_BSO: Tensor = _RowLinear.apply(x_BSD, self.weight, self._axis, self._sp)
        return y_BSO if self.bias is None else y_BSO + self.bias


def column_linear(
    x_BSD: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    axis: Axis,
    sequence_parallel: bool,
) -> tuple[Tensor, ...]:
    """Apply every (weight, bias) to the same gathered input. Comm and shapes: see the head of this file."""
    return _ColumnLinear.apply(x_BSD, axis, sequence_parallel, len(weights), *weights, *biases)  # type: ignore[no-any-return]


class _ColumnLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, axis: Axis, sp: bool, n: int, *parameters: Tensor | None
    ) -> tuple[Tensor, ...]:
        weights, biases = parameters[:n], parameters[n:]
        full = axis.all_gather(x, SEQUENCE_DIM) if sp else x
        ctx.axis, ctx.sp, ctx.has_bias = axis, sp, [bias is not None for bias in biases]
        ctx.save_for_backward(x, *weights)
        return tuple([F.linear(full, w, b) for w, b in zip(weights, biases)])  # type: ignore[arg-type]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        x, *weights = ctx.saved_tensors
        axis, sp = ctx.axis, ctx.sp
        gathering = axis.all_gather_start(x, SEQUENCE_DIM) if sp else None
        dx = grads[0] @ weights[0]
        for grad, weight in zip(grads[1:], weights[1:]):
            dx = dx + grad @ weight
        reducing = axis.reduce_scatter_start(dx, SEQUENCE_DIM) if sp else axis.all_reduce_start(dx)

        def weight_gradients() -> list[Tensor | None]:
            full = gathering.wait() if gathering is not None else x
            dw: list[Tensor | None] = [weight_gradient(grad, full) for grad in grads]
            db = [grad.flatten(0, -2).sum(0) if has else None for grad, has in zip(grads, ctx.has_bias)]
            return dw + db

        parameter_grads = weight_gradients()
        return reducing.wait(), None, None, None, *parameter_grads


class _RowLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, axis: Axis, sp: bool) -> Tensor:
        ctx.axis, ctx.sp = axis, sp
        ctx.save_for_backward(x, weight)
        partial = F.linear(x, weight)
        return axis.reduce_scatter(partial, SEQUENCE_DIM) if sp else axis.all_reduce(partial)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        full = ctx.axis.all_gather(grad, SEQUENCE_DIM) if ctx.sp else grad
        dx = full @ weight
        return dx, weight_gradient(full, x), None, None


def weight_gradient(grad: Tensor, x: Tensor) -> Tensor:
    """dW [O, D] = sum over tokens of grad [.., O] x [.., D]."""
    return grad.flatten(0, -2).t() @ x.flatten(0, -2)

"""One matrix product per expert over rows that are sorted by expert.

On the grouped kernel where it takes such tensors, else one product per expert: always so in float64, which the kernel
refuses. Neither pads the experts to a common number of rows; without any row neither is called.

Shape letters: R rows (tokens, each as often as it has experts), E experts, D input features, O output features.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fivefold.compat import grouped_mm, has_grouped_mm


def grouped_matmul(x_RD: Tensor, weight_EOD: Tensor, counts_E: Tensor) -> Tensor:
    """Each expert's rows times its matrix, transposed. An expert may have no rows; its weight gradient is zero then.

    Shapes: x [R, D], the first counts[0] rows of expert 0, and so on; weight [E, O, D]; counts [E] (int64), of sum R
            -> [R, O].
    """
    return _GroupedMatmul.apply(x_RD, weight_EOD, counts_E)  # type: ignore[no-any-return]


def weight_gradient(grad_RO: Tensor, x_RD: Tensor, counts_E: Tensor) -> Tensor:
    """dW [E, O, D], contiguous: for each expert the sum over its rows of grad [O] x [D]."""
    if not len(x_RD):
        return x_RD.new_zeros(len(counts_E), grad_RO.shape[1], x_RD.shape[1])
    if has_grouped_mm(grad_RO, x_RD):
        return grouped_mm(grad_RO.t(), x_RD, counts_E)
    rows = counts_E.tolist()
    return torch.stack([grad.t() @ x for grad, x in zip(grad_RO.split(rows), x_RD.split(rows))])


def _product(x_RD: Tensor, weight_EDO: Tensor, counts_E: Tensor) -> Tensor:
    if not len(x_RD):
        return x_RD.new_empty(0, weight_EDO.shape[2])
    if has_grouped_mm(x_RD, weight_EDO):
        return grouped_mm(x_RD, weight_EDO, counts_E)
    parts = x_RD.split(counts_E.tolist())
    return torch.cat([part @ weight for part, weight in zip(parts, weight_EDO)])


class _GroupedMatmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, counts)
        return _product(x.contiguous(), weight.transpose(1, 2), counts)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight, counts = ctx.saved_tensors
        grad = grad.contiguous()
        dx = _product(grad, weight, counts) if ctx.needs_input_grad[0] else None
        dw = weight_gradient(grad, x.contiguous(), counts) if ctx.needs_input_grad[1] else None
        return dx, dw, None

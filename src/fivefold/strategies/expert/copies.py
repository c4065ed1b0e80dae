"""Copies of experts on one rank: their weights come from home, their gradients go home (see `replicas.py`).

Shape letters: R rows, s slots of this rank, e of them homes, c copies, O and I outputs and inputs of a product.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fivefold.nn.grouped import grouped_matmul, weight_gradient
from fivefold.runtime.deferred import DeferredGradients
from fivefold.runtime.mesh import Axis
from fivefold.strategies.expert.replicas import Replicas


class Copies:
    """What a rank has of one layer beside its own experts. Weights are fetched when they are first read in a step."""

    def __init__(self, replicas: Replicas, ep: Axis, deferred: DeferredGradients | None) -> None:
        self.replicas, self.ep, self.deferred = replicas, ep, deferred
        lent = replicas.lent(ep.index)
        self._lent = [place for places in lent for place in places]
        self._sends, self._receives = list(map(len, lent)), list(replicas.borrowed(ep.index))
        self._fetched: dict[str, Tensor] = {}

    def product(self, x_RI: Tensor, name: str, weight: Tensor, counts_s: Tensor, own_rows: int) -> Tensor:
        """Each expert's rows times its matrix, transposed: `own_rows` of homes, then those of copies.

        Shapes: x [R, I], weight [e, O, I], counts [s] of sum R -> [R, O].
        Comm:   an all-to-all of c matrices on ep, once a step. Backward: one of their gradients.
        """
        return _Product.apply(x_RI, weight, self.fetch(name, weight), counts_s, own_rows, self)  # type: ignore[no-any-return]

    def fetch(self, name: str, weight: Tensor) -> Tensor:
        """The weights [c, O, I] of this rank's copies, from their homes."""
        if name not in self._fetched:
            rows = weight.detach()[self._lent]
            self._fetched[name] = self.ep.exchange(rows, self._sends, self._receives)
        return self._fetched[name]

    def bring_home(self, gradient: Tensor, of_copies: Tensor) -> Tensor:
        """Add to the gradient [e, O, I] of homes, in place, those of their copies on other ranks.

        `of_copies`: [c, O, I] of this rank's copies.
        """
        came = self.ep.exchange(of_copies, self._receives, self._sends)
        for place, one in zip(self._lent, came):  # one by one: the order of the sum is always the same
            gradient[place] += one
        return gradient

    def forget(self) -> None:
        """The homes' weights change."""
        self._fetched.clear()


class _Product(torch.autograd.Function):
    """Two grouped products in one: over the rows of homes, and over those of copies."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, of_copies: Tensor, counts: Tensor, own_rows: int, copies: Copies
    ) -> Tensor:
        ctx.own_rows, ctx.copies, ctx.weight = own_rows, copies, weight
        ctx.save_for_backward(x, weight, of_copies, counts)
        return _both(x, weight, of_copies, counts, own_rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None, None, None, None]:
        x, weight, of_copies, counts = ctx.saved_tensors
        own, copies = ctx.own_rows, ctx.copies
        dx = _both(grad, weight.transpose(1, 2), of_copies.transpose(1, 2), counts, own)
        grad, x, e = grad.contiguous(), x.contiguous(), weight.shape[0]

        def weight_gradients() -> Tensor:
            mine = weight_gradient(grad[:own], x[:own], counts[:e])
            return copies.bring_home(mine, weight_gradient(grad[own:], x[own:], counts[e:]))  # type: ignore[no-any-return]

        if copies.deferred is None or not copies.deferred.collecting:
            return dx, weight_gradients(), None, None, None, None
        copies.deferred.keep([ctx.weight], lambda: [weight_gradients()])
        return dx, None, None, None, None, None


def _both(x: Tensor, weight: Tensor, of_copies: Tensor, counts: Tensor, own: int) -> Tensor:
    e = weight.shape[0]
    parts = grouped_matmul(x[:own], weight, counts[:e]), grouped_matmul(x[own:], of_copies, counts[e:])
    return torch.cat(parts)

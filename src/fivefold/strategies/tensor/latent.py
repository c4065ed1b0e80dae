"""From latents to heads (MLA) over the ranks of tp: each expands its own heads; what all heads share is not repeated.

The latents are projected from this rank's tokens alone (under SP), so what is gathered over the sequence are latents,
not hidden states: query (compressed, or hidden), latent and rotated key in one message of q + R + O columns.

    forward   all-gather of q + R + O columns                [SP]
    backward  all-gather of q + R columns again              [SP]
              reduce-scatter of the gradient of q + R + O    [SP] or all-reduce

The key is part of it though it has no weights here: every rank's heads use it, so its gradient is a sum over ranks.
Weight gradients wait where a schedule collects them, as those of other columns (`linear.py`).

Shape letters: B batch, S sequence, Q, R, O columns of query, latent and key.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fivefold.nn.layers import LatentProjections
from fivefold.strategies.tensor.linear import SEQUENCE_DIM, Cut, sum_start, weight_gradient


class LatentColumn(nn.Module):
    """Shapes: query, latent, key [B, S/tp, ..] (SP) or [B, S, ..] -> q, kv of this rank's heads and key, [B, S, ..]."""

    def __init__(self, projections: nn.Module, cut: Cut) -> None:
        super().__init__()
        assert isinstance(projections, LatentProjections)
        self.q, self.kv = projections.q, projections.kv
        self._cut = cut

    def forward(
        self, query_BSQ: Tensor, latent_BSR: Tensor, key_BSO: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        weights = self.q.weight, self.kv.weight
        return _LatentColumn.apply(query_BSQ, latent_BSR, key_BSO, *weights, self._cut)  # type: ignore[no-any-return]


class _LatentColumn(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, latent: Tensor, key: Tensor, wq: Tensor, wkv: Tensor, cut: Cut
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.cut, ctx.parameters = cut, (wq, wkv)
        ctx.save_for_backward(query, latent, wq, wkv)
        ctx.sizes = [x.shape[-1] for x in (query, latent, key)]
        if cut.sequence_parallel:
            joined = cut.axis.all_gather(torch.cat((query, latent, key), -1), SEQUENCE_DIM)
            query, latent, key = joined.split(ctx.sizes, -1)
        return F.linear(query, wq), F.linear(latent, wkv), key.view_as(key)

    @staticmethod
    def backward(ctx: Any, dq: Tensor, dkv: Tensor, dkey: Tensor) -> tuple[Any, ...]:
        query, latent, wq, wkv = ctx.saved_tensors
        cut, later = ctx.cut, ctx.cut.defers
        gather = cut.sequence_parallel
        pair = torch.cat((query, latent), -1) if gather else None
        gathering = cut.axis.all_gather_start(pair, SEQUENCE_DIM) if gather and not later else None
        gradients = dq @ wq, dkv @ wkv, dkey
        reducing = sum_start(torch.cat(gradients, -1), cut) if cut.axis.degree > 1 else None

        def weight_gradients() -> list[Tensor | None]:
            inputs = query, latent
            if gather:
                both = gathering.wait() if gathering is not None else cut.axis.all_gather(pair, SEQUENCE_DIM)
                inputs = both.split(ctx.sizes[:2], -1)
            return [weight_gradient(dq, inputs[0]), weight_gradient(dkv, inputs[1])]

        parameter_grads: list[Tensor | None] = [None, None]
        if later:
            cut.deferred.keep(ctx.parameters, weight_gradients)
        else:
            parameter_grads = weight_gradients()
        if reducing is not None:
            gradients = reducing.wait().split(ctx.sizes, -1)
        return *gradients, *parameter_grads, None

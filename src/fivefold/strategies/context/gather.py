"""Attention of this rank's queries over gathered keys and values: the simplest cut, for shorter sequences.

    forward   all-gather of K and V in one message, 2*b*S*K*H*x bytes
    backward  reduce-scatter of dK and dV, 2*b*S*K*H*w bytes (w: at least 4 bytes an element)

Saved: q, the output, its log-sum-exp, and the gathered K and V: unlike in the ring, they do not shrink with cp.

Shape letters: B batch, N query heads, K KV heads, S tokens of this rank, H head size; n = cp ranks.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from fivefold.nn.attention import Mask
from fivefold.runtime.mesh import Axis
from fivefold.strategies.context.blocks import Gradients, Merged, View, places, wide
from fivefold.strategies.context.order import Part, parts_of_whole, ring_spans


class GatherCore(nn.Module):
    """Causal attention of this rank's queries over all keys.

    Shapes: q_BNSH, k_BKSH, v_BKSH -> [B, N, S, H], S of the n*S tokens in zig-zag order.
    """

    def __init__(self, window: int | None, axis: Axis) -> None:
        super().__init__()
        self.window, self.axis = window, axis

    def forward(self, q_BNSH: Tensor, k_BKSH: Tensor, v_BKSH: Tensor, mask: Mask | None) -> Tensor:
        axis, length = self.axis, q_BNSH.shape[2] * self.axis.degree
        mine = ring_spans(length, axis.degree, axis.index)
        seen = parts_of_whole(mine, length, self.window, mask is not None)
        view = View(self.window, mask, mine, (range(length),), q_BNSH.device)
        return _Gathered.apply(q_BNSH, k_BKSH, v_BKSH, axis, seen, view)  # type: ignore[no-any-return]


@lru_cache(maxsize=8)
def _arrival(length: int, ranks: int, device: torch.device) -> Tensor:
    """The places [n*S] of all tokens in the order in which an all-gather brings them."""
    return torch.cat([places(ring_spans(length, ranks, rank), device) for rank in range(ranks)])


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, axis: Axis, seen: tuple[Part, ...], view: View
    ) -> Tensor:
        there = axis.all_gather(torch.stack((k, v)), 3)
        arrival = _arrival(there.shape[3], axis.degree, q.device)
        kv = torch.empty_like(there).index_copy_(3, arrival, there)
        merged = Merged(q)
        merged.add(kv[0], kv[1], seen, view)
        out = merged.out.to(q.dtype)
        ctx.axis, ctx.seen, ctx.view = axis, seen, view
        ctx.save_for_backward(q, kv, out, merged.lse)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        q, kv, out, lse = ctx.saved_tensors
        axis, dtype = ctx.axis, wide(q.dtype)
        arrival = _arrival(kv.shape[3], axis.degree, q.device)
        gradients = Gradients(q, out, lse, grad, torch.zeros_like(q, dtype=dtype))
        dkv = torch.zeros_like(kv, dtype=dtype)
        gradients.add(kv[0], kv[1], dkv, ctx.seen, ctx.view)
        dk, dv = axis.reduce_scatter(dkv.index_select(3, arrival), 3).to(kv.dtype)
        return gradients.dq.to(q.dtype), dk, dv, None, None, None

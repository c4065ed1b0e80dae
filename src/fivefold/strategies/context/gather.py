"""Attention of this rank's queries over gathered keys and values: the simplest cut, for shorter sequences.

    forward   all-gather of K and V in one message, b*S*K*(H+V)*x bytes
    backward  reduce-scatter of dK and dV, b*S*K*(H+V)*w bytes (w: at least 4 bytes an element)

Saved: q, the output, its log-sum-exp, and the gathered K and V: unlike in the ring, they do not shrink with cp.

Shape letters: B batch, N query heads, K KV heads, S tokens of this rank, H head size, V that of values (mostly the
same); n = cp ranks.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from fivefold.nn.attention import Mask
from fivefold.runtime.mesh import Axis
from fivefold.strategies.context.blocks import Gradients, Merged, View, pack, places, unpack, wide
from fivefold.strategies.context.order import Part, parts_of_whole, ring_spans


class GatherCore(nn.Module):
    """Causal attention of this rank's queries over all keys.

    Shapes: q_BNSH, k_BKSH, v_BKSV -> [B, N, S, V], S of the n*S tokens in zig-zag order.
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
        parts = axis.all_gather(pack(k, v)[None], 0).split([k.numel(), v.numel()], 1)
        arrival = _arrival(k.shape[TOKENS] * axis.degree, axis.degree, q.device)
        keys, values = (_in_order(part, x, arrival) for part, x in zip(parts, (k, v)))
        merged = Merged(q, v.shape[-1])
        merged.add(keys, values, seen, view)
        out = merged.out.to(q.dtype)
        ctx.axis, ctx.seen, ctx.view = axis, seen, view
        ctx.save_for_backward(q, keys, values, out, merged.lse)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        q, keys, values, out, lse = ctx.saved_tensors
        axis, dtype = ctx.axis, wide(q.dtype)
        arrival = _arrival(keys.shape[TOKENS], axis.degree, q.device)
        gradients = Gradients(q, out, lse, grad, torch.zeros_like(q, dtype=dtype))
        dkv = torch.zeros_like(keys, dtype=dtype), torch.zeros_like(values, dtype=dtype)
        gradients.add(keys, values, dkv, ctx.seen, ctx.view)
        parts = [_by_rank(x, arrival, axis.degree) for x in dkv]
        summed = axis.reduce_scatter(torch.cat([part.flatten(1) for part in parts], 1), 0)[0].to(keys.dtype)
        dk, dv = unpack(summed, (parts[0].shape[1:], parts[1].shape[1:]))
        return gradients.dq.to(q.dtype), dk, dv, None, None, None


TOKENS = 2
"""Dim of keys and values."""


def _in_order(parts: Tensor, like: Tensor, arrival: Tensor) -> Tensor:
    """Keys or values of all ranks, each flat, in the order of the sequence. Shapes: [n, B*K*S*H] -> [B, K, n*S, H]."""
    there = parts.view(-1, *like.shape).movedim(0, TOKENS).flatten(TOKENS, TOKENS + 1)
    return torch.empty_like(there).index_copy_(TOKENS, arrival, there)


def _by_rank(whole: Tensor, arrival: Tensor, ranks: int) -> Tensor:
    """The inverse of `_in_order`. Shapes: [B, K, n*S, H] -> [n, B, K, S, H]."""
    return whole.index_select(TOKENS, arrival).unflatten(TOKENS, (ranks, -1)).movedim(TOKENS, 0)  # type: ignore[no-any-return]

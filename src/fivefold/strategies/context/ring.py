"""Ring attention: queries stay, keys and values go around (Liu et al. 2023, arXiv:2310.01889).

    forward   step t = 0 .. R-1: attend to the K, V of position i-t while they travel on to position i+1
    backward  the same steps; what is found of dK, dV is added to what comes with them and travels one step behind,
              in at least float32, so that after the last step it is where it belongs

K and V are one message. Per layer, a rank sends and receives R-1 times b*S/R*K*(H+V)*x bytes forward, and backward as
many and R-1 times b*S/R*K*(H+V)*w (x: bytes of an element, w: of an accumulated one). Saved: q, k, v, the output and
its log-sum-exp, all of this rank's tokens only.

Shape letters: B batch, N query heads, K KV heads, S tokens of this ring position, H head size, V that of values (mostly
the same), R ring positions.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fivefold.nn.attention import Mask
from fivefold.runtime.mesh import Axis, Handle
from fivefold.strategies.context.blocks import Gradients, Merged, View, pack, unpack, wide
from fivefold.strategies.context.order import Part, parts, ring_spans


class RingCore(nn.Module):
    """Causal attention of this ring position's queries over the keys of all.

    Shapes: q_BNSH, k_BKSH, v_BKSV -> [B, N, S, V], S of the R*S tokens in zig-zag order.
    """

    def __init__(self, window: int | None, axis: Axis) -> None:
        super().__init__()
        self.window, self.axis = window, axis

    def forward(self, q_BNSH: Tensor, k_BKSH: Tensor, v_BKSH: Tensor, mask: Mask | None) -> Tensor:
        steps = Steps(self.axis, q_BNSH.shape[2], self.window, mask, q_BNSH.device)
        return _Ring.apply(q_BNSH, k_BKSH, v_BKSH, steps)  # type: ignore[no-any-return]


class Steps:
    """What this position's queries see of the keys that are here at each step."""

    def __init__(
        self, axis: Axis, tokens: int, window: int | None, mask: Mask | None, device: torch.device
    ) -> None:
        self.axis, self.degree = axis, axis.degree
        self._window, self._mask, self._device = window, mask, device
        self._spans = [ring_spans(tokens * axis.degree, axis.degree, place) for place in range(axis.degree)]

    def at(self, step: int) -> tuple[tuple[Part, ...], View]:
        source = (self.axis.index - step) % self.degree
        mine, theirs = self._spans[self.axis.index], self._spans[source]
        view = View(self._window, self._mask, mine, theirs, self._device)
        return parts(mine, theirs, self._window, self._mask is not None), view


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, steps: Steps) -> Tensor:
        own, shapes = pack(k, v), (k.shape, v.shape)
        message = own
        merged = Merged(q, v.shape[-1])
        for step in range(steps.degree):
            travelling = steps.axis.pass_on_start(message) if step < steps.degree - 1 else None
            merged.add(*unpack(message, shapes), *steps.at(step))
            if travelling is not None:
                message = travelling.wait()
        out = merged.out.to(q.dtype)
        ctx.steps, ctx.shapes = steps, shapes
        ctx.save_for_backward(q, own, out, merged.lse)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, message, out, lse = ctx.saved_tensors
        steps: Steps = ctx.steps
        shapes = ctx.shapes
        axis, dtype = steps.axis, wide(q.dtype)
        gradients = Gradients(q, out, lse, grad, torch.zeros_like(q, dtype=dtype))
        own = torch.zeros_like(message, dtype=dtype)
        behind: Handle | None = None
        for step in range(steps.degree):
            travelling = axis.pass_on_start(message) if step < steps.degree - 1 else None
            dkv = own if step == 0 else torch.zeros_like(own)
            gradients.add(*unpack(message, shapes), unpack(dkv, shapes), *steps.at(step))
            if behind is not None:
                dkv += behind.wait()
            if step > 0:
                behind = axis.pass_on_start(dkv)
            if travelling is not None:
                message = travelling.wait()
        if behind is not None:
            own += behind.wait()
        dk, dv = unpack(own.to(message.dtype), shapes)
        return gradients.dq.to(q.dtype), dk, dv, None

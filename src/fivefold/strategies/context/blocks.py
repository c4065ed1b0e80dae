"""Attention over some of the keys at a time, merged exactly by its log-sum-exp.

With o_i and l_i the output and log-sum-exp over one set of keys, those over two sets are (Milakov and Gimelshein 2018,
arXiv:1805.02867; Dao et al. 2022, arXiv:2205.14135, section 3.1)

    l = log(exp(l_1) + exp(l_2))        o = exp(l_1 - l) o_1 + exp(l_2 - l) o_2

A query that sees none of a set has l_i = -inf there, and its o_i does not count. Backward of one set alone needs only
the final o and l: p = exp(scores - l) are the final probabilities (Dao et al. 2022, appendix B.4).

Which kernel: full and causal parts take the flash kernel where it takes such tensors; what a mask or window cuts
through, and all else, is computed here with explicit scores, tile by tile. Both merge in at least float32.

Values, and with them the output, may be narrower than keys (latent attention); a kernel gets them padded.

Shape letters: B batch, N query heads, K KV heads, Q and J queries and keys of a part, H head size, V that of values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from fivefold.compat import flash_attention, flash_attention_backward, has_flash
from fivefold.nn.attention import Mask, as_wide_as, visible
from fivefold.strategies.context.order import Part, Spans


def wide(dtype: torch.dtype) -> torch.dtype:
    """What partial results are added in."""
    return torch.promote_types(dtype, torch.float32)


@dataclass(frozen=True)
class View:
    """What decides who sees whom: the window, the mask of the microbatch, and where queries and keys are."""

    window: int | None
    mask: Mask | None
    queries: Spans
    keys: Spans
    device: torch.device

    def of(self, part: Part) -> Tensor | None:
        """Boolean mask of a part, or None where everything is seen."""
        if part.kind == "full":
            return None
        mask = self.mask if part.kind == "masked" else None
        return visible(self._rows[part.queries], self._columns[part.keys], self.window, mask)

    @cached_property
    def _rows(self) -> Tensor:
        return places(self.queries, self.device)

    @cached_property
    def _columns(self) -> Tensor:
        return places(self.keys, self.device)


def places(spans: Spans, device: torch.device) -> Tensor:
    """The places in the sequence of the tokens in these spans."""
    return torch.cat([torch.arange(span.start, span.stop, device=device) for span in spans])


KV = tuple[Tensor, Tensor]
"""Keys [B, K, J, H] and values [B, K, J, V], or their gradients."""


def pack(k: Tensor, v: Tensor) -> Tensor:
    """Keys and values as one message, flat: nothing is padded where their head sizes differ."""
    return torch.cat((k.flatten(), v.flatten()))


def unpack(message: Tensor, shapes: tuple[torch.Size, torch.Size]) -> KV:
    """Views of a message as keys and values of these shapes."""
    keys, values = message.split([shape.numel() for shape in shapes])
    return keys.view(shapes[0]), values.view(shapes[1])


class Merged:
    """Output and log-sum-exp of queries over the keys that were added so far.

    Shapes: out [B, N, S, V], lse [B, N, S], both in at least float32.
    """

    def __init__(self, q_BNSH: Tensor, values: int) -> None:
        """`values`: the head size V."""
        dtype = wide(q_BNSH.dtype)
        self.q = q_BNSH
        self.out = q_BNSH.new_zeros((*q_BNSH.shape[:3], values), dtype=dtype)
        self.lse = q_BNSH.new_full(q_BNSH.shape[:3], -torch.inf, dtype=dtype)

    def add(self, k: Tensor, v: Tensor, parts: Sequence[Part], view: View) -> None:
        """Let the queries see these keys as well. Shapes: k [B, K, J, H], v [B, K, J, V]."""
        for part in parts:
            rows = part.queries
            out, lse = _forward(self.q[:, :, rows], k[:, :, part.keys], v[:, :, part.keys], part, view)
            before = self.lse[:, :, rows]
            total = torch.logaddexp(before, lse)
            base = total.masked_fill(
                total == -torch.inf, 0.0
            )  # nothing seen yet: both weights are exp(-inf) = 0
            old, new = (before - base).exp_()[..., None], (lse - base).exp_()[..., None]
            self.out[:, :, rows] = torch.addcmul(self.out[:, :, rows] * old, out, new)
            self.lse[:, :, rows] = total


@dataclass(frozen=True)
class Gradients:
    """Backward of merged attention, one set of keys at a time. `out`, `lse` and `grad` are those of all keys."""

    q: Tensor
    out: Tensor
    lse: Tensor
    grad: Tensor
    dq: Tensor
    """In at least float32; completed by and by."""

    def add(self, k: Tensor, v: Tensor, dkv: KV, parts: Sequence[Part], view: View) -> None:
        """Add the gradients that these keys are part of to `dq` and to `dkv`."""
        sum_k, sum_v = dkv
        for part in parts:
            rows, columns = part.queries, part.keys
            dq, dk, dv = _backward(
                self.grad[:, :, rows], self.q[:, :, rows], k[:, :, columns], v[:, :, columns],
                self.out[:, :, rows], self.lse[:, :, rows], part, view,
            )  # fmt: skip
            self.dq[:, :, rows] += dq
            sum_k[:, :, columns] += dk
            sum_v[:, :, columns] += dv


def _forward(q: Tensor, k: Tensor, v: Tensor, part: Part, view: View) -> tuple[Tensor, Tensor]:
    if part.kind != "masked" and has_flash(q):
        out, lse = flash_attention(q, k, as_wide_as(v, q), causal=part.kind == "causal")
        return as_wide_as(out, v), lse
    scores = _scores(q, k, view.of(part))
    lse = scores.logsumexp(-1)
    probabilities = scores.sub_(lse.masked_fill(lse == -torch.inf, 0.0)[..., None]).exp_()
    out = _grouped(probabilities, v.shape[1]) @ v.to(scores.dtype)
    return out.view(*q.shape[:3], v.shape[3]), lse


def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, part: Part, view: View
) -> tuple[Tensor, Tensor, Tensor]:
    if part.kind != "masked" and has_flash(q):
        # The kernel's own dtypes and layouts: those of its forward.
        padded = [as_wide_as(x, q).contiguous() for x in (grad, v, out)]
        dq, dk, dv = flash_attention_backward(
            padded[0], q, k, padded[1], padded[2], lse.contiguous(), causal=part.kind == "causal"
        )
        return dq, dk, as_wide_as(dv, v)
    heads, scale = k.shape[1], q.shape[-1] ** -0.5
    p = _scores(q, k, view.of(part)).sub_(lse[..., None]).exp_()
    q, k, v, grad, out = (x.to(p.dtype) for x in (q, k, v, grad, out))
    grouped_grad = _grouped(grad, heads)
    dp = (grouped_grad @ v.transpose(2, 3)).view(p.shape)
    ds = dp.sub_((grad * out).sum(-1, keepdim=True)).mul_(p).mul_(scale)
    dq = (_grouped(ds, heads) @ k).view(q.shape)
    dk = _grouped(ds, heads).transpose(2, 3) @ _grouped(q, heads)
    dv = _grouped(p, heads).transpose(2, 3) @ grouped_grad
    return dq, dk, dv


def _scores(q: Tensor, k: Tensor, seen: Tensor | None) -> Tensor:
    """[B, N, Q, J] in at least float32, -inf where the query does not see the key."""
    dtype = wide(q.dtype)
    scores = _grouped(q.to(dtype) * q.shape[-1] ** -0.5, k.shape[1]) @ k.to(dtype).transpose(2, 3)
    scores = scores.view(*q.shape[:3], k.shape[2])
    return scores if seen is None else scores.masked_fill_(~seen, -torch.inf)


def _grouped(x_BNQH: Tensor, heads: int) -> Tensor:
    """[B, K, N/K*Q, H]: the queries of all heads that read one KV head."""
    return x_BNQH.unflatten(1, (heads, -1)).flatten(2, 3)  # type: ignore[no-any-return]

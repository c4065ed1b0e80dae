"""Grouped-query attention (Ainslie et al. 2023), plain single-device PyTorch.

Shape letters: B batch, S sequence, D hidden, N query heads, K key/value heads, H head size. Head counts are read from
the tensors, never from the configuration: a strategy may hand over some of the heads only.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fivefold.core.model_spec import AttentionSpec
from fivefold.nn.layers import Projections, RMSNorm
from fivefold.nn.rope import rotate


class Mask:
    """What tokens of a microbatch may not see, beside what comes after them. It is of the whole sequence, in order.

    Shapes: valid_BS (bool) or None; documents_BS (int64) or None. A key that is not valid, of another document than
    the query, or in no document (-1, padding) is hidden; every token sees itself.
    """

    def __init__(self, valid_BS: Tensor | None = None, documents_BS: Tensor | None = None) -> None:
        self.valid_BS, self.documents_BS = valid_BS, documents_BS
        self._causal: dict[tuple[int, int | None], Tensor] = {}

    def causal(self, length: int, window: int | None, device: torch.device) -> Tensor:
        """`visible` of all tokens by all, [B, 1, S, S]: made once for all layers of a microbatch."""
        if (length, window) not in self._causal:
            place = torch.arange(length, device=device)
            self._causal[length, window] = visible(place, place, window, self)
        return self._causal[length, window]


def visible(query: Tensor, key: Tensor, window: int | None, mask: Mask | None) -> Tensor:
    """Boolean [Q, K], or [B, 1, Q, K] with a mask: whether the token at place query[i] sees the one at key[j].

    Shapes: query [Q], key [K], places in the sequence.
    Causal: token i sees token j when j <= i, j > i - window, and the mask hides it not; every token sees itself.
    """
    row, column = query[:, None], key[None, :]
    seen = column <= row
    if window is not None:
        seen = seen & (column > row - window)
    if mask is None:
        return seen
    if mask.valid_BS is not None:
        seen = seen & mask.valid_BS[:, None, None, key]
    if mask.documents_BS is not None:
        documents = mask.documents_BS[:, None, query, None]
        seen = seen & (documents == mask.documents_BS[:, None, None, key]) & (documents >= 0)
    return seen | (row == column)


class AttentionCore(nn.Module):
    """Softmax attention of queries over keys and values: the part that context parallelism replaces.

    Shapes: q_BNSH, k_BKSH, v_BKSH -> [B, N, S, H]. Values may be narrower than keys; the output is as wide as they.
    What each token sees: `visible`.
    """

    def __init__(self, window: int | None) -> None:
        super().__init__()
        self.window = window

    def forward(self, q_BNSH: Tensor, k_BKSH: Tensor, v_BKSH: Tensor, mask: Mask | None) -> Tensor:
        grouped = q_BNSH.shape[1] != k_BKSH.shape[1]
        length = q_BNSH.shape[2]
        if q_BNSH.is_cpu:
            # The CPU kernel reads keys and values once per block of queries: gathering each head first is cheaper.
            k_BKSH, v_BKSH = k_BKSH.contiguous(), v_BKSH.contiguous()
        values = as_wide_as(v_BKSH, q_BNSH)
        if mask is None and (self.window is None or self.window >= length):
            out = F.scaled_dot_product_attention(q_BNSH, k_BKSH, values, is_causal=True, enable_gqa=grouped)
            return as_wide_as(out, v_BKSH)
        seen = (mask or Mask()).causal(length, self.window, q_BNSH.device)
        out = F.scaled_dot_product_attention(q_BNSH, k_BKSH, values, attn_mask=seen, enable_gqa=grouped)
        return as_wide_as(out, v_BKSH)


def as_wide_as(x: Tensor, other: Tensor) -> Tensor:
    """`x` padded with zeros, or cut, to the head size of `other`: fused kernels take one size only. Shapes: [.., H].

    Zeros added to values add zeros to the output, which are cut off again.
    """
    missing = other.shape[-1] - x.shape[-1]
    return F.pad(x, (0, missing)) if missing else x


class Attention(nn.Module):
    """Projections, optional QK-norm (Qwen3), rotary embedding, attention core, output projection.

    Shapes: x_BSD -> [B, S, D].
    """

    def __init__(self, hidden: int, spec: AttentionSpec, norm_eps: float) -> None:
        super().__init__()
        self.head_dim = spec.head_dim
        queries, keys = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
        self.qkv = Projections(hidden, {"q": queries, "k": keys, "v": keys}, bias=spec.qkv_bias)
        self.q_norm = RMSNorm(spec.head_dim, norm_eps) if spec.qk_norm else None
        self.k_norm = RMSNorm(spec.head_dim, norm_eps) if spec.qk_norm else None
        self.core = AttentionCore(spec.window)
        self.output = nn.Linear(queries, hidden, bias=spec.output_bias)

    def forward(self, x_BSD: Tensor, rope: tuple[Tensor, Tensor], mask: Mask | None) -> Tensor:
        q, k, v = [y.view(*y.shape[:-1], -1, self.head_dim) for y in self.qkv(x_BSD)]
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotate(q, *rope), rotate(k, *rope)
        out_BNSH = self.core(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), mask)
        return self.output(out_BNSH.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]

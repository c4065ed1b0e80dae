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


class AttentionCore(nn.Module):
    """Softmax attention of queries over keys and values: the part that context parallelism replaces.

    Shapes: q_BNSH, k_BKSH, v_BKSH, valid_BS (bool or None) -> [B, N, S, H].
    Causal: token i sees token j when j <= i, j > i - window, and j is valid; every token sees itself.
    """

    def __init__(self, window: int | None) -> None:
        super().__init__()
        self.window = window

    def forward(self, q_BNSH: Tensor, k_BKSH: Tensor, v_BKSH: Tensor, valid_BS: Tensor | None) -> Tensor:
        grouped = q_BNSH.shape[1] != k_BKSH.shape[1]
        length = q_BNSH.shape[2]
        if q_BNSH.is_cpu:
            # The CPU kernel reads keys and values once per block of queries: gathering each head first is cheaper.
            k_BKSH, v_BKSH = k_BKSH.contiguous(), v_BKSH.contiguous()
        if valid_BS is None and (self.window is None or self.window >= length):
            return F.scaled_dot_product_attention(q_BNSH, k_BKSH, v_BKSH, is_causal=True, enable_gqa=grouped)
        mask = causal_mask(length, self.window, valid_BS, q_BNSH.device)
        return F.scaled_dot_product_attention(q_BNSH, k_BKSH, v_BKSH, attn_mask=mask, enable_gqa=grouped)


def causal_mask(length: int, window: int | None, valid_BS: Tensor | None, device: torch.device) -> Tensor:
    """Boolean mask [S, S] or [B, 1, S, S]; True where the query (row) sees the key (column)."""
    row = torch.arange(length, device=device)[:, None]
    column = torch.arange(length, device=device)[None, :]
    mask = column <= row
    if window is not None:
        mask = mask & (column > row - window)
    if valid_BS is None:
        return mask
    return (mask & valid_BS[:, None, None, :]) | (row == column)


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

    def forward(self, x_BSD: Tensor, rope: tuple[Tensor, Tensor], valid_BS: Tensor | None) -> Tensor:
        q, k, v = [y.view(*y.shape[:-1], -1, self.head_dim) for y in self.qkv(x_BSD)]
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotate(q, *rope), rotate(k, *rope)
        out_BNSH = self.core(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), valid_BS)
        return self.output(out_BNSH.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]

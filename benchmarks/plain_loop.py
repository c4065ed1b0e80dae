"""A hand-written training step of a Llama-like model in plain PyTorch: what one would write for one process.

The yardstick of `single_rank.py`. It imports nothing of Fivefold. Functional style: the model is a dict of tensors.

Shape letters: B batch, S sequence, D hidden, N query heads, K key/value heads, H head size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

Weights = dict[str, Tensor]
"""Leaf tensors by name: embedding, head, norm, and `LAYER.PART` with the parts of `LAYER_PARTS`."""

LAYER_PARTS = ("attention_norm", "q", "k", "v", "o", "mlp_norm", "gate", "up", "down")


@dataclass(frozen=True)
class Shape:
    """Sizes of the model and settings of its training."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    seq_len: int
    norm_eps: float
    rope_theta: float
    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    clip_norm: float


def make_step(w: Weights, shape: Shape) -> Callable[[Sequence[tuple[Tensor, Tensor]]], tuple[float, float]]:
    """The training step over microbatches of (tokens, labels), labels -100 where masked -> (mean loss, grad norm)."""
    cos, sin = rope_table(shape)
    parameters = list(w.values())
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in parameters if p.ndim > 1], "weight_decay": shape.weight_decay},
            {"params": [p for p in parameters if p.ndim == 1], "weight_decay": 0.0},
        ],
        lr=shape.lr,
        betas=shape.betas,
        eps=shape.eps,
        fused=True,
    )

    def step(microbatches: Sequence[tuple[Tensor, Tensor]]) -> tuple[float, float]:
        valid = torch.stack([(labels != -100).sum() for _, labels in microbatches]).sum()
        total = torch.zeros(())
        for tokens, labels in microbatches:
            logits = forward(w, shape, tokens, cos, sin)
            loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / valid
            loss.backward()
            total += loss.detach()
        norm = torch.nn.utils.clip_grad_norm_(parameters, shape.clip_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(total), float(norm)

    return step


def forward(w: Weights, shape: Shape, tokens: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Logits [B, S, V] of tokens [B, S]."""
    head_dim = shape.hidden // shape.heads
    x = F.embedding(tokens, w["embedding"])
    for i in range(shape.layers):
        norm_1, wq, wk, wv, wo, norm_2, gate, up, down = (w[f"{i}.{part}"] for part in LAYER_PARTS)
        h = F.rms_norm(x, norm_1.shape, norm_1, shape.norm_eps)
        q = F.linear(h, wq).unflatten(-1, (shape.heads, head_dim)).transpose(1, 2)
        k = F.linear(h, wk).unflatten(-1, (shape.kv_heads, head_dim)).transpose(1, 2)
        v = F.linear(h, wv).unflatten(-1, (shape.kv_heads, head_dim)).transpose(1, 2)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + F.linear(attended.transpose(1, 2).flatten(2), wo)
        h = F.rms_norm(x, norm_2.shape, norm_2, shape.norm_eps)
        x = x + F.linear(F.silu(F.linear(h, gate)) * F.linear(h, up), down)
    return F.linear(F.rms_norm(x, w["norm"].shape, w["norm"], shape.norm_eps), w["head"])


def rope_table(shape: Shape) -> tuple[Tensor, Tensor]:
    """Cosines and sines [S, H] of all positions."""
    head_dim = shape.hidden // shape.heads
    frequencies = shape.rope_theta ** -(torch.arange(0, head_dim, 2) / head_dim)
    angles = torch.outer(torch.arange(shape.seq_len), frequencies).repeat(1, 2)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of [B, N, S, H], halves as pairs."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin

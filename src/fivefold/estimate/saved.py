"""Bytes that one microbatch leaves on one rank between forward and backward: one function for each saved tensor.

Every function takes numbers or numpy arrays of them, so that one layout and a lattice of layouts are counted alike.

Letters: T tokens of a microbatch on a cp rank (b S/cp), T' those of them that norms and inputs of column-parallel maps
keep (T/tp under sequence parallelism, else T); D hidden, N and K query and KV heads, H head size, F ffn, as cut by tp;
x bytes of an element, w bytes of a statistic (4).

The list of tensors is that of Korthikanti et al. 2022 (arXiv:2205.05198, section 4.1), extended to grouped heads, gated
MLPs, latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1), linear attention and experts. Which of them a
program keeps depends on its kernels (`Kernels`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from fivefold.core.execution import ITEMSIZE_BYTES, DType
from fivefold.core.model_spec import (
    AttentionSpec,
    BlockSpec,
    GatedDeltaSpec,
    MLASpec,
    MLPSpec,
    MoESpec,
)

Number = Any
"""A number, or a numpy array of them."""

DELTA_CHUNK_TOKENS = 64
"""Linear attention keeps its state once in so many tokens (Yang et al. 2024, arXiv:2412.06464, section 3.3)."""


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """What the kernels of a program keep."""

    element_bytes: int = 2
    statistic_bytes: int = 4
    attention: Literal["flash", "sdpa", "unfused"] = "flash"
    """`sdpa` is flash as torch's `scaled_dot_product_attention` has it: values padded to the size of keys, and a mask
    S x S kept for a sliding window."""
    norm: Literal["fused", "composed"] = "fused"
    """`fused` keeps its input; `composed` of single operations keeps the input and the normalised one, wide."""
    mlp: Literal["fused", "composed"] = "fused"
    """`composed` keeps the activation's output beside the product of a gated MLP; of a mixture, what routing reads."""
    dropout: bool = False
    """Masks of one byte after attention and MLP (and in unfused attention) are kept."""
    expert_output: bool = False
    """The experts' outputs are kept, where the router's weights are applied to them and not before."""

    @property
    def wide_bytes(self) -> int:
        """Of an element of what is computed in at least the precision of statistics."""
        return max(self.element_bytes, self.statistic_bytes)


@dataclass(frozen=True, kw_only=True)
class Share:
    """What of a microbatch one rank sees."""

    tokens: Number
    """T."""
    mine: Number
    """T'."""
    seq_len: Number
    """The keys of one row of the attention's scores."""
    tp: Number
    etp: Number
    imbalance: Number
    """Tokens of the fullest expert rank over the mean."""


def column_input(share: Share, D: int, k: Kernels) -> Number:
    """The input of q/k/v, gate/up or router: T'D x; under SP it is gathered again in backward."""
    return share.mine * D * k.element_bytes


def norm(share: Share, D: int, k: Kernels) -> Number:
    """Fused: T'D x + T' w. Composed of single operations: 2 T'D w + T' w."""
    if k.norm == "composed":
        return (2 * share.mine * D + share.mine) * k.wide_bytes
    return share.mine * (D * k.element_bytes + k.statistic_bytes)


def residual_dropout(share: Share, D: int, k: Kernels) -> Number:
    """A mask of one byte: T'D."""
    return share.mine * D * int(k.dropout)


def head_norms(share: Share, a: AttentionSpec, k: Kernels) -> Number:
    """Norms of queries and keys, if any: T (N + K) H as the norm keeps it."""
    if not a.qk_norm:
        return 0 * share.tokens
    heads = a.heads / share.tp + _kv_heads(a, share)
    if k.norm == "composed":
        return share.tokens * heads * (2 * a.head_dim + 1) * k.wide_bytes
    return share.tokens * heads * (a.head_dim * k.element_bytes + k.statistic_bytes)


def queries_keys_values(share: Share, a: AttentionSpec, k: Kernels) -> Number:
    """T (N + 2K) H x, and the gate of the output, if any: T N H x."""
    heads = (1 + a.output_gate) * a.heads / share.tp + 2 * _kv_heads(a, share)
    return share.tokens * heads * a.head_dim * k.element_bytes


def attention_core(share: Share, heads: Number, value_dim: int, k: Kernels) -> Number:
    """The output, which the output projection reads, T N H x; and what gives back the scores.

    Flash, sdpa: the log of the sum of exponentials, T N w. Unfused: softmax, T N S x, and with dropout its mask and its
    output: T N S (1 + x); together the 5 a s^2 b of Korthikanti et al., equation 1.
    """
    output = share.tokens * heads * value_dim * k.element_bytes
    if k.attention != "unfused":
        wide = k.wide_bytes if k.attention == "sdpa" else k.statistic_bytes
        return output + share.tokens * heads * wide
    kept = k.element_bytes + (1 + k.element_bytes) * int(k.dropout)
    return output + share.tokens * heads * share.seq_len * kept


def window_mask(share: Share, a: AttentionSpec, k: Kernels) -> Number:
    """Of a window that is shorter than the sequence, where the kernel takes a mask: S S x."""
    if k.attention != "sdpa" or a.window is None:
        return 0 * share.tokens
    return share.seq_len**2 * k.element_bytes * (share.seq_len > a.window)


def latent_attention(share: Share, a: MLASpec, k: Kernels) -> Number:
    """Latents before and after their norms, queries, keys and values expanded from them, and the core.

    sdpa: values are as wide as keys, and so is an output of its own. Norms composed of single operations keep a third
    copy of a latent, and two of the three wide; an input that need not be made wider is part of one tensor with the
    rotated key, which stays.
    """
    heads, x = a.heads / share.tp, k.element_bytes
    ranks = (a.q_rank or 0) + a.kv_rank
    latents = share.mine * (2 * ranks + a.rope_dim) * x
    if k.norm == "composed":
        wide = 2 * ranks + 1 + (a.q_rank is not None) + a.rope_dim * (k.wide_bytes == x)
        latents = share.mine * (wide * k.wide_bytes + ranks * x)
    core = attention_core(share, heads, a.value_dim, k)
    padded = k.attention == "sdpa" and a.value_dim < a.key_dim
    values = 2 * a.key_dim if padded else a.value_dim
    return latents + share.tokens * heads * (2 * a.key_dim + values) * x + core


def delta_attention(share: Share, a: GatedDeltaSpec, k: Kernels) -> Number:
    """Projections, their convolution, output before and after its norm, and a state [key, value] in every chunk."""
    keys, values = a.key_heads * a.key_dim / share.tp, a.value_heads * a.value_dim / share.tp
    kept = 2 * (2 * keys + values) + values + 2 * a.value_heads / share.tp + 2 * values
    states = a.value_heads / share.tp * a.key_dim * a.value_dim / DELTA_CHUNK_TOKENS
    return share.tokens * (kept * k.element_bytes + states * k.element_bytes)


def feed_forward(share: Share, ffn: Number, *, gated: bool, k: Kernels) -> Number:
    """T F x for each of: what the activation reads (gate and up), and what the second matrix reads."""
    kept = (4 if k.mlp == "composed" else 3) if gated else 2
    return share.tokens * ffn * kept * k.element_bytes


def routed(share: Share, m: MoESpec, D: int, k: Kernels) -> Number:
    """Router scores T' E w; the dispatched rows R = T' K etp x imbalance with their inner products; shared experts.

    Rows of one rank: each of its T' tokens goes to K experts, as many come back from others on average; experts cut by
    etp see the rows of all etp ranks.
    """
    rows = share.mine * m.top_k * share.etp * share.imbalance
    inner = (4 if k.mlp == "composed" else 3) if m.gated else 2
    per_row = D * (1 + int(k.expert_output)) + inner * m.ffn / share.etp
    scores = share.mine * m.experts * (k.statistic_bytes if k.mlp == "fused" else k.wide_bytes)
    if k.mlp == "composed":
        scores = scores + choices(share, m, D, rows, k)
    shared = feed_forward(share, m.shared_ffn / share.tp, gated=m.gated, k=k) if m.shared_ffn else 0
    return scores + rows * per_row * k.element_bytes + shared


def choices(share: Share, m: MoESpec, D: int, rows: Number, k: Kernels) -> Number:
    """What a router of single operations keeps beside its scores; its losses not counted. Indices take 8 bytes.

    T' K (8 + w) + T' w   the choices, their scores, and the sums of these if the weights add up to 1
    R (2 8 + w)           the token and the place of each row, and its weight
    (E + 1) 8             how many rows each expert has
    T' D w + E D w        input and weights of the router if they are made wider for it; the input as it was is kept for
                          shared experts only
    """
    wide = k.wide_bytes
    kept = share.mine * m.top_k * 8
    if m.norm_topk_prob:
        kept = kept + share.mine * (m.top_k + 1) * wide
    kept = kept + rows * (16 + wide) + 8 * (m.experts + 1)
    if wide > k.element_bytes:
        kept = kept + (share.mine + m.experts) * D * wide
        kept = kept - (0 if m.shared_ffn else column_input(share, D, k))
    return kept


def own_kernels(dtype: DType) -> Kernels:
    """Of this project's runtime on a CPU: counted to the byte in real steps, experts without dispatch."""
    element = ITEMSIZE_BYTES[dtype]
    return Kernels(
        element_bytes=element, attention="sdpa", norm="composed", mlp="composed", expert_output=True
    )


@dataclass(frozen=True)
class Saved:
    """What one layer keeps of one microbatch, in the parts that can be recomputed apart."""

    attention: Number
    """With its norm."""
    mlp: Number
    """Dense or routed, with its norm."""
    input: Number
    """What a recomputed region keeps in place of its own: T'D x."""


def layer(block: BlockSpec, D: int, share: Share, k: Kernels) -> Saved:
    """What one decoder layer keeps of one microbatch."""
    a, m = block.attention, block.mlp
    outer = norm(share, D, k) + column_input(share, D, k) + residual_dropout(share, D, k)
    if isinstance(a, AttentionSpec):
        core = queries_keys_values(share, a, k) + head_norms(share, a, k) + window_mask(share, a, k)
        core = core + attention_core(share, a.heads / share.tp, a.head_dim, k)
    elif isinstance(a, MLASpec):
        core = latent_attention(share, a, k)
    else:
        core = delta_attention(share, a, k)
    if isinstance(m, MLPSpec):
        inner = feed_forward(share, m.ffn / share.tp, gated=m.gated, k=k)
    else:
        inner = routed(share, m, D, k)
    return Saved(outer + core, outer + inner, share.mine * D * k.element_bytes)


def _kv_heads(a: AttentionSpec, share: Share) -> Number:
    """KV heads of a tp rank: at least one."""
    held = a.kv_heads / share.tp
    return held + (1 - held) * (held < 1)

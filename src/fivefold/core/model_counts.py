"""Parameters and FLOPs of a model, block by block. Exact integers; nothing is instantiated.

Notation: D hidden, F ffn, N heads, H head_dim, V vocab, E experts, K top_k, L layers, S sequence length.

FLOPs are those of matrix products: 2 per multiply-add. Norms, activations, softmax, rotation and the
embedding lookup are left out, as in the model FLOPs of PaLM (arXiv:2204.02311, appendix B). Attention is
causal: a token at position i (from 0) meets i + 1 keys, fewer under a window. Papers that count full S x S
attention have about twice as much for it.
"""

from __future__ import annotations

from typing import Literal, TypedDict

from fivefold.core.model_spec import (
    AttentionSpec,
    BlockSpec,
    GatedDeltaSpec,
    MLASpec,
    MLPSpec,
    ModelSpec,
    MoESpec,
)

Component = Literal["embedding", "attention", "mlp", "router", "experts", "shared_experts", "norm", "head"]
COMPONENTS: tuple[Component, ...] = (
    "embedding", "attention", "mlp", "router", "experts", "shared_experts", "norm", "head",
)  # fmt: skip
Counts = dict[Component, int]


class ParameterCounts(TypedDict):
    """`active_parameters`: what one token uses, embeddings and head included, K of E experts."""

    total_parameters: int
    active_parameters: int
    by_component: Counts


def parameter_counts(spec: ModelSpec) -> ParameterCounts:
    """Parameters of the model by component; they sum to the total. A tied head counts 0.

    `norm` holds all norm weights, also of queries, keys and latents; `embedding` also learned positions.
    Formula: sums of the matrices that the model definitions list; see `block_parameters`.
    """
    counts: Counts = dict.fromkeys(COMPONENTS, 0)
    counts["embedding"] = (spec.vocab + spec.position_table) * spec.hidden
    counts["norm"] = _norm_weights(spec)
    counts["head"] = (0 if spec.tied_embeddings else spec.vocab * spec.hidden) + spec.vocab * spec.head_bias
    idle = 0
    for block in spec.blocks:
        for component, n in block_parameters(spec, block).items():
            counts[component] += n
        if isinstance(block.mlp, MoESpec):
            idle += (block.mlp.experts - block.mlp.top_k) * expert_parameters(spec.hidden, block.mlp)
    total = sum(counts.values())
    return {"total_parameters": total, "active_parameters": total - idle, "by_component": counts}


def block_parameters(spec: ModelSpec, block: BlockSpec) -> Counts:
    """Parameters of one decoder layer by component (embedding and head: 0)."""
    counts: Counts = dict.fromkeys(COMPONENTS, 0)
    attention, mlp, D = block.attention, block.mlp, spec.hidden
    counts["attention"] = sum(_attention_matrices(attention, D)) + _attention_vectors(attention, D)
    norms = {"pre": 2, "post": 2, "sandwich": 4, "shared": 1}[block.norms]
    counts["norm"] = norms * _norm_weights(spec) + _inner_norms(attention)
    if isinstance(mlp, MLPSpec):
        counts["mlp"] = _mlp(D, mlp.ffn, gated=mlp.gated, bias=mlp.bias)
    else:
        counts["router"] = mlp.experts * D + mlp.experts * mlp.router_bias
        counts["experts"] = mlp.experts * expert_parameters(D, mlp)
        counts["shared_experts"] = _mlp(D, mlp.shared_ffn, gated=mlp.gated, bias=False) + D * mlp.shared_gate
    return counts


def expert_parameters(hidden: int, mlp: MoESpec) -> int:
    """Parameters of one routed expert."""
    return _mlp(hidden, mlp.ffn, gated=mlp.gated, bias=mlp.bias)


def block_flops(spec: ModelSpec, block: BlockSpec, sequence: int) -> float:
    """Forward FLOPs of one decoder layer per token, averaged over a causal sequence of S tokens.

    Formula: 2 x (weights of the matrix products that one token meets) + attention core.
    Source:  Narayanan et al. 2021, arXiv:2104.04473, appendix A; core: `attention_flops`.
    """
    D, mlp = spec.hidden, block.mlp
    weights = sum(_attention_matrices(block.attention, D))
    if isinstance(mlp, MLPSpec):
        weights += _mlp(D, mlp.ffn, gated=mlp.gated, bias=False)
    else:
        weights += mlp.experts * D + D * mlp.shared_gate
        weights += _mlp(D, mlp.top_k * mlp.ffn + mlp.shared_ffn, gated=mlp.gated, bias=False)
    return 2 * weights + attention_flops(block.attention, sequence)


def attention_flops(attention: AttentionSpec | MLASpec | GatedDeltaSpec, sequence: int) -> float:
    """Forward FLOPs per token of the attention core: scores and weighted values, or updates of a state.

    Formula: mean keys x 2 N (score dims + value dims): GQA 4 N H, MLA 2 N (nope + rope + value).
             Gated delta rule: per value head three products with the state [key_dim, value_dim] (read the
             old value, write the difference, read the output), 2 FLOPs each; it does not grow with S.
    Source:  Dao, FlashAttention-2, arXiv:2307.08691, section 4.1 (4 S^2 N H, halved when causal; here exactly
             (S+1)/2 keys); DeepSeek-V2, arXiv:2405.04434, eq. 9-11, keys and values expanded from the latent;
             Yang et al., Gated Delta Networks, arXiv:2412.06464, eq. 10.
    """
    if isinstance(attention, GatedDeltaSpec):
        return 6 * attention.value_heads * attention.key_dim * attention.value_dim
    if isinstance(attention, MLASpec):
        score, value = attention.nope_dim + attention.rope_dim, attention.value_dim
        return mean_keys(sequence) * 2 * attention.heads * (score + value)
    keys = mean_keys(sequence, window=attention.window, chunk=attention.chunk)
    return keys * 4 * attention.heads * attention.head_dim


def attention_weights(attention: AttentionSpec | MLASpec | GatedDeltaSpec, hidden: int) -> int:
    """Weights of the matrix products of one attention that every token meets."""
    return sum(_attention_matrices(attention, hidden))


def mean_keys(sequence: int, *, window: int | None = None, chunk: int | None = None) -> float:
    """Keys that a token meets on average: (S+1)/2 when causal, less under a window or inside chunks."""
    if chunk is not None and chunk < sequence:
        whole, rest = divmod(sequence, chunk)
        return (
            whole * chunk * mean_keys(chunk, window=window) + rest * mean_keys(rest, window=window)
        ) / sequence
    if window is None or window >= sequence:
        return (sequence + 1) / 2
    return window - window * (window - 1) / (2 * sequence)


def head_flops(spec: ModelSpec) -> int:
    """Forward FLOPs per token of the output head, tied or not: 2 D V (arXiv:2104.04473, appendix A)."""
    return 2 * spec.hidden * spec.vocab


def forward_flops(spec: ModelSpec, sequence: int) -> float:
    """Forward FLOPs per token of the whole model, averaged over a causal sequence of S tokens."""
    return sum(block_flops(spec, block, sequence) for block in spec.blocks) + head_flops(spec)


def training_flops(spec: ModelSpec, sequence: int) -> float:
    """Model FLOPs per trained token: forward, and twice that backward (arXiv:2104.04473, appendix A).

    Recompute is not counted: this is the numerator of MFU, not of HFU.
    """
    return 3 * forward_flops(spec, sequence)


def _norm_weights(spec: ModelSpec) -> int:
    return spec.hidden * (2 if spec.norm == "layer" else 1)


def _mlp(D: int, F: int, *, gated: bool, bias: bool) -> int:
    inner = 2 if gated else 1
    return (inner + 1) * D * F + ((inner * F + D) if bias else 0)


def _attention_matrices(attention: AttentionSpec | MLASpec | GatedDeltaSpec, D: int) -> list[int]:
    """Weights of the matrix products that every token meets, in the order they are applied."""
    if isinstance(attention, AttentionSpec):
        width, kv_width = attention.heads * attention.head_dim, attention.kv_heads * attention.head_dim
        return [D * width * (1 + attention.output_gate), D * kv_width, D * kv_width, width * D]
    if isinstance(attention, MLASpec):
        N, q_width = attention.heads, attention.heads * (attention.nope_dim + attention.rope_dim)
        queries = (
            [D * q_width] if attention.q_rank is None else [D * attention.q_rank, attention.q_rank * q_width]
        )
        return [
            *queries,
            D * (attention.kv_rank + attention.rope_dim),
            attention.kv_rank * N * (attention.nope_dim + attention.value_dim),
            N * attention.value_dim * D,
        ]
    keys = attention.key_heads * attention.key_dim
    values = attention.value_heads * attention.value_dim
    convolution = (
        2 * keys + values
    ) * attention.conv_kernel  # depthwise, one multiply-add per weight and token
    return [D * (2 * keys + 2 * values), D * 2 * attention.value_heads, convolution, values * D]


def _attention_vectors(attention: AttentionSpec | MLASpec | GatedDeltaSpec, D: int) -> int:
    """Biases and other vectors, norms left out."""
    if isinstance(attention, AttentionSpec):
        heads = attention.heads * (1 + attention.output_gate) + 2 * attention.kv_heads
        biases = heads * attention.head_dim * attention.qkv_bias + D * attention.output_bias
        return biases + attention.heads * attention.sinks
    if isinstance(attention, MLASpec):
        return ((attention.q_rank or 0) + attention.kv_rank + attention.rope_dim + D) * attention.bias
    return 2 * attention.value_heads  # decay rate and time-step bias


def _inner_norms(attention: AttentionSpec | MLASpec | GatedDeltaSpec) -> int:
    """Norm weights inside the attention: queries and keys, latents, or the linear output."""
    if isinstance(attention, AttentionSpec):
        if not attention.qk_norm:
            return 0
        heads = 2 if attention.qk_norm_over == "head" else attention.heads + attention.kv_heads
        return heads * attention.head_dim
    if isinstance(attention, MLASpec):
        return (attention.q_rank or 0) + attention.kv_rank
    return attention.value_dim

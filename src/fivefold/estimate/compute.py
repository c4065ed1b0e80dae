"""Seconds that one rank computes for one layer, the head and the optimizer, term by term.

Letters: T = b S / cp tokens of a microbatch on this rank, D hidden, N and K query and KV heads, H head size, F ffn,
V vocabulary, E experts, k top_k; P peak FLOP/s. All are columns: one value for each job. A map [k -> n] of m rows costs
2 m n k FLOPs; its backward has the same for the input's gradient [n -> k] and for the weight's [m -> n] of k rows.

Efficiency is a function of shape (`gemm`), attention is apart from matrix products (`attention_core`), and whatever
passes over memory is counted in bytes (`elementwise`). `c` are the coefficients as columns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fivefold.units import GIGA, MEGA

if TYPE_CHECKING:
    from fivefold.estimate.jobs import Blocks, Column, Flags, Jobs

    Values = dict[str, Column]

HOST_BYTES_PER_S = 25 * GIGA
"""One of eight ranks' share of the host's memory bandwidth, about 200 GB/s when all update at once."""
HALF = 2
"""Bytes of an element of activations and of weights in compute."""
ROOF = 4.0
"""Exponent with which two limits of one kernel are joined: the p-norm is smooth and at most 19 % above the larger."""


@dataclass(frozen=True)
class Passes:
    """Seconds of one layer, or of the head, for one microbatch."""

    forward: Column
    backward: Column
    weights: Column | float = 0.0
    """Of backward: what the gradients of weights take."""


def join(*limits: Column, power: float = ROOF) -> Column:
    """The larger of several limits, smoothly: (sum x^p)^(1/p)."""
    return sum(limit**power for limit in limits) ** (1 / power)


def peak(jobs: Jobs, c: Values, *, low: bool) -> Column:
    """FLOP/s that a large product reaches; `low`: with operands of the job's precision, else of 16 bits."""
    import numpy as np

    if not low:
        return jobs.peak_flops_per_s * c["gemm_16bit"]
    share = np.where(
        jobs.bits == 8, c["gemm_8bit"], np.where(jobs.bits == 4, c["gemm_4bit"], c["gemm_16bit"])
    )
    return jobs.peak_low_flops_per_s * share


def gemm(m: Column, n: Column, k: Column, jobs: Jobs, c: Values, *, low: bool = True) -> Column:
    """Seconds of one matrix product [m, k] x [k, n].

    Formula: 2 m n k / P (1 + a 1e6 / (m n) + b 100 / k), joined with the bytes of its operands over the bandwidth.
    Source:  form fitted to measured products: tiles that do not fill the device cost a, short sums cost b. Joined as
             in Williams et al. 2009, "Roofline".
    """
    import numpy as np

    tile = np.where(jobs.bits == 16, c["gemm_tile"], c["gemm_tile_low"]) if low else c["gemm_tile"]
    flops = 2 * (m * n * k + k * tile * MEGA + m * n * c["gemm_depth"] * 100)
    width = np.where(low, jobs.bits / 8, HALF)
    moved = (m * k + k * n) * width + m * n * HALF
    seconds = join(flops / peak(jobs, c, low=low), moved / (jobs.memory_bytes_per_s * c["memory"]))
    return np.where(m * n * k > 0, seconds, 0.0)


def linear(m: Column, n: Column, k: Column, jobs: Jobs, c: Values, *, low: bool = True) -> Passes:
    """A linear map of m rows, [k -> n], forward and backward. Frozen weights have no weight gradient."""
    import numpy as np

    weights = np.where(jobs.frozen, 0.0, gemm(k, n, m, jobs, c, low=low))
    back = gemm(m, k, n, jobs, c, low=low) + weights
    forward = gemm(m, n, k, jobs, c, low=low)
    if low:
        moved = (m * k + k * n) * c["passes_quantise"] * 1.5  # read in 16 bits, written in half of it
        cast = np.where(jobs.bits < 16, moved / (jobs.memory_bytes_per_s * c["memory"]), 0.0)
        forward, back = forward + cast, back + 2 * cast
    return Passes(forward, back, weights)


def attention_maps(block: Blocks, jobs: Jobs) -> list[tuple[Column, Column]]:
    """(n, k) of the linear maps around the attention core, as cut by tp; (0, 0) where a layer has none.

    Source: grouped-query attention (Ainslie et al. 2023, arXiv:2305.13245); MLA (DeepSeek-V2, arXiv:2405.04434,
            eq. 9-13: the maps into latents are whole on every tp rank).
    """
    import numpy as np

    D, tp = jobs.hidden, jobs.tp
    mla, low_q = block.kv_rank > 0, block.q_rank > 0
    q = block.heads * block.qk_dim / tp
    kv = np.maximum(block.kv_heads / tp, 1) * (block.qk_dim + block.v_dim)
    zero = np.zeros_like(D)
    return [
        (np.where(mla, np.where(low_q, block.q_rank, q), q + kv), D),
        (np.where(mla & low_q, q, zero), block.q_rank),
        (np.where(mla, block.kv_rank + block.rope_dim, zero), D),
        (
            np.where(mla, block.heads * (block.qk_dim - block.rope_dim + block.v_dim) / tp, zero),
            block.kv_rank,
        ),
        (D, block.heads * block.v_dim / tp),
    ]


def attention_core(block: Blocks, jobs: Jobs, c: Values) -> Passes:
    """Scores and weighted values of one layer.

    Formula: fused: 2 T N (H_qk + H_v) x keys that a token meets (half of S when causal), at a share of the peak that
             grows with S: attention / (1 + attention_half / S); backward 2.5 times the FLOPs.
             Not fused: products over all S x S, and passes over S x S for mask, softmax and dropout; backward twice.
    Source:  Dao 2023, arXiv:2307.08691, sections 3.1 and 4.1; Megatron-LM's fused softmax needs
             b N / tp % 4 = 0 (fused_softmax.py).
    """
    import numpy as np

    heads, S = block.heads / jobs.tp, jobs.seq_len
    keys = np.where(block.window < S, block.window * (1 - block.window / (2 * S)), S / 2)
    pair = 2 * jobs.tokens * heads * (block.qk_dim + block.v_dim)
    odd = np.where(block.qk_dim % 8 > 0, c["odd_head"], 1.0)
    narrow = 1 + np.maximum(0, 128 / np.clip(block.qk_dim, 1, 128) - 1) * 0.35
    share = c["attention"] / (1 + c["attention_half"] / np.minimum(S, block.window))
    fused = pair * keys / (jobs.peak_flops_per_s * share) * odd * narrow

    batch = jobs.micro_batch * heads
    rows = S / jobs.cp
    products = batch * gemm_of_heads(rows, S, block, jobs, c) * odd
    slow = np.where(slow_softmax(block, jobs), c["slow_softmax"], 1.0)
    passes = batch * rows * S * HALF * c["passes_softmax"] * slow / (jobs.memory_bytes_per_s * c["memory"])
    return Passes(
        np.where(jobs.fused_attention, fused, products + passes),
        np.where(jobs.fused_attention, 2.5 * fused, 2 * products + passes),
    )


def slow_softmax(block: Blocks, jobs: Jobs) -> Flags:
    """Whether attention is not fused and its softmax is not either: Megatron-LM's kernel needs b N / tp % 4 = 0.

    Source: Megatron-LM, megatron/model/fused_softmax.py, `is_kernel_available` (2021).
    """
    import numpy as np

    batch = np.round(jobs.micro_batch * block.heads / jobs.tp)
    return ~jobs.fused_attention & (batch % 4 > 0)


def gemm_of_heads(rows: Column, S: Column, block: Blocks, jobs: Jobs, c: Values) -> Column:
    """Seconds of one head's two products over all S x S; many heads fill the device together, so tiles cost nothing."""
    flops = 2 * rows * S * (block.qk_dim + block.v_dim + 2 * c["gemm_depth"] * 100)
    return flops / peak(jobs, c, low=False)


def elementwise(block: Blocks, jobs: Jobs, c: Values) -> Column:
    """Seconds that norms, residuals, dropout, rotation and activations of a layer take forward; backward takes twice.

    Formula: (passes_hidden T D + passes_ffn T F + passes_state T 2 I) x 2 bytes over the bandwidth, I the inner width
             of a state-space layer. Sequence parallelism cuts those over D.
    Source:  counts as in Korthikanti et al. 2022, arXiv:2205.05198, section 4.1.
    """
    import numpy as np

    D = jobs.hidden / np.where(jobs.sequence_parallel, jobs.tp, 1.0) * parts_of_layer(block) / 2
    inner = block.ffn * block.gated / jobs.tp
    wide = np.where(block.state > 0, 2 * block.heads * block.qk_dim / jobs.tp, 0.0)
    moved = jobs.tokens * HALF * (c["passes_hidden"] * D + c["passes_ffn"] * inner + c["passes_state"] * wide)
    return moved / (jobs.memory_bytes_per_s * c["memory"])


def parts_of_layer(block: Blocks) -> Column:
    """2: attention and a feed-forward part; 1: one of them, as in a layer of a hybrid model."""
    import numpy as np

    return np.where(block.heads > 0, 1.0, 0.0) + np.where((block.ffn > 0) | (block.experts > 0), 1.0, 0.0)


def expert_width(block: Blocks, jobs: Jobs) -> Column:
    """Width that routed experts read and write: the hidden one, or that of the latent space."""
    import numpy as np

    return np.where(block.latent > 0, block.latent, jobs.hidden)


def routed_tokens(block: Blocks, jobs: Jobs) -> Column:
    """Copies of tokens that the experts of one rank compute, when balanced: T k etp / tp (with one copy per choice)."""
    return jobs.tokens * block.top_k * jobs.etp / jobs.tp


def experts(block: Blocks, jobs: Jobs, c: Values) -> Passes:
    """Routed experts of one rank: grouped products of T k etp / (tp E/ep) rows each, and passes over routed tokens.

    Source: Gale et al. 2022, MegaBlocks, arXiv:2211.15841, section 5 (grouped products); Liu et al. 2025,
            arXiv:2504.14960 (folding of ep and etp).
    """
    import numpy as np

    is_moe = block.experts > 0
    local = np.maximum(block.experts / jobs.ep, 1)
    tokens = routed_tokens(block, jobs)
    rows = np.where(is_moe, tokens / local, 1.0)
    F = block.moe_ffn / jobs.etp
    slower = (1 + 30 / rows) / c["grouped"]
    D = expert_width(block, jobs)
    up = linear(rows, F * block.gated, D, jobs, c)
    down = linear(rows, D, F, jobs, c)
    moved = tokens * HALF * (c["passes_experts"] * D + c["passes_ffn"] * F * block.gated)
    passes = moved / (jobs.memory_bytes_per_s * c["memory"])
    forward = local * slower * (up.forward + down.forward) + passes
    backward = local * slower * (up.backward + down.backward) + 2 * passes
    weights = local * slower * (up.weights + down.weights)
    if (block.latent > 0).any():
        there = linear(jobs.tokens, block.latent / jobs.tp, jobs.hidden, jobs, c)
        back = linear(jobs.tokens, jobs.hidden, block.latent / jobs.tp, jobs, c)
        forward = forward + there.forward + back.forward
        backward = backward + there.backward + back.backward
        weights = weights + there.weights + back.weights
    return Passes(*(np.where(is_moe, seconds, 0.0) for seconds in (forward, backward, weights)))


def head(jobs: Jobs, c: Values) -> Passes:
    """Output head and loss of one microbatch: [D -> V/tp] in 16 bits, and passes over logits of 4 bytes.

    Source: 6 T D V FLOPs in all, Narayanan et al. 2021, arXiv:2104.04473, appendix A.
    """
    tokens, V = jobs.tokens, jobs.vocab / jobs.tp
    maps = linear(tokens, V, jobs.hidden, jobs, c, low=False)
    passes = tokens * V * 4 * c["passes_logits"] / (jobs.memory_bytes_per_s * c["memory"])
    return Passes(maps.forward + passes / 2, maps.backward + passes / 2, maps.weights)


def layer_parameters(block: Blocks, jobs: Jobs) -> tuple[Column, Column]:
    """Parameters of one layer on one rank: (dense ones as cut by tp, those of experts as cut by ep and etp)."""
    dense = sum(n * k for n, k in attention_maps(block, jobs))
    dense = dense + (block.gated + 1) * block.ffn * jobs.hidden / jobs.tp + block.experts * jobs.hidden
    dense = dense + 2 * block.latent * jobs.hidden
    routed = (
        block.experts / jobs.ep * (block.gated + 1) * block.moe_ffn * expert_width(block, jobs) / jobs.etp
    )
    return dense, routed


def optimizer(parameters: Column, jobs: Jobs, c: Values) -> Column:
    """Seconds of one update of so many parameters: all of Adam's states are read and written once.

    Formula: bytes per parameter (weights 4+4+2, two moments 4+4 each, gradient 2-4) over the bandwidth.
    Source:  Rajbhandari et al. 2020, arXiv:1910.02054, section 3.1.
    """
    import numpy as np

    moved = parameters * c["optimizer"]
    return np.where(jobs.offload, moved / HOST_BYTES_PER_S, moved / (jobs.memory_bytes_per_s * c["memory"]))

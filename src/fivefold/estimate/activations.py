"""Bytes that one decoder layer keeps between forward and backward on one rank, tensor by tensor.

Letters: T = b*S tokens of a microbatch, D hidden, N and K query and KV heads, H head size, F ffn, as cut by tp.
T' = T/tp under sequence parallelism, else T: what norms and the inputs of column-parallel maps keep.
x bytes of an element in the dtype of arithmetic, w bytes of at least float32 (norms compute in it).

    2 norms                      each 2 T'D w (input, normalised input) + T' w (root mean square)
    inputs of q/k/v, gate/up     each T'D x: under SP this rank's tokens only, they are gathered again in backward
    QK-norms, if any             2 T(N+K)H w + T(N+K) w
    attention                    T(2N + 2K)H x (q, k, v, output) + TN w (log of the sum of exponentials)
    a mask, where one is needed  S*S x (sliding window)
    gated MLP                    4 TF x (gate, up, activation, product); plain MLP: 2 TF x
    a recomputed region          T'D x, its input, and nothing of the above that is inside it

The formula is that of Korthikanti et al. 2022 (arXiv:2205.05198, section 4) for flash attention, GQA and a gated MLP;
each term is what torch's CPU kernels save, counted to the byte. Fused norms keep T'D x + T' w instead.
"""

from __future__ import annotations

from dataclasses import dataclass

from fivefold.core.execution import ITEMSIZE_BYTES, DType
from fivefold.core.layout import Layout
from fivefold.core.model_spec import AttentionSpec, BlockSpec, MLPSpec
from fivefold.core.recompute import Regions


@dataclass(frozen=True)
class SavedBytes:
    """What a layer keeps, by part."""

    norms: int
    projections: int
    """Inputs of the column-parallel maps."""
    attention: int
    mlp: int
    inputs: int
    """Inputs of what is recomputed; its own parts are 0."""

    @property
    def total(self) -> int:
        return self.norms + self.projections + self.attention + self.mlp + self.inputs


def layer_saved_bytes(
    block: BlockSpec,
    hidden: int,
    layout: Layout,
    *,
    micro_batch: int,
    seq_len: int,
    dtype: DType,
    recomputed: Regions = (),
) -> SavedBytes:
    """Bytes kept by one layer for one microbatch of `micro_batch` x `seq_len` tokens (cp = 1).

    `recomputed`: what is computed again in backward. While the backward of a region runs, all that it keeps without
    recompute is there as well: that of one region at a time, with a zero-bubble schedule until its W.

    Formula: see the head of this file. What all layers share (rotary angles) and the parameters are not counted.
    What is not recomputed must be plain GQA, or a dense MLP.
    """
    x = ITEMSIZE_BYTES[dtype]
    wide = max(x, ITEMSIZE_BYTES["float32"])
    tokens = micro_batch * seq_len
    mine = tokens // layout.tp if layout.sequence_parallel else tokens
    norms = projections = core = width = 0
    for part in _kept_parts(block, recomputed):
        norms += (2 * mine * hidden + mine) * wide
        projections += mine * hidden * x
        if isinstance(part, MLPSpec):
            width = (4 if part.gated else 2) * tokens * (part.ffn // layout.tp) * x
            continue
        heads = part.heads // layout.tp + max(1, part.kv_heads // layout.tp)
        norms += (2 * part.head_dim + 1) * tokens * heads * wide if part.qk_norm else 0
        core = 2 * tokens * heads * part.head_dim * x + tokens * (part.heads // layout.tp) * wide
        if part.window is not None and part.window < seq_len:
            core += seq_len * seq_len * x
    inputs = len(recomputed) * mine * hidden * x
    return SavedBytes(norms=norms, projections=projections, attention=core, mlp=width, inputs=inputs)


def _kept_parts(block: BlockSpec, recomputed: Regions) -> list[AttentionSpec | MLPSpec]:
    """The parts of a layer whose activations stay."""
    parts: list[AttentionSpec | MLPSpec] = []
    if {"layer", "attention"}.isdisjoint(recomputed):
        assert isinstance(block.attention, AttentionSpec)
        parts.append(block.attention)
    if {"layer", "mlp", "moe"}.isdisjoint(recomputed):
        assert isinstance(block.mlp, MLPSpec)
        parts.append(block.mlp)
    return parts

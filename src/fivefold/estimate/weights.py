"""The parameters of a model as matrices with the way in which each is cut: what memory and collectives are made of.

The same facts as in the table of parameters (`core/sharding.py`), in closed form and for every model that can be read,
also one that cannot be run here: a layout of thousands of ranks takes microseconds, and arrays of layouts take as long.

    tp      by tensor parallelism, on rows (heads, ffn, vocabulary) or columns
    kv      by KV heads: as tp, but where tp exceeds them neighbours hold the same head
    none    replicated over tp
    expert  whole experts over ep, each by etp

Letters: D hidden, F ffn, N and K query and KV heads, H head size, V vocabulary, E experts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

from fivefold.core.model_spec import (
    AttentionSpec,
    BlockSpec,
    GatedDeltaSpec,
    MLASpec,
    MLPSpec,
    ModelSpec,
    MoESpec,
)

Cut = Literal["tp_rows", "tp_columns", "kv", "none", "expert_rows", "expert_columns"]


@dataclass(frozen=True)
class Matrix:
    """`count` equal parameters of `rows` x `columns` elements (a vector has 1 column)."""

    rows: int
    columns: int
    cut: Cut
    count: int = 1
    heads: int = 0
    """KV heads in the rows, where `cut` is kv."""

    @property
    def elements(self) -> int:
        return self.count * self.rows * self.columns

    @property
    def is_expert(self) -> bool:
        return self.cut in ("expert_rows", "expert_columns")

    def local(self, tp: Any, ep: Any, etp: Any) -> tuple[Any, Any]:
        """(parameters x columns, rows) that one rank holds, padded; numbers or arrays of them."""
        if self.cut == "tp_rows":
            return self.count * self.columns, -(-self.rows // tp)
        if self.cut == "tp_columns":
            return self.count * -(-self.columns // tp), self.rows
        if self.cut == "kv":
            held = -(-self.heads // tp)
            return self.count * self.columns, self.rows // self.heads * held
        if self.cut == "expert_rows":
            return self.count // ep * self.columns, -(-self.rows // etp)
        if self.cut == "expert_columns":
            return self.count // ep * -(-self.columns // etp), self.rows
        return self.count * self.columns, self.rows + 0 * tp


@dataclass(frozen=True)
class Elements:
    """What one rank holds, in elements; `shard_*` what ZeRO leaves of it to one data rank, padded row by row."""

    dense: Any
    expert: Any
    shard_dense: Any
    shard_expert: Any


def local_elements(
    matrices: tuple[Matrix, ...], *, tp: Any, ep: Any, etp: Any, shards: Any, expert_shards: Any
) -> Elements:
    """Elements of these parameters on one rank, and the shards of them over `shards` data ranks (experts: edp ranks).

    Formula: ZeRO cuts dim 0 of each local parameter, padded: ceil(rows / shards) x columns.
    Checked by: tests/unit/estimate/test_weights.py, against the rows of the table of parameters.
    """
    sums: list[Any] = [0, 0, 0, 0]
    for matrix in matrices:
        columns, rows = matrix.local(tp, ep, etp)
        n = expert_shards if matrix.is_expert else shards
        place = 1 if matrix.is_expert else 0
        sums[place] = sums[place] + columns * rows
        sums[2 + place] = sums[2 + place] + columns * -(-rows // n)
    return Elements(*sums)


@lru_cache(maxsize=4096)
def block_matrices(spec_hidden: int, norm_rows: int, block: BlockSpec) -> tuple[Matrix, ...]:
    """The parameters of one decoder layer; `norm_rows`: 1, or 2 where norms have biases.

    Their elements sum to `model_counts.block_parameters`.
    """
    norms = {"pre": 2, "post": 2, "sandwich": 4, "shared": 1}[block.norms]
    found = [Matrix(spec_hidden, 1, "none", norms * norm_rows)]
    found += _attention(block.attention, spec_hidden)
    found += (
        _dense(block.mlp, spec_hidden) if isinstance(block.mlp, MLPSpec) else _routed(block.mlp, spec_hidden)
    )
    return tuple(matrix for matrix in found if matrix.elements)


def matrices_of(spec: ModelSpec, block: BlockSpec) -> tuple[Matrix, ...]:
    """`block_matrices` of a block of this model."""
    return block_matrices(spec.hidden, 2 if spec.norm == "layer" else 1, block)


def embedding_matrices(spec: ModelSpec) -> tuple[Matrix, ...]:
    """What stands before the first layer."""
    rows = [Matrix(spec.vocab, spec.hidden, "tp_rows"), Matrix(spec.position_table, spec.hidden, "none")]
    return tuple(matrix for matrix in rows if matrix.elements)


def head_matrices(spec: ModelSpec, *, tied_here: bool) -> tuple[Matrix, ...]:
    """What stands after the last layer; `tied_here`: the head reads an embedding that the same rank holds."""
    norm = Matrix(spec.hidden, 1, "none", 2 if spec.norm == "layer" else 1)
    head = Matrix(0 if tied_here else spec.vocab, spec.hidden, "tp_rows")
    bias = Matrix(spec.vocab if spec.head_bias else 0, 1, "tp_rows")
    return tuple(matrix for matrix in (norm, head, bias) if matrix.elements)


def _attention(attention: AttentionSpec | MLASpec | GatedDeltaSpec, D: int) -> Iterator[Matrix]:
    if isinstance(attention, AttentionSpec):
        yield from _grouped(attention, D)
    elif isinstance(attention, MLASpec):
        yield from _latent(attention, D)
    else:
        yield from _delta(attention, D)


def _grouped(a: AttentionSpec, D: int) -> Iterator[Matrix]:
    width, kv_width = a.heads * a.head_dim * (1 + a.output_gate), a.kv_heads * a.head_dim
    yield Matrix(width, D, "tp_rows")
    yield Matrix(kv_width, D, "kv", 2, heads=a.kv_heads)
    yield Matrix(D, a.heads * a.head_dim, "tp_columns")
    if a.qkv_bias:
        yield Matrix(width, 1, "tp_rows")
        yield Matrix(kv_width, 1, "kv", 2, heads=a.kv_heads)
    yield Matrix(D * a.output_bias, 1, "none")
    yield Matrix(a.heads * a.sinks, 1, "tp_rows")
    if a.qk_norm and a.qk_norm_over == "head":
        yield Matrix(a.head_dim, 1, "none", 2)
    elif a.qk_norm:
        yield Matrix(a.heads * a.head_dim, 1, "tp_rows")
        yield Matrix(kv_width, 1, "kv", heads=a.kv_heads)


def _latent(a: MLASpec, D: int) -> Iterator[Matrix]:
    """The down projections and the norms of latents are small and replicated (Megatron-Core, DeepSeek-V3)."""
    queries = a.heads * (a.nope_dim + a.rope_dim)
    if a.q_rank is None:
        yield Matrix(queries, D, "tp_rows")
    else:
        yield Matrix(a.q_rank, D, "none")
        yield Matrix(a.q_rank, 1, "none", 1 + a.bias)
        yield Matrix(queries, a.q_rank, "tp_rows")
    yield Matrix(a.kv_rank + a.rope_dim, D, "none")
    yield Matrix(a.kv_rank, 1, "none")
    yield Matrix((a.kv_rank + a.rope_dim + D) * a.bias, 1, "none")
    yield Matrix(a.heads * (a.nope_dim + a.value_dim), a.kv_rank, "tp_rows")
    yield Matrix(D, a.heads * a.value_dim, "tp_columns")


def _delta(a: GatedDeltaSpec, D: int) -> Iterator[Matrix]:
    """Cut by heads, as Megatron-Core and vLLM do."""
    keys, values = a.key_heads * a.key_dim, a.value_heads * a.value_dim
    yield Matrix(2 * keys + 2 * values, D, "tp_rows")
    yield Matrix(2 * a.value_heads, D, "tp_rows")
    yield Matrix(2 * keys + values, a.conv_kernel, "tp_rows")
    yield Matrix(2 * a.value_heads, 1, "tp_rows")
    yield Matrix(a.value_dim, 1, "none")
    yield Matrix(D, values, "tp_columns")


def _dense(mlp: MLPSpec, D: int, ffn: int | None = None) -> Iterator[Matrix]:
    F = mlp.ffn if ffn is None else ffn
    inputs = 2 if mlp.gated else 1
    yield Matrix(F, D, "tp_rows", inputs)
    yield Matrix(D, F, "tp_columns")
    yield Matrix(F * mlp.bias, 1, "tp_rows", inputs)
    yield Matrix(D * mlp.bias, 1, "none")


def _routed(mlp: MoESpec, D: int) -> Iterator[Matrix]:
    inputs = 2 if mlp.gated else 1
    yield Matrix(mlp.experts, D, "none")
    yield Matrix(mlp.experts * mlp.router_bias, 1, "none")
    yield Matrix(mlp.ffn, D, "expert_rows", inputs * mlp.experts)
    yield Matrix(D, mlp.ffn, "expert_columns", mlp.experts)
    if mlp.bias:
        yield Matrix(mlp.ffn, 1, "expert_rows", inputs * mlp.experts)
        yield Matrix(D, 1, "expert_columns", mlp.experts)
    if mlp.shared_ffn:
        yield from _dense(MLPSpec(ffn=mlp.shared_ffn, gated=mlp.gated), D)
    yield Matrix(D * mlp.shared_gate, 1, "none")

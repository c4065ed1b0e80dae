"""The one table of parameters: what each is, who holds which part of it, and how its gradient is completed.

`parameters(spec)` lists the parameters of a model as on one device. Each strategy's `rules.py` fills its columns and
`strategies/compose.py` puts them together. Initialisation, gradient reduction, norm and clipping, verification,
memory and the predicted communication all read this table and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import Literal

from fivefold.core.layout import Axis, ExpertAxis, Layout, MeshAxis
from fivefold.core.model_spec import (
    AttentionSpec,
    BlockSpec,
    MLASpec,
    MLPSpec,
    ModelSpec,
    MoESpec,
    require_plain_decoder,
)

Role = Literal[
    "embedding", "head", "norm", "head_norm",
    "q", "k", "v", "attention_output", "gate", "up", "down",
    "latent", "latent_up",
    "router", "selection_bias", "expert_gate", "expert_up", "expert_down", "shared_gate",
    "positions", "whole",
]  # fmt: skip
"""The last two are of modules that are not ours: a table of learned positions, and what is never cut."""

INIT_STD = 0.02


@dataclass(frozen=True, slots=True)
class Shard:
    """Cut along `dim` into degree/replicas blocks, the last one padded; `replicas` neighbours hold the same block."""

    dim: int
    replicas: int = 1


@dataclass(frozen=True, slots=True)
class ParameterRow:
    """One parameter. `shape` is the global, logical shape; everything local follows from the columns."""

    name: str
    role: Role
    shape: tuple[int, ...]
    is_bias: bool = False
    init_mean: float = 0.0
    init_std: float = INIT_STD
    init_name: str = ""
    """The name that seeds its values; differs from `name` for the second copy of a tied parameter."""
    stage: int = 0
    """Virtual stage that owns it."""
    mesh: Literal["dense", "expert"] = "dense"
    placement: Mapping[MeshAxis | ExpertAxis | Literal["data"], Shard] = field(default_factory=dict)
    """Axis -> how it is cut along that axis; an axis that is absent holds replicas. `data` cuts what others leave, over
    `data_axis`."""
    zero: Shard | None = None
    """How ZeRO cuts its gradient and its optimizer state over data ranks, see `held`; None: every data rank has all."""
    sums: Mapping[Axis, int | None] = field(default_factory=dict)
    """Axis -> its gradient is summed over the axis (None) or over runs of so many members. Absent: already complete."""
    order: tuple[int, ...] | None = None
    """Of stacked experts that were placed anew: which expert is at each place of dim 0; None: they are in order."""
    tied_to: str | None = None
    """This is a second copy of that parameter on another stage: the gradients of both are summed, it counts once."""

    @property
    def block(self) -> str:
        """The block it belongs to, for judging errors: its decoder layer, the embedding, or norm and head."""
        parts = self.name.split(".")
        return (
            ".".join(parts[:2])
            if parts[0] == "layers"
            else "embedding"
            if parts[0] in ("embedding", "positions")
            else "head"
        )

    @property
    def data_axis(self) -> Literal["data", "edp"]:
        """The ranks that hold the same part of it and see different tokens."""
        return "data" if self.mesh == "dense" else "edp"

    @property
    def may_be_skipped(self) -> bool:
        """Whether a step without any gradient of it is no fault: what a module of no known role skips, such as an
        expert that no token chose, has a gradient of zero."""
        return self.role == "whole"

    def data_shards(self, layout: Layout) -> int:
        """Into how many parts ZeRO cuts what the ranks of `data_axis` would hold alike; 1: it does not."""
        return layout.data_shards if self.mesh == "dense" else layout.expert_shards

    @property
    def held(self) -> ParameterRow:
        """The row of what one data rank keeps of it between steps: the parameter itself, unless ZeRO cuts it."""
        if self.zero is None:
            return self
        return replace(self, placement={**self.placement, "data": self.zero}, zero=None)

    @property
    def whole(self) -> ParameterRow:
        """The row without the cut over data ranks: what `held` is a part of."""
        if "data" not in self.placement:
            return self
        rest = dict(self.placement)
        return replace(self, zero=rest.pop("data"), placement=rest)

    def region(self, layout: Layout, coordinate: Mapping[MeshAxis, int]) -> tuple[slice, ...]:
        """The global region that a rank holds, per dim, without padding (it can be empty); see `pieces` for `order`."""
        at = coordinate if self.mesh == "dense" else layout.expert_place(coordinate)
        region = [slice(0, size) for size in self.shape]
        for axis, shard in self.placement.items():
            if axis == "data":
                continue
            block = self._block_size(layout, axis, shard)
            start = at[axis] // shard.replicas * block  # type: ignore[index]
            size = self.shape[shard.dim]
            region[shard.dim] = slice(min(start, size), min(start + block, size))
        if "data" in self.placement:
            dim = self.placement["data"].dim
            part, block = region[dim], self.local_shape(layout)[dim]
            start = part.start + self._data_index(layout, coordinate) % self.data_shards(layout) * block
            region[dim] = slice(min(start, part.stop), min(start + block, part.stop))
        return tuple(region)

    def pieces(
        self, layout: Layout, coordinate: Mapping[MeshAxis, int]
    ) -> Iterator[tuple[tuple[slice, ...], tuple[slice, ...]]]:
        """(part of what a rank holds, its global region), without padding: one pair, or one for each expert."""
        region = self.region(layout, coordinate)
        inside = tuple(slice(0, part.stop - part.start) for part in region)
        if self.order is None:
            yield inside, region
            return
        for i, expert in enumerate(self.order[region[0]]):
            yield (slice(i, i + 1), *inside[1:]), (slice(expert, expert + 1), *region[1:])

    def local_shape(self, layout: Layout) -> tuple[int, ...]:
        """The shape of every rank's part, with padding: the same on all ranks that own the parameter."""
        shape = list(self.shape)
        for axis, shard in self.placement.items():
            if axis != "data":
                shape[shard.dim] = self._block_size(layout, axis, shard)
        if "data" in self.placement:
            dim = self.placement["data"].dim
            shape[dim] = -(-shape[dim] // self.data_shards(layout))
        return tuple(shape)

    def local_elements(self, layout: Layout) -> int:
        return prod(self.local_shape(layout))

    def counts_once_here(self, coordinate: Mapping[MeshAxis, int]) -> bool:
        """Whether this rank's part enters a sum over all tp and pp ranks, so that each element is counted once."""
        if self.tied_to is not None:
            return False
        shard = self.placement.get("tp")
        return coordinate["tp"] % shard.replicas == 0 if shard else coordinate["tp"] == 0

    def written_here(self, layout: Layout, coordinate: Mapping[MeshAxis, int]) -> bool:
        """Whether this rank's part enters a checkpoint, so that each element is written by one rank of all."""
        parts = self.data_shards(layout) if "data" in self.placement else 1
        once = self.mesh == "expert" or self.counts_once_here(coordinate)
        return self._data_index(layout, coordinate) < parts and once

    def _data_index(self, layout: Layout, coordinate: Mapping[MeshAxis, int]) -> int:
        """The place of a coordinate on `data_axis`."""
        if self.mesh == "dense":
            return layout.data_index(coordinate)
        return layout.expert_place(coordinate)["edp"]

    def _block_size(self, layout: Layout, axis: MeshAxis | ExpertAxis, shard: Shard) -> int:
        blocks = layout.degree(axis) // shard.replicas
        return -(-self.shape[shard.dim] // blocks)


def parameters(spec: ModelSpec) -> tuple[ParameterRow, ...]:
    """The parameters of a model on one device, in the order of its modules. Raises: ModelError."""
    require_plain_decoder(spec)
    embedding = ParameterRow("embedding.weight", "embedding", (spec.vocab, spec.hidden))
    layers = [row for i, block in enumerate(spec.blocks) for row in _layer(f"layers.{i}", block, spec)]
    norm = _norm("norm.weight", "norm", spec.hidden)
    head = ParameterRow("head.weight", "head", (spec.vocab, spec.hidden))
    rows = [embedding, *layers, norm, *([] if spec.tied_embeddings else [head])]
    return tuple(replace(row, init_name=row.name) for row in rows)


def buffers(spec: ModelSpec, *, load: bool = False) -> tuple[ParameterRow, ...]:
    """What a model has beside parameters and a checkpoint holds: no gradient, at least float32, initially zero.

    `load`: and what training remembers of how busy experts were (`balance=batch`), initially 1.
    """
    return (*_selection_biases(spec), *(_loads(spec) if load else ()))


def _loads(spec: ModelSpec) -> Iterator[ParameterRow]:
    for i, block in enumerate(spec.blocks):
        if isinstance(block.mlp, MoESpec):
            shape = (block.mlp.experts,)
            yield ParameterRow(
                f"layers.{i}.mlp.router.load", "selection_bias", shape, init_mean=1.0, init_std=0.0
            )


def _selection_biases(spec: ModelSpec) -> tuple[ParameterRow, ...]:
    return tuple(
        ParameterRow(
            f"layers.{i}.mlp.router.selection_bias",
            "selection_bias",
            (block.mlp.experts,),
            is_bias=True,
            init_std=0.0,
        )
        for i, block in enumerate(spec.blocks)
        if isinstance(block.mlp, MoESpec) and block.mlp.selection_bias
    )


def expert_counts(spec: ModelSpec) -> tuple[ParameterRow, ...]:
    """What a run that places experts anew holds as well (`engine/rebalance.py`), float64, initially zero.

    A checkpoint may lack it, or have it for nothing: it only says where experts are.
    """
    return tuple(
        ParameterRow(
            f"layers.{i}.mlp.experts.{name}", "selection_bias", (block.mlp.experts,), init_std=0.0
        )
        for i, block in enumerate(spec.blocks) if isinstance(block.mlp, MoESpec)
        for name in ("counted", "placed")
    )  # fmt: skip


def stored(spec: ModelSpec) -> tuple[ParameterRow, ...]:
    """Everything that a file with the weights of a model holds: parameters, then buffers."""
    return (*parameters(spec), *buffers(spec))


def _layer(prefix: str, block: BlockSpec, spec: ModelSpec) -> Iterator[ParameterRow]:
    residual_std = INIT_STD / (2 * spec.layers) ** 0.5  # Radford et al. 2019, section 2.3
    yield _norm(f"{prefix}.attention_norm.weight", "norm", spec.hidden)
    if isinstance(block.attention, MLASpec):
        yield from _latent_attention(f"{prefix}.attention", block.attention, spec.hidden, residual_std)
    else:
        assert isinstance(block.attention, AttentionSpec)
        yield from _attention(prefix, block.attention, spec.hidden, residual_std)
    yield _norm(f"{prefix}.mlp_norm.weight", "norm", spec.hidden)
    if isinstance(block.mlp, MoESpec):
        yield from _moe(f"{prefix}.mlp", block.mlp, spec.hidden, residual_std)
    else:
        yield from _mlp(f"{prefix}.mlp", block.mlp, spec.hidden, residual_std)


def _attention(
    prefix: str, attention: AttentionSpec, hidden: int, residual_std: float
) -> Iterator[ParameterRow]:
    queries, keys = attention.heads * attention.head_dim, attention.kv_heads * attention.head_dim
    yield from _linear(f"{prefix}.attention.qkv.q", "q", queries, hidden, attention.qkv_bias)
    yield from _linear(f"{prefix}.attention.qkv.k", "k", keys, hidden, attention.qkv_bias)
    yield from _linear(f"{prefix}.attention.qkv.v", "v", keys, hidden, attention.qkv_bias)
    if attention.qk_norm:
        yield _norm(f"{prefix}.attention.q_norm.weight", "head_norm", attention.head_dim)
        yield _norm(f"{prefix}.attention.k_norm.weight", "head_norm", attention.head_dim)
    output = f"{prefix}.attention.output"
    yield from _linear(output, "attention_output", hidden, queries, attention.output_bias, residual_std)


def _latent_attention(prefix: str, mla: MLASpec, hidden: int, residual_std: float) -> Iterator[ParameterRow]:
    values = mla.heads * mla.value_dim
    if mla.q_rank is not None:
        yield from _linear(f"{prefix}.down.q", "latent", mla.q_rank, hidden, mla.bias)
    yield from _linear(f"{prefix}.down.kv", "latent", mla.kv_rank + mla.rope_dim, hidden, mla.bias)
    if mla.q_rank is not None:
        yield _norm(f"{prefix}.query_norm.weight", "norm", mla.q_rank)
    yield _norm(f"{prefix}.latent_norm.weight", "norm", mla.kv_rank)
    yield from _linear(f"{prefix}.up.q", "latent_up", mla.heads * mla.key_dim, mla.q_rank or hidden, False)
    keys_and_values = mla.heads * mla.nope_dim + values
    yield from _linear(f"{prefix}.up.kv", "latent_up", keys_and_values, mla.kv_rank, False)
    output = f"{prefix}.output"
    yield from _linear(output, "attention_output", hidden, values, mla.bias, residual_std)


def _mlp(prefix: str, mlp: MLPSpec, hidden: int, residual_std: float) -> Iterator[ParameterRow]:
    if mlp.gated:
        yield from _linear(f"{prefix}.inputs.gate", "gate", mlp.ffn, hidden, mlp.bias)
    yield from _linear(f"{prefix}.inputs.up", "up", mlp.ffn, hidden, mlp.bias)
    yield from _linear(f"{prefix}.down", "down", hidden, mlp.ffn, mlp.bias, residual_std)


def _moe(prefix: str, moe: MoESpec, hidden: int, residual_std: float) -> Iterator[ParameterRow]:
    E, F = moe.experts, moe.ffn
    yield from _linear(f"{prefix}.router", "router", E, hidden, moe.router_bias)
    yield ParameterRow(f"{prefix}.experts.gate", "expert_gate", (E, F, hidden), mesh="expert")
    yield ParameterRow(f"{prefix}.experts.up", "expert_up", (E, F, hidden), mesh="expert")
    down = f"{prefix}.experts.down"
    yield ParameterRow(down, "expert_down", (E, hidden, F), mesh="expert", init_std=residual_std)
    if moe.shared_ffn:
        shared = MLPSpec(ffn=moe.shared_ffn, gated=moe.gated)
        yield from _mlp(f"{prefix}.shared", shared, hidden, residual_std)
    if moe.shared_gate:
        yield from _linear(f"{prefix}.shared_gate", "shared_gate", 1, hidden, False)


def _norm(name: str, role: Role, size: int) -> ParameterRow:
    return ParameterRow(name, role, (size,), init_mean=1.0, init_std=0.0)


def _linear(
    name: str, role: Role, outputs: int, inputs: int, bias: bool, std: float = INIT_STD
) -> Iterator[ParameterRow]:
    yield ParameterRow(f"{name}.weight", role, (outputs, inputs), init_std=std)
    if bias:
        yield ParameterRow(f"{name}.bias", role, (outputs,), is_bias=True, init_std=0.0)

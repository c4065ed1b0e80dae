"""Many training jobs as columns: what the estimate of step time reads. One row per job; sizes as float arrays [n].

A table of measured runs becomes `Jobs`, and so does the lattice of a search: both are priced by the same functions.
Degrees, sizes and rates are float64 so that products of large sizes stay exact up to 2**53.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Column: TypeAlias = NDArray[np.float64]
    Flags: TypeAlias = NDArray[np.bool_]
    Words: TypeAlias = NDArray[np.str_]


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """One kind of decoder layer in every job; a job without it has `count` 0.

    A layer of a hybrid model has one part only: attention without an MLP (`ffn` and `experts` 0), or the reverse
    (`heads` and head sizes 0). A state-space layer is attention to as many keys as a chunk of it costs.
    """

    count: Column
    """Layers of this kind in the whole model."""
    heads: Column
    kv_heads: Column
    qk_dim: Column
    """Size of a head in the product of queries and keys."""
    v_dim: Column
    q_rank: Column
    """MLA: rank of the compressed query; 0: projected directly."""
    kv_rank: Column
    """MLA: rank of the latent of keys and values; 0: no MLA."""
    rope_dim: Column
    state: Column
    """Size of a state of each head; 0: no state-space layer."""
    window: Column
    """Keys that a token can meet at most; the sequence length where there is no window."""
    ffn: Column
    """Width of the dense MLP, or of the shared experts together; 0: none."""
    gated: Column
    """2 where the MLP has a gate beside its up projection, else 1."""
    experts: Column
    top_k: Column
    moe_ffn: Column
    """Width of one routed expert; 0: a dense layer."""
    latent: Column
    """Width that routed experts read and write, where tokens are projected to it and back; 0: the hidden width."""


@dataclass(frozen=True, kw_only=True)
class Jobs:
    """Columns of n jobs."""

    # Model
    blocks: tuple[Blocks, ...]
    hidden: Column
    vocab: Column
    tied: Flags
    frozen: Flags
    """Whether the base weights get no gradient (LoRA)."""
    # Work
    seq_len: Column
    micro_batch: Column
    microbatches: Column
    # Cut
    tp: Column
    pp: Column
    dp: Column
    cp: Column
    ep: Column
    etp: Column
    chunks: Column
    zero: Column
    sequence_parallel: Flags
    bubble: Column
    """Share of the 1F1B bubble that the schedule leaves; `step.BUBBLE` names the schedules."""
    overlap: Column
    """Share of expert communication that the schedule hides behind another microbatch; `step.OVERLAP`."""
    # Execution
    bits: Column
    """Bits of an operand of the linear maps: 16, 8 or 4."""
    scaling: Column
    """How finely 8-bit operands are scaled: 0 a tensor, 1 blocks, 2 rows."""
    grad_bytes: Column
    """Bytes of a gradient element that is reduced."""
    recompute: Column
    """Share of the layers that are computed again in full."""
    recompute_attention: Flags
    """Whether the attention core is computed again."""
    fused_attention: Flags
    """One kernel that skips masked blocks (flash), or separate products and softmax over all S x S."""
    one_copy: Flags
    """Whether a token travels once to each rank that holds some of its experts, not once for each expert."""
    offload: Flags
    """Whether the optimizer's states are in host memory."""
    # Device
    peak_flops_per_s: Column
    """Of 16-bit operands."""
    peak_low_flops_per_s: Column
    """Of operands of `bits`."""
    memory_bytes_per_s: Column
    link_bytes_per_s: Column
    """Of one device to its peers in the fast domain, one direction."""
    nic_bytes_per_s: Column
    """One device's share of the network."""
    domain: Column
    """Devices in the fast domain."""
    # Keys of the coefficients, and of the correction where runs are near
    hardware: Words
    software: Words
    release: Column
    """When the software was released, in years."""
    stack: Words
    """Name of the framework."""
    placed: tuple[Column, Column, Column] | None = None
    """Layers of the first, a middle and the last pipeline rank; None: as `step.stage_layers` deals them."""

    def __len__(self) -> int:
        return len(self.hidden)

    @property
    def layers(self) -> Column:
        total: Column = sum(block.count for block in self.blocks)  # type: ignore[assignment]
        return total

    @property
    def tokens(self) -> Column:
        """Tokens that one rank of a context-parallel group computes in a microbatch: b S / cp."""
        return self.micro_batch * self.seq_len / self.cp

    @property
    def devices(self) -> Column:
        return self.tp * self.pp * self.dp * self.cp

    def take(self, rows: Any) -> Jobs:
        """The rows that an index array or a mask names."""
        return replace(
            self,
            blocks=tuple(
                Blocks(**{f.name: getattr(block, f.name)[rows] for f in fields(block)})
                for block in self.blocks
            ),
            **{
                f.name: getattr(self, f.name)[rows]
                for f in fields(self)
                if f.name not in ("blocks", "placed")
            },
            placed=self.placed and tuple(column[rows] for column in self.placed),
        )


def columns(rows: Sequence[Mapping[str, Any]], kind: type[Any], **given: Any) -> Any:
    """`kind` (Jobs or Blocks) from one mapping a row; fields in `given` are taken as they are."""
    import numpy as np

    types = {"Column": np.float64, "Flags": np.bool_, "Words": np.str_}
    made: dict[str, Any] = {
        f.name: np.array([row[f.name] for row in rows], dtype=types[str(f.type)])
        for f in fields(kind)
        if f.name not in given and f.default is MISSING
    }
    return kind(**made, **given)

"""Tensor parallelism: what may be cut, what is cut, and what it communicates.

Megatron's cut (Shoeybi et al. 2019, section 3) with sequence parallelism (Korthikanti et al. 2022, section 4.2.2):

    q, k, v, gate, up       by output features (heads)       column: input gathered over the sequence
    latent_up (MLA)         by heads                         latents gathered over the sequence, in place of the input
    attention_output, down  by input features                row: partial sums reduce-scattered over the sequence
    embedding, head         by vocabulary, padded to tp      the logits are never gathered
    norms, row biases       replicated                       under SP they see S/tp tokens: gradient summed over tp
    latent (MLA), router,   replicated                       as norms; shared experts are cut as an MLP is
    gate of shared experts

KV heads: when tp is a multiple of kv_heads, tp/kv_heads neighbours hold the same head (its memory does not fall) and
each sees its own query heads only, so the gradient is summed over these neighbours.

Letters: b micro-batch, S sequence, D hidden, V vocabulary; x bytes of one element.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from math import gcd

from fivefold.core.events import Event, Events
from fivefold.core.layout import Layout
from fivefold.core.layout_checks import divisors
from fivefold.core.model_spec import AttentionSpec, BlockSpec, MLASpec, MLPSpec, ModelSpec, MoESpec
from fivefold.core.recompute import Regions
from fivefold.core.sharding import ParameterRow, Shard
from fivefold.errors import LayoutError, nearest_numbers

COLUMN = ("q", "k", "v", "gate", "up", "latent_up")
ROW = ("attention_output", "down")
VOCABULARY = ("embedding", "head")


def check(spec: ModelSpec, layout: Layout, seq_len: int) -> None:
    """Raises: LayoutError naming the size that tp does not divide and the nearest degrees that do."""
    tp = layout.tp
    if tp == 1:
        return
    for size, name in _broken(spec, tp):
        legal = [d for d in divisors(_common(spec)) if not _broken(spec, d)]
        raise LayoutError(
            f"tp{tp} does not fit {spec.name}: {name} = {size} is not divisible by {tp}; "
            f"nearest legal tp: {nearest_numbers(tp, legal)}"
        )
    if layout.sequence_parallel and layout.cp == 1 and seq_len % tp:  # with cp: a rule of context parallelism
        below = seq_len // tp * tp
        lengths = (length for length in (below, below + tp) if 0 < length <= spec.max_positions)
        raise LayoutError(
            f"sequence length {seq_len} is not divisible by tp = {tp}, which sequence parallelism needs; "
            f"nearest: {nearest_numbers(seq_len, lengths)}, or add 'nosp'"
        )


def _broken(spec: ModelSpec, tp: int) -> list[tuple[int, str]]:
    """(size, name) of everything that this degree does not divide."""
    broken = []
    for block in spec.kinds_of_blocks:
        attention = block.attention
        if isinstance(attention, AttentionSpec | MLASpec) and attention.heads % tp:
            broken.append((attention.heads, "heads"))
        if isinstance(attention, AttentionSpec) and attention.kv_heads % tp and tp % attention.kv_heads:
            broken.append((attention.kv_heads, "kv_heads (nor is tp a multiple of it)"))
        width, name = _dense_width(block)
        if width % tp:
            broken.append((width, name))
    return broken


def _common(spec: ModelSpec) -> int:
    """What every legal degree divides: all heads and all widths."""
    blocks = spec.kinds_of_blocks
    heads = [block.attention.heads for block in blocks if isinstance(block.attention, AttentionSpec)]
    return gcd(*heads, *(_dense_width(block)[0] for block in blocks))


def _dense_width(block: BlockSpec) -> tuple[int, str]:
    """What tp cuts of the feed-forward part: its width, or that of the shared experts; 0 where there is neither."""
    return (
        (block.mlp.ffn, "ffn")
        if isinstance(block.mlp, MLPSpec)
        else (block.mlp.shared_ffn, "ffn of the shared experts")
    )


def kv_replicas(kv_heads: int, tp: int) -> int:
    """How many neighbours on axis tp hold the same KV head."""
    return max(1, tp // kv_heads)


def place(row: ParameterRow, spec: ModelSpec, layout: Layout) -> ParameterRow:
    """Fill the tp columns of one row: how it is cut, and over whom its gradient is summed."""
    if layout.tp == 1 or row.mesh == "expert":
        return row
    if row.role in COLUMN:
        replicas = 1
        if row.role in ("k", "v"):
            attention = spec.blocks[int(row.name.split(".")[1])].attention
            assert isinstance(attention, AttentionSpec)
            replicas = kv_replicas(attention.kv_heads, layout.tp)
        sums = {**row.sums, "tp": replicas} if replicas > 1 else row.sums
        return replace(row, placement={**row.placement, "tp": Shard(0, replicas)}, sums=sums)
    if row.role in VOCABULARY:
        return replace(row, placement={**row.placement, "tp": Shard(0)})
    if row.role in ROW and not row.is_bias:
        return replace(row, placement={**row.placement, "tp": Shard(1)})
    # Replicated. Heads are cut even without SP, so a norm on heads sees only some of them on each rank.
    partial = layout.sequence_parallel or row.role == "head_norm"
    return replace(row, sums={**row.sums, "tp": None}) if partial else row


def predict_chunk(
    spec: ModelSpec,
    layout: Layout,
    *,
    layers: range,
    first: bool,
    last: bool,
    tokens: int,
    dtype: str,
    itemsize: int,
    recomputed: Sequence[Regions],
    keeps_gathered: bool = False,
) -> Events:
    """Events of one microbatch (`tokens` = b*S, under cp b*S/cp) through one virtual stage, forward and backward.

    A layer is two pairs of a column and a row, attention and MLP; a routed one has the second only for shared experts.
    `recomputed`: what each layer computes again in backward (see `_again`).

    Per pair with SP:     forward an all-gather + a reduce-scatter, backward 2 all-gathers (one of them gathers the
                          input again, which is not kept) + a reduce-scatter, each b*S*D*x bytes.
                          `keeps_gathered`, in a module that is not ours: it is kept, so backward has 1 all-gather.
    Per pair, nosp:       an all-reduce forward, one backward, the same bytes.
    MLA:                  its column has the latents as input, see `latent.py`: other widths than D.
    Embedding and head:   as a row and a column; the loss adds two all-reduces of b*S and 2*b*S elements.
    """
    if layout.tp == 1:
        return Counter()
    D, sp = spec.hidden, layout.sequence_parallel
    blocks = [spec.blocks[layer] for layer in layers]
    columns = [widths for block in blocks for widths in _column_inputs(block, D)]
    columns = [(inputs, 0 if keeps_gathered else again) for inputs, again in columns]
    widths: Counter[tuple[str, str, int]] = Counter()
    for inputs, again in [*columns, *[(D, D)] * last]:
        if sp:
            widths["forward", "all_gather", inputs] += 1
            widths["backward", "all_gather", again] += 1
        widths["backward", "reduce_scatter" if sp else "all_reduce", inputs] += 1
    rows = len(columns) + first
    widths["forward", "reduce_scatter" if sp else "all_reduce", D] += rows
    if sp:
        widths["backward", "all_gather", D] += rows
    for block, regions in zip(blocks, recomputed):
        gathers, sums = _again(block, regions, D)
        widths["backward", "reduce_scatter" if sp else "all_reduce", D] += sums
        for inputs in gathers if sp else ():
            widths["backward", "all_gather", inputs] += 1
    size = tokens * itemsize
    events = Counter({Event(p, "tp", op, dtype, size * w): n for (p, op, w), n in widths.items() if n and w})  # type: ignore[arg-type]
    if last:
        wide, wide_size = ("float64", 8) if dtype == "float64" else ("float32", 4)
        events[Event("forward", "tp", "all_reduce", wide, tokens * wide_size)] += 1
        events[Event("forward", "tp", "all_reduce", wide, 2 * tokens * wide_size)] += 1
    return events


def _column_inputs(block: BlockSpec, hidden: int) -> list[tuple[int, int]]:
    """For each column of a layer: how wide its input is, and what of it backward needs again for weight gradients."""
    attention, inputs = block.attention, (hidden, hidden)
    if isinstance(attention, MLASpec):
        again = (attention.q_rank or hidden) + attention.kv_rank
        inputs = again + attention.rope_dim, again
    return [inputs] + [(hidden, hidden)] * (_dense_width(block)[0] > 0)


def _again(block: BlockSpec, regions: Regions, hidden: int) -> tuple[list[int], int]:
    """(widths of the columns' inputs that are gathered, sums of a row) once more when backward recomputes.

    A sum is repeated only where something that backward reads comes after it: that of attention before the MLP of the
    same region, that of shared experts before the gate that scales them.
    """
    whole = "layer" in regions
    feeds = not {"layer", "mlp", "moe"}.isdisjoint(regions) and _dense_width(block)[0] > 0
    gated = isinstance(block.mlp, MoESpec) and block.mlp.shared_gate
    attends = [_column_inputs(block, hidden)[0][0]] if whole or "attention" in regions else []
    return attends + [hidden] * feeds, whole + (feeds and gated)


def gradient_sums(rows: list[ParameterRow]) -> dict[int | None, list[ParameterRow]]:
    """The rows whose gradients are summed over tp, by the size of the runs (None: the whole axis)."""
    groups: dict[int | None, list[ParameterRow]] = {}
    for row in rows:
        if "tp" in row.sums:
            groups.setdefault(row.sums["tp"], []).append(row)
    return groups


def predict_gradient_sums(rows: list[ParameterRow], layout: Layout, dtype: str, itemsize: int) -> Events:
    """One all-reduce per step for each group of `gradient_sums`, of all its gradients in one buffer."""
    events: Events = Counter()
    for group in gradient_sums(rows).values():
        size = sum(row.local_elements(layout) for row in group) * itemsize
        events[Event("reduce", "tp", "all_reduce", dtype, size)] += 1
    return events

"""Expert parallelism: which degrees are legal, what is cut, and what it communicates.

The dp*cp*tp ranks of a stage factor a second time, as (edp, ep, etp) with etp fastest: an ep rank holds E/ep whole
experts, or F/etp of the width of each; edp ranks hold the same. It adds no ranks. Tokens go to where their experts are
(Lepikhin et al. 2020, arXiv:2006.16668, section 3.2), in numbers that the router decides: nothing is padded.

    gate, up  [E, F, D]     ep: dim 0, etp: dim 1            router, shared experts     as other dense parameters
    down      [E, D, F]     ep: dim 0, etp: dim 2            gradients of experts       summed over edp alone

A routed layer, per microbatch (backward: the same in reverse):

    etp > 1   the tokens of the etp ranks are gathered, with the experts and weights that were chosen
    ep > 1    counts per expert are exchanged, then the tokens, one row for each choice of an expert; results come back
    etp > 1   partial sums are reduce-scattered

Without sequence parallelism the tp ranks have the same tokens, and etp = tp: nothing is gathered, sums are all-reduced.

Letters: b micro-batch, S sequence, T tokens of a rank, D hidden, E experts, K choices of a token; F width of an expert.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import gcd

from fivefold.core.events import Event, Events, Op, Phase, forward_again
from fivefold.core.experts import ExpertsConfig
from fivefold.core.layout import Layout
from fivefold.core.layout_checks import divisors
from fivefold.core.model_spec import ModelSpec, MoESpec
from fivefold.core.recompute import Regions
from fivefold.core.router import RouterConfig
from fivefold.core.sharding import ParameterRow, Shard
from fivefold.errors import ConfigError, LayoutError, nearest_numbers
from fivefold.strategies.expert.replicas import Replicas, share

WIDTH_DIM = {"expert_gate": 1, "expert_up": 1, "expert_down": 2}
"""Role -> the dim of the experts' width, which etp cuts."""

Counts = Callable[[int, int, int], Sequence[int]]
"""(rank, layer, microbatch) -> how many choices of that rank's tokens each of the E experts got."""


def routed_layers(spec: ModelSpec) -> dict[int, MoESpec]:
    """The layers that have experts."""
    return {i: block.mlp for i, block in enumerate(spec.blocks) if isinstance(block.mlp, MoESpec)}


def check(spec: ModelSpec, layout: Layout) -> None:
    """Raises: LayoutError for degrees that do not divide, or tokens that would be dispatched twice."""
    ep, etp, tp = layout.ep, layout.etp, layout.tp
    moes = list(dict.fromkeys(routed_layers(spec).values()))
    if not moes:
        if ep * etp > 1:
            raise LayoutError(
                f"{spec.name} has no experts, which ep{ep} etp{etp} would cut; leave ep and etp out"
            )
        return
    ranks = layout.data * tp
    experts = gcd(*(moe.experts for moe in moes))
    if experts % ep:
        legal = nearest_numbers(ep, (d for d in divisors(experts) if ranks // etp % d == 0))
        raise LayoutError(
            f"ep{ep} does not fit {spec.name}: {experts} experts are not divisible by {ep}; nearest legal ep: {legal}"
        )
    width = gcd(*(moe.ffn for moe in moes))
    if width % etp:
        legal = nearest_numbers(etp, (d for d in divisors(width) if ranks // ep % d == 0))
        raise LayoutError(
            f"etp{etp} does not fit {spec.name}: the width {width} of an expert is not divisible by {etp}; "
            f"nearest legal etp: {legal}"
        )
    _check_same_tokens(spec, layout)
    if layout.expert_shards == 0:
        _refuse_groups(layout)


def check_router(spec: ModelSpec, router: RouterConfig) -> None:
    """Raises: ConfigError for a setting of routers that would do nothing in this model."""
    changed = [
        key for key, field in RouterConfig.model_fields.items() if getattr(router, key) != field.default
    ]
    moes = routed_layers(spec).values()
    if changed and not moes:
        raise ConfigError(f"router.{changed[0]} does nothing: {spec.name} has no experts; leave it out")
    if router.bias_speed and not any(moe.selection_bias for moe in moes):
        raise ConfigError(
            f"router.bias_speed does nothing: no router of {spec.name} has a selection bias; leave it out, or use "
            "router.balance_coefficient"
        )


def check_experts(spec: ModelSpec, layout: Layout, router: RouterConfig, config: ExpertsConfig) -> None:
    """Raises: ConfigError for placing experts anew where nothing could be placed otherwise, or in too many slots."""
    if config.rebalance_every is None:
        return
    what, moes = f"experts.rebalance_every={config.rebalance_every}", routed_layers(spec).values()
    if not moes:
        raise ConfigError(f"{what} does nothing: {spec.name} has no experts; leave it out")
    if layout.ep == 1:
        raise ConfigError(
            f"{what} does nothing with ep1: every rank has all experts; leave it out, or cut them, such as ep2"
        )
    if router.capacity == "pad":
        raise ConfigError(
            f"{what} does nothing with router.capacity=pad: every expert gets as many rows; leave it out, or use drop"
        )
    fewest = min(moe.experts for moe in moes)
    most = fewest - fewest // layout.ep
    if config.spare_slots > most:
        raise ConfigError(
            f"experts.spare_slots={config.spare_slots} beside the {fewest // layout.ep} experts of a rank make more "
            f"than the {fewest} that {spec.name} has; at most {most}"
        )


def same_tokens(layout: Layout) -> bool:
    """Whether the ranks of an etp group have the same tokens: those of tp do, without sequence parallelism."""
    return layout.tp > 1 and not layout.sequence_parallel


def _check_same_tokens(spec: ModelSpec, layout: Layout) -> None:
    if not same_tokens(layout):
        return
    tp = layout.tp
    if layout.etp != tp:
        raise LayoutError(
            f"the experts of {spec.name} with etp{layout.etp} and tp{tp} need sequence parallelism, else {tp} ranks "
            f"would compute the same tokens; leave out nosp, or use etp{tp}"
        )
    inside = [axis for axis in layout.order[: layout.order.index("tp")] if axis in ("dp", "cp")]
    if any(layout.degree(axis) > 1 for axis in inside):
        raise LayoutError(
            f"etp{layout.etp} takes neighbouring ranks, which order={'-'.join(layout.order)} gives to "
            f"{' and '.join(inside)}; without sequence parallelism they must be the tp ranks: leave out nosp or order"
        )


def _refuse_groups(layout: Layout) -> None:
    group = layout.zero_group or layout.data
    others = [g for g in divisors(layout.data) if layout.replace(zero_group=g).expert_shards]
    raise LayoutError(
        f"zero{layout.zero}/{group}: a group of {group} x tp{layout.tp} ranks holds no whole number of "
        f"ep{layout.ep} x etp{layout.etp} = {layout.ep * layout.etp} ranks with all experts, nor the other way round; "
        f"nearest group: {nearest_numbers(group, others)}"
    )


def place(row: ParameterRow, layout: Layout) -> ParameterRow:
    """Fill the ep and etp columns of one row."""
    if row.mesh != "expert":
        return row
    cut = {"ep": Shard(0)} if layout.ep > 1 else {}
    if layout.etp > 1:
        cut["etp"] = Shard(WIDTH_DIM[row.role])
    return replace(row, placement={**row.placement, **cut})  # type: ignore[dict-item]


@dataclass(frozen=True)
class Rows:
    """What one rank dispatches in one layer and microbatch: a row for each choice of an expert."""

    sent: int
    received: int


def dispatched(
    layout: Layout, rank: int, layer: int, microbatch: int, counts: Counts, replicas: Replicas | None = None
) -> Rows:
    """The rows of a rank, from what the ranks of its expert mesh chose. `replicas`: where experts have copies."""

    def leaving(member: int) -> list[int]:
        group = (member,) if same_tokens(layout) else layout.group_of("etp", member)
        return [sum(column) for column in zip(*(counts(one, layer, microbatch) for one in group))]

    ranks = layout.group_of("ep", rank)
    own = leaving(rank)
    if replicas is not None:
        table = share([leaving(member) for member in ranks], replicas)
        return Rows(sum(own), sum(sum(row[ranks.index(rank)]) for row in table))
    size = len(own) // layout.ep
    first = ranks.index(rank) * size
    return Rows(sum(own), sum(sum(leaving(member)[first : first + size]) for member in ranks))


def even(moe: MoESpec, layout: Layout, tokens: int) -> Rows:
    """The rows of a rank where every expert is chosen equally often: what can be said before a run."""
    rows = tokens * moe.top_k * _copies(layout)
    return Rows(rows, rows)


def _copies(layout: Layout) -> int:
    """How many ranks' tokens a rank dispatches."""
    return 1 if same_tokens(layout) else layout.etp


@dataclass(frozen=True, kw_only=True)
class Numbers:
    """What the communication of a routed layer follows from, beside layout and rows."""

    sequences: int
    """b, of a microbatch."""
    seq_len: int
    """S, of whole sequences."""
    pieces: int
    """Runs of neighbouring tokens that a rank holds of a sequence, at most."""
    hidden: int
    dtype: str
    itemsize: int
    router: RouterConfig


def tokens_here(layout: Layout, seq_len: int) -> int:
    """Tokens of each sequence that a rank's routers see."""
    return seq_len // layout.cp // (layout.tp if layout.sequence_parallel else 1)


def rows_per_expert(moe: MoESpec, layout: Layout, numbers: Numbers) -> int | None:
    """Rows that a rank sends to each expert where they are padded to its capacity; None: as many as there are.

    Formula: b min(C, tokens of a sequence here), of each rank whose tokens it dispatches.
    """
    capacity = numbers.router.capacity_of(moe, numbers.seq_len)
    if capacity is None or numbers.router.capacity == "drop":
        return None
    return _copies(layout) * numbers.sequences * min(capacity, tokens_here(layout, numbers.seq_len))


def predict_layer(
    moe: MoESpec, layout: Layout, rows: Rows, numbers: Numbers, regions: Regions = (), *, copied: bool = False
) -> Events:
    """Events of one microbatch (T tokens of this rank) through router and experts of one layer, forward and backward.

    ep:   forward all-to-alls of 8 E bytes and, there and back, of R D x bytes, R the larger of the rows that leave and
          come; backward the last two again. Padded to capacity: R is fixed, and no counts travel. `copied`: experts
          have copies, so that counts are gathered by all, 8 E ep bytes.
    etp:  forward all-gathers of etp T (D x + 8 K + w K) bytes and a reduce-scatter of etp T D x; backward all-gather
          and reduce-scatters of the same but for the choices. Same tokens: an all-reduce of T D x forward, all-reduces
          of T D x and T K w backward. w: at least 4 bytes.
    What ranks with other tokens of the same sequences agree on: see `_predict_router`.
    `regions`: what the layer computes again in backward: all of forward happens there once more, but for the sum over
    etp where no shared experts come after it.
    """
    found = _predict_router(moe, layout, numbers)
    dtype, tokens = numbers.dtype, numbers.sequences * tokens_here(layout, numbers.seq_len)
    wide, wide_size = ("float64", 8) if dtype == "float64" else ("float32", 4)
    if layout.ep > 1:
        padded = rows_per_expert(moe, layout, numbers)
        if copied:
            found[Event("forward", "ep", "all_gather", "int64", 8 * moe.experts * layout.ep)] += 1
        elif padded is None:
            found[Event("forward", "ep", "all_to_all", "int64", 8 * moe.experts)] += 1
        travel = max(rows.sent, rows.received) if padded is None else padded * moe.experts
        for phase in BOTH:
            event = Event(phase, "ep", "all_to_all", dtype, travel * numbers.hidden * numbers.itemsize)
            found[event] += 2
    if layout.etp > 1:
        copies = _copies(layout)
        x, weights = (
            copies * tokens * numbers.hidden * numbers.itemsize,
            copies * tokens * moe.top_k * wide_size,
        )
        if same_tokens(layout):
            found.update(Event(phase, "etp", "all_reduce", dtype, x) for phase in BOTH)
            found[Event("backward", "etp", "all_reduce", wide, weights)] += 1
        else:
            found[Event("forward", "etp", "all_gather", "int64", copies * tokens * moe.top_k * 8)] += 1
            found[Event("forward", "etp", "all_gather", wide, weights)] += 1
            found[Event("backward", "etp", "reduce_scatter", wide, weights)] += 1
            found.update(Event(phase, "etp", op, dtype, x) for phase in BOTH for op in GATHER_AND_SCATTER)
    if {"layer", "moe"}.isdisjoint(regions):
        return found
    again = forward_again(found)
    if layout.etp > 1 and not moe.shared_ffn:
        again[
            Event("backward", "etp", "all_reduce" if same_tokens(layout) else "reduce_scatter", dtype, x)
        ] -= 1
    return found + again


BOTH: tuple[Phase, ...] = ("forward", "backward")
GATHER_AND_SCATTER: tuple[Op, ...] = ("all_gather", "reduce_scatter")


def _predict_router(moe: MoESpec, layout: Layout, numbers: Numbers) -> Events:
    """What the routers of ranks with other tokens of the same sequences (tp under SP, and cp) agree on, forward.

    Capacity: all-gathers of 4 b P E bytes a rank, over tp, then over cp. Balance by sequence: all-reduces of 8 b (E+1).
    """
    found: Events = Counter()
    axes = [axis for axis in ("tp", "cp") if axis == "cp" or layout.sequence_parallel]
    size = 4 * numbers.sequences * numbers.pieces * moe.experts
    for axis in axes:
        degree = layout.degree(axis)  # type: ignore[arg-type]
        size *= degree
        if degree > 1 and numbers.router.capacity_factor is not None:
            found[Event("forward", axis, "all_gather", "int32", size)] += 1  # type: ignore[arg-type]
        if degree > 1 and numbers.router.joins_sequences:
            joined = 8 * numbers.sequences * (moe.experts + 1)
            found[Event("forward", axis, "all_reduce", "int64", joined)] += 1  # type: ignore[arg-type]
    return found


def predict_numbers(spec: ModelSpec, layout: Layout, config: ExpertsConfig) -> Events:
    """What a step agrees on beside the loss: the table of all routed layers (data, tp under SP, pp)."""
    layers = routed_layers(spec)
    found: Events = Counter()
    if layers:
        ranks = 0 if config.rebalance_every is None else layout.ep
        size = 8 * len(layers) * (max(moe.experts for moe in layers.values()) + NUMBERS_OF_A_LAYER + ranks)
        for axis in ("data", "tp", "pp"):
            if layout.degree(axis) > 1 and (axis != "tp" or layout.sequence_parallel):
                found[Event("metrics", axis, "all_reduce", "float64", size)] += 1
    return found


NUMBERS_OF_A_LAYER = 5
"""Beside the choices of each expert: tokens, dropped choices, entropy, balance and z-loss.

Where experts are placed anew, what each ep rank computed as well.
"""

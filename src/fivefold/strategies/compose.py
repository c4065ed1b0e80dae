"""The order in which the strategies act, torch-free: legality, the parameter table, the predicted communication.

check            data, pipeline, tensor, context, expert: in this order, the first broken rule is the one that is told
parameter_table  one device -> pipeline (stage, ties) -> tensor (cut, sums) -> expert (cut) -> data (sums, ZeRO's cut)
predict_events   what one rank dispatches in one training step; equal to the ledger of a run
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from fivefold.core.events import Event, Events
from fivefold.core.execution import microbatches
from fivefold.core.layout import Layout
from fivefold.core.model_spec import ModelSpec, require_plain_decoder
from fivefold.core.plan import Plan
from fivefold.core.recompute import check as check_recompute
from fivefold.core.sharding import ParameterRow, parameters
from fivefold.errors import LayoutError
from fivefold.strategies.context import rules as context
from fivefold.strategies.context.order import Spans, local_spans, section
from fivefold.strategies.data import rules as data
from fivefold.strategies.expert import replicas as copies
from fivefold.strategies.expert import rules as expert
from fivefold.strategies.expert.replicas import Replicas
from fivefold.strategies.pipeline import rules as pipeline
from fivefold.strategies.pipeline.actions import COMPUTATIONS
from fivefold.strategies.pipeline.placement import stage_layers
from fivefold.strategies.pipeline.schedules import rank_actions, schedule_kinds
from fivefold.strategies.tensor import rules as tensor
from fivefold.units import MIB


def check(plan: Plan) -> None:
    """Whether this plan can be run. Raises: ModelError, LayoutError or WorkloadError with the numbers."""
    require_plain_decoder(plan.model)
    check_cut(plan)


def check_cut(plan: Plan) -> None:
    """Whether a model of these sizes can be cut so, whoever computes it. Raises: LayoutError or WorkloadError."""
    spec, layout = plan.model, plan.layout
    if plan.workload.seq_len > spec.max_positions:
        raise LayoutError(
            f"sequence length {plan.workload.seq_len} exceeds the {spec.max_positions} positions of {spec.name}"
        )
    check_recompute(plan.execution.recomputed, spec)
    data.check(layout, plan.execution.zero3_gather)
    pipeline.check(spec, layout, plan.workload.seq_len)
    tensor.check(spec, layout, plan.workload.seq_len)
    context.check(spec, layout, plan.workload.seq_len)
    expert.check(spec, layout)
    expert.check_router(spec, plan.execution.router)
    expert.check_experts(spec, layout, plan.execution.router, plan.execution.experts)
    count = microbatches(plan.workload, layout, plan.execution)
    pipeline.check_schedule(layout, count, plan.execution.actions)
    if layout.zero >= 2 and layout.pp > 1:
        kinds = schedule_kinds(layout.schedule, layout.pp, layout.chunks, count, plan.execution.actions)
        data.check_schedule(layout, kinds, experts=bool(expert.routed_layers(spec)))


Rows = tuple[ParameterRow, ...]


def parameter_table(spec: ModelSpec, layout: Layout, seq_len: int, rows: Rows | None = None) -> Rows:
    """All parameters of the model under this layout, one row for each copy that a stage owns.

    `rows`: those of a module that is not ours, on one device, whose sizes `spec` has; None: our decoder's.
    """
    rows = pipeline.place(rows or parameters(spec), spec, layout, seq_len)
    return tuple(data.place(expert.place(tensor.place(row, spec, layout), layout), layout) for row in rows)


def rows_of(table: tuple[ParameterRow, ...], layout: Layout, pp_rank: int) -> dict[int, list[ParameterRow]]:
    """The rows of one pipeline rank, by chunk."""
    return {
        chunk: [row for row in table if row.stage == chunk] for chunk in layout.virtual_stages_of(pp_rank)
    }


def predict_events(
    plan: Plan,
    rank: int,
    rows: Rows | None = None,
    routed: expert.Counts | None = None,
    *,
    replicas: Mapping[int, Replicas] | None = None,
    places_anew: bool = False,
) -> Events:
    """Every collective, send and receive of one training step on one rank (set-up apart).

    `rows`: as for `parameter_table`.
    `routed`: what the routers chose in that step, on which the bytes of a dispatch depend; None: all experts alike.
    `replicas`: where the experts of each layer are in that step; None: at their first homes, no copies.
    `places_anew`: whether experts are placed after that step.
    Raises: as `check`, for a plan that cannot be run.
    """
    check(plan) if rows is None else check_cut(plan)
    layout, execution = plan.layout, plan.execution
    pp_rank = layout.coordinate(rank)["pp"]
    count = microbatches(plan.workload, layout, execution)
    tokens = execution.micro_batch * plan.workload.seq_len // layout.cp
    dtype, itemsize = execution.dtype, execution.itemsize_bytes
    grad_dtype, grad_itemsize = execution.grad_dtype, execution.grad_itemsize_bytes
    chunks = rows_of(parameter_table(plan.model, layout, plan.workload.seq_len, rows), layout, pp_rank)
    own = [row for chunk in chunks.values() for row in chunk]
    layers = stage_layers(plan.model, layout, plan.workload.seq_len)
    actions = rank_actions(layout, pp_rank, count, custom=execution.actions)
    numbers = data.Numbers(
        bucket_bytes=int(execution.bucket_mib * MIB), dtype=dtype, itemsize=itemsize,
        grad_dtype=grad_dtype, grad_itemsize=grad_itemsize, gather_once=execution.zero3_gather == "step",
    )  # fmt: skip
    events: Events = Counter()
    for chunk, chunk_rows in chunks.items():
        recomputed = execution.recomputed.of_layers(plan.model, layers[chunk])
        passes = tensor.predict_chunk(
            plan.model, layout, layers=layers[chunk], first=chunk == 0, last=chunk == layout.stages - 1,
            tokens=tokens, dtype=dtype, itemsize=itemsize, recomputed=recomputed, keeps_gathered=rows is not None,
        )  # fmt: skip
        passes += context.predict_chunk(
            plan.model, layout, layers=layers[chunk], tokens=tokens, dtype=dtype, itemsize=itemsize,
            recomputed=recomputed,
        )  # fmt: skip
        events.update({event: n * count for event, n in passes.items()})
        events += _predict_experts(plan, rank, layers[chunk], routed, replicas or {})
        events += _predict_copies(plan, rank, chunk_rows, replicas or {}, places_anew)
        kinds = [a.kind for a in actions if a.chunk == chunk and a.kind in COMPUTATIONS]
        events += data.predict(chunk_rows, layout, numbers, kinds)
    events += pipeline.predict_transfers(
        actions,
        tokens=tokens // layout.tp if layout.sequence_parallel else tokens,
        hidden=plan.model.hidden, dtype=dtype, itemsize=itemsize,
    )  # fmt: skip
    held = [row.held for row in own]
    events += tensor.predict_gradient_sums(held, layout, grad_dtype, grad_itemsize)
    events += pipeline.predict_tie(held, layout, grad_dtype, grad_itemsize)
    events += expert.predict_numbers(plan.model, layout, execution.experts)
    return events + _predict_scalars(plan)


def _predict_experts(
    plan: Plan,
    rank: int,
    layers: range,
    routed: expert.Counts | None,
    replicas: Mapping[int, Replicas],
) -> Events:
    """Dispatch and combine in these layers, microbatch by microbatch: each has rows of its own."""
    layout, execution, seq_len = plan.layout, plan.execution, plan.workload.seq_len
    numbers = expert.Numbers(
        sequences=execution.micro_batch, seq_len=seq_len, pieces=max(map(len, shared_tokens(layout, seq_len))),
        hidden=plan.model.hidden, dtype=execution.dtype, itemsize=execution.itemsize_bytes, router=execution.router,
    )  # fmt: skip
    tokens = execution.micro_batch * expert.tokens_here(layout, seq_len)
    events: Events = Counter()
    for layer, moe in expert.routed_layers(plan.model).items():
        regions = execution.recomputed.of(layer, plan.model.blocks[layer])
        for j in range(microbatches(plan.workload, layout, execution)) if layer in layers else ():
            rows = (
                expert.even(moe, layout, tokens)
                if routed is None
                else expert.dispatched(layout, rank, layer, j, routed, replicas.get(layer))
            )
            events += expert.predict_layer(moe, layout, rows, numbers, regions, copied=layer in replicas)
    return events


def _predict_copies(
    plan: Plan,
    rank: int,
    rows: list[ParameterRow],
    replicas: Mapping[int, Replicas],
    places_anew: bool,
) -> Events:
    """Copies of the experts of a chunk in a step, and their homes that move after it. `rows`: of the chunk."""
    layout, execution = plan.layout, plan.execution
    experts = [row for row in rows if row.mesh == "expert"]
    events: Events = Counter()
    for layer, placed in replicas.items():
        own = [row for row in experts if row.block == f"layers.{layer}"]
        count = microbatches(plan.workload, layout, execution)
        events += copies.predict_copies(
            own, layout, rank, placed, execution.dtype, execution.itemsize_bytes, count
        )
    if places_anew:
        kinds = 1 + len(execution.optimizer.moments)
        events += copies.predict_moves(
            experts, layout, execution.grad_dtype, execution.grad_itemsize_bytes, kinds
        )
    return events


def shared_tokens(layout: Layout, seq_len: int) -> list[Spans]:
    """The places of the tokens that each rank holds of the same sequences: tp under SP, then cp, the first fastest."""
    found = []
    for cp in range(layout.cp):
        spans = local_spans(seq_len, layout, cp)
        parts = layout.tp if layout.sequence_parallel else 1
        size = seq_len // layout.cp // parts
        found += [section(spans, part * size, (part + 1) * size) for part in range(parts)]
    return found


def _predict_scalars(plan: Plan) -> Events:
    """The few numbers that every step agrees on, 8 bytes each but for the flag.

    metrics: the count of valid tokens (data) before the step, two of them where a router loss is a mean over all that
             are no padding; the sum of losses (data, then pp) after it.
    norm:    the squared gradient norm (data where ZeRO shards, tp, then pp; world for a model with experts);
             under a loss scale before it the flag of an overflow (world), 4 bytes.
    """
    layout, experts = plan.layout, bool(expert.routed_layers(plan.model))
    events: Events = Counter()
    if layout.data > 1:
        counts = 16 if experts and plan.execution.router.counts_tokens else 8
        events[Event("metrics", "data", "all_reduce", "int64", counts)] += 1
        events[Event("metrics", "data", "all_reduce", "float64", 8)] += 1
    if layout.pp > 1:
        events[Event("metrics", "pp", "all_reduce", "float64", 8)] += 1
    if plan.execution.scaling is not None and layout.world_size > 1:
        events[Event("norm", "world", "all_reduce", "float32", 4)] += 1
    if experts:
        if layout.world_size > 1:
            events[Event("norm", "world", "all_reduce", "float64", 8)] += 1
        return events
    if layout.data_shards > 1:
        events[Event("norm", "data", "all_reduce", "float64", 8)] += 1
    for axis in ("tp", "pp"):
        if layout.degree(axis) > 1:
            events[Event("norm", axis, "all_reduce", "float64", 8)] += 1
    return events

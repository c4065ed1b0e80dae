"""A trained model as a Hugging Face checkpoint, written by all stages at once.

    data ranks   one of them, (dp, cp) = (0, 0), writes; the others wait
    tp ranks     send their parts to tp 0, one parameter at a time, in pieces, without padding or copies of KV heads
    experts      every rank of a stage that holds a part of them that no other sends, sends it there
    pp stages    tp 0 of each writes files of its own; rank 0 of the job adds index and config and names the folder

Comm: P elements of the stage's parameters less tp 0's own part, as sends on axis tp, for experts on axis world; a few
numbers on axis world.

A checkpoint of a run becomes the same folder without any rank: one process reads it tensor by tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import chain
from math import prod
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.core.plan import Plan
from fivefold.core.sharding import ParameterRow, buffers
from fivefold.engine.engine import Engine
from fivefold.errors import CheckpointError, ConfigError, ModelError
from fivefold.nn.hub_write import MAX_SHARD_BYTES, HFWriter, Written
from fivefold.runtime.mesh import Axis, Mesh
from fivefold.strategies import compose
from fivefold.train.checkpoint import Manifest, read_model_files
from fivefold.train.checkpoint_reader import Reader, check_files
from fivefold.train.companions import Companions
from fivefold.units import MIB

PIECE_BYTES = MIB
"""Of one message."""

Pairs = Iterable[tuple[ParameterRow, Tensor]]


def export_hf(
    folder: str | Path,
    plan: Plan,
    pairs: Pairs,
    mesh: Mesh,
    *,
    dtype: str | None = None,
    companions: Companions | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> Written:
    """Write the model; every rank calls this with its own parameters (`Engine.parameters`, all chunks).

    `dtype`: of the file; None: that of the run. `companions`: config and files beside the weights.
    Memory: one parameter and a piece on each tp 0, a piece on the others. Nodes must share the file system of `folder`.
    Raises: ModelError, the same on all ranks; nothing is then left at `folder`.
    """
    writer = _writer(folder, plan, dtype, companions, max_shard_bytes)
    first = mesh.rank == 0
    try:
        agree(mesh, _fault(writer.begin) if first else None)
        agree(mesh, _write_own(writer, pairs, mesh))
        agree(mesh, _fault(writer.commit) if first else None)
    except BaseException:
        writer.abandon()
        if first:
            writer.abort()
        raise
    return Written(writer.folder, writer.files, writer.bytes)


def held_by(engine: Engine) -> list[tuple[ParameterRow, Tensor]]:
    """What of a model this rank holds between two steps: parameters, in the optimizer's dtype, and buffers."""
    held = [(row, values) for kind, row, values in engine.data.persistent() if kind == "weights"]
    names = {row.name for row in buffers(engine.plan.model)}
    more = engine.routers.buffers() if engine.routers is not None else []
    return held + [(row, values) for row, values in more if row.name in names]


def export_checkpoint(
    checkpoint: Path, folder: str | Path, *, dtype: str | None = None, max_shard_bytes: int = MAX_SHARD_BYTES
) -> Written:
    """Write the model of a checkpoint: the same files, bit for bit, that the run itself exports after that step.

    Memory: one parameter. Every file of the checkpoint is compared with its checksum before anything is written.
    Raises: CheckpointError for a checkpoint that is damaged, ModelError as `export_hf` does; nothing is then left.
    """
    manifest = Manifest.load(checkpoint)
    try:
        plan = Plan.read(manifest.plan, where=str(checkpoint))
    except ConfigError as error:
        raise CheckpointError(str(error)) from None
    companions = Companions.from_files(read_model_files(checkpoint, manifest))
    writer = _writer(folder, plan, dtype, companions, max_shard_bytes)
    writer.refuse_taken()
    check_files(checkpoint, manifest, rank=0, ranks=1)
    reader = Reader(checkpoint, manifest)
    writer.begin()
    try:
        for stage, rows in enumerate(_owned(plan)):
            for row in rows:
                kind = "buffers" if row.role == "selection_bias" else "weights"
                writer.put(row.name, reader.read(f"{kind}/{row.name}", row.shape))
            writer.check_done(stage)
        return writer.commit()
    except BaseException:
        writer.abort()
        raise


def _writer(
    folder: str | Path, plan: Plan, dtype: str | None, companions: Companions | None, max_shard_bytes: int
) -> HFWriter:
    """With files of its own for each stage. Selection biases are as wide as they are while training."""
    companions = companions or Companions({}, {})
    owned, dtype = _owned(plan), dtype or plan.execution.dtype
    dtypes = {row.name: dtype for rows in owned for row in rows}
    wide = "float64" if dtype == "float64" else "float32"
    return HFWriter(
        folder,
        plan.model,
        dtype={**dtypes, **{row.name: wide for row in buffers(plan.model)}},
        config=companions.config,
        max_shard_bytes=max_shard_bytes,
        groups=[[row.name for row in rows] for rows in owned],
        companions=companions.files,
    )


def _owned(plan: Plan) -> list[list[ParameterRow]]:
    """Parameters and buffers of each stage, in order; the second copy of a tied one is left out."""
    table = compose.parameter_table(plan.model, plan.layout, plan.workload.seq_len)
    owned = [row for row in table if row.tied_to is None]
    stage_of = {row.block: row.stage for row in owned}
    owned += [replace(row, stage=stage_of[row.block]) for row in buffers(plan.model)]
    return [
        [row for row in owned if plan.layout.owner_of(row.stage) == stage] for stage in range(plan.layout.pp)
    ]


def _write_own(writer: HFWriter, pairs: Pairs, mesh: Mesh) -> str | None:
    """Gather and write this stage's parameters. A rank that cannot write goes on receiving: others are sending."""
    place = mesh.layout.data_index(mesh.coordinate)
    own = list(pairs)
    dense = [pair for pair in own if pair[0].mesh == "dense"] if place < mesh.layout.data_shards else []
    experts = [pair for pair in own if pair[0].mesh == "expert"]
    fault: str | None = None
    for row, tensor in chain(full_tensors(dense, mesh), whole_experts(experts, mesh)):
        if tensor is not None and fault is None:
            fault = _fault(writer.put, row.name, tensor)
        del tensor  # before the next one is gathered
    if mesh.coordinate["tp"] == place == 0 and fault is None:
        fault = _fault(writer.check_done, mesh.coordinate["pp"])
    return fault


def full_tensors(pairs: Pairs, mesh: Mesh) -> Iterator[tuple[ParameterRow, Tensor | None]]:
    """Every dense parameter of this stage whole, on the CPU of its first data and tp rank; None on the others.

    Shapes: local part with padding -> `row.shape`. The second copy of a tied parameter is left out.
            A tensor holds until the next one is asked for: all are put together in the same memory.
    Comm:   ZeRO's shards are sent to the first rank of their group, then local parts to tp 0, piece by piece; all
            these ranks must list the same parameters in the same order.
    Memory: the largest parameter and one piece on tp 0, one piece elsewhere; where ZeRO shards, the largest local part
            as well. Degree 1: a view, no copy.
    """
    own = [(row, local.detach()) for row, local in pairs if row.tied_to is None]
    axis = mesh.axis("tp")
    if axis.degree == 1:
        for row, part in _join_shards(own, mesh):
            yield row, None if part is None else part[tuple(slice(0, size) for size in row.shape)].cpu()
        return
    # One buffer for all: buffers of many sizes, made and freed in turn, would leave holes that nobody can use.
    cut = [(prod(row.shape), local) for row, local in own if "tp" in row.placement]
    most = max((elements * local.element_size() for elements, local in cut), default=0)
    buffer = torch.empty(most if axis.index == 0 else 0, dtype=torch.uint8)
    piece = torch.empty(PIECE_BYTES, dtype=torch.uint8, device=mesh.device.device)
    for row, part in _join_shards(own, mesh):
        if part is None:
            yield row, None
            continue
        local, shard = part, row.placement.get("tp")
        if shard is None:
            yield row, local.cpu() if axis.index == 0 else None
            continue
        full = _as(buffer, local.dtype, row.shape) if axis.index == 0 else None
        for member in range(0, axis.degree, shard.replicas):
            region = row.region(mesh.layout, {**mesh.coordinate, "tp": member})
            target = full[region] if full is not None else None
            _pass_on(local, [cut.stop - cut.start for cut in region], axis, member, target, piece)
        yield row, full


def whole_experts(pairs: Pairs, mesh: Mesh) -> Iterator[tuple[ParameterRow, Tensor | None]]:
    """The experts of this stage whole, on the CPU of its first rank; None on the others. As `full_tensors`.

    Comm:   of the ranks that hold the same part one sends it to the first rank, expert by expert, on axis world.
    Memory: the largest stacked parameter on the first rank, and one matrix of an expert everywhere.
    """
    own, layout = [(row, local.detach()) for row, local in pairs], mesh.layout
    axis, stage = mesh.axis("world"), mesh.coordinate["pp"]
    first = layout.rank(dp=0, cp=0, tp=0, pp=stage)
    most = max((prod(row.shape) * local.element_size() for row, local in own), default=0)
    buffer = torch.empty(most if mesh.rank == first else 0, dtype=torch.uint8)
    piece = torch.empty(PIECE_BYTES, dtype=torch.uint8, device=mesh.device.device)
    for row, local in own:
        full = _as(buffer, local.dtype, row.shape) if mesh.rank == first else None
        for member in layout.stage_ranks(stage):
            if not row.written_here(layout, layout.coordinate(member)):
                continue
            experts, *rest = row.region(layout, layout.coordinate(member))
            for i, expert in enumerate(range(experts.start, experts.stop)):
                mine = local[i] if member == mesh.rank else local[0]
                target = full[expert][tuple(rest)] if full is not None else None
                _pass_on(mine, [cut.stop - cut.start for cut in rest], axis, member, target, piece, to=first)
        yield row, full


def _join_shards(pairs: Pairs, mesh: Mesh) -> Iterator[tuple[ParameterRow, Tensor | None]]:
    """Local parts that ZeRO cut, whole on the first data rank, None on the others; what is not cut as it is."""
    axis, layout = mesh.axis("data", mesh.layout.data_shards), mesh.layout
    cut = [local.nbytes * axis.degree for row, local in pairs if "data" in row.placement]
    device = mesh.device.device
    buffer = torch.empty(max(cut, default=0) if axis.index == 0 else 0, dtype=torch.uint8, device=device)
    piece = torch.empty(PIECE_BYTES if cut else 0, dtype=torch.uint8, device=device)
    for row, local in pairs:
        if "data" not in row.placement:
            yield row, local if axis.index == 0 else None
            continue
        rows, *rest = row.whole.local_shape(layout)
        block = local.shape[0]
        full = _as(buffer, local.dtype, (rows, *rest)) if axis.index == 0 else None
        for member in range(axis.degree):
            first, last = (min(i * block, rows) for i in (member, member + 1))
            target = full[first:last] if full is not None else None
            _pass_on(local, [last - first, *rest], axis, member, target, piece)
        yield row.whole, full


def _pass_on(
    local: Tensor,
    sizes: list[int],
    axis: Axis,
    member: int,
    target: Tensor | None,
    piece: Tensor,
    to: int = 0,
) -> None:
    """Bring the first `sizes` of the member's part to `target` on member `to`, in messages of at most a piece."""
    if 0 in sizes:
        return
    row_bytes = local.element_size() * prod(sizes[1:])
    step = max(1, PIECE_BYTES // row_bytes)
    if step * row_bytes > piece.numel():
        piece = torch.empty(
            row_bytes, dtype=torch.uint8, device=piece.device
        )  # a single row of more than a piece
    mine = local[tuple(slice(0, size) for size in sizes)] if axis.index == member else None
    for start in range(0, sizes[0], step):
        stop = min(start + step, sizes[0])
        if mine is not None and target is not None:
            target[start:stop] = mine[start:stop]
        elif mine is not None:
            values = _as(piece, local.dtype, (stop - start, *sizes[1:])).copy_(mine[start:stop])
            axis.send_start(values, axis.ranks[to]).wait()
        elif target is not None:
            values = _as(piece, local.dtype, (stop - start, *sizes[1:]))
            target[start:stop] = axis.receive_start(values, axis.ranks[member]).wait()


def _as(buffer: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """The beginning of a buffer of bytes as a tensor."""
    return buffer[: prod(shape) * dtype.itemsize].view(dtype).view(shape)


def agree(mesh: Mesh, fault: str | None) -> None:
    """Meet all ranks; if any has a fault, all raise that of the lowest such rank.

    Comm: an all-reduce of one number on axis world, and one of 16 KiB where there is a fault.
    """
    world = mesh.axis("world")
    code = torch.tensor([mesh.rank if fault else mesh.layout.world_size], device=mesh.device.device)
    world.all_reduce(code, op=dist.ReduceOp.MIN)
    speaker = int(code)
    if speaker == mesh.layout.world_size:
        return
    text = torch.zeros(MOST_MESSAGE_BYTES, dtype=torch.int32)
    if speaker == mesh.rank and fault is not None:
        encoded = fault.encode()[:MOST_MESSAGE_BYTES]
        text[: len(encoded)] = torch.tensor(list(encoded), dtype=torch.int32)
    text = world.all_reduce(text.to(mesh.device.device)).cpu()
    raise ModelError(bytes(text[text > 0].tolist()).decode(errors="ignore"))


MOST_MESSAGE_BYTES = 4096


def _fault(action: Callable[..., object], *args: object) -> str | None:
    """The message of the user's mistake that `action` runs into, or None."""
    try:
        action(*args)
    except ModelError as error:
        return str(error)
    return None

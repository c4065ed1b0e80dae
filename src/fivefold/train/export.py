"""A trained model as a Hugging Face checkpoint, written by all stages at once.

    data ranks   one of them, (dp, cp) = (0, 0), writes; the others wait
    tp ranks     send their parts to tp 0, one parameter at a time, in pieces, without padding or copies of KV heads
    pp stages    tp 0 of each writes files of its own; rank 0 of the job adds index and config and names the folder

Comm: P elements of the stage's parameters less tp 0's own part, as sends on axis tp; a few numbers on axis world.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.core.plan import Plan
from fivefold.core.sharding import ParameterRow
from fivefold.errors import ModelError
from fivefold.nn.hub_write import MAX_SHARD_BYTES, HFWriter, Written
from fivefold.runtime.mesh import Axis, Mesh
from fivefold.strategies import compose
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
    config: Mapping[str, Any] | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    companions: Sequence[Path] = (),
) -> Written:
    """Write the model; every rank calls this with its own parameters (`Engine.parameters`, all chunks).

    `dtype`: of the file; None: that of the run. `config`, `companions`: as in `HFWriter`.
    Memory: one parameter and a piece on each tp 0, a piece on the others. Nodes must share the file system of `folder`.
    Raises: ModelError, the same on all ranks; nothing is then left at `folder`.
    """
    table = compose.parameter_table(plan.model, plan.layout, plan.workload.seq_len)
    owned = [row for row in table if row.tied_to is None]
    groups = [
        [row.name for row in owned if plan.layout.owner_of(row.stage) == stage]
        for stage in range(plan.layout.pp)
    ]
    writer = HFWriter(
        folder,
        plan.model,
        dtype=dtype or plan.execution.dtype,
        config=config,
        max_shard_bytes=max_shard_bytes,
        groups=groups,
        companions=companions,
    )
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


def _write_own(writer: HFWriter, pairs: Pairs, mesh: Mesh) -> str | None:
    """Gather and write this stage's parameters. A rank that cannot write goes on receiving: others are sending."""
    if mesh.coordinate["dp"] or mesh.coordinate["cp"]:
        return None
    fault: str | None = None
    for row, tensor in full_tensors(pairs, mesh):
        if tensor is not None and fault is None:
            fault = _fault(writer.put, row.name, tensor)
        del tensor  # before the next one is gathered
    if mesh.coordinate["tp"] == 0 and fault is None:
        fault = _fault(writer.check_done, mesh.coordinate["pp"])
    return fault


def full_tensors(pairs: Pairs, mesh: Mesh) -> Iterator[tuple[ParameterRow, Tensor | None]]:
    """Every parameter of this stage whole, on the CPU of its first tp rank; None on the others.

    Shapes: local part with padding -> `row.shape`. The second copy of a tied parameter is left out.
            A tensor holds until the next one is asked for: all are put together in the same memory.
    Comm:   sends to tp 0, one piece after the other; all tp ranks must list the same parameters in the same order.
    Memory: the largest parameter and one piece on tp 0, one piece elsewhere. Degree 1: a view, no copy.
    """
    own = [(row, local.detach()) for row, local in pairs if row.tied_to is None]
    axis = mesh.axis("tp")
    if axis.degree == 1:
        for row, local in own:
            yield row, local[tuple(slice(0, size) for size in row.shape)].cpu()
        return
    # One buffer for all: buffers of many sizes, made and freed in turn, would leave holes that nobody can use.
    cut = [(prod(row.shape), local) for row, local in own if row.placement]
    most = max((elements * local.element_size() for elements, local in cut), default=0)
    buffer = torch.empty(most if axis.index == 0 else 0, dtype=torch.uint8)
    piece = torch.empty(PIECE_BYTES, dtype=torch.uint8, device=mesh.device.device)
    for row, local in own:
        shard = row.placement.get("tp")
        if shard is None:
            yield row, local.cpu() if axis.index == 0 else None
            continue
        full = _as(buffer, local.dtype, row.shape) if axis.index == 0 else None
        for member in range(0, axis.degree, shard.replicas):
            region = row.region(mesh.layout, {**mesh.coordinate, "tp": member})
            target = full[region] if full is not None else None
            _pass_on(local, [cut.stop - cut.start for cut in region], axis, member, target, piece)
        yield row, full


def _pass_on(
    local: Tensor, sizes: list[int], axis: Axis, member: int, target: Tensor | None, piece: Tensor
) -> None:
    """Bring the first `sizes` of the member's part to `target` on tp 0, row by row in messages of at most a piece."""
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
            axis.send_start(values, axis.ranks[0]).wait()
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

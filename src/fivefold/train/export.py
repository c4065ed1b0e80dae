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
from fivefold.runtime.mesh import Mesh
from fivefold.strategies import compose
from fivefold.units import MIB

PIECE_BYTES = 4 * MIB
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
    Memory: one parameter on each tp 0, nothing on the others. Nodes must share the file system of `folder`.
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
    if mesh.coordinate["tp"] == 0 and fault is None:
        fault = _fault(writer.check_done, mesh.coordinate["pp"])
    return fault


def full_tensors(pairs: Pairs, mesh: Mesh) -> Iterator[tuple[ParameterRow, Tensor | None]]:
    """Every parameter of this stage whole, on the CPU of its first tp rank; None on the others.

    Shapes: local part with padding -> `row.shape`. The second copy of a tied parameter is left out.
    Comm:   sends to tp 0, one piece after the other; all tp ranks must list the same parameters in the same order.
    Memory: one parameter and one piece on tp 0, one piece elsewhere. Degree 1: a view, no copy.
    """
    for row, local in pairs:
        if row.tied_to is None:
            yield row, _gather(row, local.detach(), mesh)


def _gather(row: ParameterRow, local: Tensor, mesh: Mesh) -> Tensor | None:
    axis = mesh.axis("tp")
    shard = row.placement.get("tp")
    if axis.degree == 1:
        return local[tuple(slice(0, size) for size in row.shape)].cpu()
    if shard is None:
        return local.cpu() if axis.index == 0 else None
    full = torch.empty(row.shape, dtype=local.dtype) if axis.index == 0 else None
    for member in range(0, axis.degree, shard.replicas):
        region = row.region(mesh.layout, {**mesh.coordinate, "tp": member})
        sizes = [cut.stop - cut.start for cut in region]
        row_bytes = local.element_size() * prod(sizes[1:])
        step = max(1, PIECE_BYTES // max(1, row_bytes))
        mine = local[tuple(slice(0, size) for size in sizes)] if axis.index == member else None
        target = full[region] if full is not None else None
        for start in range(0, sizes[0] if min(sizes) else 0, step):
            stop = min(start + step, sizes[0])
            if mine is not None and target is not None:
                target[start:stop] = mine[start:stop]
            elif mine is not None:
                axis.send_start(mine[start:stop].contiguous(), axis.ranks[0]).wait()
            elif target is not None:
                piece = torch.empty(stop - start, *sizes[1:], dtype=local.dtype, device=local.device)
                target[start:stop] = axis.receive_start(piece, axis.ranks[member]).wait()
    return full


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

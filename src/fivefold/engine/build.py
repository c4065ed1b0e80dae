"""From a plan to this rank's part of the model: cut on the meta device, then only the own part is made."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from fivefold.core.layout import Layout, MeshAxis
from fivefold.core.plan import Plan
from fivefold.core.sharding import ParameterRow, buffers
from fivefold.engine.model import Model, Native
from fivefold.nn.init import make_shard
from fivefold.runtime.deferred import DeferredGradients
from fivefold.runtime.memory import unfilled
from fivefold.runtime.mesh import Mesh
from fivefold.strategies import compose
from fivefold.strategies.pipeline.placement import stage_layers

Pairs = list[tuple[ParameterRow, nn.Parameter]]


ValueSource = Callable[[ParameterRow, Layout, Mapping[MeshAxis, int], str], Tensor]
"""(row, layout, coordinate, dtype) -> this rank's local values of a parameter, padding zero."""


def build_chunks(
    plan: Plan,
    mesh: Mesh,
    *,
    seed: int,
    noise: float = 0.0,
    weights: ValueSource | None = None,
    deferred: DeferredGradients | None = None,
    model: Model | None = None,
) -> dict[int, tuple[nn.Module, Pairs]]:
    """This rank's chunks: virtual stage -> (module, its parameters with their rows).

    Strategies act in a fixed order: the pipeline keeps a stage, tensor and context parallelism replace modules,
    recompute wraps regions of layers, then the parameters are made in their local shapes. Memory: never more than this
    rank's part and one tile; under ZeRO-3 the parameters get no values and no memory: data parallelism gathers them.
    `noise`: standard deviation added to norms and biases, so that a fault in them shows (for verification); selection
    biases get a tenth: the scores of a new router hardly differ, and with more all tokens would choose alike.
    `weights`: where the values come from; None: the seed. `deferred`: for schedules with W actions.
    `model`: what is cut; None: our decoder.
    """
    spec, layout = plan.model, plan.layout
    model = model or Native(spec)
    table = compose.parameter_table(spec, layout, plan.workload.seq_len, model.rows)
    layers = stage_layers(spec, layout, plan.workload.seq_len)
    values = weights or partial(initial_value, seed=seed, noise=noise)
    chunks: dict[int, tuple[nn.Module, Pairs]] = {}
    embedding: nn.Parameter | None = None
    for chunk, rows in compose.rows_of(table, layout, mesh.coordinate["pp"]).items():
        last = chunk == layout.stages - 1
        module = model.chunk(plan, layers[chunk], first=chunk == 0, last=last, mesh=mesh, deferred=deferred)
        shared = {"head.weight": embedding} if embedding is not None and last else {}
        chunks[chunk] = (module, materialise(module, rows, mesh, plan.execution.dtype, values, shared))
        if model.rows is None:  # buffers of another module are as they are
            fill_buffers(module, buffers(spec), mesh, plan.execution.grad_dtype, values)
        if chunk == 0 and spec.tied_embeddings:
            embedding = module.get_parameter("embedding.weight")
    return chunks


def materialise(
    module: nn.Module,
    rows: list[ParameterRow],
    mesh: Mesh,
    dtype: str,
    values: ValueSource,
    shared: Mapping[str, nn.Parameter] | None = None,
) -> Pairs:
    """Give every parameter of the module its local values. Tied parameters stay one parameter.

    `shared`: parameters, by their name here, that another chunk of this rank has and counts as its own.
    """
    pairs: Pairs = []
    names = {name: id(p) for name, p in module.named_parameters(remove_duplicate=False)}
    by_name = {row.name: row for row in rows}
    made = {names[name]: p for name, p in (shared or {}).items() if name not in by_name}
    for name, identity in names.items():
        if identity not in made:
            row = by_name.pop(name)
            made[identity] = nn.Parameter(_local_value(row, mesh, dtype, values))
            pairs.append((row, made[identity]))
        parent, _, leaf = name.rpartition(".")
        setattr(module.get_submodule(parent), leaf, made[identity])
    assert not by_name, f"the table has parameters that the module lacks: {sorted(by_name)}"
    return pairs


def fill_buffers(
    module: nn.Module, rows: Sequence[ParameterRow], mesh: Mesh, dtype: str, values: ValueSource
) -> None:
    """Give the buffers of a chunk their values. `rows`: of the whole model; every rank of a stage holds them whole."""
    present = dict(module.named_buffers())
    for row in rows:
        if row.name in present:
            parent, _, leaf = row.name.rpartition(".")
            value = values(row, mesh.layout, mesh.coordinate, dtype).to(mesh.device.device)
            module.get_submodule(parent).register_buffer(leaf, value)


def _local_value(row: ParameterRow, mesh: Mesh, dtype: str, values: ValueSource) -> Tensor:
    if mesh.layout.zero == 3 and row.zero is not None:
        return unfilled(row.local_shape(mesh.layout), getattr(torch, dtype), mesh.device.device)
    return values(row, mesh.layout, mesh.coordinate, dtype).to(mesh.device.device)


def initial_value(
    row: ParameterRow,
    layout: Layout,
    coordinate: Mapping[MeshAxis, int],
    dtype: str,
    *,
    seed: int,
    noise: float = 0.0,
) -> Tensor:
    """The initial local values of one parameter, padding zero."""
    region, shape = row.region(layout, coordinate), row.local_shape(layout)
    kind = getattr(torch, dtype)
    std = row.init_std or (noise / 10 if row.role == "selection_bias" else noise)
    if std == 0.0:
        shard = torch.full([r.stop - r.start for r in region], row.init_mean, dtype=kind)
    else:
        shard = make_shard(row.init_name, region, seed=seed, std=std, mean=row.init_mean, dtype=kind)
    if tuple(shard.shape) == shape:
        return shard
    padded = torch.zeros(shape, dtype=kind)
    padded[tuple(slice(0, size) for size in shard.shape)] = shard
    return padded

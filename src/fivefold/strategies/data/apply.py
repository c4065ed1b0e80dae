"""Data parallelism behind one face: the schedule says when, this says how gradients are kept, summed and applied.

zero0          `replicated.py`      zero3   `fully_sharded.py`
zero1, zero2   `zero.py`         a model with experts: two of these, `joined.py`
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor, nn

from fivefold.core.sharding import ParameterRow
from fivefold.runtime.mesh import Mesh
from fivefold.strategies.data.fully_sharded import FullySharded, ShardValues
from fivefold.strategies.data.joined import Joined
from fivefold.strategies.data.masters import MakeOptimizer, Moved
from fivefold.strategies.data.replicated import Replicated
from fivefold.strategies.data.zero import shard_optimizer

__all__ = ["DataParallel", "MakeOptimizer", "Replicated", "data_parallel"]


class DataParallel(Protocol):
    """What a schedule and a training step need of data parallelism, whatever the ZeRO stage.

    A row that comes with a tensor describes that tensor: its region, its shape with padding.
    """

    def watch(self, chunk: int) -> None:
        """The next backward of this chunk completes its gradients: reduce each as it becomes ready."""

    def accumulate(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        """Add a microbatch's gradient that did not come through autograd (the W of a zero-bubble schedule)."""

    def reduce(self, chunk: int) -> None:
        """All gradients of this chunk are complete on this rank: start every reduction that has not started."""

    def wait(self) -> None:
        """Wait for all reductions."""

    def local_gradients(self) -> list[tuple[ParameterRow, Tensor]]:
        """Every parameter's gradient, summed over data ranks, as far as this rank holds it."""

    def step(self, lr: float) -> None:
        """Update the parameters and forget the gradients."""

    def reorder(self, orders: Mapping[str, tuple[int, ...]], moved: Moved) -> None:
        """Between two steps: dim 0 of some parameters, by name, gets another order. Comm: that of `moved`."""

    def forget_gradients(self) -> None:
        """Drop the gradients of a step without an update."""

    def reshard(self) -> None:
        """Let go of parameters that forward passes without a backward gathered."""

    def weights(self) -> list[tuple[ParameterRow, Tensor]]:
        """The parameters between two steps, as this rank holds them."""

    def state(self) -> dict[str, dict[str, Tensor]]:
        """Optimizer state by parameter name."""

    def tensors(self) -> list[Tensor]:
        """Everything that it keeps on this rank, for counting memory."""

    def persistent(self) -> list[tuple[str, ParameterRow, Tensor]]:
        """(kind, row, tensor) of weights and moments: what a checkpoint holds, and is loaded into in place."""

    @property
    def updates(self) -> int:
        """How often the optimizer has updated the parameters."""

    def loaded(self, updates: int) -> None:
        """The persistent tensors were loaded: take over their values and the number of updates."""


def data_parallel(
    parameters: dict[int, list[tuple[ParameterRow, nn.Parameter]]],
    modules: dict[int, nn.Module],
    mesh: Mesh,
    make_optimizer: MakeOptimizer,
    values: ShardValues,
    *,
    bucket_bytes: int,
    gather_once: bool,
) -> DataParallel:
    """The form that the layout asks for, of dense parameters and of experts. One rank in a sharding group: ZeRO-0.

    `parameters`, `modules`: of each chunk. `values`: where ZeRO-3 gets its shards, as its parameters hold none.
    """
    parts: list[DataParallel] = []
    owned: list[list[tuple[ParameterRow, nn.Parameter]]] = []
    for kind in ("dense", "expert"):
        own = {chunk: [pair for pair in pairs if pair[0].mesh == kind] for chunk, pairs in parameters.items()}
        pairs = [pair for chunk in own.values() for pair in chunk]
        if pairs:
            shards = pairs[0][0].data_shards(mesh.layout)
            if shards == 1:
                part: DataParallel = Replicated(own, mesh, make_optimizer, bucket_bytes=bucket_bytes)
            elif mesh.layout.zero < 3:
                part = shard_optimizer(own, mesh, make_optimizer, bucket_bytes=bucket_bytes)
            else:
                part = FullySharded(own, modules, mesh, make_optimizer, values, gather_once=gather_once)
            parts.append(part)
            owned.append(pairs)
    if len(parts) == 1:
        return parts[0]
    return Joined(parts, owned, [row.name for pairs in parameters.values() for row, _ in pairs])

"""Data parallelism behind one face: the schedule says when, this says how gradients are kept, summed and applied.

ZeRO-0: every data rank holds all parameters, gradients and optimizer state of its shard of the model.
Communication: one all-reduce per bucket and step on axis data (dp x cp), started as soon as the bucket's last gradient
is ready (pp = 1: during the last microbatch's backward) or at the schedule's REDUCE_GRAD, awaited before the norm.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

import torch
from torch import Tensor, nn

from fivefold.core.sharding import ParameterRow
from fivefold.runtime.mesh import Handle, Mesh
from fivefold.strategies.data.rules import buckets


class DataParallel(Protocol):
    """What a schedule and a training step need of data parallelism, whatever the ZeRO stage."""

    def unshard(self, chunk: int) -> None:
        """Make the parameters of a chunk whole before it computes."""

    def reshard(self, chunk: int) -> None:
        """Let go of what `unshard` gathered."""

    def watch(self, chunk: int) -> None:
        """The next backward of this chunk completes its gradients: reduce each as it becomes ready."""

    def grad_ready(self, row: ParameterRow) -> None:
        """The gradient of this parameter is complete on this rank."""

    def reduce(self, chunk: int) -> None:
        """All gradients of this chunk are complete on this rank: start every reduction that has not started."""

    def wait(self) -> None:
        """Wait for all reductions."""

    def local_gradients(self) -> list[tuple[ParameterRow, Tensor]]:
        """Every parameter's reduced gradient, as far as this rank holds it."""

    def step(self, lr: float) -> None:
        """Update the parameters and forget the gradients."""

    def state(self) -> dict[str, dict[str, Tensor]]:
        """Optimizer state by parameter name."""


MakeOptimizer = Callable[[list[tuple[ParameterRow, nn.Parameter]]], torch.optim.Optimizer]


class Replicated:
    """ZeRO-0. With one data rank it adds no buffer, no hook and no collective."""

    def __init__(
        self,
        parameters: dict[int, list[tuple[ParameterRow, nn.Parameter]]],
        mesh: Mesh,
        make_optimizer: MakeOptimizer,
        *,
        bucket_bytes: int,
    ) -> None:
        """`parameters`: chunk -> its (row, parameter) pairs in the order of the model."""
        self.mesh = mesh
        self.axis = mesh.axis("data")
        self.pairs = [pair for chunk in parameters.values() for pair in chunk]
        self.optimizer = make_optimizer(self.pairs)
        self.buckets: dict[int, list[_Bucket]] = {chunk: [] for chunk in parameters}
        self._bucket_of: dict[str, _Bucket] = {}
        self._watched: set[int] = set()
        if self.axis.degree > 1:
            for chunk, pairs in parameters.items():
                self._make_buckets(chunk, {row.name: (row, p) for row, p in pairs}, bucket_bytes)

    def unshard(self, chunk: int) -> None:
        """Nothing to gather: every rank holds all."""

    def reshard(self, chunk: int) -> None:
        """Nothing was gathered."""

    def watch(self, chunk: int) -> None:
        self._watched.add(chunk)

    def grad_ready(self, row: ParameterRow) -> None:
        bucket = self._bucket_of[row.name]
        if bucket.chunk not in self._watched:
            return
        bucket.missing -= 1
        if bucket.missing == 0:
            phase, self.mesh.phase = self.mesh.phase, "reduce"
            bucket.start(self)
            self.mesh.phase = phase

    def reduce(self, chunk: int) -> None:
        for bucket in self.buckets[chunk]:
            if bucket.handle is None:
                bucket.start(self)
        self._watched.discard(chunk)

    def wait(self) -> None:
        for bucket in self._all_buckets():
            assert bucket.handle is not None, "a bucket was never reduced"
            bucket.handle.wait()
            bucket.handle, bucket.missing = None, bucket.size

    def local_gradients(self) -> list[tuple[ParameterRow, Tensor]]:
        gradients = []
        for row, parameter in self.pairs:
            assert parameter.grad is not None, f"{row.name} has no gradient"
            gradients.append((row, parameter.grad))
        return gradients

    def step(self, lr: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        if self.axis.degree == 1:
            self.optimizer.zero_grad(set_to_none=True)
        for bucket in self._all_buckets():
            bucket.flat.zero_()

    def state(self) -> dict[str, dict[str, Tensor]]:
        return {
            row.name: {
                key: value for key, value in self.optimizer.state[p].items() if isinstance(value, Tensor)
            }
            for row, p in self.pairs
        }

    def _all_buckets(self) -> Iterable[_Bucket]:
        return (bucket for chunk in self.buckets.values() for bucket in chunk)

    def _make_buckets(
        self, chunk: int, by_name: dict[str, tuple[ParameterRow, nn.Parameter]], limit: int
    ) -> None:
        rows = [row for row, _ in by_name.values()]
        itemsize = next(iter(by_name.values()))[1].itemsize
        for group in buckets(rows, self.mesh.layout, limit, itemsize):
            bucket = _Bucket(chunk, [by_name[row.name][1] for row in group])
            self.buckets[chunk].append(bucket)
            for row in group:
                self._bucket_of[row.name] = bucket
                by_name[row.name][1].register_post_accumulate_grad_hook(
                    lambda _, row=row: self.grad_ready(row)
                )


class _Bucket:
    """Gradients of some parameters as views of one flat buffer, so that reducing them copies nothing."""

    def __init__(self, chunk: int, parameters: list[nn.Parameter]) -> None:
        self.chunk = chunk
        self.size = self.missing = len(parameters)
        self.handle: Handle | None = None
        self.flat = parameters[0].new_zeros(sum(p.numel() for p in parameters))
        for parameter, part in zip(parameters, self.flat.split([p.numel() for p in parameters])):
            parameter.grad = part.view_as(parameter)

    def start(self, owner: Replicated) -> None:
        self.handle = owner.axis.all_reduce_start(self.flat)

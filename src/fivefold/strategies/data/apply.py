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

    def forget_gradients(self) -> None:
        """Drop the gradients of a step without an update."""

    def state(self) -> dict[str, dict[str, Tensor]]:
        """Optimizer state by parameter name."""

    def tensors(self) -> list[Tensor]:
        """Everything that it keeps on this rank, for counting memory."""

    def persistent(self) -> list[tuple[str, ParameterRow, Tensor]]:
        """(kind, row, local tensor) of weights and moments: what a checkpoint holds, and is loaded into in place."""

    @property
    def updates(self) -> int:
        """How often the optimizer has updated the parameters."""

    def loaded(self, updates: int) -> None:
        """The persistent tensors were loaded: take over their values and the number of updates."""


MakeOptimizer = Callable[[list[tuple[ParameterRow, nn.Parameter]]], torch.optim.Optimizer]


class Replicated:
    """ZeRO-0. With one data rank and parameters in float32 or float64 it adds no buffer, no hook and no collective.

    Parameters in bfloat16 have a float32 master each: microbatch gradients are added to it in float32, reduced in
    float32, and the optimizer updates it and rounds it to the parameter (Micikevicius et al. 2018, sections 3.1-3.2).
    """

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
        masters = {chunk: [(row, p, _master(p)) for row, p in pairs] for chunk, pairs in parameters.items()}
        self.triples = [triple for chunk in masters.values() for triple in chunk]
        self.optimizer = make_optimizer([(row, master) for row, _, master in self.triples])
        self._rows = {row.name: row for row, _, _ in self.triples}
        self._updates = 0
        self.buckets: dict[int, list[_Bucket]] = {chunk: [] for chunk in parameters}
        self._bucket_of: dict[str, _Bucket] = {}
        self._watched: set[int] = set()
        if self.axis.degree > 1:
            for chunk, triples in masters.items():
                self._make_buckets(chunk, [(row, master) for row, _, master in triples], bucket_bytes)
        for row, parameter, master in self.triples:
            if master is not parameter or self.axis.degree > 1:
                parameter.register_post_accumulate_grad_hook(
                    lambda p, row=row, master=master: self._accumulated(row, p, master)
                )

    def unshard(self, chunk: int) -> None:
        """Nothing to gather: every rank holds all."""

    def reshard(self, chunk: int) -> None:
        """Nothing was gathered."""

    def watch(self, chunk: int) -> None:
        self._watched.add(chunk)

    def grad_ready(self, row: ParameterRow) -> None:
        bucket = self._bucket_of.get(row.name)
        if bucket is None or bucket.chunk not in self._watched:
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
        for row, _, master in self.triples:
            assert master.grad is not None, f"{row.name} has no gradient"
            gradients.append((row, master.grad))
        return gradients

    def step(self, lr: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self._updates += 1
        self._round_to_parameters()
        self.forget_gradients()

    def forget_gradients(self) -> None:
        if self.axis.degree == 1:
            self.optimizer.zero_grad(set_to_none=True)
        for bucket in self._all_buckets():
            bucket.flat.zero_()

    def state(self) -> dict[str, dict[str, Tensor]]:
        return {
            row.name: {
                key: value for key, value in self.optimizer.state[p].items() if isinstance(value, Tensor)
            }
            for row, _, p in self.triples
        }

    def tensors(self) -> list[Tensor]:
        """Masters (or parameters), their gradients and the optimizer's state, as far as they exist now."""
        masters = [master for _, _, master in self.triples]
        states = [tensor for state in self.state().values() for tensor in state.values()]
        return [*masters, *(p.grad for p in masters if p.grad is not None), *states]

    def persistent(self) -> list[tuple[str, ParameterRow, Tensor]]:
        found = [("weights", row, master.detach()) for row, _, master in self.triples]
        for name, state in self.state().items():
            row = self._rows[name]
            found += [(kind, row, value) for kind, value in state.items() if kind != "step"]
        return found

    @property
    def updates(self) -> int:
        return self._updates

    def loaded(self, updates: int) -> None:
        self._updates = updates
        for state in self.state().values():
            if "step" in state:
                state["step"].fill_(updates)
        self._round_to_parameters()

    def _round_to_parameters(self) -> None:
        for _, parameter, master in self.triples:
            if master is not parameter:
                parameter.detach().copy_(master)

    def _accumulated(self, row: ParameterRow, parameter: Tensor, master: nn.Parameter) -> None:
        """After a microbatch's backward: add a narrow gradient to the master's, then say that it is there."""
        if master is not parameter:
            assert parameter.grad is not None
            if master.grad is None:
                master.grad = parameter.grad.to(master.dtype)
            else:
                master.grad += parameter.grad
            parameter.grad = None
        self.grad_ready(row)

    def _all_buckets(self) -> Iterable[_Bucket]:
        return (bucket for chunk in self.buckets.values() for bucket in chunk)

    def _make_buckets(self, chunk: int, pairs: list[tuple[ParameterRow, nn.Parameter]], limit: int) -> None:
        masters = {row.name: master for row, master in pairs}
        itemsize = pairs[0][1].itemsize
        for group in buckets([row for row, _ in pairs], self.mesh.layout, limit, itemsize):
            bucket = _Bucket(chunk, [masters[row.name] for row in group])
            self.buckets[chunk].append(bucket)
            self._bucket_of.update({row.name: bucket for row in group})


def _master(parameter: nn.Parameter) -> nn.Parameter:
    """The float32 copy that the optimizer updates; the parameter itself where it is wide enough."""
    if parameter.dtype in (torch.float32, torch.float64):
        return parameter
    return nn.Parameter(parameter.detach().float())


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

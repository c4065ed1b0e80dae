"""ZeRO-0: every data rank holds all parameters, gradients and optimizer state of its shard of the model.

Communication: one all-reduce per bucket and step on axis data (dp x cp; for experts edp), started as soon as its last
gradient is ready and those before it are under way (pp = 1: during the last microbatch's backward) or at the schedule's
REDUCE_GRAD, awaited before the norm.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from fivefold.core.sharding import ParameterRow
from fivefold.runtime.deferred import add_to_grad
from fivefold.runtime.mesh import Handle, Mesh
from fivefold.strategies.data.masters import MakeOptimizer, Masters
from fivefold.strategies.data.rules import buckets


class Replicated(Masters):
    """ZeRO-0. With one data rank and parameters in float32 or float64 it adds no buffer, no hook and no collective.

    Parameters in 16 bits have a float32 master each: microbatch gradients are added to it in float32, reduced in
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
        """`parameters`: chunk -> its (row, parameter) pairs in the order of the model, all dense or all experts."""
        self.mesh = mesh
        self.axis = mesh.axis(next(row.data_axis for pairs in parameters.values() for row, _ in pairs))
        masters = {chunk: [(row, p, _master(p)) for row, p in pairs] for chunk, pairs in parameters.items()}
        super().__init__([triple for chunk in masters.values() for triple in chunk], make_optimizer)
        self.buckets: dict[int, list[_Bucket]] = {chunk: [] for chunk in parameters}
        self._bucket_of: dict[str, _Bucket] = {}
        self._watched: set[int] = set()
        self._triple_of = {id(p): (row, p, master) for row, p, master in self.triples}
        if self.axis.degree > 1:
            for chunk, triples in masters.items():
                self._make_buckets(chunk, [(row, master) for row, _, master in triples], bucket_bytes)
        for row, parameter, master in self.triples:
            if master is not parameter or self.axis.degree > 1:
                parameter.register_post_accumulate_grad_hook(
                    lambda p, row=row, master=master: self._accumulated(row, p, master)
                )

    def reshard(self) -> None:
        """Nothing was gathered: every rank holds all."""

    def watch(self, chunk: int) -> None:
        self._watched.add(chunk)

    def accumulate(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        add_to_grad(parameter, gradient)
        row, parameter, master = self._triple_of[id(parameter)]
        if master is not parameter:
            self._accumulated(row, parameter, master)

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

    def forget_gradients(self) -> None:
        if self.axis.degree == 1:
            self.optimizer.zero_grad(set_to_none=True)
        for bucket in self._all_buckets():
            bucket.flat.zero_()

    def spread(self) -> None:
        for _, parameter, master in self.triples:
            if master is not parameter:
                parameter.detach().copy_(master)

    def _accumulated(self, row: ParameterRow, parameter: Tensor, master: nn.Parameter) -> None:
        """After a microbatch's backward: add a narrow gradient to the master's, then see whether a bucket is full."""
        if parameter.grad is None:
            return  # autograd had nothing: the gradient comes with a W
        if master is not parameter:
            if master.grad is None:
                master.grad = parameter.grad.to(master.dtype)
            else:
                master.grad += parameter.grad
            parameter.grad = None
        bucket = self._bucket_of.get(row.name)
        if bucket is None or bucket.chunk not in self._watched:
            return
        bucket.missing -= 1
        if not bucket.missing:
            self._start_full(bucket.chunk)

    def _start_full(self, chunk: int) -> None:
        """Start the buckets that are full, one after another, as all ranks do.

        Gradients may come in another order elsewhere, or not at all: a module that is not ours may skip some of its
        parameters where no token of this rank needs them.
        """
        phase, self.mesh.phase = self.mesh.phase, "reduce"
        for bucket in self.buckets[chunk]:
            if bucket.handle is None:
                if bucket.missing:
                    break
                bucket.start(self)
        self.mesh.phase = phase

    def _all_buckets(self) -> Iterable[_Bucket]:
        return (bucket for chunk in self.buckets.values() for bucket in chunk)

    def _make_buckets(self, chunk: int, pairs: list[tuple[ParameterRow, nn.Parameter]], limit: int) -> None:
        masters = {row.name: master for row, master in pairs}
        itemsize = max((master.itemsize for master in masters.values()), default=0)
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

"""ZeRO-1 and ZeRO-2: every rank updates its shard of each parameter (Rajbhandari et al. 2020, sections 5.1 and 5.2).

zero1   A microbatch's gradients are added up on each rank. One reduce-scatter per bucket and step, started as
        soon as the bucket is complete (pp = 1: during the last microbatch's backward) or at REDUCE_GRAD.
zero2   As soon as the gradients of a bucket are there in a microbatch, they are reduce-scattered and let go; what this
        rank keeps of their sum is added up. One bucket at a time is under way, while the next one fills.

Then, for both: with groups (`zero1/8`) one all-reduce of each bucket's shards over the groups; norm, clipping and
update on shards; one all-gather per bucket of the new parameters (phase optimizer), all started before the first is
awaited.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor, nn

from fivefold.core.sharding import ParameterRow
from fivefold.runtime.mesh import Mesh
from fivefold.strategies.data.masters import MakeOptimizer, Masters, no_gradient
from fivefold.strategies.data.rules import buckets
from fivefold.strategies.data.shards import Bucket


class Sharded(Masters):
    """Gradients summed to shards, and an optimizer that updates shards. `each_microbatch`: reduce after every one."""

    def __init__(
        self,
        held: dict[int, list[Bucket]],
        order: list[ParameterRow],
        mesh: Mesh,
        make_optimizer: MakeOptimizer,
        *,
        each_microbatch: bool,
    ) -> None:
        """`held`: the buckets of each chunk; `order`: the rows in the order of the model."""
        self.mesh = mesh
        self.held = held
        self.each_microbatch = each_microbatch
        self.under_way: Bucket | None = None
        self._watched: set[int] = set()
        self._turn = dict.fromkeys(held, 0)
        """Chunk -> the bucket that is reduced next, counted as backward fills them."""
        self._place_of: dict[int, tuple[Bucket, int]] = {}
        found: dict[str, tuple[ParameterRow, nn.Parameter, nn.Parameter]] = {}
        for bucket in self.buckets():
            for i, (row, parameter) in enumerate(zip(bucket.rows, bucket.parameters)):
                found[row.name] = row.held, parameter, bucket.masters[i]
                self._place_of[id(parameter)] = bucket, i
                parameter.register_post_accumulate_grad_hook(self._accumulated)
        super().__init__([found[row.name] for row in order], make_optimizer)

    def buckets(self) -> Iterable[Bucket]:
        return (bucket for chunk in self.held.values() for bucket in chunk)

    def reshard(self) -> None:
        """Nothing was gathered: every rank holds all parameters."""

    def watch(self, chunk: int) -> None:
        self._watched.add(chunk)

    def accumulate(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        bucket, index = self._place_of[id(parameter)]
        if self.each_microbatch and bucket.filled[index]:
            self._refuse_gaps(bucket)
        bucket.add(index, gradient)
        if not self.each_microbatch and bucket.chunk not in self._watched:
            return
        bucket.missing -= 1
        self._start_full(bucket.chunk)

    def reduce(self, chunk: int) -> None:
        if not self.each_microbatch:
            for bucket in self.in_order(chunk):
                if bucket.reducing is None:
                    self._start(bucket)
            self._turn[chunk] = 0
        self._watched.discard(chunk)

    def wait(self) -> None:
        for bucket in self.buckets():
            if self.each_microbatch and any(bucket.filled):
                self._refuse_gaps(bucket)
            bucket.reduce_wait()
        self.under_way = None
        summing = [bucket.sum_groups_start() for bucket in self.buckets() if bucket.across.degree > 1]
        for handle in summing:
            handle.wait()
        for bucket in self.buckets():
            bucket.hand_out()

    def forget_gradients(self) -> None:
        for bucket in self.buckets():
            bucket.forget()

    def spread(self) -> None:
        for bucket in self.buckets():
            bucket.gather_start()
        for bucket in self.buckets():
            bucket.gather_wait()

    def tensors(self) -> list[Tensor]:
        return [*super().tensors(), *(tensor for bucket in self.buckets() for tensor in bucket.tensors())]

    def completed(self, bucket: Bucket) -> None:
        """All gradients of the bucket are on their way."""

    def in_order(self, chunk: int) -> Sequence[Bucket]:
        """The buckets of a chunk as backward fills them."""
        return self.held[chunk]

    def _start_full(self, chunk: int) -> None:
        """Start the buckets that are full, one after another, as all ranks do: see `Replicated`."""
        order = self.in_order(chunk)
        while not order[self._turn[chunk]].missing:
            self._start(order[self._turn[chunk]])
            self._turn[chunk] = (self._turn[chunk] + 1) % len(order)

    def _refuse_gaps(self, bucket: Bucket) -> None:
        """A microbatch has ended that filled a bucket in part: elsewhere it may be full, and be reduced."""
        raise no_gradient(bucket.rows[bucket.filled.index(False)], "in a microbatch")

    def _start(self, bucket: Bucket) -> None:
        phase, self.mesh.phase = self.mesh.phase, "reduce"
        if self.each_microbatch:
            if self.under_way is not None:
                self.under_way.reduce_wait()
            self.under_way = bucket
        bucket.reduce_start()
        self.completed(bucket)
        self.mesh.phase = phase

    def _accumulated(self, parameter: Tensor) -> None:
        """After autograd has added a microbatch's gradient: take it over, so that none outlives its bucket."""
        assert isinstance(parameter, nn.Parameter)
        gradient, parameter.grad = parameter.grad, None
        if gradient is not None:  # else it comes with a W
            self.accumulate(parameter, gradient)


def shard_optimizer(
    parameters: dict[int, list[tuple[ParameterRow, nn.Parameter]]],
    mesh: Mesh,
    make_optimizer: MakeOptimizer,
    *,
    bucket_bytes: int,
) -> Sharded:
    """ZeRO-1 or ZeRO-2, as the layout says. `parameters`: chunk -> its (row, parameter) pairs, with their values."""
    level = mesh.layout.zero
    held: dict[int, list[Bucket]] = {}
    for chunk, pairs in parameters.items():
        by_name = {row.name: (row, p) for row, p in pairs}
        wide = max((4, *(p.itemsize for _, p in pairs)))
        groups = buckets([row for row, _ in pairs], mesh.layout, bucket_bytes, wide)
        held[chunk] = [
            Bucket(chunk, [by_name[row.name] for row in group], mesh, keep=level == 1) for group in groups
        ]
        for bucket in held[chunk]:
            bucket.cut()
    order = [row for pairs in parameters.values() for row, _ in pairs]
    return Sharded(held, order, mesh, make_optimizer, each_microbatch=level == 2)

"""ZeRO-3: parameters are sharded as well, and whole only while a unit computes (Rajbhandari et al. 2020, section 5.3).

A unit is a decoder layer, the embedding, or norm and head. Hooks on its modules, on axis data:

    before its forward     all-gather of its parameters, if it is not whole; the next unit's is started
    after its forward      its whole parameters are let go, unless its backward is near (norm and head)
    before its backward    all-gather again; that of the unit before is started
    after its backward     reduce-scatter of its gradients, its whole parameters are let go

With `gather_once`, units are gathered at the first forward of a step and stay whole until its end, and gradients are
added up and reduce-scattered once: the volume of ZeRO-1, and its memory while a step lasts.

A parameter is an ordinary tensor whose memory comes and goes: what autograd has saved refers to the same memory, so it
is there again when backward needs it. Every microbatch in flight shares it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fivefold.core.sharding import ParameterRow
from fivefold.runtime.mesh import Mesh
from fivefold.strategies.data.masters import MakeOptimizer
from fivefold.strategies.data.rules import Unit, units
from fivefold.strategies.data.shards import Bucket
from fivefold.strategies.data.zero import Sharded

ShardValues = Callable[[ParameterRow], Tensor]
"""The initial values of what this rank holds of a parameter: row (`held`) -> shard with padding."""

MODULES = {"embedding": ("embedding", "positions"), "head": ("norm", "head")}
"""The modules of a block, in the order of forward, as far as the model has them; a layer is its own."""


class FullySharded(Sharded):
    """ZeRO-3. Parameters need no values: their memory is let go at once, shards are made by `values`."""

    def __init__(
        self,
        parameters: dict[int, list[tuple[ParameterRow, nn.Parameter]]],
        modules: dict[int, nn.Module],
        mesh: Mesh,
        make_optimizer: MakeOptimizer,
        values: ShardValues,
        *,
        gather_once: bool,
    ) -> None:
        self.gather_once = gather_once
        held: dict[int, list[Bucket]] = {}
        for chunk, pairs in parameters.items():
            parts = units([row for row, _ in pairs])
            by_name = {row.name: (row, p) for row, p in pairs}
            held[chunk] = [
                _make(chunk, [by_name[row.name] for row in unit.rows], mesh, values) for unit in parts
            ]
            for i in range(len(parts)):
                self._hook(modules[chunk], parts, held[chunk], i)
        order = [row for pairs in parameters.values() for row, _ in pairs]
        super().__init__(held, order, mesh, make_optimizer, each_microbatch=not gather_once)

    def reshard(self) -> None:
        for bucket in self.buckets():
            bucket.let_go()

    def weights(self) -> list[tuple[ParameterRow, Tensor]]:
        return [(row, master.detach()) for row, _, master in self.triples]

    def spread(self) -> None:
        """The next forward gathers the new values."""
        self.reshard()

    def forget_gradients(self) -> None:
        super().forget_gradients()
        self.reshard()

    def completed(self, bucket: Bucket) -> None:
        if not self.gather_once:
            bucket.let_go()

    def in_order(self, chunk: int) -> Sequence[Bucket]:
        return self.held[chunk][::-1]

    def _hook(self, module: nn.Module, parts: list[Unit], held: list[Bucket], index: int) -> None:
        """Hook one unit of a chunk. `parts`, `held`: all its units and their buckets in the order of forward."""
        unit, bucket = parts[index], held[index]
        names = [name for block in sorted(unit.blocks) for name in MODULES.get(block, (block,))]
        there = dict(module.named_modules())
        modules = [there[name] for name in names if name in there]
        ran = 0
        above = held[index + 1] if index + 1 < len(held) else None
        # The embedding with a head tied to it is the first unit, and in backward comes before the last one.
        below = held[index - 1] if (index or unit.stays) and parts[index - 1].read_in_backward else None

        def before_forward(_module: nn.Module, _inputs: Any) -> None:
            self._make_whole(bucket, None if ran else above)

        def before_backward(_gradient: Tensor) -> None:
            self._make_whole(bucket, below)

        def after_forward(_module: nn.Module, _inputs: Any, out: Tensor) -> None:
            nonlocal ran
            ran = (ran + 1) % len(modules)
            if ran:
                return
            if out.requires_grad and unit.read_in_backward:
                out.register_hook(before_backward)
            if not unit.stays and not self.gather_once:
                bucket.let_go()

        for one in modules:  # in whatever order they run
            one.register_forward_pre_hook(before_forward)
            one.register_forward_hook(after_forward)

    @torch.no_grad()
    def _make_whole(self, bucket: Bucket, next_one: Bucket | None) -> None:
        if not bucket.is_whole:
            if bucket.gathering is None:
                bucket.gather_start()
            bucket.gather_wait()
        if next_one is not None and not next_one.is_whole and next_one.gathering is None:
            next_one.gather_start()


def _make(
    chunk: int, pairs: list[tuple[ParameterRow, nn.Parameter]], mesh: Mesh, values: ShardValues
) -> Bucket:
    bucket = Bucket(chunk, pairs, mesh, keep=False)
    bucket.let_go()
    for master, row in zip(bucket.masters, bucket.rows):
        master.detach().copy_(values(row.held))
    return bucket

"""Parameters whose shards travel together, and the buffers in which they do.

n ranks of a sharding group. Of a local parameter of R rows, each rank keeps k = ceil(R/n), the last ones fewer or
padding only (as `torch.chunk` and FSDP2 cut); w elements a row, so b = k w elements of a shard, S the sum of all b.

    flat    [S]      shards in at least float32, which the optimizer updates: every master is a view of it
    whole   [n S]    the parameters, each padded to n k rows, in their own dtype: every parameter is a view of it
    full    [n, S]   gradients of whole parameters; row r is what rank r will keep of their sum
    total   [S]      what this rank keeps of the gradients' sum: every master's gradient is a view of it

Communication on axis data (for experts edp): reduce-scatter of `full`; all-gather of `flat` in the parameters' dtype,
copied to `whole`; with several groups an all-reduce of `total` over the ranks that hold the same shard.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fivefold.core.sharding import ParameterRow
from fivefold.runtime.memory import resize_storage
from fivefold.runtime.mesh import Handle, Mesh
from fivefold.strategies.data.masters import no_gradient


@dataclass(frozen=True)
class Place:
    """Where one parameter's shards are in a bucket: `start` in each rank's S, `b` elements of the whole `size`."""

    start: int
    b: int
    size: int


class Bucket:
    """See the head of this file. `keep`: whether the buffer for whole gradients stays from step to step."""

    def __init__(
        self, chunk: int, pairs: list[tuple[ParameterRow, nn.Parameter]], mesh: Mesh, *, keep: bool
    ) -> None:
        """Moves the parameters, all dense or all experts, to the bucket's buffer, with the values that there are."""
        layout = mesh.layout
        self.chunk, self.keep = chunk, keep
        self.rows = [row for row, _ in pairs]
        over = self.rows[0].data_axis
        self.n = self.rows[0].data_shards(layout)
        self.axis = mesh.axis(over, self.n)
        self.across = mesh.axis(over, self.n, across=True)
        self.parameters = [parameter for _, parameter in pairs]
        self.sizes = [row.held.local_elements(layout) for row in self.rows]
        self.S = sum(self.sizes)
        starts = [sum(self.sizes[:i]) for i in range(len(pairs))]
        self.places = [Place(start, b, p.numel()) for start, b, p in zip(starts, self.sizes, self.parameters)]
        self.padded = any(place.size < self.n * place.b for place in self.places)
        first = self.parameters[0]
        self.dtype, self.wide = first.dtype, torch.promote_types(first.dtype, torch.float32)
        self.flat = torch.zeros(self.S, dtype=self.wide, device=first.device)
        shapes = [row.held.local_shape(layout) for row in self.rows]
        self.masters = [
            nn.Parameter(part.view(shape)) for part, shape in zip(self.flat.split(self.sizes), shapes)
        ]
        self.shapes = shapes
        self._move_parameters()
        self.missing = len(pairs)
        """Gradients of this microbatch that are not there yet."""
        self.full: Tensor | None = None
        self.total: Tensor | None = None
        self.filled = [False] * len(pairs)
        self.reducing: Handle | None = None
        self.gathering: Handle | None = None

    def _move_parameters(self) -> None:
        self.whole = torch.zeros(self.n * self.S, dtype=self.dtype, device=self.flat.device)
        self.is_whole = True
        self.parts = [
            part.view(self.n, -1) for part in self.whole.split([self.n * size for size in self.sizes])
        ]
        for part, place, parameter in zip(self.parts, self.places, self.parameters):
            mine = part.view(-1)[: place.size].view(parameter.shape)
            if parameter.untyped_storage().nbytes():
                mine.copy_(parameter.detach())
            parameter.data = mine  # keeps its version: gathering is no change that autograd could see

    # Parameters

    def cut(self) -> None:
        """Take this rank's shards from the whole parameters."""
        for shard, part in zip(self.flat.split(self.sizes), self.parts):
            shard.copy_(part[self.axis.index])

    def gather_start(self) -> None:
        """Comm: one all-gather of S elements from each rank, in the parameters' dtype."""
        self.gathering = self.axis.all_gather_start(self.flat.to(self.dtype), 0)

    def gather_wait(self) -> None:
        """The parameters are whole and hold the values that the masters had at `gather_start`."""
        assert self.gathering is not None, "nothing is being gathered"
        gathered, self.gathering = self.gathering.wait(), None
        if not self.is_whole:
            resize_storage(self.whole, self.whole.numel())
            self.is_whole = True
        torch.split_with_sizes_copy(gathered.view(self.n, -1), self.sizes, dim=1, out=self.parts)

    def let_go(self) -> None:
        """Free the memory of the whole parameters; views that autograd saved find it again after the next gather."""
        assert self.gathering is None, "it is just being gathered"
        if self.is_whole:
            resize_storage(self.whole, 0)
            self.is_whole = False

    # Gradients

    def add(self, index: int, gradient: Tensor) -> None:
        """Add a microbatch's gradient of one parameter to the whole gradients, in at least float32."""
        if self.full is None:
            make = torch.zeros if self.padded else torch.empty
            self.full = make(self.n, self.S, dtype=self.wide, device=self.flat.device)
        place, values = self.places[index], gradient.reshape(-1)
        blocks = place.size // place.b
        body = self.full.as_strided((blocks, place.b), (self.S, 1), place.start)
        targets = [(body, values[: blocks * place.b].view(blocks, place.b))]
        if rest := place.size - blocks * place.b:
            targets.append((self.full[blocks, place.start : place.start + rest], values[-rest:]))
        for target, value in targets:
            if self.filled[index]:
                target += value
            else:
                target.copy_(value)
        self.filled[index] = True

    def reduce_start(self) -> None:
        """Comm: one reduce-scatter of n S elements."""
        for index, (row, place) in enumerate(zip(self.rows, self.places)):
            if not self.filled[index]:
                if not row.may_be_skipped:
                    raise no_gradient(row)
                self.add(index, self.flat.new_zeros(place.size, dtype=self.wide))
        assert self.full is not None
        self.reducing = self.axis.reduce_scatter_start(self.full.view(-1), 0)
        self.filled, self.missing = [False] * len(self.rows), len(self.rows)
        if not self.keep:
            self.full = None

    def reduce_wait(self) -> None:
        """Add what this rank got of the last reduction to what it keeps."""
        if self.reducing is None:
            return
        reduced, self.reducing = self.reducing.wait(), None
        if self.total is None:
            self.total = reduced
        else:
            self.total += reduced

    def sum_groups_start(self) -> Handle:
        """Comm: one all-reduce of S elements over the ranks that hold the same shard in other groups."""
        assert self.total is not None, "a bucket was never reduced"
        return self.across.all_reduce_start(self.total)

    def hand_out(self) -> None:
        """Give every master its gradient."""
        assert self.total is not None, "a bucket was never reduced"
        for master, part, shape in zip(self.masters, self.total.split(self.sizes), self.shapes):
            master.grad = part.view(shape)

    def forget(self) -> None:
        self.total = None
        for master in self.masters:
            master.grad = None

    def tensors(self) -> list[Tensor]:
        """The buffers that exist now and are not views: memory of this rank beside the optimizer's state."""
        return [self.flat, self.whole, *(t for t in (self.full, self.total) if t is not None)]

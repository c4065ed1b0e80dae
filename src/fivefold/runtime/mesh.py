"""The mesh as one rank sees it: its coordinate and, for every axis, the ranks that it talks to.

Collectives are methods of an `Axis`, so that each one names its axis. At degree 1 each returns its input: no
collective, no copy. All of them are plain functions of tensors; `collectives.py` makes them differentiable.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.compat import default_timeout
from fivefold.core.events import Phase
from fivefold.core.layout import Axis as AxisName
from fivefold.core.layout import Layout
from fivefold.runtime.device import Device, Stopwatch


class Axis:
    """One axis, or runs of `size` members of it: the ranks of this rank's group, in order, and its place in it."""

    def __init__(
        self, name: AxisName, ranks: tuple[int, ...], rank: int, clock: Stopwatch, parallel: bool
    ) -> None:
        """`parallel`: whether any rank of the job has company on this axis, so that all ranks must make a group."""
        self.name = name
        self.ranks = ranks
        self.degree = len(ranks)
        self.index = ranks.index(rank)
        self.clock = clock
        self.exchanged_bytes = 0
        """Of all exchanges since whoever counts them set it to 0: of each, the larger of what went and what came."""
        made = None
        if parallel:
            timeout = default_timeout(clock.device.device)
            made = dist.new_group(list(ranks), timeout=timeout, use_local_synchronization=True)
        self.group: dist.ProcessGroup | None = made if self.degree > 1 else None

    def all_reduce(self, x: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
        """Reduce `x` in place over the axis and return it. Comm: one all-reduce of x."""
        if self.group is not None:
            started = self.clock.start()
            dist.all_reduce(x, op=op, group=self.group)
            self.clock.stop(self.name, started)
        return x

    def all_reduce_start(self, x: Tensor) -> Handle:
        """Begin an in-place sum of `x`; the result holds after `wait`."""
        return Handle(self, x, dist.all_reduce(x, group=self._active, async_op=True))

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        """Join the axis members' `x` along `dim`, in axis order. Comm: one all-gather; larger buffer: the result."""
        return x if self.group is None else self.all_gather_start(x, dim).wait()

    def all_gather_start(self, x: Tensor, dim: int) -> Handle:
        """Begin `all_gather`; `wait` returns the joined tensor."""
        x = x.contiguous()
        out = x.new_empty(self.degree * x.shape[0], *x.shape[1:])
        work = dist.all_gather_single(out, x, group=self._active, async_op=True)
        return Handle(self, out.unflatten(0, (self.degree, -1)), work, join=dim % x.ndim)

    def reduce_scatter(self, x: Tensor, dim: int) -> Tensor:
        """Sum `x` over the axis and keep this rank's part of `dim`. Comm: one reduce-scatter; larger buffer: x."""
        return x if self.group is None else self.reduce_scatter_start(x, dim).wait()

    def reduce_scatter_start(self, x: Tensor, dim: int) -> Handle:
        """Begin `reduce_scatter`; `wait` returns this rank's part."""
        dim %= x.ndim
        parts = x.unflatten(dim, (self.degree, -1)).movedim(dim, 0).flatten(0, 1).contiguous()
        out = parts.new_empty(parts.shape[0] // self.degree, *parts.shape[1:])
        work = dist.reduce_scatter_single(out, parts, group=self._active, async_op=True)
        return Handle(self, out, work, keep=parts)

    def all_to_all(self, x: Tensor, cut: int, join: int) -> Tensor:
        """Part i of `x` along `cut` goes to member i; what comes is joined along `join`, in axis order.

        Comm: one all-to-all of x.
        """
        if self.group is None:
            return x
        cut, join = cut % x.ndim, join % x.ndim
        parts = x.unflatten(cut, (self.degree, -1)).movedim(cut, 0).contiguous()
        out = torch.empty_like(parts)
        started = self.clock.start()
        dist.all_to_all_single(out, parts, group=self.group)
        self.clock.stop(self.name, started)
        return out.movedim(0, join).flatten(join, join + 1)

    def exchange(self, x: Tensor, sends: Sequence[int], receives: Sequence[int]) -> Tensor:
        """Give each member its rows of `x`, `sends[i]` of them to member i; returns `receives[i]` rows from each i.

        Comm: one all-to-all; larger buffer: of the rows that go and those that come. Nothing is padded.
        """
        return x if self.group is None else self.exchange_start(x, sends, receives).wait()

    def exchange_start(self, x: Tensor, sends: Sequence[int], receives: Sequence[int]) -> Handle:
        """Begin `exchange`; `wait` returns the rows that came, in axis order."""
        x = x.contiguous()
        out = x.new_empty(sum(receives), *x.shape[1:])
        self.exchanged_bytes += max(x.nbytes, out.nbytes)
        work = dist.all_to_all_single(out, x, list(receives), list(sends), group=self._active, async_op=True)
        return Handle(self, out, work, keep=x)

    def pass_on_start(self, x: Tensor) -> Handle:
        """Begin to send `x` to the next member of the ring; `wait` returns what the one before sent.

        Comm: one send and one receive of x, posted together, so that no order of ranks can deadlock.
        """
        out = torch.empty_like(x)
        there, here = self.ranks[(self.index + 1) % self.degree], self.ranks[self.index - 1]
        posts = [
            dist.P2POp(dist.isend, x, there, group=self._active),
            dist.P2POp(dist.irecv, out, here, group=self._active),
        ]
        return Handle(self, out, _All(dist.batch_isend_irecv(posts)), keep=x)

    def send_start(self, x: Tensor, to: int) -> Handle:
        """Begin a send of `x` to the global rank `to`."""
        return Handle(self, x, dist.isend(x, to, group=self._active))

    def receive_start(self, buffer: Tensor, source: int) -> Handle:
        """Begin to receive into `buffer` from the global rank `source`; `wait` returns it."""
        return Handle(self, buffer, dist.irecv(buffer, source, group=self._active))

    @property
    def _active(self) -> dist.ProcessGroup:
        assert self.group is not None, f"axis {self.name} has degree 1: there is nobody to talk to"
        return self.group


class _All:
    """Several works of one exchange, waited for together."""

    def __init__(self, works: list[dist.Work]) -> None:
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            work.wait()


class Handle:
    """A collective under way. `wait` returns its result once; only the waiting is counted as communication time."""

    def __init__(
        self, axis: Axis, result: Tensor, work: Any, *, join: int | None = None, keep: Any = None
    ) -> None:
        self._axis, self._result, self._work, self._join, self._keep = axis, result, work, join, keep

    @property
    def buffer(self) -> Tensor:
        """Where the result will be; nothing may read it before `wait`."""
        return self._result

    def wait(self) -> Tensor:
        if self._work is not None:
            started = self._axis.clock.start()
            self._work.wait()
            self._axis.clock.stop(self._axis.name, started)
            self._work = self._keep = None
            if self._join is not None:
                dim = self._join
                self._result = self._result.movedim(0, dim).flatten(dim, dim + 1)
        return self._result


class Mesh:
    """This rank's coordinate in a layout and its axes. Groups are made on first use.

    Every rank of the job must ask for the same axes in the same order, also a rank that has no part in one of them
    (a middle stage in `tie`): torch names a group after its ranks and the number of groups that the process made
    before, so ranks that made different numbers of groups would wait for each other under different names.
    """

    def __init__(self, layout: Layout, rank: int, device: Device) -> None:
        self.layout = layout
        self.rank = rank
        self.device = device
        self.coordinate = layout.coordinate(rank)
        self.clock = Stopwatch(device)
        self.phase: Phase = "setup"
        """What the step is doing now: the ledger files every collective under it."""
        self._axes: dict[tuple[object, ...], Axis] = {}

    def axis(self, name: AxisName, size: int | None = None, *, across: bool = False) -> Axis:
        """The axis `name` from here; with `size`, runs of that many consecutive members of it.

        With `across` as well: the members at this rank's place in all the runs (see `Layout.groups`).
        """
        degree = self.layout.degree(name)
        size = (
            None if size == degree and not across else size
        )  # one group for the whole axis, however asked for
        members = degree // (size or 1) if across else size or degree
        ranks = self.layout.group_of(name, self.rank, size, across=across)
        return self._make((name, size, across), name, ranks or (self.rank,), members > 1)

    def edge(self, purpose: object, ends: tuple[int, int] | None) -> Axis:
        """A group on axis pp of the two ranks `ends` that carries one kind of message one way; None: not this rank's.

        One group per directed edge and purpose: a send never queues behind a receive, on any backend.
        """
        return self._make(("edge", purpose), "pp", ends or (self.rank,), True)

    def axis_name_of(self, group_name: str) -> AxisName:
        """The axis that a process group belongs to: how the ledger names what torch dispatches."""
        for axis in self._axes.values():
            if axis.group is not None and axis.group.group_name == group_name:
                return axis.name
        return "world"

    def _make(self, key: tuple[object, ...], name: AxisName, ranks: tuple[int, ...], parallel: bool) -> Axis:
        if key not in self._axes:
            self._axes[key] = Axis(name, ranks, self.rank, self.clock, parallel)
        return self._axes[key]


DEFAULT_TIMEOUT = timedelta(minutes=10)
"""How long a collective may take before its rank gives up."""

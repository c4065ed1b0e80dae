"""Tokens to where their experts are, and the results back: the experts of a layer on the ranks of an expert mesh.

Communication of one microbatch, forward (backward: the reverse of each, with the same bytes):

    etp > 1    all-gather of the tokens, of the experts that they chose, and of the weights          axis etp
    ep > 1     all-to-all of the E counts; all-to-all of a row of D for each choice; and back          axis ep
    etp > 1    reduce-scatter of the partial sums                                                      axis etp

Tokens that every etp rank has already (tp ranks without sequence parallelism) are not gathered: the gradients of tokens
and weights are all-reduced, and so are the partial sums. A rank can send or receive no row at all. Nothing is padded,
unless it is asked for under a capacity: then every expert gets the same number of rows, and no counts travel.

While the tokens travel to their experts, a rank computes its shared experts (`overlap`), and their gradients while
those of the tokens travel back.

A row leaves for each choice (token, expert), sorted by expert, so that rows for one rank are neighbours. What comes is
sorted by sender, then by expert, and is brought into the order of experts for the grouped products.

Where experts have copies (`replicas.py`), choices go to slots: a home, or a copy.

Shape letters: T tokens of a rank, K choices of a token, D hidden, E experts, e experts of this rank, R rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from fivefold.nn.grouped import grouped_matmul, weight_gradient
from fivefold.nn.moe import Experts, MoE, combine, count, place
from fivefold.runtime.collectives import (
    Exchange,
    all_gather,
    all_reduce,
    broadcast_input,
    exchange,
    reduce_scatter,
)
from fivefold.runtime.deferred import DeferredGradients
from fivefold.runtime.mesh import Axis
from fivefold.strategies.expert.copies import Copies
from fivefold.strategies.expert.replicas import Replicas, share

Meanwhile = Callable[[], None]


@dataclass(frozen=True)
class Cut:
    """Over which ranks experts are cut, and what becomes of their weight gradients."""

    ep: Axis
    etp: Axis
    same_tokens: bool
    """Whether the etp ranks have the same tokens."""
    deferred: DeferredGradients | None = None
    """Where a schedule collects weight gradients; None: they are computed in backward."""
    padded: Padding | None = None
    """How many rows every expert gets; None: as many as choose it."""


@dataclass(frozen=True)
class Padding:
    """A rank sends each expert `capacity` rows for every `tokens` tokens: no more than it can take of one sequence."""

    capacity: int
    tokens: int


class DispatchedExperts(Experts):
    """Takes the place of the experts of one layer and holds those of this rank, e = E/ep of width F/etp.

    Shapes: x_TD, experts_TK (int64), weights_TK -> [T, D]. `meanwhile` is called once, while the tokens travel.
    """

    def __init__(self, experts: nn.Module, cut: Cut) -> None:
        nn.Module.__init__(self)
        assert isinstance(experts, Experts)
        self.activation = experts.activation
        self.gate, self.up, self.down = experts.gate, experts.up, experts.down
        self._cut = cut
        self._copies: Copies | None = None
        self.tell: Callable[[int], None] | None = None
        """Called with the rows that this rank computes, in each forward."""

    def place(self, replicas: Replicas | None) -> None:
        """The weights are now those of these homes, and choices go to them and their copies; None: as at first."""
        copies = None if replicas is None else Copies(replicas, self._cut.ep, self._cut.deferred)
        self._copies = copies

    def forget_copies(self) -> None:
        """The weights change: copies are fetched anew when they are read again."""
        if self._copies is not None:
            self._copies.forget()

    def forward(
        self, x_TD: Tensor, experts_TK: Tensor, weights_TK: Tensor, meanwhile: Meanwhile | None = None
    ) -> Tensor:
        etp = self._cut.etp
        if self._cut.same_tokens:
            x_TD, weights_TK = broadcast_input(x_TD, etp), broadcast_input(weights_TK, etp)
            return all_reduce(self._exchanged(x_TD, experts_TK, weights_TK, meanwhile), etp)
        x_TD, weights_TK = all_gather(x_TD, etp, 0), all_gather(weights_TK, etp, 0)
        experts_TK = etp.all_gather(experts_TK, 0)
        return reduce_scatter(self._exchanged(x_TD, experts_TK, weights_TK, meanwhile), etp, 0)

    def compute(self, x_RD: Tensor, counts_E: Tensor, own_rows: int = 0) -> Tensor:
        """Rows sorted by slot through their experts; with copies, the first `own_rows` are of homes."""
        gate_RF = self.activation(self._product(x_RD, "gate", counts_E, own_rows))
        return self._product(
            gate_RF * self._product(x_RD, "up", counts_E, own_rows), "down", counts_E, own_rows
        )

    def _product(self, x_RD: Tensor, name: str, counts_E: Tensor, own_rows: int) -> Tensor:
        weight = getattr(self, name)
        if self._copies is not None and len(counts_E) > len(weight):
            return self._copies.product(x_RD, name, weight, counts_E, own_rows)
        if self._cut.deferred is None:
            return grouped_matmul(x_RD, weight, counts_E)
        return _Deferring.apply(x_RD, weight, counts_E, self._cut.deferred)  # type: ignore[no-any-return]

    def _exchanged(
        self, x_TD: Tensor, experts_TK: Tensor, weights_TK: Tensor, meanwhile: Meanwhile | None
    ) -> Tensor:
        route = self._route(experts_TK)
        if self.tell is not None:
            self.tell(sum(route.receives))
        compute = partial(self.compute, own_rows=route.own_rows)
        return exchanged(x_TD, weights_TK, route, self._cut.ep, compute, meanwhile)

    def _route(self, experts_TK: Tensor) -> Route:
        ep, padded, here = self._cut.ep, self._cut.padded, self.gate.shape[0]
        if self._copies is not None:
            return shared_route(experts_TK, self._copies.replicas, ep)
        if padded is None or ep.degree == 1:
            return find_route(experts_TK, here, ep)
        return padded_route(experts_TK, here, ep, experts_TK.shape[0] // padded.tokens * padded.capacity)


def overlap(moe: MoE) -> None:
    """Let shared experts compute while tokens travel: the same products and sums, in another order."""

    def forward(x_BSD: Tensor, valid_BS: Tensor | None = None) -> Tensor:
        shared: list[Tensor] = []
        routing = moe.router(x_BSD, valid_BS)
        y_TD = moe.experts(
            x_BSD.flatten(0, 1), routing.experts_TK, routing.weights_TK,
            lambda: shared.append(moe.shared_output(x_BSD)),
        )  # fmt: skip
        return y_TD.view_as(x_BSD) + shared[0]  # type: ignore[no-any-return]

    moe.forward = forward  # type: ignore[method-assign]


def exchanged(
    x_TD: Tensor,
    weights_TK: Tensor,
    route: Route,
    ep: Axis,
    compute: Callable[[Tensor, Tensor], Tensor],
    meanwhile: Meanwhile | None = None,
) -> Tensor:
    """The weighted sum of what the chosen experts make of each token, or this etp rank's part of it.

    `compute`: rows [R, D] sorted by expert, and how many each expert of this rank has [e] -> [R, D].
    `meanwhile`: what a rank does while rows travel to their experts; only at ep > 1.
    """
    rows_RD = x_TD[route.order_R // weights_TK.shape[1]]
    if route.slots_R is not None:
        rows_RD = place(rows_RD, route.slots_R, sum(route.sends))
    if meanwhile is None:
        rows_RD = exchange(rows_RD, ep, route.sends, route.receives)
    else:
        under_way = Exchange(ep, route.sends, route.receives)
        started = under_way.start(rows_RD)
        meanwhile()
        rows_RD = under_way.wait(started)
    if route.by_expert_R is None:
        rows_RD = compute(rows_RD, route.counts_E)
    else:
        sorted_RD = compute(rows_RD[route.by_expert_R], route.counts_E)
        rows_RD = place(sorted_RD, route.by_expert_R, len(sorted_RD))
    rows_RD = exchange(rows_RD, ep, route.receives, route.sends)
    rows_RD = rows_RD if route.slots_R is None else rows_RD[route.slots_R]
    return combine(rows_RD, route.order_R, weights_TK)


@dataclass(frozen=True)
class Route:
    """Where the rows of one microbatch go."""

    order_R: Tensor
    """The choices that are computed, as places among the T*K, sorted by expert."""
    sends: list[int]
    """Rows for each ep rank."""
    receives: list[int]
    """Rows from each ep rank."""
    counts_E: Tensor
    """[e]: rows for each expert of this rank, of all senders together."""
    by_expert_R: Tensor | None
    """The rows that came in the order of their experts; None where they come so."""
    slots_R: Tensor | None = None
    """The places of the choices among the rows that leave, which are padded; None: they are the rows."""
    own_rows: int = 0
    """With copies: how many rows come for homes."""


def find_route(experts_TK: Tensor, here: int, ep: Axis) -> Route:
    """Sort the choices by expert and agree on how many rows travel. `here`: experts of a rank.

    Comm: an all-to-all of the E counts, as int64. The device is waited for once.
    """
    flat, number = experts_TK.flatten(), here * ep.degree
    counts_E = count(flat, number)
    each = [here] * ep.degree
    arriving_E = ep.exchange(counts_E, each, each)
    leave, come = torch.stack((counts_E, arriving_E)).view(2, ep.degree, here).sum(-1).tolist()
    order = (flat % (number + 1)).argsort(stable=True)[: sum(leave)]  # those that go nowhere come last
    by_expert = None
    if ep.degree > 1 and here > 1:
        expert = torch.arange(here, device=flat.device).repeat(ep.degree)
        by_expert = expert.repeat_interleave(arriving_E, output_size=sum(come)).argsort(stable=True)
    return Route(order, leave, come, arriving_E.view(ep.degree, here).sum(0), by_expert)


def shared_route(experts_TK: Tensor, replicas: Replicas, ep: Axis) -> Route:
    """The same where experts have copies: choices are sorted by slot, of which a rank has its homes and its copies.

    Comm: an all-gather of the E counts, as int64. The device is waited for once.
    """
    flat, number = experts_TK.flatten(), len(replicas.order)
    counts = ep.all_gather(count(flat, number)[None], 0).tolist()
    table = share(counts, replicas)
    mine, come = table[ep.index], [row[ep.index] for row in table]
    width = len(mine[0])
    parts = [(rank * width + slot, mine[rank][slot]) for copies in replicas.copies for rank, slot in copies]
    slot, rows = torch.tensor(parts, device=flat.device).unbind(1)
    by_expert = (flat % (number + 1)).argsort(stable=True)[: sum(counts[ep.index])]
    order = by_expert[slot.repeat_interleave(rows, output_size=len(by_expert)).argsort(stable=True)]
    arriving = torch.tensor(list(chain(*come)), device=flat.device)
    slots = torch.arange(width, device=flat.device).repeat(ep.degree)
    receives = list(map(sum, come))
    by_slot = slots.repeat_interleave(arriving, output_size=sum(receives)).argsort(stable=True)
    homes = len(replicas.homes[ep.index])
    return Route(
        order, list(map(sum, mine)), receives, arriving.view(ep.degree, width).sum(0), by_slot,
        own_rows=sum(sum(row[:homes]) for row in come),
    )  # fmt: skip


def padded_route(experts_TK: Tensor, here: int, ep: Axis, rows: int) -> Route:
    """The same with `rows` rows for every expert, which no expert's choices exceed. Comm: none."""
    flat, number = experts_TK.flatten(), here * ep.degree
    counts_E = count(flat, number)
    order = (flat % (number + 1)).argsort(stable=True)[: int(counts_E.sum())]
    expert = flat[order]
    nth = torch.arange(len(order), device=flat.device) - (counts_E.cumsum(0) - counts_E)[expert]
    each = [here * rows] * ep.degree
    by_expert = (
        torch.arange(number * rows, device=flat.device).view(ep.degree, here, rows).transpose(0, 1).flatten()
    )
    counts_here = torch.full((here,), ep.degree * rows, device=flat.device)
    return Route(order, each, each, counts_here, by_expert, expert * rows + nth)


class _Deferring(torch.autograd.Function):
    """A grouped product whose weight gradient a schedule may collect."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, counts: Tensor, deferred: DeferredGradients) -> Tensor:
        ctx.deferred, ctx.weight = deferred, weight
        ctx.save_for_backward(x, weight, counts)
        return grouped_matmul(x, weight, counts)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        x, weight, counts = ctx.saved_tensors
        dx = grouped_matmul(grad, weight.transpose(1, 2), counts)
        grad, x = grad.contiguous(), x.contiguous()
        if not ctx.deferred.collecting:
            return dx, weight_gradient(grad, x, counts), None, None
        ctx.deferred.keep([ctx.weight], lambda: [weight_gradient(grad, x, counts)])
        return dx, None, None, None

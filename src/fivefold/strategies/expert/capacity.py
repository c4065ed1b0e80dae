"""An expert takes the first C tokens of each sequence that choose it, wherever these tokens are.

Priority is the place in the sequence (GShard, arXiv:2006.16668, algorithm 1, counts in that order too), and the limit
is per sequence, so that neither microbatches nor ranks decide who is dropped. Ranks that hold parts of the same
sequences (cp, and tp under sequence parallelism) exchange how many of their tokens chose each expert, piece by piece: a
piece is a run of neighbouring tokens on one rank, and what comes before it in the sequence may be on any rank.

Comm (forward): all-gathers of B*P*E counts over tp (SP) and then over cp, P pieces a rank; none where nothing is cut.

Shape letters: B sequences, S tokens of a sequence here, P pieces, K choices of a token, E experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from fivefold.nn.moe import NOWHERE, Routing
from fivefold.runtime.mesh import Axis

Spans = tuple[range, ...]
"""Places in the sequence of the tokens of one rank, a run each, in ascending order."""


@dataclass(frozen=True)
class Pieces:
    """Which tokens of each sequence the ranks hold that share it. `axes`: of these ranks, the fastest first."""

    all: Sequence[Spans]
    """Of every rank, in the order in which gathers over `axes` bring them: the last axis slowest."""
    axes: Sequence[Axis]
    device: torch.device | None = None
    """Where tokens are counted; None: torch's default."""

    @property
    def mine(self) -> Spans:
        place, stride = 0, 1
        for axis in self.axes:
            place, stride = place + axis.index * stride, stride * axis.degree
        return self.all[place]

    @property
    def count(self) -> int:
        """Pieces of the rank that has most; others have empty ones besides."""
        return max(map(len, self.all))

    @cached_property
    def earlier(self) -> Tensor:
        """[P, ranks*P], float64: 1 where the piece of any rank comes before a piece of this one in the sequence."""
        starts = [spans[i].start if i < len(spans) else None for spans in self.all for i in range(self.count)]
        rows = [[int(s is not None and s < span.start) for s in starts] for span in self.mine]
        rows += [[0] * len(starts)] * (self.count - len(self.mine))
        return torch.tensor(rows, dtype=torch.float64, device=self.device)


class Limit:
    """A hook on a router: choices beyond an expert's capacity go nowhere. The others keep their weights."""

    def __init__(self, experts: int, capacity: int, pieces: Pieces) -> None:
        self.experts, self.capacity, self.pieces = experts, capacity, pieces

    def __call__(self, _module: nn.Module, inputs: tuple[Any, ...], routing: Routing) -> Routing:
        B = inputs[0].shape[0]
        experts_BSK = routing.experts_TK.view(B, -1, routing.experts_TK.shape[1])
        with torch.no_grad():
            chosen_BSE = chosen(experts_BSK, self.experts)
            counts = gather_counts(chosen_BSE, self.pieces)
            kept_BSE = kept(chosen_BSE, counts, self.pieces, self.capacity)
            stays = kept_BSE.gather(2, experts_BSK.clamp(min=0)).view_as(routing.experts_TK)
        return replace(routing, experts_TK=routing.experts_TK.masked_fill(~stays, NOWHERE))


def chosen(experts_BSK: Tensor, experts: int) -> Tensor:
    """[B, S, E] int32: 1 where the token chose the expert; a negative choice is none."""
    marks = experts_BSK.new_zeros(*experts_BSK.shape[:2], experts + 1, dtype=torch.int32)
    return marks.scatter_(2, experts_BSK.remainder(experts + 1), 1)[..., :experts]


def gather_counts(chosen_BSE: Tensor, pieces: Pieces) -> Tensor:
    """[ranks, B, P, E]: how many tokens of each piece of each rank chose each expert. Comm: see above."""
    runs = chosen_BSE.split([len(span) for span in pieces.mine], dim=1)
    counts = chosen_BSE.new_zeros(chosen_BSE.shape[0], pieces.count, chosen_BSE.shape[2])
    for i, run in enumerate(runs):
        counts[:, i] = run.sum(1, dtype=torch.int32)
    gathered = counts[None]
    for axis in pieces.axes:
        gathered = axis.all_gather(gathered, 0)
    return gathered


def kept(chosen_BSE: Tensor, counts: Tensor, pieces: Pieces, capacity: int) -> Tensor:
    """[B, S, E] bool: which choices their expert takes. `counts`: of `gather_counts`."""
    everywhere = counts.transpose(1, 2).flatten(0, 1).double()
    before = torch.einsum("pq,qbe->bpe", pieces.earlier, everywhere).int()
    runs = chosen_BSE.split([len(span) for span in pieces.mine], dim=1)
    places = [run.cumsum(1, dtype=torch.int32) - run + before[:, i, None] for i, run in enumerate(runs)]
    return (torch.cat(places, dim=1) < capacity) & chosen_BSE.bool()

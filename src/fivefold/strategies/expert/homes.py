"""Experts that change their homes: rows of stacked tensors, of weights or moments, go to other ep ranks.

Shape letters: e experts of a rank.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fivefold.core.sharding import ParameterRow
from fivefold.runtime.mesh import Axis, Mesh


class Moves:
    """From one order of all experts, of which each ep rank holds e in a row, to another one."""

    def __init__(self, before: Sequence[int], after: Sequence[int], mesh: Mesh) -> None:
        self.mesh, self.ep = mesh, mesh.axis("ep")
        e, rank = len(before) // self.ep.degree, self.ep.index
        was = {expert: place for place, expert in enumerate(before)}
        will_be = {expert: place for place, expert in enumerate(after)}
        goes_to = [will_be[expert] for expert in before[rank * e : (rank + 1) * e]]
        comes_from = [was[expert] // e for expert in after[rank * e : (rank + 1) * e]]
        self._leaving = sorted(range(e), key=goes_to.__getitem__)
        self._places = sorted(range(e), key=comes_from.__getitem__)
        ranks = range(self.ep.degree)
        self._sends = [sum(place // e == other for place in goes_to) for other in ranks]
        self._receives = [comes_from.count(other) for other in ranks]

    def __call__(self, row: ParameterRow, held: Tensor) -> tuple[Tensor, Tensor]:
        """What a rank holds of a stacked tensor -> (the local tensor in the new order, what it holds of that).

        Comm: an all-gather over edp where ZeRO cuts it, an all-to-all of all e experts over ep.
        """
        if "data" not in row.placement:
            moved = self.moved(held)
            return moved, moved
        layout = self.mesh.layout
        axis: Axis = self.mesh.axis("edp", row.data_shards(layout))
        rows = row.whole.local_shape(layout)[0]
        moved = self.moved(axis.all_gather(held, 0)[:rows])
        mine = torch.zeros_like(held)
        part = moved[axis.index * len(held) :][: len(held)]
        mine[: len(part)] = part
        return moved, mine

    def moved(self, whole: Tensor) -> Tensor:
        """Rows [e, ..] in the old order -> in the new one. Comm: an all-to-all over ep."""
        came = self.ep.exchange(whole[self._leaving], self._sends, self._receives)
        return torch.empty_like(came).index_copy_(0, torch.tensor(self._places, device=came.device), came)

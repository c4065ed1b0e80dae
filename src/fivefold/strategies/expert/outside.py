"""Expert parallelism acts on a module that is not ours: its experts modules stay, with the experts of this rank.

Its own router chooses. What its experts are called with is dispatched as for our own (`dispatch.py`), and its own
forward computes what comes: each row as a token of one choice, of an expert numbered among those of this rank.

Communication: that of `dispatch.py` with etp = 1.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from fivefold.nn.roles import modules_with_role
from fivefold.runtime.mesh import Axis, Mesh
from fivefold.strategies.expert.dispatch import exchanged, find_route

Forward = Callable[[Tensor, Tensor, Tensor], Tensor]

COUNT_NAMES = ("num_experts", "n_experts", "num_local_experts")
"""Attributes of an experts module that say how many experts it has."""


def apply(stage: nn.Module, mesh: Mesh) -> None:
    """Let the experts modules of a stage dispatch. At ep = 1 nothing is touched."""
    ep = mesh.axis("ep")
    if ep.degree == 1:
        return
    for _, module in modules_with_role(stage, "experts"):
        whole = next(module.parameters()).shape[0]
        for name in COUNT_NAMES:
            if getattr(module, name, None) == whole:
                setattr(module, name, whole // ep.degree)
        module.forward = partial(_dispatched, module, module.forward, ep)


def _dispatched(
    module: nn.Module, own: Forward, ep: Axis, x_TD: Tensor, experts_TK: Tensor, weights_TK: Tensor
) -> Tensor:
    """Shapes: x [T, D], experts [T, K] (int64), weights [T, K] -> [T, D]."""
    weights = list(module.parameters())

    def compute(rows_RD: Tensor, counts_E: Tensor) -> Tensor:
        if not len(rows_RD):  # every weight has a gradient, if nothing comes then zero
            return rows_RD + sum(weight.flatten()[:0].sum() for weight in weights)
        expert_R = torch.arange(len(counts_E), device=rows_RD.device).repeat_interleave(
            counts_E, output_size=len(rows_RD)
        )
        return own(rows_RD, expert_R[:, None], weights_TK.new_ones(len(rows_RD), 1))

    route = find_route(experts_TK, weights[0].shape[0], ep)
    return exchanged(x_TD, weights_TK, route, ep, compute)

"""Expert parallelism acts on a module that is not ours: its experts modules stay, with the experts of this rank.

Its own router chooses. What its experts are called with is dispatched as for our own (`dispatch.py`), and its own
forward computes what comes: each row as a token of one choice, of an expert numbered among those of this rank. Where
nothing comes it computes a row of zeros that counts for nothing, so that gradients come as on the other ranks.

Communication: that of `dispatch.py` with etp = 1.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fivefold.errors import ModelError
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
    for name, module in modules_with_role(stage, "experts"):
        whole = next(module.parameters()).shape[0]
        for attribute in COUNT_NAMES:
            if getattr(module, attribute, None) == whole:
                setattr(module, attribute, whole // ep.degree)
        dispatched = partial(_dispatched, whole // ep.degree, module.forward, ep)
        module.forward = partial(_called, name, inspect.signature(module.forward), dispatched)


def _called(name: str, signature: inspect.Signature, forward: Forward, *args: Any, **named: Any) -> Tensor:
    """Call `forward` with the three tensors that the module is called with, by whatever names."""
    given = list(signature.bind(*args, **named).arguments.values())
    if len(given) != 3 or not all(isinstance(value, Tensor) for value in given):
        raise ModelError(
            f"{name} is called with {len(given)} arguments ({', '.join(type(value).__name__ for value in given)}); "
            f"experts that travel take tokens, the experts that they chose, and weights: three tensors"
        )
    x_TD, experts_TK, weights_TK = given
    return forward(x_TD, experts_TK.long(), weights_TK)


def _dispatched(
    here: int, own: Forward, ep: Axis, x_TD: Tensor, experts_TK: Tensor, weights_TK: Tensor
) -> Tensor:
    """`here`: experts of a rank. Shapes: x [T, D], experts [T, K] (int64), weights [T, K] -> [T, D]."""

    def compute(rows_RD: Tensor, counts_E: Tensor) -> Tensor:
        if not len(rows_RD):
            one_RD = torch.cat((rows_RD, rows_RD.new_zeros(1, rows_RD.shape[1])))
            return own(one_RD, counts_E.new_zeros(1, 1), weights_TK.new_zeros(1, 1))[:0]
        expert_R = torch.arange(len(counts_E), device=rows_RD.device).repeat_interleave(
            counts_E, output_size=len(rows_RD)
        )
        return own(rows_RD, expert_R[:, None], weights_TK.new_ones(len(rows_RD), 1))

    return exchanged(x_TD, weights_TK, find_route(experts_TK, here, ep), ep, compute)

"""The optimizer of one rank's local parameters, and the global gradient norm."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fivefold.compat import scale_in_place
from fivefold.core.optimizer import OptimizerConfig
from fivefold.core.sharding import ParameterRow
from fivefold.runtime.mesh import Mesh


def make_optimizer(
    config: OptimizerConfig, pairs: list[tuple[ParameterRow, nn.Parameter]]
) -> torch.optim.Optimizer:
    """torch's fused AdamW or SGD on local tensors; norms and biases have no weight decay."""
    decayed = [p for row, p in pairs if not _is_vector(row)]
    others = [p for row, p in pairs if _is_vector(row)]
    groups = [
        {"params": decayed, "weight_decay": config.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if config.name == "sgd":
        sgd = torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum, fused=True)
        return _with_state(sgd, config.moments, counts=False)
    adamw = torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)
    return _with_state(adamw, config.moments, counts=True)


def _with_state(
    optimizer: torch.optim.Optimizer, moments: tuple[str, ...], *, counts: bool
) -> torch.optim.Optimizer:
    """Make the state now, all zero, as the first step would: memory is known from the start, and it can be loaded."""
    for group in optimizer.param_groups:
        for p in group["params"] if moments else ():
            state = {"step": torch.zeros((), device=p.device)} if counts else {}
            optimizer.state[p] = {**state, **{name: torch.zeros_like(p) for name in moments}}
    return optimizer


def _is_vector(row: ParameterRow) -> bool:
    return row.is_bias or row.role in ("norm", "head_norm")


def global_norm(gradients: list[tuple[ParameterRow, Tensor]], mesh: Mesh, *, experts: bool = False) -> Tensor:
    """The 2-norm of all gradients of the model, each parameter counted once; float64 scalar, equal on all ranks.

    Replicas over tp count on one rank, shards on each; the second copy of a tied embedding does not count. Data ranks
    hold the same gradients, or ZeRO's shards of them, which all count.
    With `experts` in the model, which are cut otherwise, each element counts on the one rank that would write it down.
    Comm: an all-reduce of one number over the ranks of a sharding group, over tp, then over pp; with experts over all
          ranks (phase norm).
    """
    layout, at = mesh.layout, mesh.coordinate
    counted = [
        gradient
        for row, gradient in gradients
        if (row.written_here(layout, at) if experts else row.counts_once_here(at))
    ]
    squared = torch.zeros((), dtype=torch.float64, device=mesh.device.device)
    if counted:
        squared += torch.nn.utils.get_total_norm(counted).double() ** 2
    mesh.phase = "norm"
    if experts:
        return mesh.axis("world").all_reduce(squared).sqrt()
    mesh.axis("data", layout.data_shards).all_reduce(squared)
    mesh.axis("tp").all_reduce(squared)
    mesh.axis("pp").all_reduce(squared)
    return squared.sqrt()


def clip(gradients: list[tuple[ParameterRow, Tensor]], norm: Tensor, largest: float) -> None:
    """Scale all gradients by min(1, largest / norm), in place (Pascanu et al. 2013, algorithm 1)."""
    factor = (largest / (norm + 1e-6)).clamp(max=1.0)
    tensors = [gradient for _, gradient in gradients]
    scale_in_place(tensors, factor.to(tensors[0].dtype))

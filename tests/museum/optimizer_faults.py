"""Faults in the gradient norm, in clipping, and in what the optimizer remembers."""

from __future__ import annotations

import torch
import torch.distributed as dist

from fivefold.core.sharding import ParameterRow
from fivefold.engine import engine, optimizer
from fivefold.strategies.data.replicated import Replicated

from .exhibit import HARD, Patch, exhibit


def norm_over(*axes: str):
    """`global_norm` that sums the squares over these axes only."""

    def norm(gradients, mesh, experts=False):
        counted = [gradient for row, gradient in gradients if row.counts_once_here(mesh.coordinate)]
        squared = torch.zeros((), dtype=torch.float64)
        if counted:
            squared += torch.nn.utils.get_total_norm(counted).double() ** 2
        mesh.phase = "norm"
        for axis in axes:
            mesh.axis(axis, mesh.layout.data_shards if axis == "data" else None).all_reduce(squared)
        return squared.sqrt()

    return norm


@exhibit("pp2", "dp2 pp2:gpipe", "the gradient norm differs", "norm pp all_reduce", "axis pp",
         seen_in="torchtitan #596", quick=True)  # fmt: skip
def norm_per_stage(patch: Patch) -> None:
    """Each pipeline stage clips by the norm of its own gradients."""
    patch.setattr(engine, "global_norm", norm_over("data", "tp"))


@exhibit("tp2", "tp2 pp2", "the gradient norm differs", "norm tp all_reduce", "axis tp",
         seen_in="kin of Megatron PR 5916 (experts)")  # fmt: skip
def norm_without_tp(patch: Patch) -> None:
    """The norm leaves out the shards of the other tp ranks."""
    patch.setattr(engine, "global_norm", norm_over("data", "pp"))


@exhibit("dp2 zero1", "dp2 tp2 zero3", "the gradient norm differs", "norm data all_reduce", "so it is with zero0",
         seen_in="kin of DeepSpeed #8475 (experts)")  # fmt: skip
def norm_of_own_shards(patch: Patch) -> None:
    """Under ZeRO the norm leaves out the shards of the other data ranks."""
    patch.setattr(engine, "global_norm", norm_over("tp", "pp"))


@exhibit("tp2", "dp2 tp2 zero1", "the gradient norm differs", "axis tp", seen_in="Megatron #1628")
def norm_counts_replicas(patch: Patch) -> None:
    """Parameters that every tp rank holds are counted on each of them."""
    patch.setattr(ParameterRow, "counts_once_here", lambda self, coordinate: self.tied_to is None)


@exhibit("pp2", "tp2 pp2", "the gradient norm differs", "axis pp", spec=HARD)
def norm_counts_both_copies(patch: Patch) -> None:
    """A tied embedding on two stages is counted twice."""
    once = ParameterRow.counts_once_here

    def faulty(self, coordinate):
        return coordinate["tp"] == 0 or "tp" in self.placement if self.tied_to else once(self, coordinate)

    patch.setattr(ParameterRow, "counts_once_here", faulty)


@exhibit("pp2", "tp2 pp2", "the weight after an SGD step of", "axis pp", seen_in="torchtitan #596")
def clipped_by_own_norm(patch: Patch) -> None:
    """The right norm is reported, but each rank clips by the norm of what it holds."""
    clip = optimizer.clip

    def faulty(gradients, norm, largest):
        clip(gradients, torch.nn.utils.get_total_norm([g for _, g in gradients]).to(norm.dtype), largest)

    patch.setattr(engine, "clip", faulty)


@exhibit("dp2", "tp2 pp2", "the weight after an SGD step of", "norm", "on rank 1 only", "axis dp")
def decay_of_norms_on_some_ranks(patch: Patch) -> None:
    """Odd ranks apply weight decay to norms, even ranks do not."""
    vector = optimizer._is_vector
    patch.setattr(optimizer, "_is_vector", lambda row: vector(row) and dist.get_rank() % 2 == 0)


@exhibit(
    "dp2", "dp2 tp2", "the first moment of", "in step 2", "on rank 1 only", "axis dp", late=True, quick=True
)
def moments_not_advanced(patch: Patch) -> None:
    """On the last data rank, the second update leaves the moments where they were."""
    step = Replicated.step

    def faulty(self, lr):
        kept = [(value, value.clone()) for state in self.state().values() for value in state.values()]
        step(self, lr)
        for value, old in kept if self.updates == 2 and self.axis.index == self.axis.degree - 1 > 0 else ():
            value.copy_(old)

    patch.setattr(Replicated, "step", faulty)


@exhibit("dp2", "dp2 pp2", "the count of updates of", "in step 2", "worst 0.5", "axis dp", late=True)
def count_not_advanced(patch: Patch) -> None:
    """Only the count stands still: weights follow it in the third step, by a wrong bias correction."""
    step = Replicated.step

    def faulty(self, lr):
        step(self, lr)
        for state in self.state().values() if self.updates == 2 and self.axis.index > 0 else ():
            if "step" in state:
                state["step"] -= 1

    patch.setattr(Replicated, "step", faulty)


@exhibit("dp2", "cp2", "every rank, adamw step 2: reduce data all_reduce float32 28 B: predicted none, recorded 1",
         "axis dp", late=True)  # fmt: skip
def a_collective_too_many_later(patch: Patch) -> None:
    """One step of one optimizer sends something that nobody planned."""
    step = engine.Engine.step

    def faulty(self, load, lr):
        result = step(self, load, lr)
        if self.data.updates == 2 and self.plan.execution.optimizer.name == "adamw":
            self.mesh.phase = "reduce"
            self.mesh.axis("data").all_reduce(torch.zeros(7))
        return result

    patch.setattr(engine.Engine, "step", faulty)

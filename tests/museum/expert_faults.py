"""Faults of expert parallelism: experts' gradients and norm, dispatch, and what ranks must agree on to choose."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor, nn

from fivefold.engine import engine
from fivefold.engine.engine import Engine
from fivefold.engine.routers import Routers
from fivefold.nn.moe import MoE, Router
from fivefold.nn.router_losses import load, updated_bias
from fivefold.runtime.mesh import Handle, Mesh
from fivefold.strategies.data import replicated
from fivefold.strategies.expert import apply as expert
from fivefold.strategies.expert import dispatch
from fivefold.strategies.expert.capacity import Pieces
from fivefold.strategies.tensor import apply as tensor
from fivefold.verify.workload import ROUTERS

from .exhibit import LATENT, MIXED, MIXED_16, Patch, exhibit

_, BATCH, CAPACITY, _ = ROUTERS

Part = TypeVar("Part", bound=nn.Module)


# Gradients and norm


@exhibit("dp4 ep4", "dp2 tp2 ep2", "the gradient of layers.1.mlp.experts.down", "exactly 4.000x, which is dp or ep",
         "axis ep", spec=MIXED, seen_in="pytorch #160285, DeepSpeed #5618", quick=True)  # fmt: skip
def expert_gradients_times_ep(patch: Patch) -> None:
    """Experts see the tokens of ep ranks and divide by the tokens of one, so their gradients are ep times too large."""
    complete = Engine._complete_gradients

    def faulty(self):
        gradients = complete(self)
        for row, gradient in gradients:
            if row.mesh == "expert":
                gradient *= self.plan.layout.ep
        return gradients

    patch.setattr(Engine, "_complete_gradients", faulty)


@exhibit("dp4 ep2", "cp2 tp2 ep2", "the gradient of layers.1.mlp.experts.down", "reduce edp all_reduce", "(missing)",
         "axis ep", spec=MIXED_16, quick=True)  # fmt: skip
def experts_not_summed_over_edp(patch: Patch) -> None:
    """Ranks with the same experts keep the gradients of their own tokens: experts are left out of data parallelism."""
    start = replicated._Bucket.start

    def faulty(self, owner):
        if owner.axis.name == "edp" and owner.mesh.layout.ep > 1:
            self.handle = Handle(owner.axis, self.flat, None)
        else:
            start(self, owner)

    patch.setattr(replicated._Bucket, "start", faulty)


def norm_weighing_experts(patch: Patch, times: Callable[[Mesh], int]) -> None:
    """The squares of experts count so many times, in the norm that clips and is reported."""
    norm = engine.global_norm

    def faulty(gradients, mesh, *, experts=False):
        factor = times(mesh) ** 0.5
        weighed = [(row, g * factor if row.mesh == "expert" else g) for row, g in gradients]
        return norm(weighed, mesh, experts=experts)

    patch.setattr(engine, "global_norm", faulty)


@exhibit("dp2 ep2", "tp2 pp2 ep2", "the gradient norm differs", "experts count exactly 0.000x", "axis ep",
         spec=MIXED, seen_in="Megatron PR 5916, DeepSpeed #8475", quick=True)  # fmt: skip
def norm_without_experts(patch: Patch) -> None:
    """Experts are no data-parallel parameters, so the norm leaves them out."""
    norm_weighing_experts(patch, lambda mesh: int(mesh.layout.ep == 1))


@exhibit("dp4 ep2", "cp2 tp2 ep2", "the gradient norm differs", "experts count exactly 2.000x", "edp", "axis ep",
         spec=MIXED)  # fmt: skip
def norm_counts_copies_of_experts(patch: Patch) -> None:
    """The squares are summed over all ranks, and those of an expert are on each rank that has it."""
    norm_weighing_experts(patch, lambda mesh: mesh.layout.edp if mesh.layout.ep > 1 else 1)


@exhibit("dp2", "dp2 tp2 ep2", "the gradient of layers.1.mlp.shared.down", "exactly 2.000x, which is dp",
         "reduce data all_reduce", "axis dp", spec=LATENT)  # fmt: skip
def shared_experts_summed_twice(patch: Patch) -> None:
    """Shared experts are summed over data ranks as dense parameters, and again with the experts."""
    complete = Engine._complete_gradients

    def faulty(self):
        gradients = complete(self)
        for row, gradient in gradients:
            if ".shared." in row.name:
                self.mesh.axis("data").all_reduce(gradient)
        return gradients

    patch.setattr(Engine, "_complete_gradients", faulty)


@exhibit("tp2", "tp2 cp2 ep2", "the gradient of layers.1.mlp.router", "reduce tp all_reduce", "axis tp",
         spec=MIXED, seen_in="Megatron #7452", quick=True)  # fmt: skip
def routers_not_summed_under_sp(patch: Patch) -> None:
    """Under sequence parallelism each tp rank keeps its router's gradient of its own tokens."""
    sums = tensor.sum_gradients
    patch.setattr(
        tensor,
        "sum_gradients",
        lambda gradients, mesh: sums([pair for pair in gradients if pair[0].role != "router"], mesh),
    )


# Losses of routers, and their biases


def strength(patch: Patch, change: Callable[[Routers], None]) -> None:
    """`change` the scales of the routers' losses before a step."""
    begin = Routers.begin

    def faulty(self, *, scale):
        begin(self, scale=scale)
        change(self)

    patch.setattr(Routers, "begin", faulty)


def balance_times(factor: Callable[[Mesh], int]) -> Callable[[Routers], None]:
    def change(routers: Routers) -> None:
        for router in routers.routers.values():
            router.losses.per_sequence *= factor(routers.mesh)

    return change


@exhibit("tp2", "tp2 dp2 ep2", "the gradient of layers.1.mlp.router",
         "the balance loss acts exactly 2.000x, which is tp", "axis tp", spec=MIXED,
         seen_in="Megatron PR 5047, #3672")  # fmt: skip
def balance_times_tp(patch: Patch) -> None:
    """Every tp rank adds the balance loss as if it had all tokens of its sequences."""
    strength(patch, balance_times(lambda mesh: mesh.layout.tp))


@exhibit("cp2", "cp2 dp2 ep2", "the gradient of layers.1.mlp.router",
         "the balance loss acts exactly 2.000x, which is cp", "axis cp", spec=MIXED_16,
         seen_in="Megatron #3943")  # fmt: skip
def balance_times_cp(patch: Patch) -> None:
    """The balance loss is a mean over the tokens of a rank, which has 1/cp of each sequence."""
    strength(patch, balance_times(lambda mesh: mesh.layout.cp))


@exhibit("dp2 ep2", "dp2 pp2", "the gradient of layers.1.mlp.router", "the balance loss acts exactly 0.500x",
         "1 / dp", "axis dp", spec=LATENT, quick=True)  # fmt: skip
def balance_gradient_averaged_over_dp(patch: Patch) -> None:
    """What is told of the balance loss is right; its gradient is averaged over data ranks once too often."""

    def change(routers: Routers) -> None:
        for router in routers.routers.values():
            router.losses.config = router.losses.config.replace(
                balance_coefficient=router.losses.config.balance_coefficient / routers.mesh.layout.dp
            )

    strength(patch, change)


@exhibit("pp2", "pp2 dp2 ep2", "the gradient of layers.1.mlp.router", "the z-loss acts exactly 3.000x",
         "which is the number of microbatches", "axis pp", spec=MIXED)  # fmt: skip
def z_loss_times_microbatches(patch: Patch) -> None:
    """Under a pipeline the z-loss is a mean over the tokens of a microbatch, and microbatches are summed."""

    def change(routers: Routers) -> None:
        if routers.mesh.layout.pp > 1:
            plan = routers.plan
            count = plan.workload.global_batch // (plan.layout.dp * plan.execution.micro_batch)
            for router in routers.routers.values():
                router.losses.per_token *= count

    strength(patch, change)


@exhibit("tp2 pp2", "tp2 cp2", "what is told of layers.0.mlp.router (balance)", "exactly 0.500x, which is 1 / tp",
         "axis tp", spec=MIXED, seen_in="kin of torchtitan #3280")  # fmt: skip
def told_balance_averaged_over_tp(patch: Patch) -> None:
    """Under sequence parallelism the balance loss acts as it should, and what is told of it is a mean over tp."""
    finish = Routers.finish

    def faulty(self):
        for router in self.routers.values():
            router.losses.balance /= self.mesh.layout.tp
        return finish(self)

    patch.setattr(Routers, "finish", faulty)


def own_counts(self: Routers, layer: int) -> Tensor:
    """What the tokens of this rank alone chose."""
    return self._seen[layer][: self.spec[layer].experts].long()


@exhibit("dp2 ep2", "tp2 cp2", "the buffer of layers.1.mlp.router.selection_bias", "axis dp",
         spec=LATENT)  # fmt: skip
def biases_by_own_counts(patch: Patch) -> None:
    """Each rank moves its selection biases by the tokens that it has seen itself: routers drift apart."""

    def faulty(self):
        speed = self.plan.execution.router.bias_speed
        for layer, router in self.routers.items():
            router.selection_bias.copy_(updated_bias(router.selection_bias, own_counts(self, layer), speed))

    patch.setattr(Routers, "update", faulty)


@exhibit("dp2", "cp2 pp2 ep2", "the buffer of layers.0.mlp.router.load", "axis dp", spec=MIXED, router=BATCH)
def load_by_own_counts(patch: Patch) -> None:
    """The balance loss over a batch reads how often this rank's own tokens chose each expert."""

    def faulty(self):
        for layer, router in self.routers.items():
            loads = router.losses.load_E
            loads.copy_(load(own_counts(self, layer), loads.dtype))

    patch.setattr(Routers, "update", faulty)


# Choice


def on_parts(patch: Patch, kind: type[Part], change: Callable[[Mesh, Part], None]) -> None:
    """`change` every module of this kind, after the strategies acted on a model."""
    apply = expert.apply

    def faulty(whole, mesh, *args, **kwargs):
        apply(whole, mesh, *args, **kwargs)
        for module in whole.modules():
            if isinstance(module, kind):
                change(mesh, module)

    patch.setattr(expert, "apply", faulty)


@exhibit("cp2", "tp2 cp2 ep2", "the choice of experts of layers.0.mlp.router", "forward cp all_gather", "(missing)",
         "axis cp", spec=MIXED, router=CAPACITY, loss_sees=True)  # fmt: skip
def capacity_of_each_rank(patch: Patch) -> None:
    """An expert takes its number of tokens from each rank that has a part of a sequence, not of the whole sequence."""
    init = Pieces.__init__

    def faulty(self, all, axes, *device):
        mine = Pieces.__new__(Pieces)
        init(mine, all, axes, *device)
        init(self, [mine.mine], [], *device)

    patch.setattr(Pieces, "__init__", faulty)


@exhibit("tp2 ep2", "tp2 dp2", "the choice of experts of layers.1.mlp.router", "axis tp", spec=LATENT,
         loss_sees=True)  # fmt: skip
def groups_ignored_under_sp(patch: Patch) -> None:
    """The router of a rank with a part of the sequence chooses among all experts, not within the best groups."""

    def ungrouped(mesh: Mesh, router: Router) -> None:
        if mesh.layout.sequence_parallel:
            router.spec = router.spec.replace(groups=1, topk_groups=1)

    on_parts(patch, Router, ungrouped)


# Dispatch and combine


def on_weights(patch: Patch, change: Callable[[Tensor], Tensor]) -> None:
    """`change` the weights of the experts' outputs where tokens are dispatched."""
    exchanged = dispatch.exchanged

    def faulty(x_TD, weights_TK, *others):
        return exchanged(x_TD, change(weights_TK), *others)

    patch.setattr(dispatch, "exchanged", faulty)


@exhibit("dp2 ep2", "tp2 pp2 ep2", "the output of layers.1", "axis ep", spec=LATENT, loss_sees=True)
def scaling_forgotten_where_dispatched(patch: Patch) -> None:
    """Where experts are dispatched the weights of their outputs lack the routed scaling of 2.5."""
    on_weights(patch, lambda weights: weights / 2.5)


@exhibit("dp2 ep2", "cp2 tp2 ep2", "the gradient of layers.1.mlp.router", "axis ep", spec=MIXED)
def weights_detached(patch: Patch) -> None:
    """Dispatch keeps the numbers of the weights and not where they come from: routers learn nothing."""
    on_weights(patch, Tensor.detach)


@exhibit("dp2 ep2", "tp2 pp2 ep2", "the output of layers.0", "axis ep", spec=MIXED_16, loss_sees=True)
def weights_applied_twice(patch: Patch) -> None:
    """Rows are weighed by their expert's rank, and again where they are combined."""
    on_weights(patch, Tensor.square)


@exhibit("dp2 ep2", "tp2 pp2 ep2", "the output of layers.0", "axis ep", spec=MIXED, loss_sees=True)
def rows_return_in_another_order(patch: Patch) -> None:
    """The rows of the first expert of each rank come back in the reverse order: each is added to another token."""
    exchanged = dispatch.exchanged

    def faulty(x_TD, weights_TK, route, ep, compute, *others):
        def turned(rows_RD, counts_E):
            out = compute(rows_RD, counts_E)
            first = int(counts_E[0])
            return torch.cat((out[:first].flip(0), out[first:]))

        return exchanged(x_TD, weights_TK, route, ep, turned if ep.degree > 1 else compute, *others)

    patch.setattr(dispatch, "exchanged", faulty)


@exhibit(
    "tp2 nosp etp2", "dp2 etp2", "the output of layers.0", "etp", "(missing)", spec=MIXED, loss_sees=True
)
def parts_of_experts_not_summed(patch: Patch) -> None:
    """Each etp rank goes on with what its part of every expert's width makes."""
    patch.setattr(dispatch, "all_reduce", lambda x, axis: x)
    patch.setattr(dispatch, "reduce_scatter", lambda x, axis, dim: x.chunk(axis.degree, dim)[axis.index])


@exhibit(
    "tp2 nosp etp2", "tp2 pp2 nosp etp2", "the output of layers.1", "axis tp", spec=LATENT, loss_sees=True
)
def shared_experts_added_by_every_rank(patch: Patch) -> None:
    """Each tp rank adds the shared experts' whole output before the sum over tp, and so it is in it tp times."""

    def doubled(mesh: Mesh, moe: MoE) -> None:
        if mesh.layout.tp > 1 and not mesh.layout.sequence_parallel:
            moe.shared.register_forward_hook(lambda _module, _inputs, out: out * mesh.layout.tp)

    on_parts(patch, MoE, doubled)

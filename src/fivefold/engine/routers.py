"""The routers of one rank: what training asks of them, and what they did in a step, agreed on by all ranks.

Communication: one all-reduce of what every routed layer counted, over data, over tp where its ranks have other tokens
(sequence parallelism), and over pp, so that every rank knows the whole model's experts (phase metrics).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fivefold.core.plan import Plan
from fivefold.core.sharding import ParameterRow, buffers
from fivefold.nn.moe import Router, Routing, chosen, count
from fivefold.nn.roles import modules_with_role
from fivefold.nn.router_losses import RouterLosses, load, updated_bias
from fivefold.runtime.mesh import Mesh
from fivefold.strategies.expert.dispatch import DispatchedExperts
from fivefold.strategies.expert.rules import routed_layers, same_tokens

NUMBERS = ("tokens", "dropped", "entropy", "balance", "z")
"""What is summed over ranks beside the choices of each expert."""


@dataclass(frozen=True)
class LayerRouting:
    """What the router of one layer did in a step, over the whole global batch."""

    chosen: tuple[int, ...]
    """How often each expert was chosen, before any was dropped."""
    tokens: int
    """Padding aside."""
    dropped: int
    """Choices beyond an expert's capacity."""
    entropy: float
    """Of a token's scores, the mean over tokens, in nats; log E where all experts are alike.
    0 for a module that is not ours, whose scores are not known."""
    balance: float
    """The balance loss, without its coefficient; 0 where none is asked for."""
    z: float
    """The z-loss, likewise."""
    ranks: tuple[int, ...] = ()
    """Rows that each ep rank computed, its replicas over edp together; empty where experts are not placed anew."""

    @property
    def imbalance(self) -> float:
        """Choices of the busiest expert over the mean."""
        return max(self.chosen) * len(self.chosen) / max(1, sum(self.chosen))

    def of_ranks(self, ep: int) -> list[int]:
        """Choices that each ep rank's experts got, its replicas over edp together."""
        if self.ranks:
            return list(self.ranks)
        here = len(self.chosen) // ep
        return [sum(self.chosen[i : i + here]) for i in range(0, len(self.chosen), here)]


class Routers:
    """The routers of this rank's chunks. A step goes `begin`, forward and backward, `finish`, `update`."""

    def __init__(self, plan: Plan, mesh: Mesh, chunks: Mapping[int, nn.Module]) -> None:
        self.plan, self.mesh = plan, mesh
        self.spec = routed_layers(plan.model)
        self.routers: dict[int, Router] = {}
        for chunk in chunks.values():
            for name, router in modules_with_role(chunk, "router"):
                assert isinstance(router, Router)
                self.routers[int(name.split(".")[1])] = router
        # A module that is not ours routes by itself: what its router chose is what its experts are called with.
        self._others: set[int] = set()
        for chunk in chunks.values():
            for name, experts in modules_with_role(chunk, "experts"):
                layer = int(name.split(".")[1])
                if layer not in self.routers:
                    self._others.add(layer)
                    experts.register_forward_pre_hook(self._count(layer), with_kwargs=True)
        self._ranks = plan.layout.ep if plan.execution.experts.rebalance_every is not None else 0
        for chunk in chunks.values() if self._ranks else ():
            for name, experts in modules_with_role(chunk, "experts"):
                assert isinstance(experts, DispatchedExperts)
                experts.tell = partial(self._computed, int(name.split(".")[1]))
        self._seen: dict[int, Tensor] = {}
        self._found: dict[int, LayerRouting] = {}
        for layer, router in self.routers.items():
            router.register_forward_pre_hook(self._before)
            router.register_forward_hook(self._keep(layer))
            if plan.execution.router.has_losses:
                router.losses = self._losses(layer)
        self.counting = False
        self.dispatch_bytes = 0
        """Of the all-to-alls of this rank in a step: tokens to their experts and back, and copies of experts."""
        self.tokens: Tensor | float = 1.0
        """Of the global batch of a step, padding aside."""

    @property
    def counts_tokens(self) -> bool:
        """Whether `tokens` is needed before a step."""
        return self.plan.execution.router.counts_tokens

    def begin(self, *, scale: float) -> None:
        """Before a step. `scale`: what its gradients are multiplied by."""
        self.counting = True
        self.mesh.axis("ep").exchanged_bytes = 0
        wide = getattr(torch, self.plan.execution.grad_dtype)
        for layer in (*self.routers, *self._others):
            width = self.spec[layer].experts + len(NUMBERS) + self._ranks
            self._seen[layer] = torch.zeros(width, dtype=torch.float64, device=self.mesh.device.device)
        for router in self.routers.values():
            if router.losses is not None:
                router.losses.reset()
                router.losses.per_sequence = 1.0 / self.plan.workload.global_batch
                router.losses.per_token = 1.0 / torch.as_tensor(self.tokens, dtype=wide)
                router.losses.gradient_scale = scale

    def finish(self) -> dict[int, LayerRouting]:
        """After the backwards of a step: what all routed layers of the model did. Comm: see the head of this file."""
        self.counting = False
        self.dispatch_bytes = self.mesh.axis("ep").exchanged_bytes
        self.mesh.phase = "metrics"
        widest = max(moe.experts for moe in self.spec.values())
        order = list(self.spec)
        table = torch.zeros(
            len(order),
            widest + len(NUMBERS) + self._ranks,
            dtype=torch.float64,
            device=self.mesh.device.device,
        )
        for layer, seen in self._seen.items():
            router, experts = self.routers.get(layer), self.spec[layer].experts
            if router is not None and router.losses is not None:
                seen[experts + 3], seen[experts + 4] = router.losses.balance, router.losses.z
            row = table[order.index(layer)]
            row[:experts], row[widest:] = seen[:experts], seen[experts:]
        self.mesh.axis("data").all_reduce(table)
        if self.plan.layout.sequence_parallel:
            self.mesh.axis("tp").all_reduce(table)
        self.mesh.axis("pp").all_reduce(table)
        for layer, values in zip(order, table.tolist()):
            tokens, dropped, entropy, balance, z, *ranks = values[widest:]
            chosen = tuple(map(int, values[: self.spec[layer].experts]))
            mean = entropy / max(1.0, tokens)
            self._found[layer] = LayerRouting(
                chosen, int(tokens), int(dropped), mean, balance, z, tuple(map(int, ranks))
            )
        return dict(self._found)

    def update(self) -> None:
        """After the parameters were updated: move the selection biases, keep the load for the next step."""
        speed = self.plan.execution.router.bias_speed
        for layer, router in self.routers.items():
            chosen = torch.tensor(self._found[layer].chosen, device=self.mesh.device.device)
            if router.selection_bias is not None and speed:
                router.selection_bias.copy_(updated_bias(router.selection_bias, chosen, speed))
            if router.losses is not None and router.losses.load_E is not None:
                router.losses.load_E.copy_(load(chosen, router.losses.load_E.dtype))

    def buffers(self) -> list[tuple[ParameterRow, Tensor]]:
        """What routers keep between steps beside parameters: what a checkpoint holds, and is loaded into in place."""
        found = []
        for row in buffers(self.plan.model, load=self.plan.execution.router.keeps_load):
            router = self.routers.get(int(row.name.split(".")[1]))
            if router is not None:
                losses = router.losses
                kept = losses.load_E if row.name.endswith(".load") and losses else router.selection_bias
                assert kept is not None
                found.append((row, kept))
        return found

    def _losses(self, layer: int) -> RouterLosses:
        losses = RouterLosses(self.plan.execution.router)
        losses.join = self._join
        if self.plan.execution.router.keeps_load:
            wide = getattr(torch, self.plan.execution.grad_dtype)
            losses.load_E = torch.ones(self.spec[layer].experts, dtype=wide, device=self.mesh.device.device)
        return losses

    def _join(self, counts: Tensor) -> Tensor:
        """Add up what ranks with other tokens of the same sequences have. Comm: all-reduces over tp (SP) and cp."""
        if self.plan.layout.sequence_parallel:
            self.mesh.axis("tp").all_reduce(counts)
        return self.mesh.axis("cp").all_reduce(counts)

    def _before(self, router: nn.Module, _inputs: Any) -> None:
        assert isinstance(router, Router)
        router.first_time = self.mesh.phase == "forward"

    def _computed(self, layer: int, rows: int) -> None:
        """Rows of this rank's experts; of etp ranks that compute the same rows, as often as `finish` adds them up."""
        ep, etp = self.mesh.axis("ep"), self.mesh.axis("etp")
        if (
            self.counting
            and self.mesh.phase == "forward"
            and (etp.index == 0 or same_tokens(self.plan.layout))
        ):
            self._seen[layer][self.spec[layer].experts + len(NUMBERS) + ep.index] += rows

    def _count(self, layer: int) -> Any:
        experts = self.spec[layer].experts

        @torch.no_grad()
        def hook(_module: nn.Module, args: Any, kwargs: Any) -> None:
            if self.counting and self.mesh.phase == "forward":
                experts_TK, seen = chosen(args, kwargs), self._seen[layer]
                seen[:experts] += count(experts_TK.flatten(), experts)
                seen[experts] += len(experts_TK)

        return hook

    def _keep(self, layer: int) -> Any:
        experts = self.spec[layer].experts

        @torch.no_grad()
        def hook(router: Router, _inputs: Any, routing: Routing) -> None:
            if not (self.counting and router.first_time):
                return
            seen, chosen = self._seen[layer], routing.counts_E
            entropy_T = torch.special.entr(routing.scores_TE).sum(-1)
            if routing.valid_T is not None:
                entropy_T = entropy_T * routing.valid_T
            seen[:experts] += chosen
            seen[experts] += routing.tokens_B.sum()
            seen[experts + 1] += chosen.sum() - count(routing.experts_TK.flatten(), experts).sum()
            seen[experts + 2] += entropy_T.sum()

        return hook

"""The homes and copies of a run's experts: counted in every step, placed anew after every n steps.

Optimizer, ZeRO and the norm work on homes and know of nothing; rows of the parameter table say which expert is where
(`ParameterRow.order`), so that checkpoints and verification find each one.
Communication: `strategies/expert/replicas.py`.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from fivefold.core.plan import Plan
from fivefold.core.sharding import ParameterRow, expert_counts
from fivefold.engine.routers import LayerRouting
from fivefold.nn.roles import modules_with_role
from fivefold.runtime.mesh import Mesh
from fivefold.strategies.data.apply import DataParallel
from fivefold.strategies.expert.dispatch import DispatchedExperts
from fivefold.strategies.expert.homes import Moves
from fivefold.strategies.expert.replicas import place_replicas
from fivefold.strategies.expert.rules import routed_layers

WEIGHTS = ("gate", "up", "down")


class Rebalancing:
    """Of the routed layers of one rank. All ranks that share experts decide alike: what was chosen is agreed on."""

    def __init__(self, plan: Plan, mesh: Mesh, chunks: Mapping[int, nn.Module], data: DataParallel) -> None:
        self.plan, self.mesh, self.data = plan, mesh, data
        self.config = plan.execution.experts
        self.experts: dict[int, DispatchedExperts] = {}
        for chunk in chunks.values():
            for name, module in modules_with_role(chunk, "experts"):
                assert isinstance(module, DispatchedExperts)
                self.experts[int(name.split(".")[1])] = module
        moes, device = routed_layers(plan.model), mesh.device.device
        zeros = {layer: torch.zeros(moes[layer].experts, dtype=torch.float64) for layer in self.experts}
        self._order = {layer: tuple(range(moes[layer].experts)) for layer in self.experts}
        self.counted = {layer: counts.to(device) for layer, counts in zeros.items()}
        """How often each expert was chosen since they were placed."""
        self.placed = {layer: counts.clone().to(device) for layer, counts in zeros.items()}
        """What they were placed by; zero before the first time."""
        self.steps = 0

    def after_step(self, routing: Mapping[int, LayerRouting]) -> None:
        """Every step, after the update. Comm: after every n steps that of `move` (phase optimizer)."""
        assert self.config.rebalance_every is not None
        self.steps += 1
        for layer, experts in self.experts.items():
            experts.forget_copies()
            self.counted[layer] += torch.tensor(routing[layer].chosen, device=self.mesh.device.device)
        if self.steps % self.config.rebalance_every:
            return
        for layer, counts in self.counted.items():
            self.placed[layer].copy_(counts)
            counts.zero_()
        self._place()

    def forget_copies(self) -> None:
        """After forward passes without an update: a step fetches them itself."""
        for experts in self.experts.values():
            experts.forget_copies()

    def buffers(self) -> list[tuple[ParameterRow, Tensor]]:
        """The counts by layer: what a checkpoint holds, and is loaded into in place."""
        kept, found = {"counted": self.counted, "placed": self.placed}, []
        for row in expert_counts(self.plan.model):
            _, layer, *_, name = row.name.split(".")
            if int(layer) in self.experts:
                found.append((row, kept[name][int(layer)]))
        return found

    def restore(self, steps: int) -> None:
        """Counts and weights were loaded, every expert at its first home: place them as they were. Comm: of `move`."""
        self.steps = steps
        self.mesh.phase = "setup"
        if any(bool(counts.any()) for counts in self.placed.values()):
            self._place()

    def settle(self) -> None:
        """All experts go to their first homes, in order, and have no copies. Comm: of `move` (phase setup)."""
        self.mesh.phase = "setup"
        for layer, experts in self.experts.items():
            self.move(layer, tuple(range(len(self._order[layer]))))
            experts.place(None)

    def _place(self) -> None:
        for layer, experts in self.experts.items():
            counts = self.placed[layer].tolist()
            replicas = place_replicas(counts, self.plan.layout.ep, self.config.spare_slots)
            self.move(layer, replicas.order)
            experts.place(replicas)

    def move(self, layer: int, order: tuple[int, ...]) -> None:
        """Weights and moments of one layer to the homes that this order gives. Comm: see `Moves`, for each of them."""
        names = [f"layers.{layer}.mlp.experts.{name}" for name in WEIGHTS]
        moves = Moves(self._order[layer], order, self.mesh)
        self.data.reorder(dict.fromkeys(names, order), moves)
        self._order[layer] = order

"""Which experts the tokens of a step went to, as one rank's routers decided: what a dispatch's bytes follow from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fivefold.core.plan import Plan
from fivefold.engine.engine import Engine
from fivefold.nn.moe import Routing, count
from fivefold.nn.roles import modules_with_role
from fivefold.strategies.expert.rules import Counts, routed_layers

Routed = dict[int, list[list[int]]]
"""Layer -> for each microbatch, how many choices of this rank's tokens each expert got."""


class watching_routes:
    """Counts the choices of one step through hooks that touch nothing; `with` gives the counts, complete at its end."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.routed: Routed = {}
        self.hooks: list[Any] = []

    def __enter__(self) -> Routed:
        for module in self.engine.chunks.values():
            for name, router in modules_with_role(module, "router"):
                self.hooks.append(router.register_forward_hook(self._keep(int(name.split(".")[1]))))
        return self.routed

    def __exit__(self, *_: Any) -> None:
        for hook in self.hooks:
            hook.remove()

    def _keep(self, layer: int) -> Any:
        experts = routed_layers(self.engine.plan.model)[layer].experts

        def hook(_module: Any, _inputs: Any, routing: Routing) -> None:
            if self.engine.mesh.phase == "forward":  # not where a layer is computed again
                with torch.no_grad():
                    counts = count(routing.experts_TK.flatten(), experts).tolist()
                self.routed.setdefault(layer, []).append(counts)

        return hook


def counts_of(routed: Sequence[Routed], plan: Plan) -> Counts:
    """The choices by (rank, layer, microbatch); none where a rank has not seen any."""
    none = {layer: [0] * moe.experts for layer, moe in routed_layers(plan.model).items()}

    def counts(rank: int, layer: int, microbatch: int) -> Sequence[int]:
        seen = routed[rank].get(layer, [])
        return seen[microbatch] if microbatch < len(seen) else none[layer]

    return counts

"""What the routers of a run did: a few numbers of every step, and how often each expert was chosen so far.

All ranks know it after a step (see `engine/routers.py`): nothing more is communicated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from fivefold.core.plan import Plan
from fivefold.engine.routers import LayerRouting
from fivefold.strategies.expert.placement import imbalance


@dataclass(frozen=True)
class ExpertNumbers:
    """One step of all routed layers. None: there is no such thing in this run."""

    expert_imbalance: float
    """Choices of the busiest expert over the mean of its layer, in the layer where that is largest."""
    rank_imbalance: float | None
    """The same of the ranks of ep, with all their experts."""
    dropped_choices: int
    """Beyond the capacity of an expert, in all layers."""
    dropped_frac: float
    """The same of all choices."""
    router_entropy: float
    """Of a token's scores, in nats, the mean over tokens and layers."""
    balance_loss: float | None
    """Without its coefficient, the mean over layers: 1 where all experts are alike."""
    z_loss: float | None
    """Likewise."""
    dispatch_bytes: int | None
    """Of this rank's all-to-alls: tokens to their experts and back, and experts that are copied."""


def numbers_of(plan: Plan, routing: Mapping[int, LayerRouting], dispatch_bytes: int) -> ExpertNumbers | None:
    """What a step says of its routers, by layer of the model; None for a model without experts."""
    layers, ep, router = routing.values(), plan.layout.ep, plan.execution.router
    if not layers:
        return None
    dropped = sum(layer.dropped for layer in layers)
    return ExpertNumbers(
        expert_imbalance=max(layer.imbalance for layer in layers),
        rank_imbalance=max(imbalance(layer.of_ranks(ep)) for layer in layers) if ep > 1 else None,
        dropped_choices=dropped,
        dropped_frac=dropped / max(1, sum(sum(layer.chosen) for layer in layers)),
        router_entropy=fmean(layer.entropy for layer in layers),
        balance_loss=fmean(layer.balance for layer in layers) if router.balance_coefficient else None,
        z_loss=fmean(layer.z for layer in layers) if router.z_coefficient else None,
        dispatch_bytes=dispatch_bytes if ep > 1 else None,
    )


def counts_of(plan: Plan, routing: Mapping[int, LayerRouting]) -> list[dict[str, Any]]:
    """One step by layer, in JSON types: how often each expert was chosen, and what each ep rank's experts got."""
    ep = plan.layout.ep
    return [
        {"layer": number, "chosen": list(step.chosen), "ranks": step.of_ranks(ep), "dropped": step.dropped}
        for number, step in sorted(routing.items())
    ]


@dataclass
class LayerCounts:
    """The sums of one layer over the steps so far."""

    chosen: list[int]
    """By expert, before any choice was dropped."""
    last: Sequence[int]
    """Of the last step alone."""
    ranks: list[int]
    """By ep rank: what its experts got, wherever they were."""
    tokens: int = 0
    dropped: int = 0
    entropy: float = 0.0
    """Sum over tokens, in nats."""


class ExpertCounts:
    """Sums over the steps of this process: what a record holds does not grow with the number of steps."""

    def __init__(self, plan: Plan) -> None:
        self.ep, self.steps = plan.layout.ep, 0
        self.moved = plan.execution.experts.rebalance_every is not None
        self.layers: dict[int, LayerCounts] = {}

    def after(self, routing: Mapping[int, LayerRouting]) -> None:
        """Add one step."""
        self.steps += 1
        for number, step in routing.items():
            layer = self.layers.setdefault(number, LayerCounts([0] * len(step.chosen), (), [0] * self.ep))
            layer.chosen = [before + now for before, now in zip(layer.chosen, step.chosen)]
            layer.last = step.chosen
            layer.ranks = [before + now for before, now in zip(layer.ranks, step.of_ranks(self.ep))]
            layer.tokens += step.tokens
            layer.dropped += step.dropped
            layer.entropy += step.entropy * step.tokens

    def as_result(self) -> dict[str, Any]:
        """What a record holds, in JSON types."""
        return {
            "steps": self.steps,
            "ep": self.ep,
            "moved": self.moved,
            "layers": [
                {
                    "layer": number,
                    "chosen": layer.chosen,
                    "chosen_last_step": list(layer.last),
                    "ranks": layer.ranks,
                    "tokens": layer.tokens,
                    "dropped": layer.dropped,
                    "entropy": layer.entropy / max(1, layer.tokens),
                }
                for number, layer in sorted(self.layers.items())
            ],
        }

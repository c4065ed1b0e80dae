"""Which experts the tokens of a step go to, as one rank's routers decide: seen, and replayed from another run.

Rounding decides between experts whose scores are nearly equal, and one token that goes elsewhere changes everything
after it. So layouts are judged on equal terms only in float64; in other formats all runs replay the choices of one
(their weights, and all else, are their own).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from fivefold.core.plan import Plan
from fivefold.engine.engine import Engine
from fivefold.nn.moe import Router, chosen, count
from fivefold.nn.roles import modules_with_role
from fivefold.strategies import compose
from fivefold.strategies.expert.rules import Counts, routed_layers

Ints = npt.NDArray[np.int64]
Routed = dict[int, dict[int, list[int]]]
"""Layer -> microbatch -> how many choices of this rank's tokens each expert got."""
Choices = Mapping[str, Ints]
"""`layers.3.mlp.router sgd step 1` -> the experts [G, S, K] of all tokens of that step, in ascending order."""


class watching_routes:
    """The choices of one step, through hooks; complete at the end of `with`. `replay`: those to make instead."""

    def __init__(self, engine: Engine, run: str, replay: Choices | None = None) -> None:
        self.engine, self.run, self.replay = engine, run, replay
        self.routed: Routed = {}
        self.experts: dict[str, dict[int, Ints]] = {}
        """Router -> microbatch -> the experts [B, S, K] of the tokens here, in ascending order; -1: none."""
        self.chosen: dict[str, dict[int, Ints]] = {}
        """The same before any choice was dropped: what can be replayed."""
        self.undo: list[Any] = []

    def __enter__(self) -> watching_routes:
        for module in self.engine.chunks.values():
            for name, router in modules_with_role(module, "router"):
                assert isinstance(router, Router)
                self.experts[name], self.chosen[name] = {}, {}
                self.undo.append(router.register_forward_hook(self._keep(name)).remove)
                router.choose = self._choosing(name, router.choose)  # type: ignore[method-assign, assignment]
                self.undo.append(partial(delattr, router, "choose"))
            self._watch_others(module)
        return self

    def __exit__(self, *_: Any) -> None:
        for undo in self.undo:
            undo()

    def _watch_others(self, chunk: nn.Module) -> None:
        """The choices of routers that are not ours: what experts are called with. They are not replayed."""
        for name, experts in modules_with_role(chunk, "experts"):
            router = router_name(int(name.split(".")[1]))
            if router not in self.experts:
                self.experts[router] = {}
                keep = self._kept(router)
                hook = partial(_called, keep)
                self.undo.append(experts.register_forward_pre_hook(hook, with_kwargs=True).remove)

    def _keep(self, name: str) -> Any:
        kept = self._kept(name)
        return lambda _module, _inputs, routing: kept(routing.experts_TK)

    def _kept(self, name: str) -> Callable[[Tensor], None]:
        layer, rows = int(name.split(".")[1]), self.engine.plan.execution.micro_batch
        number = routed_layers(self.engine.plan.model)[layer].experts

        @torch.no_grad()
        def keep(experts_TK: Tensor) -> None:
            if self.engine.mesh.phase != "forward":  # a layer is computed again
                return
            microbatch = self.engine.pipeline.now.microbatch
            self.routed.setdefault(layer, {})[microbatch] = count(experts_TK.flatten(), number).tolist()
            self.experts[name][microbatch] = _sorted(experts_TK, rows)

        return keep

    def _choosing(self, name: str, choose: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        """What stands for `Router.choose`: it, or what was chosen for the same microbatch, rows and places."""

        def chosen(scores_TE: Tensor) -> Tensor:
            microbatch = self.engine.pipeline.now.microbatch
            if self.replay is None:
                experts_TK = choose(scores_TE)
            else:
                everywhere = self.replay[f"{name} {self.run}"]
                parts = [everywhere[rows, places] for rows, places in where(self.engine, microbatch)]
                experts = torch.from_numpy(np.concatenate(parts, axis=1)).flatten(0, 1)
                experts_TK = experts.to(scores_TE.device)
            if self.engine.mesh.phase == "forward":
                self.chosen[name][microbatch] = _sorted(experts_TK, self.engine.plan.execution.micro_batch)
            return experts_TK

        return chosen


def _sorted(experts_TK: Tensor, rows: int) -> Ints:
    """[B, S, K]: in ascending order, as which of two is the better one can be a tie."""
    return experts_TK.sort(-1).values.view(rows, -1, experts_TK.shape[1]).cpu().numpy()


def choices_of(wholes: Mapping[tuple[str, str], Whole]) -> Choices:
    """What was chosen, from what all ranks saw: tensors by (quantity, name)."""
    return {name: whole.values.astype(np.int64) for (kind, name), whole in wholes.items() if kind == CHOICES}


class Whole(Protocol):
    """A tensor put together from the pieces of all ranks."""

    values: npt.NDArray[Any]


CHOICES = "choices"
"""The quantity that `replay` takes; not judged."""


def router_name(layer: int) -> str:
    """What a layer's router is called, in all that is seen of it."""
    return f"layers.{layer}.mlp.router"


def _called(
    keep: Callable[[Tensor], None], _module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    keep(chosen(args, kwargs))


def where(engine: Engine, microbatch: int) -> list[tuple[slice, slice]]:
    """(rows of the global batch, places in the sequence) of a microbatch's tokens that this rank's routers see."""
    plan, layout, at = engine.plan, engine.plan.layout, engine.mesh.coordinate
    size = plan.execution.micro_batch
    first = at["dp"] * (plan.workload.global_batch // layout.dp) + microbatch * size
    parts = layout.tp if layout.sequence_parallel else 1
    here = at["cp"] * parts + (at["tp"] if parts > 1 else 0)
    spans = compose.shared_tokens(layout, plan.workload.seq_len)[here]
    return [(slice(first, first + size), slice(span.start, span.stop)) for span in spans]


def counts_of(routed: Sequence[Routed], plan: Plan) -> Counts:
    """The choices by (rank, layer, microbatch); none where a rank has not seen any."""
    none = {layer: [0] * moe.experts for layer, moe in routed_layers(plan.model).items()}

    def counts(rank: int, layer: int, microbatch: int) -> Sequence[int]:
        return routed[rank].get(layer, {}).get(microbatch, none[layer])

    return counts

"""Faults of recompute: what is repeated in vain, what the second run reads, what is counted twice."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from fivefold.core.model_spec import MoESpec
from fivefold.engine.routers import Routers
from fivefold.runtime.recompute import _Run

from .exhibit import SMALL, Patch, exhibit

ROUTED = SMALL.replace(
    name="small-routed",
    blocks=tuple(block.replace(mlp=MoESpec(experts=4, top_k=2, ffn=8)) for block in SMALL.blocks),
)


@exhibit("tp2", "tp2 pp2 nosp", "the numbers agree", "backward tp reduce_scatter", "predicted 21, recorded 27",
         "recompute=full: without it the difference is gone", recompute="full", quick=True)  # fmt: skip
def a_second_run_goes_to_the_end(patch: Patch) -> None:
    """Backward computes a layer again up to its output, which it does not need: every last sum is repeated."""

    def faulty(self):
        kept: dict[int, torch.Tensor] = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            kept[len(kept)] = tensor.detach()
            return tensor.detach()

        with saved_tensors_hooks(pack, lambda tensor: tensor), torch.enable_grad():
            self.call()
        self.call = None
        return kept

    patch.setattr(_Run, "_run_again", faulty)


@exhibit("pp2", "tp2 pp2:gpipe", "the gradient of layers.0", "recompute=attention: without it the difference is gone",
         recompute="attention")  # fmt: skip
def inputs_of_another_microbatch(patch: Patch) -> None:
    """One place for the inputs of a layer: the second run reads those of the microbatch that came last."""
    init = _Run.__init__
    latest: dict[Any, Any] = {}

    def faulty(self, function, inputs, named):
        init(self, function, inputs, named)
        latest[function] = self.call
        self.call = lambda: latest[function]()

    patch.setattr(_Run, "__init__", faulty)


@exhibit("dp2 ep2", "tp2 ep2", "router", "recompute=moe: without it the difference is gone",
         spec=ROUTED, recompute="moe")  # fmt: skip
def routers_count_twice(patch: Patch) -> None:
    """A router that is computed again counts its tokens and adds up its losses again."""

    def faulty(self, router, _inputs):
        router.first_time = True

    patch.setattr(Routers, "_before", faulty)

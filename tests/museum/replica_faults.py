"""Faults of experts that change ranks, and of their copies: what must go with them, and what must come home."""

from __future__ import annotations

from fivefold.strategies.data.masters import Masters
from fivefold.strategies.expert.copies import Copies

from .exhibit import MIXED, Patch, exhibit


@exhibit("dp2 ep2", "tp2 pp2 ep2", "the gradient of layers.1.mlp.experts.down in step 2 is the first to differ",
         "backward ep all_to_all float64 49152 B: predicted 18, recorded none (missing)",
         "experts.rebalance_every=1: without it the difference is gone",
         spec=MIXED, rebalance=True, late=True, quick=True)  # fmt: skip
def replica_gradients_not_summed(patch: Patch) -> None:
    """Tokens go to a copy of an expert, and what they teach it stays there: its home learns from the others alone."""
    patch.setattr(Copies, "bring_home", lambda self, gradient, of_copies: gradient)


@exhibit("dp2 ep2", "tp2 pp2 ep2", "the first moment of layers.1.mlp.experts.down in step 1 is the first to differ",
         "experts.rebalance_every=1: without it the difference is gone", spec=MIXED, rebalance=True)  # fmt: skip
def moments_stay_behind(patch: Patch) -> None:
    """An expert's weights go to its new home, the moments of whoever was there before stay."""
    reorder = Masters.reorder

    def faulty(self, orders, moved):
        before = {
            name: {key: value.clone() for key, value in state.items()} for name, state in self.state().items()
        }
        reorder(self, orders, moved)
        for name, state in self.state().items() if orders else ():
            for key, value in state.items():
                value.copy_(before[name][key])

    patch.setattr(Masters, "reorder", faulty)

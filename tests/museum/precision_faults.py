"""Faults of a loss scale: when gradients are unscaled, who knows of an overflow, what outlives it."""

from __future__ import annotations

import torch

from fivefold.engine import engine
from fivefold.engine.engine import Engine
from fivefold.engine.loss_scale import LossScaler

from .exhibit import Patch, exhibit

ONLY_SCALED = "the loss scale: without one the difference is gone"
EVERYWHERE = f"{ONLY_SCALED}, and one device has it too"


@exhibit("pp2", "dp2 tp2", "the loss scale differs by 1 in adamw step 4 and sgd step 4, on rank 0 only",
         "norm world all_reduce float32 4 B: predicted 1, recorded none", "axis pp",
         overflow=True, quick=True)  # fmt: skip
def scale_not_agreed(patch: Patch) -> None:
    """Each rank goes by its own overflows: after one on one stage, ranks scale by different numbers."""
    patch.setattr(LossScaler, "agree", lambda self, found: found)


@exhibit("tp2", "dp2 pp2 zero1", "the loss scale differs", "on rank 1 only", "norm world all_reduce", "axis tp",
         overflow=True)  # fmt: skip
def overflow_agreed_over_data_only(patch: Patch) -> None:
    """The flag is summed over data ranks: an overflow of one tp rank or stage is known to its replicas alone."""

    def faulty(self, found):
        self.mesh.phase = "norm"
        return self.mesh.axis("data").all_reduce(found)

    patch.setattr(LossScaler, "agree", faulty)


@exhibit("dp2", "tp2 pp2", "the gradient of head", "exactly 65536.000x, which is the loss scale", EVERYWHERE,
         overflow=True, seen_in="Lightning #9599, apex PR 1512", quick=True)  # fmt: skip
def unscaled_after_clipping(patch: Patch) -> None:
    """Norm and clipping see scaled gradients, so that nearly all is clipped away; the unscaling comes after."""
    unscale, clip = LossScaler.unscale, engine.clip
    scales = []

    def looked(self, gradients):
        scales.append(self.scale)
        return unscale(self, [(row, gradient.clone()) for row, gradient in gradients])

    def clipped(gradients, norm, largest):
        clip(gradients, norm, largest)
        for _, gradient in gradients if scales else ():
            gradient /= scales[-1]

    patch.setattr(LossScaler, "unscale", looked)
    patch.setattr(engine, "clip", clipped)


@exhibit("tp2", "dp2 pp2", "the gradient of head", "1 / the loss scale", EVERYWHERE, overflow=True,
         seen_in="slime PR 1842 (with Megatron-Core)")  # fmt: skip
def unscaled_twice(patch: Patch) -> None:
    """Gradients are unscaled to be looked at, and once more by the step itself."""
    unscale = LossScaler.unscale

    def faulty(self, gradients):
        for _, gradient in gradients:
            gradient /= self.scale
        return unscale(self, gradients)

    patch.setattr(LossScaler, "unscale", faulty)


@exhibit("cp2", "dp2 pp2", "the gradient norm differs", "in adamw step 2 and sgd step 2", EVERYWHERE, overflow=True,
         seen_in="DeepSpeed PR 8588")  # fmt: skip
def unscaled_by_the_next_scale(patch: Patch) -> None:
    """The scale is updated before gradients are unscaled: in a step after which it grows they come out halved."""
    unscale = LossScaler.unscale

    def faulty(self, gradients):
        finite = all(bool(torch.isfinite(g).all()) for _, g in gradients)
        following = self.state.after(overflow=not finite, grow_every=self.config.grow_every).scale
        for _, gradient in gradients:
            gradient *= self.scale / following
        return unscale(self, gradients)

    patch.setattr(LossScaler, "unscale", faulty)


@exhibit("pp2", "dp2 tp2", "the loss scale differs by 0.5 in adamw step 3 and sgd step 3", EVERYWHERE, overflow=True,
         seen_in="transformers #34053, metaseq #3, accelerate #4289")  # fmt: skip
def scale_not_saved(patch: Patch) -> None:
    """A run that goes on from a checkpoint begins with the first scale again."""
    patch.setattr(LossScaler, "loaded", lambda self, state: None)


@exhibit("dp2", "tp2 pp2", "the count of updates of", "in step 3", ONLY_SCALED, overflow=True)
def skipped_step_is_counted(patch: Patch) -> None:
    """A step that overflowed changes no weight, but the optimizer counts it: later bias corrections are wrong."""
    step = Engine.step

    def faulty(self, load, lr):
        result = step(self, load, lr)
        for state in self.data.state().values() if result.overflow else ():
            if "step" in state:
                state["step"] += 1
        return result

    patch.setattr(Engine, "step", faulty)


@exhibit("cp2", "dp2 zero3", "the first moment of", "in step 3", ONLY_SCALED, overflow=True)
def moments_decay_in_a_skipped_step(patch: Patch) -> None:
    """A step that overflowed is taken with gradients of zero: moments decay."""
    step = Engine.step

    def faulty(self, load, lr):
        result = step(self, load, lr)
        for state in self.data.state().values() if result.overflow else ():
            if "exp_avg" in state:
                state["exp_avg"] *= 0.9
        return result

    patch.setattr(Engine, "step", faulty)

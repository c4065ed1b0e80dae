"""The loss scale of one rank. All ranks agree on every overflow, so they have the same scale at every step."""

from __future__ import annotations

import torch
from torch import Tensor

from fivefold.compat import unscale_in_place
from fivefold.core.loss_scale import LossScaleConfig, LossScaleState
from fivefold.core.sharding import ParameterRow
from fivefold.runtime.mesh import Mesh


class LossScaler:
    """Unscales complete gradients, once, before the norm and clipping; halves and doubles the scale."""

    def __init__(self, config: LossScaleConfig, mesh: Mesh) -> None:
        self.config, self.mesh = config, mesh
        self.state = LossScaleState(scale=config.initial)

    @property
    def scale(self) -> int:
        """Of the next step, or of the one under way."""
        return self.state.scale

    def unscale(self, gradients: list[tuple[ParameterRow, Tensor]]) -> Tensor:
        """Divide all gradients by the scale, in place.

        Returns: scalar float32 that is above 0 if a gradient is not finite on any rank: a stage, an expert or a shard
                 that only one rank has counts for all.
        Comm:    an all-reduce of one number over world (phase norm).
        """
        found = torch.zeros(1, device=self.mesh.device.device)
        inverse = torch.full((1,), 1.0 / self.scale, device=found.device)
        unscale_in_place([gradient for _, gradient in gradients], found, inverse)
        return self.agree(found)

    def agree(self, found: Tensor) -> Tensor:
        """The number of ranks that found an overflow."""
        self.mesh.phase = "norm"
        return self.mesh.axis("world").all_reduce(found)

    def update(self, *, overflow: bool) -> None:
        """After a step whose loss was finite: another loss would not be mended by another scale."""
        self.state = self.state.after(overflow=overflow, grow_every=self.config.grow_every)

    def loaded(self, state: LossScaleState) -> None:
        """Go on with the scale of a checkpoint."""
        self.state = state

"""What training asks of the routers of a mixture of experts: balance and z-loss. Part of `Execution`, not of the model.

The same checkpoint is trained with other coefficients, or none, and computes the same; so they are settings of
training, as the optimizer's are. What changes a model's output (scores, groups, scaling) is in `MoESpec`.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from fivefold.core.value import Value

Balance = Literal["sequence", "batch"]


class RouterConfig(Value):
    """Losses that routers add, each summed over the routed layers, and the pace of loss-free balancing.

    Equations: `nn/router_losses.py`. All are off by default.
    """

    balance: Balance = "sequence"
    """Over which tokens the load is balanced: those of each sequence, or all of a global batch (the one before)."""
    balance_coefficient: float = Field(default=0.0, ge=0, le=1e3)
    """DeepSeek-V3 has 0.0001 (`sequence`); Mixtral 0.02 and Switch 0.01 (`batch`)."""
    z_coefficient: float = Field(default=0.0, ge=0, le=1e3)
    """ST-MoE has 0.001."""
    bias_speed: float = Field(default=0.0, ge=0, le=1e3)
    """How far a step moves each selection bias, in models that have them; DeepSeek-V3 has 0.001."""

    @property
    def has_losses(self) -> bool:
        return self.balance_coefficient > 0 or self.z_coefficient > 0

"""What training asks of the routers of a mixture of experts: losses, balance, capacity. Part of `Execution`.

The same checkpoint is trained with other coefficients, or none, and computes the same; so they are settings of
training, as the optimizer's are. What changes a model's output (scores, groups, scaling) is in `MoESpec`.
"""

from __future__ import annotations

from math import ceil
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from fivefold.core.model_spec import MoESpec
from fivefold.core.optimizer import Number
from fivefold.core.value import Value

Balance = Literal["sequence", "batch"]

MOST = 1e3
"""Of any of these numbers: beyond, nothing would be left of the model's own loss or of a limit."""

Strength = Annotated[Number, Field(ge=0, le=MOST)]


class RouterConfig(Value):
    """Losses that routers add, each summed over the routed layers; the pace of loss-free balancing; a capacity.

    Equations: `nn/router_losses.py`. All are off by default.
    """

    balance: Balance = "sequence"
    """Over which tokens the load is balanced: those of each sequence, or all of a global batch (the one before)."""
    balance_coefficient: Strength = 0.0
    """DeepSeek-V3 has 0.0001 (`sequence`); Mixtral 0.02 and Switch 0.01 (`batch`)."""
    z_coefficient: Strength = 0.0
    """ST-MoE has 0.001."""
    bias_speed: Strength = 0.0
    """How far a step moves each selection bias, in models that have them; DeepSeek-V3 has 0.001."""
    capacity_factor: Annotated[Number, Field(gt=0, le=MOST)] | None = None
    """An expert takes the first ceil(f K S / E) tokens of a sequence of S that choose it; null: all of them."""
    capacity: Literal["drop", "pad"] = "drop"
    """What travels to an expert that fewer tokens choose: these alone, or rows up to its capacity."""

    @model_validator(mode="after")
    def _settings_act(self) -> Self:
        """A setting that would be ignored is refused rather than dropped in silence."""
        if self.balance == "batch" and self.balance_coefficient == 0:
            raise ValueError(
                "balance=batch does nothing without a balance_coefficient; set it, or leave balance out"
            )
        if self.capacity == "pad" and self.capacity_factor is None:
            raise ValueError(
                "capacity=pad does nothing without a capacity_factor; set it, or leave capacity out"
            )
        return self

    def capacity_of(self, moe: MoESpec, seq_len: int) -> int | None:
        """Tokens of one sequence that an expert takes; None: no limit.

        Formula: ceil(f K S / E), at most S. Source: Fedus et al. 2021, arXiv:2101.03961, eq. 3, for each sequence.
        """
        if self.capacity_factor is None:
            return None
        return min(seq_len, ceil(self.capacity_factor * moe.top_k * seq_len / moe.experts))

    @property
    def keeps_load(self) -> bool:
        """Whether a loss reads how busy the experts were in the step before."""
        return self.balance == "batch" and self.balance_coefficient > 0

    @property
    def joins_sequences(self) -> bool:
        """Whether a loss reads what all tokens of a sequence chose, on whichever ranks they are."""
        return self.balance == "sequence" and self.balance_coefficient > 0

    @property
    def counts_tokens(self) -> bool:
        """Whether a loss is a mean over all tokens of the global batch."""
        return self.z_coefficient > 0 or self.keeps_load

    @property
    def has_losses(self) -> bool:
        return self.balance_coefficient > 0 or self.z_coefficient > 0

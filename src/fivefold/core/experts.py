"""How experts are balanced over the ranks that share them, by where they are rather than by what is chosen."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, model_validator

from fivefold.core.optimizer import Integer, Positive
from fivefold.core.value import Value

MOST_SPARE = 4096
"""Slots of a rank: as many as a model may have experts."""


class ExpertsConfig(Value):
    """Copies of hot experts, and homes that move (`strategies/expert/replicas.py`). The results are those without."""

    rebalance_every: Positive | None = None
    """Steps after which experts are placed anew, by how often each was chosen in them; null: they stay."""
    spare_slots: Annotated[Integer, Field(ge=0, le=MOST_SPARE)] = 1
    """Copies of other ranks' experts that a rank holds beside its own."""

    @model_validator(mode="after")
    def _settings_act(self) -> Self:
        """A setting that would be ignored is refused rather than dropped in silence."""
        if (
            self.rebalance_every is None
            and self.spare_slots != type(self).model_fields["spare_slots"].default
        ):
            raise ValueError(
                "spare_slots does nothing without rebalance_every; set it, or leave spare_slots out"
            )
        return self

"""The loss scale of float16: settings, and its state between two steps."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import AfterValidator, Field

from fivefold.core.optimizer import Integer, Positive
from fivefold.core.value import Value

LARGEST_SCALE = 2**24
"""Beyond, the gradients of a loss near 1 overflow in float16 (largest number: 65504) whatever the model."""


def _power_of_two(value: int) -> int:
    """Multiplying by one changes no digit of a gradient, so that scaling and unscaling are exact."""
    below = 1 << (value.bit_length() - 1)
    if value != below:
        raise ValueError(f"expected a power of two, such as {below} or {2 * below}")
    return value


class LossScaleConfig(Value):
    """Gradients of float16 are computed times a scale, so that small ones do not vanish.

    Where one overflows on any rank, the step changes nothing and the scale is halved; it doubles after `grow_every`
    steps in a row that did not.
    Source: Micikevicius et al. 2018, section 3.2; the dynamic scale is that of NVIDIA's Apex and torch's GradScaler.
    """

    initial: Annotated[Integer, Field(ge=1, le=LARGEST_SCALE), AfterValidator(_power_of_two)] = 65536
    """The scale of the first step; a power of two."""
    grow_every: Positive = 2000
    """Steps in a row without an overflow after which the scale doubles."""


class LossScaleState(Value):
    """What a checkpoint keeps of the scale."""

    scale: Annotated[Integer, Field(ge=1, le=LARGEST_SCALE), AfterValidator(_power_of_two)]
    """The scale of the next step."""
    good_steps: Annotated[Integer, Field(ge=0)] = 0
    """Steps in a row without an overflow since the scale last changed."""
    overflows: Annotated[Integer, Field(ge=0)] = 0
    """Steps that overflowed so far."""

    def after(self, *, overflow: bool, grow_every: int) -> Self:
        """The state after a step. The scale stays within 1 and `LARGEST_SCALE`."""
        if overflow:
            return self.replace(scale=max(1, self.scale // 2), good_steps=0, overflows=self.overflows + 1)
        if self.good_steps + 1 < grow_every:
            return self.replace(good_steps=self.good_steps + 1)
        return self.replace(scale=min(LARGEST_SCALE, 2 * self.scale), good_steps=0)

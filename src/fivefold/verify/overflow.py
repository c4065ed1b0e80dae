"""A loss scale under verification: it grows, a step overflows on one rank, and the run goes on as if from a checkpoint.

The layout has the scale, the layout compared with has none, and the same step of both has an infinite gradient. A scale
that is a power of two changes no digit in float64, so the two must agree in everything: the step is skipped on every
rank; weights, moments and counts stay as they were; and at every step every rank has the scale that is due.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor

from fivefold.core.loss_scale import LARGEST_SCALE, LossScaleConfig
from fivefold.core.model_spec import ModelSpec
from fivefold.core.sharding import ParameterRow, parameters
from fivefold.engine.engine import Engine

SCALE = LossScaleConfig(grow_every=2)
RESUMED_AFTER = 1
"""The step after which a new engine goes on: the scale is still the first one, but on its way to grow."""
OVERFLOW_STEP = 3
"""The step whose gradient is infinite: the first one with a larger scale."""
STEPS = 4
"""The fewest steps that show what an overflow leaves behind."""


def expected_scale(step: int) -> int:
    """The loss scale of a step (from 1), in closed form: S, S, 2S (overflows), S, S, 2S, 2S, 4S, ..."""
    grown = 0 if step < OVERFLOW_STEP else 1 if step == OVERFLOW_STEP else (step - STEPS) // SCALE.grow_every
    return min(LARGEST_SCALE, SCALE.initial << grown)


@contextmanager
def overflowing(engine: Engine) -> Iterator[None]:
    """Inside, one element of one parameter's gradient is infinite, on the one rank of all that counts it.

    Without a scale nobody tells replicas of each other: there, on all that hold it, as after a reduction.
    """
    name = where(engine.plan.model)

    def plant(gradients: list[tuple[ParameterRow, Tensor]]) -> None:
        layout, at = engine.plan.layout, engine.mesh.coordinate
        for row, gradient in gradients:
            begins = all(part.start == 0 < part.stop for part in row.region(layout, at))
            if row.name == name and begins and (engine.scaler is None or row.written_here(layout, at)):
                gradient.view(-1)[0] = math.inf

    engine.before_unscale = plant
    try:
        yield
    finally:
        engine.before_unscale = None


def where(spec: ModelSpec) -> str:
    """The parameter that overflows: a matrix of the last layer, which one stage and one tp rank have the start of."""
    return [row.name for row in parameters(spec) if row.name.startswith("layers.") and len(row.shape) > 1][-1]


def resumed(engine: Engine, make: Callable[[], Engine]) -> Engine:
    """A new engine with all that a checkpoint of the old one holds. Experts that were placed anew go home for it."""
    new = make()
    engine.settle()
    for (_, _, to), (_, _, values) in zip(new.persistent(), engine.persistent(), strict=True):
        to.copy_(values)
    new.restore(engine.data.updates, engine.loss_scale, RESUMED_AFTER)
    return new

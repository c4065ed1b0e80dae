"""What the lab does on every rank of one layout: verify the first step, then train and take times."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from fivefold.core.events import Event
from fivefold.core.plan import Plan
from fivefold.data.batches import Dataset
from fivefold.runtime.launch import Rank
from fivefold.train.trainer import StepMetrics, Trainer
from fivefold.verify.observe import Observation, observe

WARM_UP = 2
"""Steps that are not timed: the first makes state, the second is profiled."""


@dataclass(frozen=True)
class RankReport:
    """Everything that one rank of one layout brings back."""

    observation: Observation
    metrics: list[StepMetrics]
    peak_memory_bytes: int
    events: Counter[Event]


def measure(rank: Rank, plan: Plan, dataset: Dataset, *, steps: int, seed: int) -> RankReport:
    """Observe one step (SGD and AdamW, weights with noise), then train `steps` steps from the true start."""
    observation = observe(rank, plan, dataset, seed=seed, steps=1)
    trainer = Trainer(plan, rank, dataset, steps=steps, seed=seed)
    metrics = list(trainer)
    assert trainer.profile is not None, "a lab run has at least one step"
    return RankReport(observation, metrics, trainer.profile.peak_memory_bytes, trainer.profile.events)


def timed(metrics: list[StepMetrics]) -> list[StepMetrics]:
    """The steps whose times count."""
    return metrics[WARM_UP:] or metrics[-1:]

"""What can be refused before torch is imported, which takes seconds."""

from __future__ import annotations

from fivefold.catalog.models import resolve
from fivefold.core.cluster import Cluster
from fivefold.core.plan import Plan
from fivefold.errors import ConfigError
from fivefold.strategies import compose
from fivefold.strategies.expert.rules import routed_layers
from fivefold.train.config import TrainConfig


def check_cheaply(config: TrainConfig) -> None:
    """Whether the model, the layout and the batch go together. A layout that is still to be measured is not judged.

    Raises: ModelError, LayoutError or WorkloadError with the numbers; ConfigError for a log of what is not there.
    """
    spec = resolve(config.model)
    if config.log.experts and not routed_layers(spec):
        raise ConfigError(f"log.experts does nothing: {spec.name} has no experts; leave it out")
    if config.layout.placement == "measured":
        return
    compose.check(
        Plan(
            model=spec,
            cluster=Cluster.parse("cpu"),
            workload=config.workload,
            layout=config.layout,
            execution=config.execution,
        )
    )

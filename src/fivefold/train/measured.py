"""`ppN@measured`: layers placed by what the stages of a recorded run took."""

from __future__ import annotations

from pathlib import Path

from fivefold.catalog.models import resolve
from fivefold.core.model_spec import ModelSpec
from fivefold.core.plan import Plan
from fivefold.errors import LayoutError, UserError
from fivefold.records.store import RunRecord, Store, default_path, store_exists
from fivefold.strategies.pipeline.placement import measured_counts, stage_layers
from fivefold.train.config import TrainConfig
from fivefold.train.log import STAGE_SECONDS


def resolve_placement(config: TrainConfig) -> TrainConfig:
    """The config with `@measured` made a list of layers; any other config as it is.

    Raises: LayoutError where no record has stage times of this model under a pipeline; RecordError for a bad store.
    """
    layout = config.layout
    if layout.placement != "measured":
        return config
    spec = resolve(config.model)
    path = default_path() if config.log.records in (None, "default") else Path(str(config.log.records))
    if not store_exists(path):
        raise LayoutError(_nothing(config, spec, f"there is no record at {path}"))
    with Store.open(path, create=False) as store:
        wanted = store.runs(limit=None) if config.measured == "last" else [store.run(config.measured)]
        for record in wanted:
            plan = _plan(record)
            seconds = store.results(record.id).get(STAGE_SECONDS) if plan is not None else None
            if plan is None or not seconds or plan.layout.pp == 1 or plan.model != spec:
                continue
            counts = [len(layers) for layers in stage_layers(spec, plan.layout, plan.workload.seq_len)]
            placement = tuple(measured_counts(seconds, counts, layout.stages))
            return config.replace(layout=layout.replace(placement=placement))
    raise LayoutError(_nothing(config, spec, f"{config.measured!r} in {path} is none"))


def _plan(record: RunRecord) -> Plan | None:
    """The plan of a record; None where another version wrote it."""
    try:
        return Plan.read(record.plan, where=record.id)
    except UserError:
        return None


def _nothing(config: TrainConfig, spec: ModelSpec, why: str) -> str:
    return (
        f"{config.layout}: @measured needs a recorded run of {spec.name} under a pipeline, and {why}; "
        f"train some steps with pp{config.layout.pp} first, or use @flops"
    )

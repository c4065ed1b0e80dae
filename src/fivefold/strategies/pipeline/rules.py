"""Pipeline parallelism: which stage owns each parameter, what crosses between stages, what is legal.

Between two neighbouring stages travel, per microbatch, the hidden states forward and their gradient backward:
b*S*D elements each, b*S/tp*D under sequence parallelism. Tied embeddings on two stages are two copies with the same
values; their gradients are summed once per step over {first, last} stage (axis tie).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from fivefold.core.events import Event, Events
from fivefold.core.layout import Layout
from fivefold.core.model_spec import ModelSpec
from fivefold.core.sharding import ParameterRow
from fivefold.errors import LayoutError
from fivefold.strategies.pipeline.actions import Action, parse_actions
from fivefold.strategies.pipeline.check import check_actions
from fivefold.strategies.pipeline.placement import stage_layers


def check(spec: ModelSpec, layout: Layout, seq_len: int) -> None:
    """Raises: LayoutError for more stages than layers, or a placement that does not add up to the layers."""
    stage_layers(spec, layout, seq_len)


def check_schedule(layout: Layout, microbatches: int, actions: Sequence[str] | None) -> None:
    """Whether a custom schedule has its actions, and they are a training step; every other takes any microbatches.

    Raises: LayoutError for actions that are missing, not asked for, incomplete, out of order or in a deadlock;
    ConfigError for lines that are no actions.
    """
    if layout.schedule != "custom":
        if actions is not None:
            raise LayoutError(
                f"actions are given, but {layout} has the schedule {layout.schedule}; "
                f"write pp{max(layout.pp, 2)}:custom, or leave them out"
            )
        return
    if actions is None:
        raise LayoutError(
            f"{layout} needs its actions, a file with a line for each of {layout.pp} pipeline ranks"
        )
    check_actions(parse_actions("\n".join(actions)), layout, microbatches)


def place(
    rows: tuple[ParameterRow, ...], spec: ModelSpec, layout: Layout, seq_len: int
) -> tuple[ParameterRow, ...]:
    """Fill the stage column; a tied embedding whose stages are on two ranks becomes two rows."""
    stage_of = {
        layer: stage for stage, layers in enumerate(stage_layers(spec, layout, seq_len)) for layer in layers
    }
    last = layout.stages - 1
    placed = []
    for row in rows:
        parts = row.name.split(".")
        first = row.block == "embedding"
        stage = stage_of[int(parts[1])] if parts[0] == "layers" else 0 if first else last
        placed.append(replace(row, stage=stage))
    if spec.tied_embeddings and layout.owner_of(0) != layout.owner_of(last):
        embedding = placed[0]
        copy = replace(embedding, name="head.weight", stage=last, tied_to=embedding.name)
        sums = {**embedding.sums, "tie": None}
        placed = [replace(embedding, sums=sums), *placed[1:], replace(copy, sums=sums)]
    return tuple(placed)


def predict_transfers(
    actions: list[Action], *, tokens: int, hidden: int, dtype: str, itemsize: int
) -> Events:
    """SEND and RECV events of one rank's action list; `tokens` are those of one message (b*S, or b*S/tp under SP)."""
    events: Events = Counter()
    for action in actions:
        direction, _, way = action.kind.partition("_")
        if direction in ("SEND", "RECV"):
            phase = "forward" if way == "F" else "backward"
            events[Event(phase, "pp", direction.lower(), dtype, tokens * hidden * itemsize)] += 1  # type: ignore[arg-type]
    return events


def predict_tie(rows: list[ParameterRow], layout: Layout, dtype: str, itemsize: int) -> Events:
    """One all-reduce per step of the tied gradient on each of the two ranks that hold a copy."""
    return Counter(
        Event("reduce", "tie", "all_reduce", dtype, row.local_elements(layout) * itemsize)
        for row in rows
        if "tie" in row.sums
    )

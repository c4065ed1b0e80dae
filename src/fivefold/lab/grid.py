"""The grid of layouts that the lab runs."""

from __future__ import annotations

from fivefold.core.layout import Layout
from fivefold.core.plan import Plan
from fivefold.engine.size import check_size
from fivefold.errors import UserError
from fivefold.runtime.device import check_device_count
from fivefold.strategies import compose

TENSOR, PIPELINE, DATA = (1, 2, 4), (1, 2), (1, 2, 4)


def grid(max_ranks: int) -> list[Layout]:
    """TP 1/2/4 x PP 1/2 x DP 1/2/4 up to `max_ranks` ranks, one device first, then by number of ranks."""
    layouts = [Layout(dp=dp, tp=tp, pp=pp) for pp in PIPELINE for tp in TENSOR for dp in DATA]
    return sorted((cut for cut in layouts if cut.world_size <= max_ranks), key=lambda cut: cut.world_size)


def check(plan: Plan, device: str) -> None:
    """Raises: UserError if the model, the workload or this machine does not allow the layout."""
    compose.check(plan)
    check_device_count(device, plan.layout.world_size)
    check_size(plan, what="verifying", advice="choose a smaller model, such as small-llama", copies=8)


def legal(plan: Plan, layouts: list[Layout], device: str) -> tuple[list[Layout], dict[str, str]]:
    """Those that this model, workload and machine allow, and why the others are not run: layout -> reason."""
    allowed, refused = [], {}
    for layout in layouts:
        try:
            check(plan.replace(layout=layout), device)
        except UserError as error:
            refused[str(layout)] = str(error)
        else:
            allowed.append(layout)
    return allowed, refused

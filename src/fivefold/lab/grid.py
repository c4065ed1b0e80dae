"""The grid of layouts that the lab runs."""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd

from fivefold.core.layout import Layout
from fivefold.core.plan import Plan
from fivefold.engine.size import check_size
from fivefold.errors import ConfigError, UserError, nearest
from fivefold.runtime.device import check_device_count
from fivefold.strategies import compose

DEGREES = {"dp": (1, 2, 4), "tp": (1, 2, 4), "pp": (1, 2), "cp": (1, 2, 4), "ep": (1, 2, 4)}
"""Axis -> its degrees in a grid."""
AXES = ("dp", "tp", "pp")
"""Those of a grid unless told otherwise."""


def parse_axes(text: str) -> tuple[str, ...]:
    """`cp,ep` as axes. Raises: ConfigError naming the one that the lab does not know, and those it knows."""
    axes = tuple(part.strip() for part in text.split(","))
    for axis in axes:
        if axis not in DEGREES:
            raise ConfigError(
                f"no axis {axis!r} in the lab{nearest(axis, DEGREES)}; it has {', '.join(DEGREES)}"
            )
    return axes


def grid(max_ranks: int, axes: Sequence[str] = AXES) -> list[Layout]:
    """Every combination of the degrees of `axes` up to `max_ranks` ranks, one device first, then by number of ranks.

    EP adds no ranks: where those of the other axes are too few for it, dp is as large as it must be, unless dp is an
    axis of the grid itself.
    """
    pp, tp, cp, ep, dp = (DEGREES[axis] if axis in axes else (1,) for axis in ("pp", "tp", "cp", "ep", "dp"))
    layouts = [
        Layout(dp=data, tp=tensor, pp=stages, cp=context, ep=experts)
        for stages in pp for tensor in tp for context in cp for experts in ep
        for data in (dp if "dp" in axes else (experts // gcd(experts, context * tensor),))
        if data * context * tensor % experts == 0
    ]  # fmt: skip
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

"""The rules that a layout can check by itself; a refusal names its numbers and the nearest legal choice."""

from __future__ import annotations

from math import gcd
from typing import TYPE_CHECKING, Any

from fivefold.core.layout_text import V_SCHEDULES, pipeline_token
from fivefold.errors import LayoutError, nearest_numbers

if TYPE_CHECKING:
    from fivefold.core.layout import Layout

CHUNKED_SCHEDULES = ("1f1b", "bfs", "custom")
"""Schedules that take `*chunks`."""

_COUNTS = ("dp", "tp", "pp", "cp", "ep", "etp", "cp_ring", "cp_ulysses", "chunks")
_MAX_WORLD = 2**24
"""Ranks beyond any cluster: a typing error, refused before lists of so many ranks are made."""


def implied(data: dict[str, Any]) -> dict[str, Any]:
    """Fields that follow from others, for whoever leaves them out."""
    cp, schedule = data.get("cp", 1), data.get("schedule")
    ring, ulysses = {"ring": (cp, 1), "ulysses": (1, cp)}.get(str(data.get("cp_method", "ring")), (1, 1))
    return {"cp_ring": ring, "cp_ulysses": ulysses, "chunks": 2 if schedule in V_SCHEDULES else 1}


def check(layout: Layout) -> None:
    """Refuse a layout that cannot be formed. Raises LayoutError."""
    for name in _COUNTS:
        if getattr(layout, name) < 1:
            raise LayoutError(f"{name} must be at least 1, got {getattr(layout, name)}; nearest: {name}=1")
    if layout.world_size > _MAX_WORLD:
        raise LayoutError(f"{layout} needs {layout.world_size} ranks; at most {_MAX_WORLD} are supported")
    if sorted(layout.order) != ["cp", "dp", "pp", "tp"]:
        raise LayoutError(
            f"order needs tp, cp, dp and pp once each, got {'-'.join(layout.order)!r}; default: tp-cp-dp-pp"
        )
    _check_zero(layout)
    _check_pipeline(layout)
    _check_context(layout)
    _check_experts(layout)


def _check_zero(layout: Layout) -> None:
    if not 0 <= layout.zero <= 3:
        raise LayoutError(
            f"zero takes 0, 1, 2 or 3, got {layout.zero}; nearest: {min(max(layout.zero, 0), 3)}"
        )
    group, dp, cp, data = layout.zero_group, layout.dp, layout.cp, layout.data
    if group is None:
        return
    if layout.zero == 0:
        raise LayoutError(
            f"zero0 shards nothing, so it takes no group (got /{group}); nearest: zero1/{group}"
        )
    if group < 1 or data % group:
        legal = nearest_numbers(group, divisors(data))
        raise LayoutError(
            f"zero{layout.zero}/{group}: groups of {group} do not divide dp{dp} x cp{cp} = {data} "
            f"data ranks; nearest group: {legal}"
        )


def _check_pipeline(layout: Layout) -> None:
    schedule, chunks, pp = layout.schedule, layout.chunks, layout.pp
    if pp == 1 and (schedule, chunks, layout.placement) != ("1f1b", 1, "even"):
        raise LayoutError(
            f"a schedule, chunks or placement needs pp of at least 2, got {pipeline_token(layout)!r}; "
            "nearest: pp2 with it"
        )
    if schedule in V_SCHEDULES:
        if chunks != 2:
            raise LayoutError(f"{schedule} always has 2 chunks, got {chunks}; write pp{pp}:{schedule}")
    elif chunks > 1 and schedule not in CHUNKED_SCHEDULES:
        raise LayoutError(
            f"{schedule} takes no chunks, got *{chunks}; nearest: pp{pp}:{schedule} or pp{pp}:1f1b*{chunks}"
        )
    if isinstance(layout.placement, tuple):
        text = "@" + "+".join(map(str, layout.placement))
        if len(layout.placement) != layout.stages:
            raise LayoutError(
                f"placement {text} lists {len(layout.placement)} stages, but pp{pp} x {chunks} chunks = "
                f"{layout.stages}; nearest: {layout.stages} numbers"
            )
        if min(layout.placement) < 1:
            raise LayoutError(
                f"placement {text}: a stage needs at least 1 decoder layer, got {min(layout.placement)}"
            )


def _check_context(layout: Layout) -> None:
    cp, method, ring, ulysses = layout.cp, layout.cp_method, layout.cp_ring, layout.cp_ulysses
    if cp == 1 and method != "ring":
        raise LayoutError(
            f"cp method {method} needs cp of at least 2, got cp1; nearest: cp2 with it, or leave it out"
        )
    if method == "ring_ulysses":
        if ring * ulysses != cp:
            fits = min(divisors(cp), key=lambda d: (abs(d - ring), d))
            nearest_cp = f"cp{cp}:ring{fits}xulysses{cp // fits}"
            raise LayoutError(
                f"ring{ring}xulysses{ulysses} = {ring * ulysses}, but cp{cp}; nearest: {nearest_cp}"
            )
    elif (ring, ulysses) != {"ring": (cp, 1), "ulysses": (1, cp), "gather": (1, 1)}[method]:
        raise LayoutError(
            f"cp{cp}:{method} leaves no choice of cp_ring={ring} and cp_ulysses={ulysses}; "
            f"leave them out, or use cp_method='ring_ulysses' with a product of {cp}"
        )


def _check_experts(layout: Layout) -> None:
    ep, etp, tp = layout.ep, layout.etp, layout.tp
    inner = layout.data * tp
    if inner % (ep * etp):
        fault = (
            f"ep{ep} x etp{etp} = {ep * etp} does not divide "
            f"the dp{layout.dp} x cp{layout.cp} x tp{tp} = {inner} ranks of a stage"
        )
        if inner % etp:
            raise LayoutError(f"{fault}; nearest etp: {nearest_numbers(etp, divisors(inner))}")
        enough = layout.dp * (ep * etp // gcd(inner, ep * etp))
        asked = f"ep{ep} etp{etp}" if etp > 1 else f"ep{ep}"
        raise LayoutError(
            f"{fault}; nearest ep: {nearest_numbers(ep, divisors(inner // etp))}; "
            f"ep adds no ranks: for {asked} take dp{enough}"
        )
    if tp > 1 and etp != tp and ep * etp > 1 and not layout.sp:
        raise LayoutError(
            f"experts with etp{etp} and tp{tp} need sequence parallelism, "
            f"else {tp} ranks would dispatch the same tokens; leave out nosp, or use etp{tp}"
        )


def divisors(n: int) -> list[int]:
    """All divisors, ascending."""
    small = [d for d in range(1, int(n**0.5) + 1) if n % d == 0]
    return sorted({*small, *(n // d for d in small)})

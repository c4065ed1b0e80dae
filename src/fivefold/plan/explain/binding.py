"""Which resource binds: each is doubled by itself, and the one that shortens the step most is named.

Memory is judged by the layouts one step away that are faster and do not fit.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from fivefold.plan.clock import Choice, Clock

if TYPE_CHECKING:
    from fivefold.estimate.jobs import Jobs

RESOURCES: dict[str, tuple[str, ...]] = {
    "computation": ("peak_flops_per_s", "peak_low_flops_per_s"),
    "memory bandwidth": ("memory_bytes_per_s",),
    "device link": ("link_bytes_per_s",),
    "network": ("nic_bytes_per_s",),
    "batch": ("microbatches",),
}
"""Resource -> columns of a job that double with it."""
HOST = ("launch", "launch_experts", "launch_collective", "launch_softmax", "fixed_step", "fixed_microbatch")
"""Coefficients that halve where the host launches kernels twice as fast."""
SLIGHT = 0.005
"""A gain of less is none."""


def resources(clock: Clock, choice: Choice) -> list[dict[str, Any]]:
    """By how much the step gets shorter where one resource is doubled, the largest first; a batch of twice as much
    counts for each of its tokens."""
    names = [*RESOURCES, "host"]
    jobs = clock.jobs([choice] * (len(names) + 1))
    for row, name in enumerate(names, 1):
        jobs = _doubled(jobs, row, RESOURCES.get(name, ()))
    c = {name: column.copy() for name, column in clock.coefficients.of(jobs).items()}
    for name in HOST:
        c[name][len(names)] /= 2
    seconds = clock.seconds(jobs, [choice] * (len(names) + 1), c).total
    found = []
    for row, name in enumerate(names, 1):
        tokens = 2 if name == "batch" else 1
        found.append({"resource": name, "gain": 1 - float(seconds[row] / seconds[0]) / tokens})
    return sorted(found, key=lambda one: -float(one["gain"]))


def _doubled(jobs: Jobs, row: int, names: tuple[str, ...]) -> Jobs:
    changed = {}
    for name in names:
        column = getattr(jobs, name).copy()
        column[row] *= 2
        changed[name] = column
    assert {f.name for f in fields(jobs)} >= changed.keys()
    return replace(jobs, **changed)


def binding(doubled: list[dict[str, Any]], steps: list[dict[str, Any]]) -> dict[str, Any]:
    """The resource that binds, and what memory holds back. `steps`: the counterfactuals."""
    first, second = doubled[0], doubled[1]
    text = f"{first['resource']}: twice as much of it would make the step {first['gain']:.0%} shorter"
    if second["gain"] > SLIGHT:
        text += f", twice the {second['resource']} {second['gain']:.0%}"
    held = [one for one in steps if one["fits"] in ("no", "unsure") and one["step_time_ratio"] < 1 - SLIGHT]
    best = min(held, key=lambda one: float(one["step_time_ratio"]), default=None)
    if best is None:
        memory = "memory holds nothing back: no step that needs more of it would be faster"
    else:
        memory = f"memory holds back {best['change']}: {1 - best['step_time_ratio']:.0%} shorter, but {best['verdict']}"
    return {
        "constraint": first["resource"],
        "gain": first["gain"],
        "text": f"{text}; {memory}",
        "doubled": doubled,
        "held_back_by_memory": best and {"change": best["change"], "gain": 1 - best["step_time_ratio"]},
    }

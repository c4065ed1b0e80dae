"""16 bits have no bound that is right for every model: a layout is as good as one device if it rounds no worse.

Both are compared with one device in float64 that starts from the same rounded weights. The error of a tensor is
sqrt(sum (a - b)^2 / sum b^2), that of a quantity the mean over its tensors: the largest of thousands of roundings is
luck, and differs twofold between two orders of the same sums. A layout passes where its error in every quantity is at
most twice that of one device in the same format, or below half a unit in the last place of one of its numbers, which a
scalar that comes out right by luck would else undercut. Faults are for float64 to find. In a mixture of experts tokens
go to the experts that float64 chose: between two of nearly equal scores, rounding decides.

float16 has a loss scale on both; errors are those of the unscaled gradients.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from fivefold.core.layout import Layout, MeshAxis
from fivefold.core.model_spec import ModelSpec
from fivefold.core.plan import Plan
from fivefold.core.sharding import ParameterRow
from fivefold.data.batches import SyntheticDataset
from fivefold.engine.build import ValueSource, initial_value
from fivefold.engine.size import check_size
from fivefold.runtime.launch import run_ranks
from fivefold.verify.communication import event_differences
from fivefold.verify.compare import QUANTITIES, Key, Whole, assemble, compare
from fivefold.verify.observe import NOISE, Observation, observe
from fivefold.verify.routes import Choices, choices_of
from fivefold.verify.verify import KEPT_COPIES, SHRINK, STEPS, Verdict, limits_of
from fivefold.verify.workload import common_plans

Narrow = Literal["bfloat16", "float16"]

WORSE = 2.0
"""So many times one device's own error is no worse: errors of roundings in another order are that far apart."""
HALF_UNIT: dict[Narrow, float] = {"bfloat16": 2.0**-9, "float16": 2.0**-12}
"""Relative error of rounding one number to 8 or 11 significant bits."""
NOT_JUDGED = ("weights_adamw",)
"""AdamW's first update is near lr x sign(g): a gradient near zero that rounds to the other side moves it by 2 lr."""


def verify_rounding(
    spec: ModelSpec,
    layout: Layout,
    *,
    dtype: Narrow = "bfloat16",
    steps: int = STEPS,
    seed: int = 0,
    device: str = "auto",
    actions: tuple[str, ...] | None = None,
    recompute: str = "none",
) -> Verdict:
    """Judge a layout in 16 bits (float32 masters and reduction) by one device's own error against float64.

    Raises: UserError if it cannot be run; RankFailure if a rank breaks.
    """
    plan, single = common_plans(spec, layout, Layout(), dtype, actions=actions, recompute=recompute)
    for one in (plan, single):
        check_size(one, what="verifying", advice=SHRINK, copies=KEPT_COPIES)
    exact = single.replace(execution=single.execution.replace(dtype="float64", loss_scale=None))
    found = assemble(_run(exact, steps, seed, device, rounded(seed, dtype)))
    replay = choices_of(found) or None
    alone, seen = (_run(one, steps, seed, device, replay=replay) for one in (single, plan))
    kept = assemble(alone).keys()  # float64 keeps the moments of more steps
    wholes = {key: whole for key, whole in found.items() if key in kept}
    own, errors, missing = _errors(alone, wholes), _errors(seen, wholes), compare(seen, wholes).missing
    lines = event_differences(plan, seen)
    bounds = {q: max(WORSE * own[q], HALF_UNIT[dtype]) for q in QUANTITIES if q not in NOT_JUDGED}
    broken = [q for q in bounds if not math.isfinite(own[q])]
    worse = {q: (errors[q], own[q]) for q, bound in bounds.items() if not errors[q] <= bound}
    return Verdict(
        passed=not worse and not broken and not lines and not missing,
        max_rel_err=max(errors[q] for q in QUANTITIES if q not in NOT_JUDGED),
        layout=layout,
        recompute=plan.execution.recompute,
        against=Layout(),
        model=spec.name,
        dtype=dtype,
        bound=max(bounds.values()),
        steps=steps,
        seq_len=plan.workload.seq_len,
        global_batch=plan.workload.global_batch,
        quantities=errors,
        own_errors=own,
        bounds=bounds,
        absent=tuple(q for q in QUANTITIES if not any(key[0] == q for key in wholes)),
        not_judged=NOT_JUDGED,
        limits=(*limits_of(plan, Layout(), steps), *_limits(dtype)),
        events_match=not lines,
        event_differences=tuple(lines),
        cause=_cause(worse, broken, missing, lines),
    )


def rounded(seed: int, narrow: Narrow) -> ValueSource:
    """Initial values as the narrow format holds them, in the dtype that is asked for."""

    def values(row: ParameterRow, layout: Layout, at: Mapping[MeshAxis, int], dtype: str) -> Tensor:
        kind: torch.dtype = getattr(torch, dtype)
        return initial_value(row, layout, at, narrow, seed=seed, noise=NOISE).to(kind)

    return values


def _errors(seen: Sequence[Observation], wholes: Mapping[Key, Whole]) -> dict[str, float]:
    """Quantity -> mean over its tensors of their relative 2-norm error, every replica counted; 0 without any."""
    off: dict[Key, float] = {}
    size: dict[Key, float] = {}
    for observation in seen:
        for piece in observation.pieces:
            key = (piece.quantity, piece.name)
            if key in wholes:
                exact = wholes[key].values[piece.region]
                off[key] = off.get(key, 0.0) + float(np.square(piece.values - exact).sum())
                size[key] = size.get(key, 0.0) + float(np.square(exact).sum())
    tensors: dict[str, list[float]] = {quantity: [] for quantity in QUANTITIES}
    for (quantity, name), error in off.items():
        if quantity in tensors and size[quantity, name] > 0:
            tensors[quantity].append(math.sqrt(error / size[quantity, name]))
    # What is not finite compares as worse than anything.
    return {
        q: math.inf if any(map(math.isnan, found)) else fmean(found or [0.0]) for q, found in tensors.items()
    }


def _limits(dtype: Narrow) -> tuple[str, ...]:
    return ("no step overflowed: verify --overflow shows how one is skipped",) if dtype == "float16" else ()


def _cause(
    worse: dict[str, tuple[float, float]],
    broken: Sequence[str],
    missing: Sequence[Key],
    lines: Sequence[str],
) -> str | None:
    if missing:
        return f"no rank holds all of {missing[0][1]} ({missing[0][0]})"
    if broken:
        return f"one device itself overflows, so nothing is known: {', '.join(broken)} not finite"
    if worse:
        parts = [
            f"{q}: error {error:.1e} against float64, one device's own is {own:.1e}"
            for q, (error, own) in worse.items()
        ]
        return f"it rounds worse than {WORSE:g}x one device: {'; '.join(parts)}; verify it in float64 for the cause"
    return f"the communication is not as predicted: {'; '.join(lines[:3])}" if lines else None


def _run(
    plan: Plan,
    steps: int,
    seed: int,
    device: str,
    weights: ValueSource | None = None,
    replay: Choices | None = None,
) -> list[Observation]:
    dataset = SyntheticDataset(plan.model.vocab, plan.workload.seq_len, seed)
    result: list[Any] = run_ranks(
        lambda rank: observe(rank, plan, dataset, seed=seed, steps=steps, weights=weights, replay=replay),
        ranks=plan.layout.world_size,
        device=device,
    )
    return result

"""Two recorded runs side by side: what was asked differently, and what came of it."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import Any

from fivefold.records.store import MetricRow, RunRecord

SUMMARY = ("tokens_per_s", "step_s", "comm_frac", "grad_norm")


@dataclass(frozen=True)
class Comparison:
    """`settings`: key of the plan -> (value in a, value in b) where they differ. `losses`: step -> (loss a, loss b)."""

    settings: dict[str, tuple[Any, Any]]
    losses: dict[int, tuple[float, float]]
    medians: dict[str, tuple[float, float]]
    """Name -> medians over the steps of rank 0."""

    @property
    def largest_loss_difference(self) -> tuple[int, float] | None:
        """(step, relative difference) where the two losses are furthest apart; None if no step is in both."""
        apart = [(abs(a - b) / max(abs(b), 1e-300), step) for step, (a, b) in self.losses.items()]
        worst = max(apart, default=None)
        return None if worst is None else (worst[1], worst[0])


def compare_runs(a: tuple[RunRecord, list[MetricRow]], b: tuple[RunRecord, list[MetricRow]]) -> Comparison:
    """Compare plans key by key, losses step by step, and medians of the main numbers."""
    plan_a, plan_b = flatten(a[0].plan), flatten(b[0].plan)
    keys = sorted(plan_a.keys() | plan_b.keys())
    rows_a, rows_b = _rank_zero(a[1]), _rank_zero(b[1])
    both = sorted(rows_a.keys() & rows_b.keys())
    return Comparison(
        settings={k: (plan_a.get(k), plan_b.get(k)) for k in keys if plan_a.get(k) != plan_b.get(k)},
        losses={
            s: (rows_a[s]["loss"], rows_b[s]["loss"])
            for s in both
            if "loss" in rows_a[s] and "loss" in rows_b[s]
        },
        medians={
            name: (_median(rows_a, name), _median(rows_b, name))
            for name in SUMMARY
            if any(name in row for row in rows_a.values()) and any(name in row for row in rows_b.values())
        },
    )


def flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    """Nested objects and lists as one level: `{"a": {"b": [1]}}` -> `{"a.b.0": 1}`."""
    items = (
        value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else None
    )
    if items is None:
        return {prefix: value}
    flat: dict[str, Any] = {}
    for key, item in items:
        flat.update(flatten(item, f"{prefix}.{key}" if prefix else str(key)))
    return flat


def _rank_zero(rows: list[MetricRow]) -> dict[int, dict[str, float]]:
    found: dict[int, dict[str, float]] = {}
    for row in rows:
        if row.rank == 0:
            found.setdefault(row.step, {}).update(row.values)
    return found


def _median(rows: dict[int, dict[str, float]], name: str) -> float:
    return median(row[name] for row in rows.values() if name in row)

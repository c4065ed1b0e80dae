"""Errors between what two layouts saw, quantity by quantity.

Error of a tensor = max|a - b| / max(max|b|, 0.01 x the largest |b| of that quantity in its block), where a block is a
decoder layer, the embedding, or norm + head; scalars, logits and activations are their own block. Every piece of every
rank is compared, so replicas that drift apart show as well.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import isfinite

import numpy as np

from fivefold.verify.observe import Array, Observation, Piece

QUANTITIES = (
    "loss", "logits", "gradients", "grad_norm", "loss_scale", "buffers", "routed_experts", "routing",
    "weights_sgd", "weights_adamw", "moments",
)  # fmt: skip
FLOOR = 0.01

Key = tuple[str, str]
"""(quantity, name of the tensor)."""


@dataclass
class Whole:
    """A global tensor put together from the pieces of all ranks."""

    values: Array
    covered: Array
    block: str


@dataclass
class Errors:
    """The error of every tensor, and what is missing."""

    by_tensor: dict[Key, float] = field(default_factory=dict)
    missing: list[Key] = field(default_factory=list)
    """Tensors, or parts of them, that no rank has."""
    shares: dict[Key, tuple[float, float]] = field(default_factory=dict)
    """For tensors whose error is not zero: (ratio r that fits a = r b best, error that is left at that ratio)."""
    by_rank: dict[Key, dict[int, float]] = field(default_factory=dict)
    """The error of every tensor on each rank that has a part of it."""

    def of(self, quantity: str) -> float:
        """The largest error of a quantity; infinite if a part of it is missing, 0 if the model has none."""
        if any(q == quantity for q, _ in self.missing):
            return float("inf")
        return max((error for (q, _), error in self.by_tensor.items() if q == quantity), default=0.0)

    def present(self, quantity: str) -> bool:
        return any(q == quantity for q, _ in [*self.by_tensor, *self.missing])


def assemble(observations: Iterable[Observation]) -> dict[Key, Whole]:
    """Global tensors from the pieces of all ranks; where replicas overlap, the first one counts."""
    wholes: dict[Key, Whole] = {}
    for piece in _pieces(observations):
        key = (piece.quantity, piece.name)
        if key not in wholes:
            values = np.zeros(piece.shape, dtype=np.float64)
            wholes[key] = Whole(values, np.zeros(piece.shape, dtype=bool), piece.block)
        whole = wholes[key]
        fresh = ~whole.covered[piece.region]
        whole.values[piece.region] = np.where(fresh, piece.values, whole.values[piece.region])
        whole.covered[piece.region] = True
    return wholes


def compare(observations: Sequence[Observation], reference: dict[Key, Whole]) -> Errors:
    """Every piece of every rank against the reference's global tensors."""
    errors = Errors()
    floors = _block_floors(reference)
    seen = assemble(observations)
    errors.missing = sorted(
        key
        for key, whole in reference.items()
        if key not in seen or not np.all(seen[key].covered | ~whole.covered)
    )
    errors.missing += sorted(key for key in seen if key not in reference)
    for rank, observation in enumerate(observations):
        for piece in observation.pieces:
            key = (piece.quantity, piece.name)
            if key not in reference or piece.values.size == 0:
                continue
            whole = reference[key]
            scale = max(_largest(whole.values), floors.get((piece.quantity, whole.block), 0.0))
            error = _relative(_distance(piece.values, whole.values[piece.region]), scale)
            errors.by_tensor[key] = max(error, errors.by_tensor.get(key, 0.0))
            of_rank = errors.by_rank.setdefault(key, {})
            of_rank[rank] = max(error, of_rank.get(rank, 0.0))
    for key, error in errors.by_tensor.items():
        if error > 0.0 and key in seen:
            errors.shares[key] = best_ratio(seen[key].values, reference[key].values)
    return errors


def _pieces(observations: Iterable[Observation]) -> Iterable[Piece]:
    return (piece for observation in observations for piece in observation.pieces)


def _block_floors(reference: dict[Key, Whole]) -> dict[tuple[str, str], float]:
    floors: dict[tuple[str, str], float] = {}
    for (quantity, _), whole in reference.items():
        if whole.block:
            key = (quantity, whole.block)
            floors[key] = max(floors.get(key, 0.0), FLOOR * _largest(whole.values))
    return floors


def _largest(values: Array) -> float:
    return float(np.abs(values).max(initial=0.0))


def _distance(a: Array, b: Array) -> float:
    if not np.all(np.isfinite(a)):
        return float("inf")
    return float(np.abs(a.astype(np.float64) - b).max(initial=0.0))


def _relative(distance: float, scale: float) -> float:
    """Never NaN, which `max` may lose: what cannot be measured is infinitely far."""
    if distance == 0.0 and isfinite(scale):
        return 0.0
    return distance / scale if scale and isfinite(distance) and isfinite(scale) else float("inf")


def best_ratio(a: Array, b: Array) -> tuple[float, float]:
    """The least-squares ratio of a to b, and the error that is left at it."""
    square = float((b * b).sum())
    if not 0.0 < square < float("inf") or not np.all(np.isfinite(a)):
        return float("nan"), float("inf")
    ratio = float((a * b).sum()) / square
    return ratio, _distance(a, ratio * b) / max(_largest(a), _largest(ratio * b), 1e-300)

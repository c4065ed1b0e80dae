"""What the record of a run says of its experts and of its precision, checked, with what follows from it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fivefold.errors import RecordError
from fivefold.strategies.expert.placement import imbalance


@dataclass(frozen=True)
class LayerLoad:
    """How the tokens of one layer chose its experts, over all recorded steps."""

    layer: int
    chosen: tuple[int, ...]
    """By expert, before any choice was dropped."""
    last: tuple[int, ...]
    """Of the last step alone."""
    ranks: tuple[int, ...]
    """By ep rank: what its experts got, wherever they were."""
    tokens: int
    dropped: int
    entropy: float
    """Mean over tokens, in nats."""

    @property
    def imbalance(self) -> float:
        """Choices of the busiest expert over the mean."""
        return imbalance(self.chosen)

    @property
    def rank_imbalance(self) -> float:
        """The same of the ranks of ep, each with all its experts."""
        return imbalance(self.ranks)

    @property
    def busiest(self) -> int:
        return max(range(len(self.chosen)), key=self.chosen.__getitem__)

    @property
    def busiest_frac(self) -> float:
        """The part of all tokens that chose the busiest expert."""
        return self.chosen[self.busiest] / max(1, self.tokens)

    @property
    def most_uneven(self) -> float:
        """The imbalance where all tokens choose the same experts: E / K."""
        return len(self.chosen) * self.tokens / max(1, sum(self.chosen))

    @property
    def dropped_frac(self) -> float:
        return self.dropped / max(1, sum(self.chosen))

    @property
    def never(self) -> int:
        """Experts that no token chose."""
        return self.chosen.count(0)


@dataclass(frozen=True)
class ExpertsReport:
    """Of a whole model."""

    ep: int
    steps: int
    moved: bool
    """Whether experts were placed anew now and then, with copies of the busiest."""
    layers: tuple[LayerLoad, ...]


@dataclass(frozen=True)
class Look:
    """One step that was looked at, by block: the gradient norm, and the largest output with its module."""

    step: int
    norms: dict[str, float]
    largest: dict[str, tuple[float, str]]


@dataclass(frozen=True)
class BlockPrecision:
    """One block over all looks. None: never seen."""

    block: str
    first_norm: float | None
    last_norm: float | None
    largest: float | None
    largest_frac: float | None
    """Of the largest number of the format."""
    step: int | None
    """Where it was largest."""
    module: str


@dataclass(frozen=True)
class PrecisionReport:
    """Loss scale, overflows, and looks at layers."""

    dtype: str
    largest_number: float
    scales: tuple[tuple[int, float], ...]
    """(first step with it, loss scale)."""
    overflow_steps: tuple[int, ...]
    looks: tuple[Look, ...]

    @property
    def blocks(self) -> list[str]:
        """In the order of the model."""
        return list(self.looks[-1].norms) if self.looks else []

    def rows(self) -> list[BlockPrecision]:
        """A row for each block; a NaN is larger than any number."""
        found = []
        for block in self.blocks:
            seen = [(*look.largest[block], look.step) for look in self.looks if block in look.largest]
            value, module, step = max(
                seen, key=lambda one: math.inf if math.isnan(one[0]) else one[0], default=(None, "", None)
            )
            part = None if value is None else value / self.largest_number
            first, last = (look.norms.get(block) for look in (self.looks[0], self.looks[-1]))
            found.append(BlockPrecision(block, first, last, value, part, step, module))
        return found


def experts_of(results: Mapping[str, Any], *, where: str) -> ExpertsReport | None:
    """From the results of a run; None where it has none. Raises: RecordError for a damaged one."""
    found = results.get("experts")
    if found is None:
        return None
    try:
        layers = tuple(
            LayerLoad(
                int(row["layer"]),
                tuple(map(int, row["chosen"])),
                tuple(map(int, row["chosen_last_step"])),
                tuple(map(int, row["ranks"])),
                int(row["tokens"]),
                int(row["dropped"]),
                float(row["entropy"]),
            )
            for row in found["layers"]
        )
        ep = int(found["ep"])
        if ep < 1 or any(not layer.chosen or len(layer.ranks) != ep for layer in layers):
            raise ValueError(ep)
        return ExpertsReport(ep, int(found["steps"]), bool(found["moved"]), layers)
    except (KeyError, TypeError, ValueError):
        raise RecordError(f"{where}: what it says of its experts is damaged") from None


def precision_of(results: Mapping[str, Any], *, where: str) -> PrecisionReport | None:
    """From the results of a run; None where it has none. Raises: RecordError for a damaged one."""
    found = results.get("precision")
    if found is None:
        return None
    try:
        looks = tuple(
            Look(
                int(look["step"]),
                {block: float(norm) for block, norm in look["grad_norm"].items()},
                {block: (float(value), str(module)) for block, (value, module) in look["largest"].items()},
            )
            for look in found["layers"]
        )
        scales = tuple((int(step), float(scale)) for step, scale in found["scales"])
        overflows = tuple(map(int, found["overflow_steps"]))
        return PrecisionReport(str(found["dtype"]), float(found["largest_number"]), scales, overflows, looks)
    except (AttributeError, KeyError, TypeError, ValueError):
        raise RecordError(f"{where}: its precision report is damaged") from None

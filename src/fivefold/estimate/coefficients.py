"""The few physical coefficients of the step time: their names, what is believed of them, and their values for a job.

A coefficient is positive. Its value for one job is

    value = common x hardware[h] x software[s]

where h is the family of the device and s the era of the training software (`software.era`). The factors are 1 where
nothing was measured. Beliefs are log-normal: `spread` is how far the logarithm may be off anywhere. A part of it
(`GENERAL`) is common to all runs of a family, of an era or of all, and a part (`LOCAL`) to the runs of one cluster
(hosts, switches, builds, tuning), of which other clusters say nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING

from fivefold.catalog.files import read

if TYPE_CHECKING:
    from fivefold.estimate.jobs import Column, Jobs

COMMON = "all"
GENERAL, LOCAL = 0.3, 0.5
"""Standard deviations of both parts over the spread. With more, odd runs of one cluster spoil the predictions of
others, and odd models those of others in it: the rest is left to the correction, which stays near to its runs."""


@dataclass(frozen=True)
class Belief:
    """What is believed of one coefficient before runs are seen."""

    value: float
    spread: float
    hardware: float = 0.0
    """Spread of the factor by device family; 0: it does not depend on the device."""
    software: float = 0.0
    meaning: str = ""
    at: Mapping[str, float] = field(default_factory=dict)
    """Typical factor by device family, software era or both (`H100 fsdp`), where it is known not to be 1."""


Key = tuple[str, str]
"""(coefficient, `all` or the name of a device family or software era)."""


@dataclass(frozen=True)
class Coefficients:
    """Logarithms of the factors by key, and how sure they are."""

    beliefs: Mapping[str, Belief]
    log: Mapping[Key, float] = field(default_factory=dict)
    """Logarithm of each factor relative to its belief; 0 where a key is missing."""
    spread: Mapping[Key, float] = field(default_factory=dict)
    """Standard deviation of it; that of the belief where a key is missing."""
    seen: frozenset[str] = frozenset()
    """Device families and software eras of the runs that were fitted."""

    def value(self, name: str, hardware: str, software: str) -> float:
        """One coefficient on one device family under one software era."""
        log = sum(self.log.get((name, key), 0.0) for key in (COMMON, hardware, software))
        belief = self.beliefs[name]
        known = (belief.at.get(key, 1.0) for key in (hardware, software, f"{hardware} {software}"))
        return belief.value * math.prod(known) * math.exp(log)

    def value_of(self, name: str, key: str) -> float:
        """The factor of one key beside its believed value."""
        return math.exp(self.log.get((name, key), 0.0))

    def of(self, jobs: Jobs) -> dict[str, Column]:
        """Every coefficient as a column of the jobs."""
        import numpy as np

        pairs, index = np.unique(
            np.char.add(np.char.add(jobs.hardware, "\n"), jobs.software), return_inverse=True
        )
        keys = [tuple(pair.split("\n")) for pair in pairs.tolist()]
        return {name: np.array([self.value(name, h, s) for h, s in keys])[index] for name in self.beliefs}

    def keys_for(self, hardware: Iterable[str], software: Iterable[str]) -> list[Key]:
        """The keys that act on jobs of these families and eras."""
        families, eras = sorted(set(hardware)), sorted(set(software))
        found: list[Key] = []
        for name, belief in self.beliefs.items():
            if belief.spread:
                found.append((name, COMMON))
            found += [(name, key) for key in families if belief.hardware]
            found += [(name, key) for key in eras if belief.software]
        return found

    def prior_spread(self, key: Key) -> float:
        """Standard deviation of the logarithm of the factor of this key, from what is known so far."""
        if key in self.spread:
            return self.spread[key]
        belief = self.beliefs[key[0]]
        if key[1] == COMMON:
            return GENERAL * belief.spread
        return GENERAL * (belief.software if key[1] in eras() else belief.hardware)

    def local_spread(self, name: str) -> float:
        """Standard deviation of the logarithm of a coefficient from one cluster to another, all else being equal."""
        belief = self.beliefs[name]
        return LOCAL * math.hypot(belief.spread, belief.hardware, belief.software)


@cache
def _table() -> dict[str, dict[str, dict[str, object]]]:
    table: dict[str, dict[str, dict[str, object]]] = read("beliefs.yaml", __package__)
    return table


@cache
def beliefs() -> Mapping[str, Belief]:
    """The beliefs of `beliefs.yaml` by name."""
    return {name: Belief(**row) for name, row in _table()["coefficients"].items()}  # type: ignore[arg-type]


@cache
def shipped() -> Coefficients:
    """The coefficients that Fivefold comes with: the beliefs, and what the runs of `coefficients.yaml` taught."""
    path = resources.files("fivefold.estimate").joinpath("coefficients.yaml")
    if not path.is_file():
        return Coefficients(beliefs())
    table = read("coefficients.yaml", __package__)
    pairs = {(name, key): pair for name, by_key in table["factors"].items() for key, pair in by_key.items()}
    return Coefficients(
        beliefs(),
        {key: math.log(pair[0]) for key, pair in pairs.items()},
        {key: pair[1] for key, pair in pairs.items()},
        frozenset(table["seen"]),
    )


@cache
def eras() -> frozenset[str]:
    """Names of the software eras."""
    from fivefold.estimate.software import ERAS

    return frozenset(ERAS)


@cache
def fitted_rows() -> tuple[dict[str, object], ...]:
    """The runs that the shipped coefficients were fitted to, as rows of a runs table."""
    import json

    path = resources.files("fivefold.estimate").joinpath("fitted_runs.jsonl")
    if not path.is_file():
        return ()
    return tuple(json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line)

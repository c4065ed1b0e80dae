"""How the shipped coefficients were made: a fit to the runs of `estimate/fitted_runs.jsonl`, from the beliefs alone.

Fewer and stiffer parts of the correction than in a calibration, so that the coefficients explain what they can. Keyed
by device family and software era; no coefficient knows a source or a model.
"""

from __future__ import annotations

from dataclasses import replace

from fivefold.estimate.coefficients import Coefficients, beliefs, fitted_rows
from fivefold.plan.fit import fit, posterior
from fivefold.plan.priced import price
from fivefold.plan.residual import Scales
from fivefold.plan.runs_table import Row, checked_record

SCALES = Scales(stack=0.03, model=0.03, kernels=0.1, layout=0.03, noise=0.05)
DIGITS = 3
MOVED, SURER = 0.2, 0.85
"""A factor is listed where it moved by so many of its believed spreads, or where runs cut the spread to so much."""


def refit() -> Coefficients:
    """The shipped coefficients made anew from their runs; a second or two."""
    rows = [
        Row(number, checked_record(values, f"fitted run {number}"))
        for number, values in enumerate(fitted_rows(), 1)
    ]
    priced = price(rows)
    assert not priced.skipped
    found = posterior(fit(priced.jobs, priced.measured_s, Coefficients(beliefs()), scales=SCALES))
    return replace(found, seen=frozenset((*priced.jobs.hardware.tolist(), *priced.jobs.software.tolist())))


def as_table(coefficients: Coefficients) -> dict[str, dict[str, list[float]]]:
    """Name -> key -> [factor, spread of its logarithm], as `coefficients.yaml` has those that runs say something of."""
    import math

    believed = Coefficients(coefficients.beliefs)
    table: dict[str, dict[str, list[float]]] = {}
    for (name, key), log in sorted(coefficients.log.items()):
        spread, before = coefficients.spread[name, key], believed.prior_spread((name, key))
        if abs(log) > MOVED * before or spread < SURER * before:
            table.setdefault(name, {})[key] = [round(math.exp(log), DIGITS), round(spread, DIGITS)]
    return table

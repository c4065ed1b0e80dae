"""How wrong the predictions are, on measured runs: error by source, intervals, and whether the best layout is found.

A run that took part in the calibration is not scored. With folds, each part of the runs is predicted from a calibration
on the other parts, and from nothing of its own.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from fivefold.errors import RecordError
from fivefold.estimate.coefficients import Coefficients, fitted_rows
from fivefold.plan import ranking
from fivefold.plan.calibration import Calibration, calibrate, predict
from fivefold.plan.priced import Priced, price
from fivefold.plan.runs_table import Row

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from fivefold.estimate.jobs import Column

By = Literal["row", "model", "group", "source"]
TOYS = "X"
"""Trust of runs that only launch kernels: their time is that of the host, so they are not scored."""


@dataclass(frozen=True)
class Scores:
    """Runs with a measured time, and what was predicted of them. Arrays [n]."""

    rows: list[Row]
    measured_s: Column
    predicted_s: Column
    p10_s: Column
    p90_s: Column
    in_sample: bool = False
    """Whether all of them took part in the fit: then this says nothing of other runs."""

    @property
    def errors(self) -> Column:
        """Predicted over measured, less one."""
        error: Column = self.predicted_s / self.measured_s - 1
        return error

    def take(self, members: list[int]) -> Scores:
        return Scores(
            [self.rows[i] for i in members],
            *(getattr(self, name)[members] for name in ("measured_s", "predicted_s", "p10_s", "p90_s")),
        )


@dataclass(frozen=True)
class Report:
    """What `fivefold validate` says."""

    scores: Scores
    memory: list[tuple[Row, float]]
    """Rows with a measured peak, and the error of the predicted one."""
    labels: list[tuple[Row, bool]]
    """Rows that say whether they ran out of memory, and whether the estimate does not say the opposite."""
    fitted: list[Row]
    """Rows that took part in a fit."""
    skipped: list[tuple[Row, str]]
    rows: list[Row]

    def summary(self) -> dict[str, Any]:
        """The object of `--json`."""
        return {
            "step_time": statistics(self.scores.errors),
            "memory": statistics([error for _, error in self.memory]),
            "feasibility": {"n": len(self.labels), "wrong": sum(not right for _, right in self.labels)},
            "ranking": _ranking(self.scores),
            **_intervals(self.scores),
            "by_source": self.by_source(),
            "fitted": len(self.fitted),
            "in_sample": self.scores.in_sample,
            "skipped": [
                {"line": row.line, "source": row.source, "model": row.model_name, "reason": reason}
                for row, reason in self.skipped
            ],
        }

    def by_source(self) -> dict[str, dict[str, Any]]:
        members: dict[str, list[int]] = defaultdict(list)
        for i, row in enumerate(self.scores.rows):
            members[row.source or "-"].append(i)
        memory: dict[str, list[float]] = defaultdict(list)
        for row, error in self.memory:
            memory[row.source or "-"].append(error)
        total = Counter(row.source or "-" for row in self.rows)
        skipped = Counter(row.source or "-" for row, _ in self.skipped)
        found = {}
        for source in sorted(total):
            part = self.scores.take(members[source])
            found[source] = {
                "rows": total[source],
                "step_time": statistics(part.errors),
                "memory": statistics(memory[source]),
                "ranking": _ranking(part),
                **_intervals(part),
                "skipped": skipped[source],
            }
        return found


def validate(
    rows: list[Row],
    calibration: Calibration | None = None,
    *,
    folds: int = 0,
    by: By = "row",
    prior: Coefficients | None = None,
    seed: int = 0,
) -> Report:
    """Predict every row and compare. `folds`: calibrate on the other parts; `by`: what is never in two parts.

    `prior`: what a fold starts from; None: the shipped coefficients, whose own runs are not scored.
    Raises: RecordError where nothing can be scored.
    """
    import numpy as np

    priced = price(rows)
    timed = np.isfinite(priced.measured_s)
    toys = np.array([row.tier_time == TOYS for row in priced.rows], dtype=bool)
    usable = timed & ~toys
    memory, labels = _memory(rows), _labels(rows)
    counted = {id(row) for row, _ in [*memory, *labels]}
    skipped = [pair for pair in priced.skipped if id(pair[0]) not in counted]
    skipped += [
        (row, _unscored(row)) for row, ok in zip(priced.rows, usable) if not ok and id(row) not in counted
    ]
    taught = set() if folds and prior is not None else set(identities(price(_teachers(calibration))))
    known = np.array([one in taught for one in identities(priced)], dtype=bool)
    in_sample = bool(usable.any() and (known | ~usable).all())
    scored = np.flatnonzero(usable & (~known | in_sample))
    if not len(scored) and not memory and not labels:
        raise RecordError(
            f"none of {len(rows)} rows can be scored: "
            f"{skipped[0][1] if skipped else 'none has a measured time or peak of memory'} (line {rows[0].line})"
        )
    scores = (
        _folded(priced, scored, folds, by, prior, seed) if folds else _predicted(priced, scored, calibration)
    )
    if in_sample and not folds:
        scores = replace(scores, in_sample=True)
    fitted = [priced.rows[i] for i in np.flatnonzero(known & usable)] if not in_sample else []
    return Report(scores, memory, labels, fitted, sorted(skipped, key=lambda pair: pair[0].line), rows)


def _unscored(row: Row) -> str:
    if row.tier_time == TOYS:
        return "a toy model: its time is that of the host"
    if row.oom and row.peak_mem_gib:
        return "ran out of memory: its peak is not what it would have needed"
    return "has no measured step time"


def statistics(errors: Any) -> dict[str, Any]:
    """Count, mean absolute, median and 90th percentile of the absolute error, and mean error; fractions."""
    import numpy as np

    values = np.asarray(errors, dtype=float)
    if not len(values):
        return {"n": 0, "mape": None, "median": None, "p90": None, "bias": None}
    size = np.abs(values)
    return {
        "n": len(values),
        "mape": float(size.mean()),
        "median": float(np.median(size)),
        "p90": float(np.quantile(size, 0.9)),
        "bias": float(values.mean()),
    }


def _ranking(scores: Scores) -> dict[str, Any]:
    groups = ranking.rank(scores.rows, scores.predicted_s, scores.measured_s)
    if not groups:
        return {"groups": 0, "mean_regret": None, "max_regret": None, "rank_correlation": None}
    regrets = [group.regret for group in groups]
    return {
        "groups": len(groups),
        "mean_regret": sum(regrets) / len(regrets),
        "max_regret": max(regrets),
        "rank_correlation": sum(group.correlation for group in groups) / len(groups),
    }


def _intervals(scores: Scores) -> dict[str, float | None]:
    import numpy as np

    if not scores.rows:
        return {"interval_coverage": None, "interval_half_width": None}
    inside = (scores.p10_s <= scores.measured_s) & (scores.measured_s <= scores.p90_s)
    width = np.sqrt(scores.p90_s / scores.p10_s) - 1
    return {"interval_coverage": float(inside.mean()), "interval_half_width": float(np.median(width))}


def _teachers(calibration: Calibration | None) -> list[Row]:
    return list(calibration.rows) if calibration else [Row(0, values) for values in fitted_rows()]


def identities(priced: Priced) -> list[str]:
    """What makes two rows one run: the same job and layout, and the same time."""
    columns = (*ranking.JOB, *ranking.LAYOUT)
    return [
        repr([row.values.get(name) for name in columns]) + f" {measured:.5g}"
        for row, measured in zip(priced.rows, priced.measured_s.tolist())
    ]


def _predicted(priced: Priced, members: NDArray[np.intp], calibration: Calibration | None) -> Scores:
    mid, low, high = predict(priced.jobs.take(members), calibration)
    return Scores([priced.rows[i] for i in members], priced.measured_s[members], mid, low, high)


def _folded(
    priced: Priced, members: NDArray[np.intp], folds: int, by: By, prior: Coefficients | None, seed: int
) -> Scores:
    """Predict each fold from a calibration on the others."""
    import numpy as np

    rows = [priced.rows[i] for i in members]
    keys = {
        "row": [str(i) for i in members],
        "model": [repr([row.values.get(name) for name in _MODEL]) for row in rows],
        "group": ranking.group_keys(rows),
        "source": [row.source or "-" for row in rows],
    }[by]
    names, place = np.unique(keys, return_inverse=True)
    if len(names) < 2:
        raise RecordError(
            f"all {len(rows)} rows are of one {by}: nothing is left to calibrate with; use another --by"
        )
    parts = min(folds, len(names))
    fold = (np.random.default_rng(seed).permutation(len(names)) % parts)[place]
    out = np.empty((3, len(members)))
    for part in range(parts):
        here = fold == part
        others = Priced([rows[i] for i in np.flatnonzero(~here)], priced.jobs.take(members[~here]),
                        priced.measured_s[members[~here]], [])  # fmt: skip
        out[:, here] = predict(priced.jobs.take(members[here]), calibrate(others, prior))
    return Scores(rows, priced.measured_s[members], *out)


_MODEL = ("model_name", "layers", "hidden", "heads", "ffn_hidden", "experts", "moe_ffn_hidden")


def _memory(rows: list[Row]) -> list[tuple[Row, float]]:
    """Error of the predicted peak of memory, of rows that have a measured one and did not run out of it."""
    from fivefold.plan.memory_rows import measured_gib, predicted_gib

    found = []
    for row in rows:
        if measured := measured_gib(row.values):
            predicted = predicted_gib(row.values)
            if not isinstance(predicted, str):
                found.append((row, predicted / measured - 1))
    return found


def _labels(rows: list[Row]) -> list[tuple[Row, bool]]:
    """Whether the estimate agrees with rows that say whether they ran out of memory; unsure is no disagreement."""
    from fivefold.plan.memory_rows import fits

    said = [(row, fits(row.values)) for row in rows]
    return [(row, word != ("yes" if row.oom else "no")) for row, word in said if word is not None]

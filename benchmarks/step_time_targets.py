"""Errors of step time and memory on a runs table, set by set: `python benchmarks/step_time_targets.py RUNS.jsonl`.

Every figure is of runs that no fit saw. Folds start from the beliefs (`--shipped`: from the shipped coefficients; then
the runs that these were fitted to are left out). Figures are percentages. `--save FOLDER` keeps them with the date.

Sources left out: each is predicted from all others, of which at most `OF_A_SOURCE` runs each take part, evenly chosen.
Regret of the many small groups of one node: each fifth of the groups is predicted from `FOR_GROUPS` runs of the others.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np

from fivefold.estimate.coefficients import Coefficients, beliefs, fitted_rows, shipped
from fivefold.plan import fit, ranking
from fivefold.plan.calibration import calibrate, predict
from fivefold.plan.priced import Priced, price
from fivefold.plan.residual import Scales
from fivefold.plan.runs_table import Row, read_rows
from fivefold.plan.validate import By, Report, identities, statistics, validate
from fivefold.records.machine import machine_facts, versions

DRAWS = 5
OF_A_SOURCE, FEW = 20, 5
FOR_GROUPS = 120
SETS: dict[str, tuple[Callable[[Row], bool], By, str]] = {
    "Bridge A2, 5 folds": (lambda r: "bridge-perf" in r.source and r.tier_time == "A2", "row", "6, dense 3.5"),
    "Bridge A2, unseen models": (lambda r: "bridge-perf" in r.source and r.tier_time == "A2", "model", "8"),
    "Mosaic, 5 folds": (lambda r: "mosaicml" in r.source, "row", "4"),
    "Mosaic, unseen models": (lambda r: "mosaicml" in r.source, "model", "-"),
    "BLOOM, 5 folds": (lambda r: "bloom" in r.source, "row", "6"),
    "BLOOM, unseen groups": (lambda r: "bloom" in r.source, "group", "regret 5"),
    "Zero-Bubble, 5 folds": (lambda r: "Zero Bubble" in r.source, "row", "4"),
    "Zero-Bubble, unseen groups": (lambda r: "Zero Bubble" in r.source, "group", "regret 1"),
    "Folding, 5 folds": (lambda r: "Folding" in r.source, "row", "8"),
    "Folding, unseen models": (lambda r: "Folding" in r.source, "model", "-"),
    "Korthikanti + SC21 3D, 5 folds": (
        lambda r: "Reducing" in r.source or ("SC21" in r.source and (r.zero_stage or 0) < 3), "row", "4.5",
    ),
    "torchtitan, 5 folds": (lambda r: "torchtitan" in r.source, "row", "10"),
    "vTrain multi node, unseen groups": (lambda r: "vtrain-ground-truth-multi" in r.source, "group", "regret 1"),
}  # fmt: skip
"""Name -> (its rows, what is never in two folds, target)."""

FOUND: dict[str, dict[str, Any]] = {}


def main() -> None:
    options = _options()
    started = time.process_time()
    prior = shipped() if options.shipped else Coefficients(beliefs())
    every = read_rows(options.runs)
    rows = [row for row in every if row.tier_time not in ("X", "C")]
    if options.shipped:
        rows = _untaught(rows)
    for name, (of_set, by, target) in SETS.items():
        members = [row for row in rows if row.source and of_set(row)]
        folds = 5 if by == "row" else 1000
        _validated(name, validate(members, folds=folds, by=by, prior=prior), target)
    _vtrain(rows, prior)
    _sources(price(rows), prior)
    _memory_and_rows(every)
    if options.save:
        _save(options, time.process_time() - started)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", type=Path)
    parser.add_argument("--shipped", action="store_true", help="folds start from the shipped coefficients")
    parser.add_argument("--save", type=Path, metavar="FOLDER")
    return parser.parse_args()


def _untaught(rows: list[Row]) -> list[Row]:
    """Without the runs that the shipped coefficients were fitted to."""
    seen = set(identities(price([Row(0, dict(values)) for values in fitted_rows()])))
    known = price(rows)
    taught = {id(row) for row, one in zip(known.rows, identities(known)) if one in seen}
    return [row for row in rows if id(row) not in taught]


def _say(name: str, target: str, **figures: Any) -> None:
    kept = {key: round(value, 2) if isinstance(value, float) else value for key, value in figures.items()}
    FOUND[name] = {**kept, "target": target}
    print(f"{name}: {' '.join(f'{k} {v}' for k, v in kept.items())}  target {target}", flush=True)


def _figures(errors: Any) -> dict[str, Any]:
    found = statistics(errors)
    return {"runs": found["n"], "mean": 100 * found["mape"], "median": 100 * found["median"]}


def _validated(name: str, report: Report, target: str) -> None:
    summary = report.summary()
    found = _figures(report.scores.errors)
    dense = [e for row, e in zip(report.scores.rows, report.scores.errors) if row.model_type == "dense"]
    if 0 < len(dense) < len(report.scores.rows):
        found["dense"] = 100 * statistics(dense)["mape"]
    found["inside"] = 100 * summary["interval_coverage"]
    found["half_width"] = 100 * summary["interval_half_width"]
    if summary["ranking"]["groups"]:
        found["groups"] = summary["ranking"]["groups"]
        found["regret"] = 100 * summary["ranking"]["mean_regret"]
    _say(name, target, **found)


def _vtrain(rows: list[Row], prior: Coefficients) -> None:
    single = _timed(rows, "vtrain-ground-truth-single")
    multi = _timed([row for row in rows if (row.tp or 1) <= 8], "vtrain-ground-truth-multi")
    for name, table, target in (("vTrain single", single, "10"), ("vTrain multi, TP <= 8", multi, "9.5")):
        for word, start in (("beliefs", prior), ("shipped", shipped())):
            log = fit.log_times(table.jobs, start)
            _say(
                f"{name}, no runs of its own, {word}", target, **_figures(np.exp(log) / table.measured_s - 1)
            )
    _draw("vTrain single, 30 random", single, lambda rng, n: rng.choice(n, 30, replace=False), prior, "4")
    _draw("vTrain single, 30 chosen", single, lambda rng, n: _chosen(rng, single, prior), prior, "2.5")
    _draw(
        "vTrain multi, 20 random",
        multi,
        lambda rng, n: rng.choice(n, 20, replace=False),
        prior,
        "6.5, median 3.5",
    )
    keys = np.unique(ranking.group_keys(single.rows), return_inverse=True)[1]
    fold = (np.random.default_rng(0).permutation(keys.max() + 1) % 5)[keys]
    expected = np.empty(len(fold))
    for part in range(5):
        others = _evenly(np.flatnonzero(fold != part), FOR_GROUPS)
        expected[fold == part] = predict(single.jobs.take(fold == part), _calibrated(single, others, prior))[
            0
        ]
    groups = ranking.rank(single.rows, expected, single.measured_s)
    regrets = [100 * group.regret for group in groups]
    found = {"groups": len(groups), "regret": float(np.mean(regrets)), "worst": float(max(regrets))}
    _say("vTrain single, unseen groups", "regret 1", **_figures(expected / single.measured_s - 1), **found)


def _timed(rows: list[Row], source: str) -> Priced:
    return price([row for row in rows if source in (row.source or "")])


def _evenly(members: Any, most: int) -> Any:
    return members[np.linspace(0, len(members) - 1, min(most, len(members))).astype(int)]


def _calibrated(table: Priced, members: Any, prior: Coefficients) -> Any:
    part = Priced([table.rows[i] for i in members], table.jobs.take(members), table.measured_s[members], [])
    return calibrate(part, prior)


def _chosen(rng: np.random.Generator, table: Priced, prior: Coefficients) -> Any:
    """30 of nine tenths of the runs, so that draws differ."""
    pool = rng.choice(len(table.rows), len(table.rows) * 9 // 10, replace=False)
    return pool[fit.reduction(table.jobs.take(pool), prior, 30, Scales())]


def _draw(
    name: str,
    table: Priced,
    choose: Callable[[np.random.Generator, int], Any],
    prior: Coefficients,
    target: str,
) -> None:
    means, medians = [], []
    for seed in range(DRAWS):
        taken = choose(np.random.default_rng(seed), len(table.rows))
        others = np.setdiff1d(np.arange(len(table.rows)), taken)
        expected, _, _ = predict(table.jobs.take(others), _calibrated(table, taken, prior))
        found = statistics(expected / table.measured_s[others] - 1)
        means.append(100 * found["mape"])
        medians.append(100 * found["median"])
    _say(
        name,
        target,
        mean=float(np.mean(means)),
        median=float(np.mean(medians)),
        draws=[round(m, 1) for m in means],
    )


def _sources(table: Priced, prior: Coefficients) -> None:
    """Every source predicted from all others."""
    of = np.array([row.source or "-" for row in table.rows])
    timed = np.isfinite(table.measured_s)
    means: dict[str, tuple[int, float]] = {}
    inside: list[bool] = []
    for source in sorted(set(of[timed])):
        others = [
            _evenly(np.flatnonzero(timed & (of == other)), OF_A_SOURCE)
            for other in sorted(set(of[timed]))
            if other != source
        ]
        mine = np.flatnonzero(timed & (of == source))
        expected, low, high = predict(
            table.jobs.take(mine), _calibrated(table, np.concatenate(others), prior)
        )
        measured = table.measured_s[mine]
        inside += ((low <= measured) & (measured <= high)).tolist()
        means[source] = (len(mine), 100 * statistics(expected / measured - 1)["mape"])
        print(f"  without {source}: {len(mine)} runs, mean {means[source][1]:.1f}", flush=True)
    large = [mean for n, mean in means.values() if n >= FEW]
    _say(
        "a source left out", "12", mean=float(np.mean([mean for _, mean in means.values()])), sources=len(means),
        mean_of_large=float(np.mean(large)), large_sources=len(large), median=float(np.median(large)),
        inside=100 * float(np.mean(inside)), by_source={s: round(mean, 1) for s, (_, mean) in means.items()},
    )  # fmt: skip


def _memory_and_rows(rows: list[Row]) -> None:
    trained = [row for row in rows if row.kind != "inference"]
    report = validate(trained)
    by: dict[str, list[float]] = {}
    for row, error in report.memory:
        by.setdefault(f"memory, {row.source}", []).append(error)
    for name, errors in sorted(by.items()):
        _say(name, "-", **_figures(errors))
    labels = sum(not right for _, right in report.labels)
    _say("memory, labels", "all right", runs=len(report.labels), wrong=labels)
    counts = {
        source: (part["skipped"], part["rows"])
        for source, part in report.by_source().items()
        if part["skipped"]
    }
    _say(
        "training runs skipped",
        "5 % of a source",
        runs=len(report.skipped),
        of=len(trained),
        by_source=counts,
    )


def _save(options: argparse.Namespace, seconds: float) -> None:
    facts = machine_facts()
    content = {
        "date": date.today().isoformat(),
        "machine": {key: facts[key] for key in ("cpu", "cores", "memory_bytes")},
        "versions": {
            "fivefold": versions()["fivefold"],
            "numpy": np.__version__,
            "python": sys.version.split()[0],
        },
        "prior": "shipped" if options.shipped else "beliefs",
        "cpu_seconds": round(seconds, 1),
        "percent": FOUND,
    }
    path = options.save / f"step_time_targets-{content['date']}.json"
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    print(f"wrote {path}")


if __name__ == "__main__":
    main()

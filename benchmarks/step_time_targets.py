"""Errors of the step time on a runs table, set by set: `python benchmarks/step_time_targets.py RUNS.jsonl`.

Every figure is of runs that no fit saw. Folds start from the beliefs alone (`--shipped`: from the shipped coefficients;
then the runs that these were fitted to are left out). Figures are percentages.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np

from fivefold.estimate.coefficients import Coefficients, beliefs, fitted_rows, shipped
from fivefold.plan import fit
from fivefold.plan.calibration import calibrate, predict
from fivefold.plan.priced import Priced, price
from fivefold.plan.residual import Scales
from fivefold.plan.runs_table import Row, read_rows
from fivefold.plan.validate import By, Report, identities, statistics, validate

DRAWS = 5
SETS: dict[str, tuple[Callable[[Row], bool], By, str]] = {
    "Bridge A2, 5 folds": (lambda r: "bridge-perf" in r.source and r.tier_time == "A2", "row", "6"),
    "Bridge A2, unseen models": (lambda r: "bridge-perf" in r.source and r.tier_time == "A2", "model", "8"),
    "Mosaic, 5 folds": (lambda r: "mosaicml" in r.source, "row", "4"),
    "Mosaic, unseen models": (lambda r: "mosaicml" in r.source, "model", "-"),
    "BLOOM, 5 folds": (lambda r: "bloom" in r.source, "row", "6"),
    "BLOOM, unseen groups": (lambda r: "bloom" in r.source, "group", "-"),
    "Zero-Bubble, 5 folds": (lambda r: "Zero Bubble" in r.source, "row", "4"),
    "Zero-Bubble, unseen groups": (lambda r: "Zero Bubble" in r.source, "group", "-"),
    "Folding, 5 folds": (lambda r: "Folding" in r.source, "row", "8"),
    "Folding, unseen models": (lambda r: "Folding" in r.source, "model", "-"),
    "Korthikanti + SC21 3D, 5 folds": (
        lambda r: "Reducing" in r.source or ("SC21" in r.source and (r.zero_stage or 0) < 3), "row", "4.5",
    ),
    "torchtitan, 5 folds": (lambda r: "torchtitan" in r.source, "row", "10"),
    "vTrain multi node, unseen groups": (lambda r: "vtrain-ground-truth-multi" in r.source, "group", "-"),
}  # fmt: skip
"""Name -> (its rows, what is never in two folds, target)."""


def main() -> None:
    prior = shipped() if "--shipped" in sys.argv else Coefficients(beliefs())
    rows = [row for row in read_rows(Path(sys.argv[1])) if row.tier_time not in ("X", "C")]
    if "--shipped" in sys.argv:
        seen = set(identities(price([Row(0, dict(values)) for values in fitted_rows()])))
        known = price(rows)
        taught = {id(row) for row, one in zip(known.rows, identities(known)) if one in seen}
        rows = [row for row in rows if id(row) not in taught]
    for name, (of_set, by, target) in SETS.items():
        members = [row for row in rows if row.source and of_set(row)]
        folds = 5 if by == "row" else 1000
        say(name, validate(members, folds=folds, by=by, prior=prior), target)
    single = timed(rows, "vtrain-ground-truth-single")
    multi = timed([row for row in rows if (row.tp or 1) <= 8], "vtrain-ground-truth-multi")
    for name, table, target in (("vTrain single", single, "10"), ("vTrain multi, TP <= 8", multi, "9.5")):
        log = fit.log_times(table.jobs, prior)
        print(f"{name}, no runs of its own: {figures(np.exp(log) / table.measured_s - 1)}  target {target}")
    draw("vTrain single, 30 random", single, lambda rng, n: rng.choice(n, 30, replace=False), prior, "4")
    draw("vTrain single, 30 chosen", single, lambda rng, n: chosen(rng, single, prior), prior, "2.5")
    draw("vTrain multi, 20 random", multi, lambda rng, n: rng.choice(n, 20, replace=False), prior, "6.5")


def say(name: str, report: Report, target: str) -> None:
    summary = report.summary()
    ranks = summary["ranking"]
    regret = (
        f"  regret {100 * ranks['mean_regret']:.1f} of {ranks['groups']} groups" if ranks["groups"] else ""
    )
    dense = [e for row, e in zip(report.scores.rows, report.scores.errors) if row.model_type == "dense"]
    split = (
        f"  dense {100 * statistics(dense)['mape']:.1f}" if 0 < len(dense) < len(report.scores.rows) else ""
    )
    print(
        f"{name}: {figures(report.scores.errors)}{split}  inside {100 * summary['interval_coverage']:.0f} of "
        f"+-{100 * summary['interval_half_width']:.0f}{regret}  target {target}",
        flush=True,
    )


def figures(errors: object) -> str:
    found = statistics(errors)
    return f"{found['n']} runs, mean {100 * found['mape']:.1f} median {100 * found['median']:.1f}"


def timed(rows: list[Row], source: str) -> Priced:
    return price([row for row in rows if source in (row.source or "")])


def chosen(rng: np.random.Generator, table: Priced, prior: Coefficients) -> np.ndarray:
    """30 of nine tenths of the runs, so that draws differ."""
    pool = rng.choice(len(table.rows), len(table.rows) * 9 // 10, replace=False)
    return pool[fit.reduction(table.jobs.take(pool), prior, 30, Scales())]


def draw(
    name: str,
    table: Priced,
    choose: Callable[[np.random.Generator, int], np.ndarray],
    prior: Coefficients,
    target: str,
) -> None:
    means, medians = [], []
    for seed in range(DRAWS):
        taken = choose(np.random.default_rng(seed), len(table.rows))
        others = np.setdiff1d(np.arange(len(table.rows)), taken)
        part = Priced([table.rows[i] for i in taken], table.jobs.take(taken), table.measured_s[taken], [])
        expected, _, _ = predict(table.jobs.take(others), calibrate(part, prior))
        found = statistics(expected / table.measured_s[others] - 1)
        means.append(100 * found["mape"])
        medians.append(100 * found["median"])
    listed = " ".join(f"{mean:.1f}" for mean in means)
    print(
        f"{name}: mean {np.mean(means):.1f} ({listed}) median {np.mean(medians):.1f}  target {target}",
        flush=True,
    )


if __name__ == "__main__":
    main()

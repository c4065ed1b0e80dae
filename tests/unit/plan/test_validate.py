"""What `validate` reports: errors, regret, intervals, and that nothing is scored that took part in a fit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fivefold.errors import RecordError
from fivefold.estimate.coefficients import fitted_rows, shipped
from fivefold.plan import fit
from fivefold.plan.calibration import calibrate
from fivefold.plan.priced import price
from fivefold.plan.ranking import rank
from fivefold.plan.runs_table import Row
from fivefold.plan.validate import statistics, validate

STEP = ("step_time", "memory", "feasibility", "ranking", "interval_coverage", "by_source", "skipped")
"""Keys of --json that others read."""


def table(error: Any = 0.0, **changes: Any) -> list[Row]:
    """16 runs of two models in four layouts each and two batches; measured = predicted x exp(error)."""
    runs = [
        {
            "source": "here", "model_name": f"h{hidden}", "layers": 24, "hidden": hidden, "heads": 16, "seq_len": 2048,
            "ffn_hidden": 4 * hidden, "vocab": 50000, "gpu": "A100-80GB", "num_gpus": 16, "tp": tp, "pp": pp,
            "micro_batch": 1, "global_batch": batch, "framework": "Megatron-LM", "precision": "fp16", **changes,
        }
        for hidden in (2048, 4096) for batch in (64, 128) for tp, pp in ((1, 1), (1, 4), (4, 1), (8, 2))
    ]  # fmt: skip
    log = fit.log_times(price([Row(i, run) for i, run in enumerate(runs)]).jobs, shipped())
    seconds = np.exp(log + error)
    return [Row(i, {**run, "iter_time_s": float(s)}) for i, (run, s) in enumerate(zip(runs, seconds), 1)]


def test_statistics_by_hand() -> None:
    found = statistics([0.1, -0.2, 0.3, 0.0])
    assert found == {"n": 4, "mape": pytest.approx(0.15), "median": pytest.approx(0.15), "p90": pytest.approx(0.27),
                     "bias": pytest.approx(0.05)}  # fmt: skip
    assert statistics([])["n"] == 0


def test_a_perfect_prediction_has_no_error() -> None:
    summary = validate(table()).summary()
    assert set(STEP) <= set(summary)
    assert summary["step_time"]["n"] == 16
    assert summary["step_time"]["mape"] == pytest.approx(0, abs=1e-9)
    assert summary["ranking"] == {"groups": 4, "mean_regret": 0, "max_regret": 0, "rank_correlation": 1}
    assert summary["interval_coverage"] == 1
    assert summary["by_source"]["here"]["step_time"] == summary["step_time"]


def test_errors_are_of_the_prediction_beside_the_measurement() -> None:
    summary = validate(table(np.log(1.25))).summary()
    assert summary["step_time"]["bias"] == pytest.approx(1 / 1.25 - 1)
    assert validate(table(np.log(2))).summary()["interval_coverage"] == 0


def test_regret_is_how_much_slower_the_predicted_best_is() -> None:
    rows = table()[:4]
    measured = np.array([2.0, 1.0, 3.0, 1.05])
    (group,) = rank(rows, np.array([1.0, 2.0, 3.0, 4.0]), measured)
    assert group.regret == 1.0
    assert group.layouts == 4
    (close,) = rank(rows, np.array([4.0, 2.0, 3.0, 1.0]), measured)
    assert close.regret == 0  # 5 % is within the spread of repeats
    assert rank(rows[:3], measured[:3], measured[:3]) == []


@pytest.mark.parametrize(
    ("predicted", "expected"),
    [([1, 2, 3, 4], 1.0), ([4, 3, 2, 1], -1.0), ([1, 2, 4, 3], 0.8), ([1, 1, 1, 1], 0.0)],
)
def test_rank_correlation(predicted: list[float], expected: float) -> None:
    (group,) = rank(table()[:4], np.array(predicted, dtype=float), np.arange(1.0, 5.0))
    assert group.correlation == pytest.approx(expected)


def test_runs_of_one_layout_count_once() -> None:
    rows = table()[:4]
    (group,) = rank([*rows, rows[0]], np.array([1, 2, 3, 4, 5.0]), np.array([1, 2, 3, 4, 1.5]))
    assert group.layouts == 4


def test_what_took_part_in_the_fit_is_not_scored() -> None:
    rows = table(0.1)
    made = calibrate(price(rows[:12]))
    report = validate(rows, made)
    assert (report.summary()["step_time"]["n"], report.summary()["fitted"]) == (4, 12)
    again = validate(rows[:12], made).summary()
    assert again["in_sample"]
    assert again["step_time"]["n"] == 12
    own = [Row(i, dict(values)) for i, values in enumerate(fitted_rows(), 1)]
    assert validate([*own, *rows]).summary()["fitted"] == len(own)


def test_each_fold_is_predicted_from_the_others_alone() -> None:
    """One model is 30 % slower: known by rows, its error is nearly gone; unseen, it is there."""
    slow = np.where(np.arange(16) < 8, 0.26, 0.0)
    by_row = validate(table(slow), folds=4).summary()["step_time"]
    by_model = validate(table(slow), folds=2, by="model").summary()["step_time"]
    assert by_row["mape"] < 0.05 < by_model["mape"]
    with pytest.raises(RecordError, match="all 16 rows are of one source"):
        validate(table(), folds=2, by="source")


def test_shuffled_measurements_leave_predictions_as_they_are() -> None:
    rows = table(np.linspace(-0.2, 0.2, 16))
    names = ("iter_time_s", "peak_mem_gib")
    order = np.random.default_rng(0).permutation(16)
    shuffled = [
        Row(row.line, {**row.values, **{n: rows[j].values[n] for n in names if n in rows[j].values}})
        for row, j in zip(rows, order)
    ]
    assert (validate(rows).scores.predicted_s == validate(shuffled).scores.predicted_s).all()


def test_rows_are_skipped_with_a_reason_and_counted() -> None:
    toy = Row(20, {**table()[0].values, "tier_time": "X"})
    bare = Row(21, {k: v for k, v in table()[0].values.items() if k != "iter_time_s"})
    unknown = Row(22, {**table()[0].values, "gpu": "TPU"})
    summary = validate([*table(), toy, bare, unknown]).summary()
    assert [one["line"] for one in summary["skipped"]] == [20, 21, 22]
    assert [one["reason"].split(":")[0].split("'")[0] for one in summary["skipped"]] == [
        "a toy model", "has no measured step time", "unknown device ",
    ]  # fmt: skip
    assert summary["by_source"]["here"]["skipped"] == 3
    with pytest.raises(RecordError, match="none of 1 rows can be scored"):
        validate([unknown])


def test_labels_of_memory_are_judged_and_counted() -> None:
    """A hundred GB of states on one device: it cannot have fitted, and did not."""
    bare = {k: v for k, v in table()[0].values.items() if k != "iter_time_s"}
    large = {**bare, "layers": 96, "hidden": 8192, "num_gpus": 1, "tp": 1, "global_batch": 1}
    rows = [
        Row(30, {**large, "oom": True}),
        Row(31, {**large, "oom": False}),
        Row(32, {**bare, "oom": False}),
    ]
    summary = validate(rows).summary()
    assert summary["feasibility"] == {"n": 3, "wrong": 1}
    assert summary["skipped"] == []
    listed = Row(33, {**large, "oom": True, "peak_mem_gib": 54.8})
    (skipped,) = validate([*table(), listed]).summary()["skipped"]
    assert skipped["reason"].startswith("ran out of memory")


def test_states_and_activations_together_are_a_measured_peak() -> None:
    bare = {k: v for k, v in table()[0].values.items() if k != "iter_time_s"}
    whole = validate([Row(1, {**bare, "peak_mem_gib": 12.0})]).summary()["memory"]
    parts = validate([Row(1, {**bare, "mem_static_gib": 7.0, "mem_act_gib": 5.0})]).summary()["memory"]
    assert whole == parts

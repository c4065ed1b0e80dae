"""The fit against runs whose truth is planted: times that the model itself gives under other coefficients."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fivefold.catalog import models
from fivefold.catalog.clusters import resolve
from fivefold.core.layout import Layout
from fivefold.errors import RecordError
from fivefold.estimate.coefficients import COMMON, Coefficients, beliefs, shipped
from fivefold.estimate.recompute import Recompute
from fivefold.plan import calibration, fit
from fivefold.plan.clock import Choice, Clock
from fivefold.plan.priced import Priced, price
from fivefold.plan.question import Question
from fivefold.plan.residual import Scales, covariance, places
from fivefold.plan.runs_table import Row
from fivefold.plan.suggest import suggestions

STIFF = Scales(stack=0.001, model=0.001, kernels=0.001, layout=0.001, noise=0.005)


def runs(**changes: Any) -> list[dict[str, Any]]:
    """A grid of 36 runs of two models."""
    return [
        {
            "source": "here", "model_name": f"h{hidden}", "layers": 24, "hidden": hidden, "heads": 16, "seq_len": 2048,
            "ffn_hidden": 4 * hidden, "vocab": 50000, "gpu": "H100-80GB", "num_gpus": 16, "gpus_per_node": 8, "tp": tp,
            "pp": pp, "micro_batch": micro_batch, "global_batch": 64, "framework": "Megatron-Core",
            "framework_version": "24.05", "precision": "bf16", **changes,
        }
        for hidden in (2048, 6144) for tp in (1, 2, 8) for pp in (1, 2) for micro_batch in (1, 2, 4)
    ]  # fmt: skip


def priced(rows: list[dict[str, Any]], measured_s: Any = None) -> Priced:
    if measured_s is not None:
        rows = [{**row, "iter_time_s": float(s)} for row, s in zip(rows, measured_s)]
    return price([Row(i, values) for i, values in enumerate(rows, 1)])


def truth(**log: float) -> Coefficients:
    return Coefficients(beliefs(), {(name, "all"): value for name, value in log.items()})


@pytest.fixture
def all_in_common(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of a coefficient is a cluster's own: what runs show is what coefficients become."""
    monkeypatch.setattr("fivefold.estimate.coefficients.GENERAL", 1.0)
    monkeypatch.setattr("fivefold.estimate.coefficients.LOCAL", 0.0)


@pytest.mark.usefixtures("all_in_common")
def test_planted_coefficients_are_found() -> None:
    planted = truth(gemm_16bit=-0.1, launch=0.4, tp_exposed=-0.3)
    jobs = priced(runs()).jobs
    measured = np.exp(fit.log_times(jobs, planted))
    found = fit.fit(jobs, measured, Coefficients(beliefs()), scales=STIFF)
    assert fit.log_times(jobs, found.coefficients) == pytest.approx(np.log(measured), abs=0.01)
    for name, expected in (("launch", 0.4), ("tp_exposed", -0.3)):
        total = sum(v for (n, _), v in found.coefficients.log.items() if n == name)
        assert total == pytest.approx(expected, abs=0.1)


@pytest.mark.usefixtures("all_in_common")
def test_one_odd_run_loses_its_weight() -> None:
    jobs = priced(runs()).jobs
    measured = np.exp(fit.log_times(jobs, truth(gemm_16bit=-0.1)))
    measured[7] *= 2.5
    found = fit.fit(jobs, measured, Coefficients(beliefs()), scales=replace(STIFF, noise=0.02))
    assert found.weights[7] == found.weights.min() < 0.2
    others = np.arange(len(measured)) != 7
    assert np.abs(fit.log_times(jobs, found.coefficients) - np.log(measured))[others].max() < 0.05


def test_runs_of_one_cluster_say_little_of_another() -> None:
    """A cluster on which launches take half as long again is learnt there, and moves others by a fraction of that."""
    jobs = priced(runs()).jobs
    slow = np.exp(fit.log_times(jobs, truth(launch=0.4)))
    found = fit.fit(jobs, slow, Coefficients(beliefs()), scales=STIFF)
    here, _ = fit.predict(jobs, found)
    assert here == pytest.approx(np.log(slow), abs=0.03)
    other = priced(runs(framework="NeMo/Megatron-Core")).jobs
    there, _ = fit.predict(other, found)
    before = fit.log_times(other, Coefficients(beliefs()))
    moved, whole = there - before, np.log(slow) - fit.log_times(jobs, Coefficients(beliefs()))
    assert 0 < moved.max() < 0.5 * whole.max()


def test_the_correction_learns_what_no_coefficient_says() -> None:
    """Runs of tp 2 are 30 % slower for no reason; half of them are seen."""
    jobs = priced(runs()).jobs
    measured = np.exp(fit.log_times(jobs, truth())) * np.where(jobs.tp == 2, 1.3, 1.0)
    seen = np.arange(len(measured)) % 2 == 0
    found = fit.fit(jobs.take(seen), measured[seen], Coefficients(beliefs()))
    log, sigma = fit.predict(jobs.take(~seen), found)
    errors = np.abs(log - np.log(measured[~seen]))
    assert np.median(errors) < 0.03
    assert np.mean(errors < fit.TENTH * sigma) >= 0.7
    far = priced(runs(hidden=512, ffn_hidden=2048, layers=4)).jobs
    assert fit.predict(far, found)[1].mean() > 2 * sigma.mean()


@pytest.mark.parametrize("change", [{"framework": "torchtitan"}, {"interconnect": "100 Gb/s per GPU"}])
def test_another_cluster_is_not_corrected(change: dict[str, Any]) -> None:
    a, b = priced(runs()).jobs, priced(runs(**change)).jobs
    keys = [("launch", COMMON), ("link", COMMON)]
    changes = fit.own_changes(np.linspace(0.1, 1, 2 * len(a)).reshape(-1, 2), keys, Coefficients(beliefs()))
    shared = covariance(places(a), places(a), Scales(), (changes, changes))
    assert shared.min() > 0
    assert not covariance(places(a), places(b), Scales(), (changes, changes)).any()
    assert np.diag(shared) == pytest.approx(Scales().variance + (changes**2).sum(axis=1))
    assert np.linalg.eigvalsh(shared).min() > -1e-9


def test_a_fit_does_not_depend_on_the_order_of_runs() -> None:
    jobs = priced(runs()).jobs
    rng = np.random.default_rng(0)
    measured = np.exp(fit.log_times(jobs, truth(launch=0.3)) + 0.02 * rng.standard_normal(len(jobs)))
    order = rng.permutation(len(jobs))
    one = fit.fit(jobs, measured, shipped(), scales=Scales())
    two = fit.fit(jobs.take(order), measured[order], shipped(), scales=Scales())
    assert fit.predict(jobs, one)[0] == pytest.approx(fit.predict(jobs, two)[0], abs=1e-6)


def test_runs_to_measure_differ_from_each_other_and_need_no_times() -> None:
    table = priced(runs())
    chosen = suggestions(table, 6)
    cells = {(one.row.hidden, one.row.tp, one.row.micro_batch) for one in chosen}
    assert len(cells) == 6
    timed = priced(runs(), np.arange(1, 37))
    assert [one.row.line for one in suggestions(timed, 6)] == [one.row.line for one in chosen]
    with pytest.raises(RecordError, match="36 rows can be chosen from, 40 are wanted"):
        suggestions(table, 40)


def test_measured_runs_are_not_asked_for_again() -> None:
    rows = runs()
    known = [{**row, "iter_time_s": 1.0 + i} for i, row in enumerate(rows[:18])]  # those of the smaller model
    chosen = suggestions(priced(known + rows[18:]), 5)
    assert all(one.row.hidden == 6144 for one in chosen)


def test_chosen_runs_teach_more_than_random_ones() -> None:
    """Kernels of each (hidden, tp, micro-batch) are fast or slow by chance; pipelines only string them up."""
    jobs = priced([run for batch in (64, 256) for run in runs(global_batch=batch)]).jobs
    rng = np.random.default_rng(1)
    cells = np.unique(np.stack([jobs.hidden, jobs.tp, jobs.micro_batch]), axis=1, return_inverse=True)[
        1
    ].ravel()
    log = fit.log_times(jobs, truth()) + 0.15 * rng.standard_normal(cells.max() + 1)[cells]

    def error(members: Any) -> float:
        found = fit.fit(jobs.take(members), np.exp(log[members]), shipped())
        return float(np.abs(fit.predict(jobs, found)[0] - log).mean())

    chosen = error(np.array(fit.reduction(jobs, shipped(), 16, Scales())))
    assert chosen < 0.7 * np.mean([error(rng.choice(len(jobs), 16, replace=False)) for _ in range(4)])


def test_a_calibration_is_the_same_after_the_file(tmp_path: Path) -> None:
    table = priced(runs())
    measured = np.exp(fit.log_times(table.jobs, truth(launch=0.3))) * np.where(table.jobs.tp == 8, 1.2, 1.0)
    made = calibration.calibrate(priced(runs(), measured))
    path = tmp_path / "mine.json"
    calibration.save(made, path)
    read = calibration.load(path)
    for a, b in zip(calibration.predict(table.jobs, made), calibration.predict(table.jobs, read)):
        assert a == pytest.approx(b, rel=1e-4)
    assert made.facts()["runs"] == 36


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("kind", "other", "is not a calibration"),
        ("version", 99, "version 99"),
        ("runs", [], "runs"),
        ("runs", [{"tp": 0}], "tp is 0"),
        ("runs", [{"tp": 1}], "not those that it was made of"),
        ("weights", [5.0] * 36, "holds 5.0"),
        ("factors", {"speed": {"all": [1, 1]}}, "unknown coefficient 'speed'"),
        ("factors", {"launch": {"all": [float("nan"), 1]}}, "holds nan"),
        ("factors", {"launch": {"all": [0, 1]}}, "holds 0"),
        ("scales", {}, "holds None"),
        ("widen", [1], "damaged"),
    ],
)
def test_a_damaged_calibration_is_refused(tmp_path: Path, key: str, value: Any, said: str) -> None:
    table = priced(runs())
    path = tmp_path / "mine.json"
    calibration.save(calibration.calibrate(priced(runs(), fit_seconds(table))), path)
    path.write_text(json.dumps({**json.loads(path.read_text()), key: value}))
    with pytest.raises(RecordError, match="mine") as caught:
        calibration.load(path)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def fit_seconds(table: Priced) -> Any:
    return np.exp(fit.log_times(table.jobs, truth()))


def test_what_is_no_calibration_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="cannot read"):
        calibration.load(tmp_path / "none.json")
    path = tmp_path / "x.json"
    path.write_text("{")
    with pytest.raises(RecordError, match="not JSON"):
        calibration.load(path)
    with pytest.raises(RecordError, match="0 rows have a measured step time"):
        calibration.calibrate(priced(runs()))


@pytest.mark.parametrize(
    ("cluster", "framework", "corrected", "said"),
    [
        ("2x8 H100, 400 Gb/s", "standard", True, "times are corrected by 36 measured runs of Our Megatron-Core"),
        ("2x8 H100, 400 Gb/s", "megatron-core", True, "times are corrected by 36"),
        ("8 H100", "standard", True, "times are corrected by 36"),
        ("2x8 H100, 400 Gb/s", "deepspeed", False, "no run on H100 with deepspeed"),
        ("2x8 H100, 100 Gb/s", "standard", False, "50 GB/s between nodes"),
        ("2x8 A100-80GB, 200 Gb/s", "standard", False, "no run on A100-80GB"),
    ],
)  # fmt: skip
def test_a_correction_reaches_a_question(cluster: str, framework: str, corrected: bool, said: str) -> None:
    """By whatever name the runs call their framework; on their devices and their network, and nowhere else."""
    rows = [{**row, "interconnect": "400 Gb/s per GPU"} for row in runs(framework="Our Megatron-Core")]
    table = priced(rows)
    slow = calibration.calibrate(priced(rows, 3 * fit_seconds(table)), shipped())
    q = Question(
        spec=models.preset("llama-2-7b"),
        cluster=resolve(cluster),
        seq_len=2048,
        global_batch=64,
        framework=framework,
    )
    clock = Clock(q, slow)
    assert said in clock.calibrated()[0]
    jobs = clock.jobs([Choice(Layout(tp=2, dp=q.devices // 2), 1, Recompute())])
    coefficients_alone = np.exp(fit.log_times(jobs, slow.coefficients))
    assert (abs(calibration.predict(jobs, slow)[0] / coefficients_alone - 1)[0] > 0.02) == corrected

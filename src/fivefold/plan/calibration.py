"""A calibration: what runs taught, as a file. It holds the runs themselves, and the fit is made again when it is read.

The file is JSON. It comes from outside: it is read with the limits and the checks of a runs table.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fivefold.core.regular_file import read_text, write_whole
from fivefold.errors import RecordError
from fivefold.estimate.coefficients import COMMON, Coefficients, Key, shipped
from fivefold.plan.priced import Priced, price
from fivefold.plan.runs_table import FLAGS, MOST_BYTES, NUMBERS, WHOLE, WORDS, Row, checked_record
from fivefold.plan.uncorrected import TENTH, predict_uncorrected

if TYPE_CHECKING:
    from fivefold.estimate.jobs import Column, Jobs
    from fivefold.plan.fit import Fit

KIND = "fivefold calibration"
VERSION = 2
MOST_RUNS = 1500
"""More runs are thinned evenly: a fit takes time with the cube of their number."""
FEWEST_RUNS = 3
LARGEST_LOG = 7.0
MOST_NAMED = 5
MOVED = 0.05
"""A coefficient that changed by less is not named."""
KEPT = frozenset((*WHOLE, *FLAGS, *WORDS, *NUMBERS)) - {
    "peak_mem_gib", "mem_static_gib", "mem_act_gib", "oom", "peak_mem_kind", "peak_mem_rank",
}  # fmt: skip


@dataclass(frozen=True)
class Calibration:
    """Coefficients, and the runs that correct them where they are near. No runs: the coefficients that are shipped."""

    rows: tuple[Row, ...]
    fit: Fit | None
    jobs: Jobs | None = None
    """The runs as jobs."""

    @property
    def coefficients(self) -> Coefficients:
        return self.fit.coefficients if self.fit else shipped()

    def facts(self) -> dict[str, Any]:
        """What a person wants to know of it: runs, noise, error of left-out runs, and what moved most."""
        fitted = self.fit
        assert fitted is not None
        moves = {
            f"{name} ({key})" if key != COMMON else name: fitted.coefficients.log.get((name, key), 0.0)
            - shipped().log.get((name, key), 0.0)
            for name, key in fitted.keys
        }
        most = sorted(moves, key=lambda name: -abs(moves[name]))[:MOST_NAMED]
        return {
            "runs": len(self.rows),
            "noise": fitted.scales.noise,
            "left_out_median": fitted.left_out,
            "moved": {name: math.exp(moves[name]) for name in most if abs(moves[name]) > MOVED},
        }


def predict(jobs: Jobs, calibration: Calibration | None) -> tuple[Column, Column, Column]:
    """Seconds of a step: median, and the tenth and ninetieth percentile."""
    import numpy as np

    from fivefold.plan import fit

    if calibration is None or calibration.fit is None:
        log, sigma = predict_uncorrected(jobs, shipped())
    else:
        log, sigma = fit.predict(jobs, calibration.fit)
    return np.exp(log), np.exp(log - TENTH * sigma), np.exp(log + TENTH * sigma)


def calibrate(priced: Priced, prior: Coefficients | None = None) -> Calibration:
    """Fit to the rows that have a measured time.

    Raises: RecordError where too few have one.
    """
    import numpy as np

    from fivefold.plan import fit

    timed = np.flatnonzero(np.isfinite(priced.measured_s))
    if len(timed) < FEWEST_RUNS:
        first = [f"; {row.name}: {reason}" for row, reason in priced.skipped[:1]]
        raise RecordError(
            f"{len(timed)} rows have a measured step time and say enough to be priced; a calibration needs at least "
            f"{FEWEST_RUNS} (iter_time_s, tokens_per_s_per_gpu, samples_per_s_per_gpu, tflops_per_gpu or mfu)"
            f"{''.join(first)}"
        )
    if len(timed) > MOST_RUNS:
        timed = timed[np.linspace(0, len(timed) - 1, MOST_RUNS).astype(int)]
    jobs = priced.jobs.take(timed)
    found = fit.fit(jobs, priced.measured_s[timed], prior or shipped())
    return Calibration(tuple(priced.rows[i] for i in timed), found, jobs)


def save(calibration: Calibration, path: Path) -> None:
    """Write the file, whole or not at all. Raises: RecordError where the disk refuses."""
    fitted = calibration.fit
    assert fitted is not None
    factors: dict[str, dict[str, list[float]]] = {}
    for i, (name, key) in enumerate(fitted.keys):
        log = fitted.coefficients.log.get((name, key), 0.0)
        factors.setdefault(name, {})[key] = [math.exp(log), float(fitted.spread[i, i] ** 0.5)]
    content = {
        "kind": KIND,
        "version": VERSION,
        "factors": factors,
        "scales": {f.name: getattr(fitted.scales, f.name) for f in fields(fitted.scales)},
        "widen": [fitted.near, fitted.far],
        "weights": [round(weight, 4) for weight in fitted.weights.tolist()],
        "runs": [{k: v for k, v in row.values.items() if k in KEPT} for row in calibration.rows],
    }
    try:
        write_whole({path: json.dumps(content, indent=1, allow_nan=False) + "\n"})
    except OSError as error:
        raise RecordError(f"cannot write calibration {path}: {error.strerror}") from None


def load(path: Path) -> Calibration:
    """Read the file and make its fit again. Raises: RecordError with what is wrong with it."""
    import numpy as np

    from fivefold.plan import fit
    from fivefold.plan.residual import Scales

    content = _read(path)
    rows = [
        Row(number, checked_record(run, f"{path}, run {number}"))
        for number, run in enumerate(content["runs"], 1)
    ]
    priced = price(rows)
    if priced.skipped or not np.isfinite(priced.measured_s).all() or len(rows) != len(content["weights"]):
        raise RecordError(
            f"calibration {path} is damaged: its runs are not those that it was made of; make it again"
        )
    names = {f.name for f in fields(Scales)}
    scales = Scales(**{name: _number(content["scales"].get(name), path, 1e-4, 10.0) for name in names})
    weights = np.array([_number(weight, path, 1e-4, 1.0) for weight in content["weights"]])
    near, far = (_number(value, path, 0.01, 100.0) for value in content["widen"])
    coefficients = replace(shipped(), log={**shipped().log, **_factors(content["factors"], path)})
    restored = fit.restore(
        priced.jobs, priced.measured_s, shipped(), coefficients, scales=scales, weights=weights
    )
    return Calibration(tuple(rows), replace(restored, near=near, far=far), priced.jobs)


def _factors(factors: Any, path: Path) -> dict[Key, float]:
    known = shipped().beliefs
    found = {}
    for name, by_key in factors.items():
        if name not in known or not isinstance(by_key, dict):
            raise RecordError(
                f"calibration {path} names an unknown coefficient {str(name)[:40]!r}; make it again"
            )
        for key, pair in by_key.items():
            value = pair[0] if isinstance(pair, list) and pair else None
            found[name, str(key)] = math.log(
                _number(value, path, math.exp(-LARGEST_LOG), math.exp(LARGEST_LOG))
            )
    return found


def _number(value: Any, path: Path, least: float, most: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        raise RecordError(
            f"calibration {path} holds {str(value)[:40]} where a number from {least:g} to {most:g} goes"
        )
    return float(value)


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(read_text(path, MOST_BYTES, "calibration", RecordError))
    except (ValueError, RecursionError):
        raise RecordError(f"{path} is not a calibration: not JSON") from None
    shape = {"factors": dict, "scales": dict, "widen": list, "weights": list, "runs": list}
    if not isinstance(content, Mapping) or content.get("kind") != KIND:
        raise RecordError(f"{path} is not a calibration; `fivefold calibrate RUNS -o FILE` makes one")
    if content.get("version") != VERSION:
        raise RecordError(
            f"calibration {path} has version {str(content.get('version'))[:20]}; this version reads {VERSION}; "
            "make it again"
        )
    wrong = [name for name, kind in shape.items() if not isinstance(content.get(name), kind)]
    if wrong or len(content["widen"]) != 2 or not 0 < len(content["runs"]) <= MOST_RUNS:
        raise RecordError(
            f"calibration {path} is damaged: {', '.join(wrong) or 'runs or widen'}; make it again"
        )
    return dict(content)

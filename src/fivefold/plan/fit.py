"""Coefficients and local correction fitted together to measured runs.

    log measured = log predicted(coefficients) + correction + noise

The coefficients are pulled towards what was believed of them; the correction is a Gaussian process. Both are solved for
at once (generalised least squares), so a coefficient explains what all runs share and the correction what is left. Runs
that fit nothing else lose weight (Huber). How large the parts of the correction and the noise are follows from how well
each run is predicted from the others.

Source: Rasmussen and Williams 2006, sections 2.7 (basis functions with a prior) and 5.4.2 (leave-one-out); Huber 1981,
        "Robust Statistics", section 7.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING, Any

from fivefold.estimate.coefficients import COMMON, Coefficients, Key
from fivefold.estimate.step import seconds_by_term
from fivefold.plan.residual import Places, Scales, covariance, nearness, places
from fivefold.plan.uncorrected import TENTH as TENTH
from fivefold.plan.uncorrected import log_times as log_times

if TYPE_CHECKING:
    from fivefold.estimate.jobs import Column, Jobs
    from fivefold.plan.residual import Matrix

NUDGE = 1e-3
HUBER = 3.0
"""Runs whose error is more standard deviations than this lose weight."""
LEAST_WEIGHT = 0.02
LONGEST_STEP = 0.5
STEPS = 8
NOISES = (0.01, 0.02, 0.04, 0.08)
KERNELS = (0.05, 0.1, 0.2, 0.3, 0.4)
LAYOUTS = (0.03, 0.08)
SURE = 0.3
"""How sure the usual scales are: standard deviation of the logarithm of each."""
TRIED_RUNS = 300
"""Scales are chosen on so many runs at most."""
NARROWEST, WIDEST = 0.6, 4.0


@dataclass(frozen=True)
class Fit:
    """What was learned. Arrays: R runs, C keys of coefficients."""

    coefficients: Coefficients
    keys: list[Key]
    scales: Scales
    weights: Column
    """[R] 1, or less for runs that fit nothing else."""
    at: Places
    solved: Column
    """[R] inverse covariance times what the coefficients leave."""
    inverse: Matrix
    """[R, R] of the covariance of correction and noise."""
    jacobian: Matrix
    """[R, C]"""
    spread: Matrix
    """[C, C] covariance of the coefficients."""
    own: Matrix
    """[R, names] change with coefficients that are the cluster's own, in their standard deviations."""
    left_out: float = 0.0
    """Median error of a run that is predicted from all others."""
    near: float = 1.0
    far: float = 1.0
    """By how much intervals are wider than the model says: near to runs, and for models without any."""


def jacobian(jobs: Jobs, coefficients: Coefficients, keys: list[Key]) -> tuple[Column, Matrix]:
    """[n] log times and [n, keys] their change with the logarithm of each factor, by forward differences."""
    import numpy as np

    names = sorted({name for name, _ in keys})
    n = len(jobs)
    values = {name: np.tile(column, len(names) + 1) for name, column in coefficients.of(jobs).items()}
    for i, name in enumerate(names, 1):
        values[name][i * n : (i + 1) * n] *= np.exp(NUDGE)
    many = jobs.take(
        np.tile(np.arange(n), len(names) + 1)
    )  # one pass over all nudges is far faster than one for each
    logs = np.log(seconds_by_term(many, values).total).reshape(-1, n)
    base = logs[0]
    changes = {name: (logs[i] - base) / NUDGE for i, name in enumerate(names, 1)}
    found = np.zeros((len(jobs), len(keys)))
    for i, (name, key) in enumerate(keys):
        on = (key == COMMON) | (jobs.hardware == key) | (jobs.software == key)
        found[:, i] = np.where(on, changes[name], 0.0)
    return base, found


def own_changes(changes: Matrix, keys: list[Key], coefficients: Coefficients) -> Matrix:
    """[n, names] from [n, keys]: the change with each coefficient, in standard deviations from cluster to cluster."""
    import numpy as np

    common = [i for i, key in enumerate(keys) if key[1] == COMMON]
    own: Matrix = changes[:, common] * np.array([coefficients.local_spread(keys[i][0]) for i in common])
    return own


def fit(jobs: Jobs, measured_s: Column, prior: Coefficients, *, scales: Scales | None = None) -> Fit:
    """Fit to runs. `scales`: of the correction; None: those that predict left-out runs best.

    O(runs^3): about a second for a thousand.
    """
    import numpy as np

    at = places(jobs)
    keys = prior.keys_for(jobs.hardware.tolist(), jobs.software.tolist())
    problem = _Problem(jobs, np.log(measured_s), prior, keys, at)
    if scales is None:
        problem.solve(Scales(), steps=3)
        scales = problem.best_scales()
    fitted = problem.solve(scales, steps=STEPS)
    left_out, near, far = problem.left_out(fitted)
    return replace(fitted, left_out=left_out, near=near, far=far)


def restore(
    jobs: Jobs,
    measured_s: Column,
    prior: Coefficients,
    found: Coefficients,
    *,
    scales: Scales,
    weights: Column,
) -> Fit:
    """A fit that was made before, from its runs and the coefficients that it ended with."""
    import numpy as np

    keys = prior.keys_for(jobs.hardware.tolist(), jobs.software.tolist())
    problem = _Problem(jobs, np.log(measured_s), prior, keys, places(jobs))
    problem.theta = np.array([found.log.get(key, 0.0) for key in keys])
    problem.weights = weights
    return problem.solve(scales, steps=0)


def posterior(fitted: Fit) -> Coefficients:
    """The coefficients with how sure they are now."""
    sure = {
        **fitted.coefficients.spread,
        **{key: float(fitted.spread[i, i] ** 0.5) for i, key in enumerate(fitted.keys)},
    }
    return replace(fitted.coefficients, spread=sure)


def predict(jobs: Jobs, fitted: Fit) -> tuple[Column, Column]:
    """[n] logarithm of the seconds of a step, and its standard deviation. Between P10 and P90 lie +- TENTH of these."""
    import numpy as np

    known = set(fitted.keys)
    others = [
        key
        for key in fitted.coefficients.keys_for(jobs.hardware.tolist(), jobs.software.tolist())
        if key not in known
    ]
    base, changes = jacobian(jobs, fitted.coefficients, fitted.keys + others)
    mine, unknown = changes[:, : len(fitted.keys)], changes[:, len(fitted.keys) :]
    here, own = places(jobs), own_changes(mine, fitted.keys, fitted.coefficients)
    shared = covariance(here, fitted.at, fitted.scales, (own, fitted.own))
    pulled = shared @ fitted.inverse
    left = mine - pulled @ fitted.jacobian
    variance = fitted.scales.variance + (own * own).sum(axis=1) - np.einsum("ij,ij->i", pulled, shared)
    variance = variance + np.einsum("ij,jk,ik->i", left, fitted.spread, left) + fitted.scales.noise**2
    if others:
        variance = variance + unknown**2 @ np.array(
            [fitted.coefficients.prior_spread(key) ** 2 for key in others]
        )
    close = nearness(here, fitted.at).max(axis=1, initial=0.0)
    widen = close * fitted.near + (1 - close) * fitted.far
    return base + shared @ fitted.solved, widen * np.sqrt(np.maximum(variance, 1e-8))


def reduction(
    jobs: Jobs, prior: Coefficients, wanted: int, scales: Scales, known: Fit | None = None
) -> list[int]:
    """Which `wanted` of these jobs, once measured, leave the least variance of the prediction over all of them.

    Greedy: each next one lowers the sum of variances most. Nothing measured of these jobs takes part.
    Source: Cohn 1996, "Neural network exploration using optimal experiment design", equation 9 (active learning).
    """
    import numpy as np

    K, noise = belief(jobs, prior, known, scales)
    chosen: list[int] = []
    for _ in range(min(wanted, len(jobs))):
        gain = (K * K).sum(axis=0) / (np.diag(K) + noise**2)
        gain[chosen] = -np.inf
        best = int(gain.argmax())
        chosen.append(best)
        K = K - np.outer(K[:, best], K[best]) / (K[best, best] + noise**2)
    return chosen


def belief(
    jobs: Jobs, prior: Coefficients, known: Fit | None = None, scales: Scales | None = None
) -> tuple[Matrix, float]:
    """[n, n] covariance of what is believed of the jobs' log times, and the standard deviation of a measurement.

    `known`: what runs taught so far, whose scales count; without it those given, or the usual ones.
    """
    import numpy as np

    scales = scales or (known.scales if known else Scales())
    at = places(jobs)
    if known is None:
        keys = prior.keys_for(jobs.hardware.tolist(), jobs.software.tolist())
        _, changes = jacobian(jobs, prior, keys)
        believed = np.array([prior.prior_spread(key) ** 2 for key in keys])
        own = own_changes(changes, keys, prior)
        return covariance(at, at, scales, (own, own)) + (changes * believed) @ changes.T, scales.noise
    _, theirs = jacobian(jobs, known.coefficients, known.keys)
    own = own_changes(theirs, known.keys, known.coefficients)
    shared = covariance(at, known.at, scales, (own, known.own))
    left = theirs - shared @ known.inverse @ known.jacobian
    here = covariance(at, at, scales, (own, own)) - shared @ known.inverse @ shared.T
    return here + left @ known.spread @ left.T, scales.noise


class _Problem:
    """One table of runs under fit."""

    def __init__(self, jobs: Jobs, log_s: Column, prior: Coefficients, keys: list[Key], at: Places) -> None:
        import numpy as np

        self.jobs, self.log_s, self.prior, self.keys, self.at = jobs, log_s, prior, keys, at
        self.start = np.array([prior.log.get(key, 0.0) for key in keys])
        self.believed = np.array([prior.prior_spread(key) ** 2 for key in keys])
        self.theta = self.start.copy()
        self.weights = np.ones(len(log_s))

    @property
    def coefficients(self) -> Coefficients:
        return replace(self.prior, log={**self.prior.log, **dict(zip(self.keys, self.theta.tolist()))})

    def solve(self, scales: Scales, *, steps: int) -> Fit:
        """Gauss-Newton steps from where it stands, weights of odd runs renewed at each."""
        import numpy as np

        for step in range(steps + 1):
            base, J = jacobian(self.jobs, self.coefficients, self.keys)
            own = own_changes(J, self.keys, self.prior)
            shared = covariance(self.at, self.at, scales, (own, own))
            inverse = np.linalg.inv(shared + np.diag(scales.noise**2 / self.weights))
            spread = np.linalg.inv(J.T @ inverse @ J + np.diag(1 / self.believed))
            if step == steps:
                break
            pull = J.T @ inverse @ (self.log_s - base) - (self.theta - self.start) / self.believed
            change = np.clip(spread @ pull, -LONGEST_STEP, LONGEST_STEP)
            self.theta = self.theta + change
            left = inverse @ (self.log_s - base - J @ change) / np.sqrt(np.diag(inverse))
            self.weights = np.clip(HUBER / np.maximum(np.abs(left), 1e-9), LEAST_WEIGHT, 1.0)
            if np.abs(change).max() < NUDGE:
                steps = min(steps, step + 1)
        return Fit(
            self.coefficients,
            self.keys,
            scales,
            self.weights,
            self.at,
            inverse @ (self.log_s - base),
            inverse,
            J,
            spread,
            own,
        )

    def _errors(self, rows: Any) -> tuple[Column, Matrix]:
        """Of some runs: what the beliefs leave of the log times (linear about here), and the change with each key."""
        base, J = jacobian(self.jobs.take(rows), self.coefficients, self.keys)
        return self.log_s[rows] - base + J @ (self.theta - self.start), J

    def best_scales(self) -> Scales:
        """The scales under which runs are predicted best from all others (leave-one-out log probability)."""
        import numpy as np

        rows = np.linspace(0, len(self.log_s) - 1, min(TRIED_RUNS, len(self.log_s))).astype(int)
        errors, J = self._errors(rows)
        at, own = self.at.take(rows), own_changes(J, self.keys, self.prior)
        by_coefficients = (J * self.believed) @ J.T

        def score(scales: Scales) -> float:
            noise = np.diag(scales.noise**2 / self.weights[rows])
            inverse = np.linalg.inv(covariance(at, at, scales, (own, own)) + by_coefficients + noise)
            sure = np.diag(inverse)
            unit = inverse @ errors / np.sqrt(sure)
            robust = np.where(np.abs(unit) < HUBER, unit**2 / 2, HUBER * np.abs(unit) - HUBER**2 / 2)
            usual = [
                getattr(scales, name) / getattr(Scales(), name) for name in ("noise", "kernels", "layout")
            ]
            return float((np.log(sure) / 2 - robust).sum() - (np.log(usual) ** 2).sum() / (2 * SURE**2))

        tried = [Scales(noise=n, kernels=k, layout=a) for n, k, a in product(NOISES, KERNELS, LAYOUTS)]
        return max(tried, key=score)

    def left_out(self, fitted: Fit) -> tuple[float, float, float]:
        """Median error of a left-out run, and by how much intervals must widen to hold 80 % of left-out runs: single
        runs, and all runs of a model together.

        Source: split conformal intervals, Angelopoulos and Bates 2021, arXiv:2107.07511, section 2.3.2.
        """
        import numpy as np

        rows = np.arange(len(self.log_s))
        errors, J = self._errors(rows)
        scales = fitted.scales
        noise = np.diag(scales.noise**2 / self.weights)
        own = own_changes(J, self.keys, self.prior)
        shared = covariance(self.at, self.at, scales, (own, own))
        inverse = np.linalg.inv(shared + (J * self.believed) @ J.T + noise)
        solved = inverse @ errors
        single = np.abs(solved) / np.sqrt(np.diag(inverse))
        group = np.unique(np.round(self.at.model, 6), axis=0, return_inverse=True)[1].ravel()
        whole = single.copy()
        if group.max() > 0:
            for g in range(group.max() + 1):
                members = np.flatnonzero(group == g)
                block = np.linalg.inv(inverse[np.ix_(members, members)])
                whole[members] = np.abs(block @ solved[members]) / np.sqrt(np.diag(block))
        near, far = (float(np.quantile(z, 0.8)) / TENTH for z in (single, whole))
        error = float(np.median(np.abs(np.expm1(solved / np.diag(inverse)))))
        return error, min(max(near, NARROWEST), WIDEST), min(max(far, NARROWEST), WIDEST)

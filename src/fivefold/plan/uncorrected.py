"""Step times where no run is near: the coefficients that Fivefold comes with, and how far off they may be."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fivefold.estimate.step import step_times

if TYPE_CHECKING:
    from fivefold.estimate.coefficients import Coefficients
    from fivefold.estimate.jobs import Column, Jobs

TENTH = 1.2816
"""Standard deviations from the median to the tenth percentile of a normal distribution."""
ELSEWHERE, UNKNOWN = 0.13, 0.2
"""Standard deviation of the logarithm of measured over predicted time on a cluster that no run was seen of, and what a
device family or software era without runs adds: from leaving out whole sources of runs."""


def log_times(jobs: Jobs, coefficients: Coefficients) -> Column:
    """Logarithm of the predicted seconds of a step."""
    import numpy as np

    return np.log(step_times(jobs, coefficients).total)


def predict_uncorrected(jobs: Jobs, coefficients: Coefficients) -> tuple[Column, Column]:
    """As `fit.predict`, where no run is near: the coefficients alone, and by how much they are off elsewhere."""
    import numpy as np

    variance = np.full(len(jobs), ELSEWHERE**2)
    for words in (jobs.hardware, jobs.software):
        unseen = [word not in coefficients.seen for word in words.tolist()]
        variance += np.array(unseen) * UNKNOWN**2
    return log_times(jobs, coefficients), np.sqrt(variance)

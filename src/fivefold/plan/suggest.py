"""Which runs to measure next: those after which the predictions of all candidates are surest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fivefold.errors import RecordError
from fivefold.estimate.coefficients import shipped
from fivefold.plan.priced import Priced
from fivefold.plan.runs_table import Row

MOST_CANDIDATES = 2000
SHOWN = (
    "model_name",
    "num_gpus",
    "tp",
    "pp",
    "dp",
    "cp",
    "ep",
    "vpp",
    "micro_batch",
    "global_batch",
    "seq_len",
    "recompute",
)


@dataclass(frozen=True)
class Suggestion:
    """One run to measure."""

    place: int
    """1: first."""
    row: Row

    def facts(self) -> dict[str, Any]:
        return {"place": self.place, "line": self.row.line, "row": dict(self.row.values)}

    @property
    def text(self) -> str:
        words = [
            f"{name} {self.row.values[name]}" for name in SHOWN if self.row.values.get(name) not in (None, "")
        ]
        return f"{self.place:3d}. line {self.row.line}: {', '.join(words)}"


def suggestions(priced: Priced, wanted: int) -> list[Suggestion]:
    """The candidates in the order in which they help most. Raises: RecordError where there are too few."""
    import numpy as np

    from fivefold.plan import fit
    from fivefold.plan.residual import Scales

    timed = np.isfinite(priced.measured_s)
    known = None
    candidates = np.arange(len(timed))
    if not timed.all():
        candidates = np.flatnonzero(~timed)
        if timed.any():
            known = fit.fit(priced.jobs.take(timed), priced.measured_s[timed], shipped())
    if len(candidates) < wanted:
        raise RecordError(
            f"{len(candidates)} rows can be chosen from, {wanted} are wanted; ask for at most {len(candidates)}"
        )
    if len(candidates) > MOST_CANDIDATES:
        candidates = candidates[np.linspace(0, len(candidates) - 1, MOST_CANDIDATES).astype(int)]
    scales = known.scales if known else Scales()
    order = fit.reduction(priced.jobs.take(candidates), shipped(), wanted, scales, known)
    return [Suggestion(place, priced.rows[candidates[i]]) for place, i in enumerate(order, 1)]

"""The step of layouts whose stages are known one by one: `step`, with the pipeline as its list of actions runs.

Every virtual stage takes what its own layers take; the first has the embedding, the last the head. The busiest rank
computes all the time that is not bubble: compute and exposed communication are its own, bubble and messages are what
the timeline (`makespan`) adds without and with the time that messages take.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from fivefold.estimate import comm
from fivefold.estimate.makespan import counted, makespan
from fivefold.estimate.step import Layer, StepTimes, layers_of, parts, times_of_parts

if TYPE_CHECKING:
    from fivefold.estimate.jobs import Column, Jobs
    from fivefold.estimate.step import Parts

    Values = dict[str, Column]

FORWARD = 1 / 3
"""Share of the forward in what a microbatch takes beside its layers: fixed costs, gathers of ZeRO-3."""


@dataclass(frozen=True)
class Pipeline:
    """How one layout deals layers to its pipeline ranks."""

    schedule: str
    chunks: int
    layers: tuple[tuple[int, ...], ...]
    """Of each virtual stage, how many of each kind of `Jobs.blocks`."""
    ranks: tuple[tuple[int, ...], ...]
    """Virtual stages of each rank."""


def staged_times(jobs: Jobs, c: Values, pipelines: Sequence[Pipeline | None]) -> StepTimes:
    """As `step.seconds_by_term`; None: the layout has no pipeline. Rows that run the same list are one array."""
    import numpy as np

    made = layers_of(jobs, c)
    pieces = parts(made, jobs, c)
    times = times_of_parts(made, pieces, jobs, c)
    groups: dict[tuple[str, int, int, int], list[int]] = {}
    for row, pipeline in enumerate(pipelines):
        if pipeline is not None:
            pp = len(pipeline.ranks)
            key = pipeline.schedule, pp, pipeline.chunks, counted(pp, int(jobs.microbatches[row]))
            groups.setdefault(key, []).append(row)
    changed = {
        name: getattr(times, name).copy() for name in ("compute", "tp", "cp", "ep", "pp", "dp", "bubble")
    }
    for key, members in groups.items():
        rows = np.array(members)
        dealt = [pipelines[row] for row in members]
        exact = _pipeline_times(key[:3], _Rows(made, pieces, jobs, c, rows), dealt)
        for name, seconds in exact.items():
            changed[name][rows] = c["stack"][rows] * seconds
    return replace(times, **changed)


@dataclass(frozen=True)
class _Rows:
    """What is known of the rows of one group."""

    made: list[Layer]
    parts: Parts
    jobs: Jobs
    c: Values
    rows: Any

    def layer(self, name: str) -> Any:
        """[kinds, n] of one layer of each kind."""
        import numpy as np

        return np.stack([getattr(layer, name)[self.rows] for layer in self.made])


def _pipeline_times(
    key: tuple[str, int, int], here: _Rows, dealt: Sequence[Pipeline | None]
) -> dict[str, Column]:
    """Seconds by term, `stack` apart. `dealt`: the pipelines of the rows."""
    import numpy as np

    schedule, pp, chunks = key
    c, rows, m = here.c, here.rows, here.jobs.microbatches[here.rows]
    counts = np.array([one.layers for one in dealt if one is not None], dtype=np.float64).transpose(1, 2, 0)
    owned = next(one.ranks for one in dealt if one is not None)
    durations = _durations(here, counts, chunks)
    n = len(rows)
    message = c["pp_exposed"][rows] * comm.message(here.jobs, c)[rows]
    both = makespan(
        schedule,
        pp,
        chunks,
        np.tile(m, 2),
        np.tile(durations, (1, 2)),
        np.concatenate([0 * message, message]),
    )
    stages = counts.shape[0]
    whole = durations[:stages] + durations[stages : 2 * stages]

    def of_ranks(values: Any) -> Any:
        return np.stack([values[list(own)].sum(axis=0) for own in owned])

    busy = of_ranks(whole)
    busiest = busy.argmax(axis=0)[None]

    def of_busiest(values: Any) -> Any:
        return m * np.take_along_axis(of_ranks(values), busiest, axis=0)[0]

    sent = {axis: of_busiest((counts * here.layer(axis)).sum(axis=1)) for axis in ("tp", "cp", "ep")}
    sent["ep"] = sent["ep"] - of_busiest((counts * _hidden(here)).sum(axis=1))
    gathered = of_busiest(counts.sum(axis=1) * here.parts.gathered[rows])
    computed = m * busy.max(axis=0)
    rest = m * c["fixed_microbatch"][rows] + gathered + sum(sent.values())
    return {
        **sent,
        "compute": computed - rest,
        "dp": here.parts.reduced[rows] + gathered,
        "pp": both[n:] - both[:n],
        "bubble": c["bubble"][rows] * (both[:n] - computed),
    }


def _durations(here: _Rows, counts: Any, chunks: int) -> Any:
    """[kinds of computations x stages, n] seconds of F, B, I and W of every virtual stage.

    `counts`: [stages, kinds of layers, n].
    """
    import numpy as np

    rows = here.rows
    hidden, again = _hidden(here), here.jobs.recompute[rows]
    backward_of = here.layer("backward") - hidden * (1 + again) / (2 + again)
    forward = (counts * (here.layer("forward") - hidden / (2 + again))).sum(axis=1)
    backward = (counts * backward_of).sum(axis=1)
    weights = (counts * here.layer("backward") * here.layer("weights")).sum(axis=1)
    beside = counts.sum(axis=1) * here.parts.gathered[rows] + here.c["fixed_microbatch"][rows] / chunks
    forward = forward + FORWARD * beside
    backward = backward + (1 - FORWARD) * beside
    ends = here.parts.head
    forward[0] += here.parts.embedding[rows] / 2
    backward[0] += here.parts.embedding[rows] / 2
    forward[-1] += ends.forward[rows]
    backward[-1] += ends.backward[rows]
    weights[-1] += np.broadcast_to(ends.weights, ends.backward.shape)[rows]
    return np.concatenate([forward, backward, backward - weights, weights])


def _hidden(here: _Rows) -> Any:
    """[kinds, n] seconds of one layer's exchange with experts that the schedule hides, as in `step.parts`."""
    import numpy as np

    sent = here.layer("ep")
    hidden = here.jobs.overlap[here.rows] * sent
    return np.minimum(hidden, here.layer("forward") + here.layer("backward") - sent)

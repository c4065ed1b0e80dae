"""Whether predictions choose well: groups of runs that differ in their layout only."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fivefold.plan.runs_table import Row

if TYPE_CHECKING:
    from fivefold.estimate.jobs import Column

LAYOUT = (
    "tp", "pp", "dp", "cp", "ep", "etp", "zero_stage", "fsdp", "hsdp", "sequence_parallel", "vpp", "pp_schedule",
    "micro_batch", "num_microbatches", "recompute",
)  # fmt: skip
"""Columns in which the runs of one group may differ."""
JOB = (
    "source", "model_type", "layers", "hidden", "heads", "kv_heads", "head_dim", "ffn_hidden", "gated_mlp", "vocab",
    "experts", "top_k", "moe_ffn_hidden", "seq_len", "gpu", "num_gpus", "gpus_per_node", "interconnect",
    "global_batch", "precision", "grad_accum_dtype", "offload", "task", "framework", "framework_version",
)  # fmt: skip
"""Columns that are the same in a group."""

FEWEST = 4
"""Layouts of a group that is judged: with fewer, chance decides."""
REPEAT = 0.06
"""Two runs of one configuration differ by so much at the median: less is no difference."""


def no_slower(a_s: float, best_s: float) -> bool:
    """Whether a step of `a_s` cannot be told from one of `best_s`: slower by no more than repeats differ."""
    return a_s / best_s - 1 <= REPEAT


@dataclass(frozen=True)
class Group:
    """One judged group."""

    name: str
    layouts: int
    regret: float
    """How much slower the predicted best is than the measured best; 0 within the spread of repeats."""
    correlation: float
    """Spearman's, of predicted and measured times."""


def group_keys(rows: list[Row]) -> list[str]:
    """The job of each row as text: rows with the same one differ in layout only."""
    return [repr([row.values.get(name) for name in JOB]) for row in rows]


def rank(rows: list[Row], predicted_s: Column, measured_s: Column) -> list[Group]:
    """Judge every group of at least `FEWEST` layouts. Runs of the same layout count once, with their mean."""
    import numpy as np

    groups: dict[str, list[int]] = defaultdict(list)
    for i, key in enumerate(group_keys(rows)):
        groups[key].append(i)
    judged = []
    for members in groups.values():
        layouts: dict[Any, list[int]] = defaultdict(list)
        for i in members:
            layouts[tuple(rows[i].values.get(name) for name in LAYOUT)].append(i)
        if len(layouts) < FEWEST:
            continue
        predicted = np.array([predicted_s[one].mean() for one in layouts.values()])
        measured = np.array([measured_s[one].mean() for one in layouts.values()])
        chosen, least = float(measured[predicted.argmin()]), float(measured.min())
        row = rows[members[0]]
        name = f"{row.source or '-'}: {row.model_name or '-'} on {row.num_gpus}"
        judged.append(
            Group(
                name,
                len(layouts),
                0.0 if no_slower(chosen, least) else chosen / least - 1,
                _spearman(predicted, measured),
            )
        )
    return judged


def _spearman(a: Column, b: Column) -> float:
    """Correlation of the ranks of two columns; ties share their mean rank. 0 where one column is constant."""
    import numpy as np

    def ranks(x: Column) -> Column:
        _, place, count = np.unique(x, return_inverse=True, return_counts=True)
        return (np.cumsum(count) - (count - 1) / 2)[place]

    p, q = ranks(a) - ranks(a).mean(), ranks(b) - ranks(b).mean()
    size = float(np.sqrt((p @ p) * (q @ q)))
    return float(p @ q) / size if size else 0.0

"""Bytes that one rank sends in a step, by axis: of the same messages that `comm` prices, whatever hides them.

Of the pipeline rank that has most layers. An all-gather or a reduce-scatter over n ranks sends (n-1)/n of its larger
buffer, an all-reduce twice that (Thakur et al. 2005, section 3).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fivefold.estimate import comm, compute
from fivefold.estimate.compute import HALF
from fivefold.estimate.step import stage_layers

if TYPE_CHECKING:
    from fivefold.estimate.jobs import Blocks, Column, Jobs


def sent_bytes(jobs: Jobs) -> dict[str, Column]:
    """Axis (tp, cp, ep, pp, dp) -> bytes. Recompute sends again what a forward sends."""
    import numpy as np

    first, middle, last = stage_layers(jobs)
    share = np.maximum(np.maximum(first, np.where(jobs.pp > 2, middle, 0)), last) / jobs.layers
    each = jobs.microbatches * share
    again = jobs.recompute
    tp = cp = ep = dense = routed = 0 * jobs.hidden
    for block in jobs.blocks:
        tp = tp + block.count * (2 + again) * _tensor(block, jobs)
        cp = cp + block.count * (3 + again) * _part(comm.context_bytes(block, jobs), jobs.cp)
        ep = ep + block.count * (2 + again) * _expert(block, jobs)
        own, experts = compute.layer_parameters(block, jobs)
        dense, routed = dense + block.count * share * own, routed + block.count * share * experts
    neighbours = np.where(jobs.pp > 1, 2 * comm.hidden_bytes(jobs) / jobs.tp, 0.0)
    table = jobs.vocab * jobs.hidden / jobs.tp * np.where((jobs.pp == 1) & ~jobs.tied, 2.0, 1.0)
    return {
        "tp": each * tp,
        "cp": each * cp,
        "ep": each * ep,
        "pp": jobs.microbatches * jobs.chunks * neighbours,
        "dp": _data(dense + table, routed, jobs),
    }


def _part(size: Column, degree: Column) -> Column:
    """What one rank sends of a gather or a scatter."""
    return (degree - 1) / degree * size


def _tensor(block: Blocks, jobs: Jobs) -> Column:
    """Forward of one layer: two gathers' worth for attention, and two for a dense MLP."""
    return 2 * comm.cut_parts(block) * _part(comm.hidden_bytes(jobs), jobs.tp)


def _expert(block: Blocks, jobs: Jobs) -> Column:
    """Forward of one layer: dispatch and combine, and the gathers over etp."""
    import numpy as np

    size = comm.dispatched_bytes(block, jobs)
    moved = 2 * _part(size, jobs.ep) + 2 * _part(size * jobs.etp, jobs.etp)
    return np.where(block.experts > 0, moved, 0.0)


def _data(dense: Column, routed: Column, jobs: Jobs) -> Column:
    """Gradients summed and parameters gathered, as often as the ZeRO stage does it."""
    import numpy as np

    m, grads = jobs.microbatches, jobs.grad_bytes
    passes = np.where(jobs.zero == 2, m, 1.0) * grads + np.where(jobs.zero == 0, grads, HALF)
    passes = np.where(jobs.zero == 3, m * (2 * HALF + grads), passes)
    data = jobs.dp * jobs.cp
    edp = data * jobs.tp / (jobs.ep * jobs.etp)
    sent = _part(dense * passes, data) + _part(routed * passes, edp)
    return np.where(jobs.frozen, 0.0, sent)

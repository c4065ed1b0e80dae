"""Step time of many jobs at once: layers -> stages -> pipeline -> step, with every term kept.

layer     computation joined with the floor of kernel launches, and exposed communication of tp, cp and ep
stage     its layers, the embedding or the head, messages, gathers of ZeRO-3 where they take longer than a layer
pipeline  m microbatches on the slowest stage, and the bubble that the schedule leaves
step      reduction of gradients that nothing hides, update of the parameters, and what does not depend on size
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from fivefold.estimate import comm, compute
from fivefold.estimate.compute import join

if TYPE_CHECKING:
    from fivefold.estimate.coefficients import Coefficients
    from fivefold.estimate.jobs import Blocks, Column, Jobs

    Values = dict[str, Column]

LAUNCH_ROOF = 4.0
"""Exponent that joins work and launches."""
BUBBLE = {
    "gpipe": 1.0, "1f1b": 1.0, "bfs": 1.0,
    "zb1p": 1 / 3, "zb2p": 0.03, "zbv": 0.06, "dualpipev": 0.3, "vhalf": 0.5, "vmin": 0.9,
}  # fmt: skip
"""Share of the 1F1B bubble that a schedule leaves, beside its chunks.

Source: Qi et al. 2023, arXiv:2401.10241, table 1 and section 3 (ZB-H1: (p-1)(F + B - W) of (p-1)(F + B + W), a third
        where all are equal); ZB-2p and ZB-V as measured in its table 4; Qi et al. 2024, arXiv:2405.15362, table 1.
"""


OVERLAP = {"dualpipev": 0.8}
"""Share of dispatch and combine that a schedule hides behind the computation of another microbatch.

Source: DeepSeek-V3, arXiv:2412.19437, section 3.2.1: all of it, at the price of 20 of 132 multiprocessors.
"""


def split_bubble(schedule: str, F: Column, I: Column, W: Column) -> Column:  # noqa: E741
    """Share of the 1F1B bubble that a schedule leaves which computes weight gradients (W) apart from I.

    Formula: of (p-1)(F + I + W): zbh1 max(F + I - W, F, I); zbv max(I - W, I/2, F - W, F - I/2, W/2); dualpipev
             max(I - W/2, F - W, F/2); for many ranks, at least 2p microbatches and equal stages.
    Source:  zbh1: Qi et al. 2023, table 2; all three as the timeline of their lists has it.
    Checked by: tests/unit/estimate/test_makespan.py
    """
    import numpy as np

    limits = {
        "zbh1": (F + I - W, F, I),
        "zbv": (I - W, I / 2, F - W, F - I / 2, W / 2),
        "dualpipev": (I - W / 2, F - W, F / 2),
    }[schedule]
    longest = limits[0]
    for limit in limits[1:]:
        longest = np.maximum(longest, limit)
    share: Column = longest / (F + I + W)
    return share


@dataclass(frozen=True)
class StepTimes:
    """Seconds of one step by term; they add up to `total`."""

    compute: Column
    """Forward, backward and recompute on the slowest stage, and the floor of launches."""
    tp: Column
    cp: Column
    ep: Column
    pp: Column
    dp: Column
    """Exposed communication by axis."""
    bubble: Column
    optimizer: Column
    fixed: Column

    @property
    def total(self) -> Column:
        seconds: Column = sum(getattr(self, f.name) for f in fields(self))
        return seconds


@dataclass(frozen=True)
class Layer:
    """One layer of one microbatch: exposed seconds by term."""

    forward: Column
    backward: Column
    weights: Column
    """Of backward: the share that the gradients of weights take."""
    tp: Column
    cp: Column
    ep: Column
    dense: Column
    """Parameters of one rank, without experts."""
    routed: Column


def step_times(jobs: Jobs, coefficients: Coefficients) -> StepTimes:
    """Seconds of one optimizer step of every job, by term. O(jobs); no loop over them."""
    return seconds_by_term(jobs, coefficients.of(jobs))


def _layer(block: Blocks, jobs: Jobs, c: Values) -> Layer:
    """Formula: ((computation + exposed communication)^p + launches^p)^(1/p), backward with the recompute in it."""
    import numpy as np

    maps = [compute.linear(jobs.tokens, n, k, jobs, c) for n, k in compute.attention_maps(block, jobs)]
    F = block.ffn / jobs.tp
    maps.append(compute.linear(jobs.tokens, F * block.gated, jobs.hidden, jobs, c))
    maps.append(compute.linear(jobs.tokens, jobs.hidden, F, jobs, c))
    maps.append(compute.experts(block, jobs, c))
    core = compute.attention_core(block, jobs, c)
    passes = compute.elementwise(block, jobs, c)
    forward = sum(one.forward for one in maps) + core.forward + passes
    backward = sum(one.backward for one in maps) + core.backward + 2 * passes

    again = jobs.recompute
    tp = c["tp_exposed"] * comm.tensor(jobs, c) * comm.cut_parts(block)
    cp = c["cp_exposed"] * comm.context(block, jobs, c)
    ep = c["ep_exposed"] * comm.expert(block, jobs, c)
    launch = launches(block, jobs, c)
    sent = tp + cp + ep
    forward_all = join(forward + sent, launch, power=LAUNCH_ROOF)
    work = backward + again * forward + np.where(jobs.recompute_attention, core.forward, 0.0)
    sent_back = tp + 2 * cp + ep + again * sent
    backward_all = join(work + sent_back, (2 + again) * launch, power=LAUNCH_ROOF)
    weights = sum(one.weights for one in maps) / (work + sent_back)
    dense, routed = compute.layer_parameters(block, jobs)
    return Layer(
        forward_all,
        backward_all,
        weights,
        (2 + again) * tp,
        (3 + again) * cp,
        (2 + again) * ep,
        dense,
        routed,
    )


def seconds_by_term(jobs: Jobs, c: Values) -> StepTimes:
    """As `step_times`, with the coefficients given as columns."""
    made = layers_of(jobs, c)
    return times_of_parts(made, parts(made, jobs, c), jobs, c)


def times_of_parts(made: list[Layer], pieces: Parts, jobs: Jobs, c: Values) -> StepTimes:
    """The step by term, of layers and parts that are made already."""
    import numpy as np

    first, middle, last = stage_layers(jobs)
    stages = np.stack(pieces.stages)
    m, scale = jobs.microbatches, c["stack"]
    share = np.where(stages.argmax(axis=0) == 0, first, np.where(stages.argmax(axis=0) == 1, middle, last))
    sent = {axis: m * share * _mean(made, jobs, axis) for axis in ("tp", "cp", "ep")}
    sent["ep"] = sent["ep"] - m * share * pieces.hidden
    gathered = m * share * pieces.gathered
    busy = m * pieces.slowest - sum(sent.values()) - gathered
    return StepTimes(
        compute=scale * busy,
        **{axis: scale * seconds for axis, seconds in sent.items()},
        pp=scale * m * pieces.messages,
        dp=scale * (pieces.reduced + gathered),
        bubble=scale * pieces.bubble,
        optimizer=scale * pieces.updated,
        fixed=scale * (c["fixed_step"] + m * c["fixed_microbatch"]),
    )


def layers_of(jobs: Jobs, c: Values) -> list[Layer]:
    """One layer of each kind. Depends on neither pp, dp, the schedule, ZeRO nor the number of microbatches."""
    return [_layer(block, jobs, c) for block in jobs.blocks]


def total_seconds(made: list[Layer], jobs: Jobs, c: Values) -> Column:
    """`StepTimes.total` alone, of layers that are made already: what a search needs of a million layouts.

    Columns may be arrays of more axes that spread over each other.
    """
    p = parts(made, jobs, c)
    each = p.slowest + p.messages + c["fixed_microbatch"]
    total: Column = c["stack"] * (
        jobs.microbatches * each + p.bubble + p.reduced + p.updated + c["fixed_step"]
    )
    return total


@dataclass(frozen=True)
class Parts:
    """Seconds: of a microbatch on the first, a middle and the last stage, and of what comes once a step."""

    stages: tuple[Column, Column, Column]
    slowest: Column
    gathered: Column
    """In one layer, by ZeRO-3."""
    hidden: Column
    """Of the exchange with experts in one layer, by the schedule."""
    messages: Column
    bubble: Column
    reduced: Column
    updated: Column
    embedding: Column
    """Of one microbatch, forward and backward."""
    head: compute.Passes


def _mean(made: list[Layer], jobs: Jobs, name: str) -> Column:
    """Of all layers."""
    total = sum(block.count * getattr(layer, name) for block, layer in zip(jobs.blocks, made))
    return total / jobs.layers  # type: ignore[no-any-return]


def parts(made: list[Layer], jobs: Jobs, c: Values) -> Parts:
    """Stages in closed form: as many layers as `stage_layers` says, all of the mean kind."""
    import numpy as np

    L, one = jobs.layers, jobs.pp == 1
    forward, backward, dense, routed = (
        _mean(made, jobs, name) for name in ("forward", "backward", "dense", "routed")
    )
    gathered = 0 * forward
    if (jobs.zero == 3).any():
        gathered = _sharded_layer(forward, backward, dense, routed, jobs, c)
    routed_sent = _mean(made, jobs, "ep")
    hidden = np.minimum(jobs.overlap * routed_sent, forward + backward - routed_sent)
    layer = forward + backward - hidden + gathered
    ends = compute.head(jobs, c)
    first, middle, last = stage_layers(jobs)
    messages = c["pp_exposed"] * 2 * jobs.chunks * comm.message(jobs, c)
    extra = messages + c["fixed_microbatch"]
    head = ends.forward + ends.backward
    embedding = 4 * comm.hidden_bytes(jobs) / (jobs.memory_bytes_per_s * c["memory"])
    stages = (
        first * layer + embedding + np.where(one, head, 0.0),
        np.where(jobs.pp > 2, middle * layer, 0.0),
        np.where(one, 0.0, last * layer + head),
    )
    slowest = np.maximum(np.maximum(stages[0], stages[1]), stages[2])
    whole = stages[0] + stages[2] + np.maximum(jobs.pp - 2, 0) * stages[1]
    bubble = jobs.bubble / jobs.chunks * c["bubble"] * (whole - slowest + (jobs.pp - 1) * extra)
    tied = np.where(jobs.tied & one, 1.0, np.where(one, 2.0, 1.0)) * jobs.vocab * jobs.hidden / jobs.tp
    dense_all, routed_all = dense * L / jobs.pp + tied, routed * L / jobs.pp
    reduced = _reduced(dense_all, routed_all, backward * L / jobs.pp, jobs, c)
    updated = compute.optimizer(_updated(dense_all, routed_all, jobs), jobs, c)
    return Parts(stages, slowest, gathered, hidden, messages, bubble, reduced, updated, embedding, ends)


def launches(block: Blocks, jobs: Jobs, c: Values) -> Column:
    """Seconds that one process takes to launch the forward of a layer: the floor of its time.

    Formula: launch + two collectives, whose ranks wait for the slowest of them: 2 launch_collective log2 tp, + those of
             routing and of each expert of the rank, + those of a softmax that is not fused.
    """
    import numpy as np

    local = np.maximum(block.experts / jobs.ep, 1)
    return (
        c["launch"] * compute.parts_of_layer(block) / 2
        + 2 * c["launch_collective"] * np.log2(jobs.tp)
        + np.where(block.experts > 0, c["launch_experts"] + local * c["launch_each_expert"], 0.0)
        + np.where(compute.slow_softmax(block, jobs), c["launch_softmax"], 0.0)
    )


def stage_layers(jobs: Jobs) -> tuple[Column, Column, Column]:
    """Layers of the first, a middle and the last pipeline rank.

    Where pp x chunks divides the layers, all are alike. Else every virtual stage has the next whole number, and the
    first and last rank share what is left over, as the embedding and the head need room (Megatron-Core's
    `account_for_embedding_in_pipeline_split`; Qi et al. 2023, section 5.1).
    """
    import numpy as np

    if jobs.placed is not None:
        return jobs.placed
    L, pp = jobs.layers, jobs.pp
    virtual = pp * jobs.chunks
    whole = np.ceil(L / virtual) * jobs.chunks
    over = whole * pp - L
    even = (over == 0) | (over > 2 * whole) | (pp < 3)
    middle = np.where(even, L / pp, whole)
    return (
        np.where(even, L / pp, whole - np.floor(over / 2)),
        middle,
        np.where(even, L / pp, whole - np.ceil(over / 2)),
    )


def _sharded_layer(
    forward: Column, backward: Column, dense: Column, routed: Column, jobs: Jobs, c: Values
) -> Column:
    """ZeRO-3, per layer and microbatch: what its two gathers and one reduction add to the layer's own time.

    Formula: exposed x t + max(0, (1 - exposed) t - layer), t = 2 gathers of 2 bytes + a reduction of gradients.
    Source:  Rajbhandari et al. 2020, section 7.2; `strategies.data.rules`, zero3.
    """
    import numpy as np

    data = jobs.dp * jobs.cp
    edp = data * jobs.tp / (jobs.ep * jobs.etp)
    passes = 2 * compute.HALF + np.where(jobs.frozen, 0.0, jobs.grad_bytes)
    seconds = comm.gather(dense * passes, data, jobs.tp, jobs, c)
    seconds = seconds + comm.gather(routed * passes, edp, jobs.ep * jobs.etp, jobs, c)
    hidden = (1 - np.minimum(c["fsdp_exposed"], 1)) * seconds
    added = seconds - hidden + np.maximum(0, hidden - forward - backward)
    return np.where(jobs.zero == 3, added, 0.0)


def _reduced(dense: Column, routed: Column, last: Column, jobs: Jobs, c: Values) -> Column:
    """Exposed seconds of summing gradients and gathering updated parameters once a step (ZeRO-0 to 2).

    Formula: exposed x t + max(0, (1 - exposed) t - backward of the last microbatch).
    Source:  Rajbhandari et al. 2020, section 7; `strategies.data.rules`.
    """
    import numpy as np

    data = jobs.dp * jobs.cp
    edp = data * jobs.tp / (jobs.ep * jobs.etp)
    often = np.where(jobs.zero == 2, jobs.microbatches, 1.0)
    after = np.where(jobs.zero == 0, jobs.grad_bytes, compute.HALF)
    passes = often * jobs.grad_bytes + after
    seconds = comm.gather(dense * passes, data, jobs.tp, jobs, c)
    seconds = seconds + comm.gather(routed * passes, edp, jobs.ep * jobs.etp, jobs, c)
    hidden = (1 - np.minimum(c["dp_exposed"], 1)) * seconds
    added = seconds - hidden + np.maximum(0, hidden - last)
    return np.where((jobs.zero == 3) | jobs.frozen, 0.0, added)


def _updated(dense: Column, routed: Column, jobs: Jobs) -> Column:
    """Parameters that one rank updates: its shard under ZeRO; next to none where the base is frozen."""
    import numpy as np

    data = np.where(jobs.zero > 0, jobs.dp * jobs.cp, 1.0)
    edp = np.where(jobs.zero > 0, jobs.dp * jobs.cp * jobs.tp / (jobs.ep * jobs.etp), 1.0)
    return np.where(jobs.frozen, 0.0, dense / data + routed / edp)

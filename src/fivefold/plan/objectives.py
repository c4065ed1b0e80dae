"""What "best" means, beside the shortest step: the question that is planned for then."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, get_args

from fivefold.errors import LayoutError
from fivefold.plan.lattice import Fixed
from fivefold.plan.question import Question
from fivefold.plan.refusal import fewest_devices, fits, with_nodes

Objective = Literal["time", "cost", "devices", "sequence", "micro-batch"]
OBJECTIVES: tuple[Objective, ...] = get_args(Objective)


def questions(question: Question, fixed: Fixed, objective: Objective) -> list[tuple[Question, Fixed]]:
    """The questions whose fastest plan is the answer; of several the one that costs least per token.

    devices: on the fewest nodes that fit. sequence: with the longest sequence that fits. micro-batch: with the largest.
    cost: on all nodes, a half of them, a quarter, ... Raises: LayoutError where nothing fits.
    """
    if objective == "time":
        return [(question, fixed)]
    if objective == "devices":
        cluster = fewest_devices(question, fixed)
        if cluster is None:
            raise LayoutError(f"{question.spec.name} fits on no number of {question.node.device}")
        return [(replace(question, cluster=cluster), fixed)]
    if objective == "sequence":
        return [(replace(question, seq_len=longest_sequence(question, fixed)), fixed)]
    if objective == "micro-batch":
        return [(question, replace(fixed, micro_batch=largest_micro_batch(question, fixed)))]
    counts = [question.node.count]
    while counts[-1] % 2 == 0:
        counts.append(counts[-1] // 2)
    others = [with_nodes(question, count) for count in counts]
    return [(other, fixed) for other in others if other is not None]


def longest_sequence(question: Question, fixed: Fixed) -> int:
    """The longest sequence that fits, to an eighth of it, in multiples of the one that was asked for."""
    if not fits(question, fixed):
        raise LayoutError(
            f"{question.spec.name} does not fit on {question.cluster} with {question.seq_len} tokens"
        )
    times = 1
    while times < 2**16 and fits(replace(question, seq_len=question.seq_len * times * 2), fixed):
        times *= 2
    best = times * 8
    for eighths in range(15, 8, -1):
        length = question.seq_len * times * eighths // 8
        if fits(replace(question, seq_len=length), fixed):
            best = times * eighths
            break
    return question.seq_len * best // 8


def largest_micro_batch(question: Question, fixed: Fixed) -> int:
    """The largest micro-batch that fits."""
    from fivefold.plan.lattice import Lattice

    for size in reversed(Lattice(question, fixed).micro_batch):
        if fits(question, replace(fixed, micro_batch=size)):
            return size
    raise LayoutError(f"{question.spec.name} does not fit on {question.cluster} with any micro-batch")

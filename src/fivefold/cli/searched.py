"""What `plan` and `explain` share: the batch that is usual, the parts that are fixed, the search, the refusal."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fivefold.cli import asked

if TYPE_CHECKING:
    from fivefold.plan.calibration import Calibration
    from fivefold.plan.clock import Clock
    from fivefold.plan.lattice import Fixed
    from fivefold.plan.objectives import Objective
    from fivefold.plan.question import Question
    from fivefold.plan.search import Answer

USUAL_TOKENS = 4_194_304
"""Tokens of a step unless told otherwise: four million, or a sequence for every fourth device if that is more."""

MOST_USUAL = 2**19
"""Sequences of the usual step, however short: a power of two that `--global-batch` takes as well."""


def question(**options: Any) -> Question:
    """What the options ask; without a global batch, of the usual one."""
    if options["global_batch"]:
        return asked.question(**options)
    made = asked.question(**{**options, "global_batch": 1})
    batch = min(MOST_USUAL, max(1, USUAL_TOKENS // made.seq_len, made.devices // 4))
    return replace(made, global_batch=batch)


def assumed(question: Question, options: dict[str, Any]) -> list[str]:
    """What was assumed beyond what was typed: of the step, the software and the cluster."""
    said = asked.said(options["cluster"])
    if not options["global_batch"]:
        tokens = question.global_batch * question.seq_len
        said = [
            f"--global-batch is not given: {question.global_batch} sequences, {tokens:,} tokens a step",
            *said,
        ]
    if question.seq_len > question.spec.max_positions:
        said.append(
            f"{question.seq_len} tokens are more than the model's {question.spec.max_positions} positions"
        )
    if options["framework"] != question.framework:
        said.append(f"{options['framework']} is planned for as {question.framework}")
    return said


def fixed(text: str, micro_batch: int | None, recompute: str | None) -> Fixed:
    """Raises: LayoutError for a part that is not searched."""
    from fivefold.core.layout import Layout
    from fivefold.core.layout_text import read_layout
    from fivefold.errors import LayoutError
    from fivefold.estimate.recompute import Recompute
    from fivefold.plan.lattice import Fixed

    fields = read_layout(text) if text.split() else {}
    for name in ("order", "placement", "zero_group"):
        if name in fields and fields[name] != "even":
            raise LayoutError(f"--fix {text!r}: {name.replace('_', ' ')} is not searched; leave it out")
    if fields.get("schedule") in ("gpipe", "bfs", "custom"):
        raise LayoutError(
            f"--fix {text!r}: {fields['schedule']} is not searched; 1f1b, zbh1, zbv and dualpipev are"
        )
    of_pipeline: dict[str, Any] = {name: fields[name] for name in ("schedule", "chunks") if name in fields}
    Layout(**of_pipeline, pp=2)
    again = Recompute.parse(recompute) if recompute is not None else None
    return Fixed(layout=fields, micro_batch=micro_batch, recompute=again)


def refuse(question: Question, fixed: Fixed, answer: Answer, facts: dict[str, Any], as_json: bool) -> int:
    """Say that nothing fits, by how much, and what does. Returns: the exit code. Raises: LayoutError with the line."""
    from fivefold.cli.output import print_json
    from fivefold.errors import LayoutError
    from fivefold.plan.refusal import refusal

    why, nearest = refusal(question, fixed, answer)
    if not as_json:
        raise LayoutError(why)
    print_json({**facts, "refusal": why, "nearest": nearest})
    return 2


def best(
    question: Question, fixed: Fixed, objective: Objective, known: Calibration | None, *, top: int
) -> tuple[Clock, Answer]:
    """The best plans of the question that the objective makes of it, and what priced them.

    Raises: LayoutError where an objective finds nothing that fits.
    """
    from fivefold.plan.clock import Clock
    from fivefold.plan.objectives import questions
    from fivefold.plan.search import search

    tried = []
    for one, given in questions(question, fixed, objective):
        clock = Clock(one, known)
        tried.append((clock, search(one, clock, given, top=top)))
    return min(tried, key=lambda pair: _device_seconds_per_token(pair[0].question, pair[1]))


def _device_seconds_per_token(question: Question, answer: Answer) -> float:
    if not answer.found:
        return float("inf")
    return answer.found[0].step_s * question.devices / (question.global_batch * question.seq_len)

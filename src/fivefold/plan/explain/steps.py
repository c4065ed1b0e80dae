"""What each step away from a layout would change: memory, time, and the term that changes most as the reason."""

from __future__ import annotations

from typing import Any

from fivefold.plan.clock import Clock
from fivefold.plan.explain.moves import Move, moves
from fivefold.plan.question import Question
from fivefold.plan.result import layout_facts
from fivefold.plan.search import Found, evaluate
from fivefold.units import format_bytes, format_seconds

NO_CHANGE = 0.0005
TERMS = {
    "compute": "computation", "bubble": "bubble", "optimizer": "optimizer", "fixed": "fixed costs",
    **{axis: f"{axis} communication" for axis in ("tp", "cp", "ep", "pp", "dp")},
}  # fmt: skip
"""Terms of the step as words."""


def counterfactuals(question: Question, clock: Clock, found: Found) -> list[dict[str, Any]]:
    """Every step away, priced by the same estimator; those that are not legal with the rule."""
    steps = moves(question, found.choice)
    formed = [step for step in steps if step.choice is not None]
    priced = dict(zip(formed, evaluate(question, clock, [s.choice for s in formed if s.choice is not None])))
    return [
        _row(question, found, step, priced[step]) if step in priced else _forbidden(step) for step in steps
    ]


def _forbidden(step: Move) -> dict[str, Any]:
    return {
        "axis": step.axis, "change": step.text, "legal": False, "fits": None, "step_time_ratio": float("inf"),
        "verdict": "not legal", "text": f"{step.text}: not legal: {step.rule}",
    }  # fmt: skip


def _row(question: Question, found: Found, step: Move, there: Found) -> dict[str, Any]:
    assert step.choice is not None
    have, peak = question.capacity_bytes, float(there.memory.peak.total())
    more = peak - float(found.memory.peak.total())
    ratio = there.step_s / found.step_s
    time_term = leading(found.terms, there.terms, there.step_s - found.step_s)
    memory_term = leading(found.memory.peak.terms, there.memory.peak.terms, more)
    fits = there.memory.fits(have)
    verdict = {
        "yes": "fits",
        "unsure": "may not fit",
        "no": f"does not fit ({format_bytes(peak)} of {format_bytes(have)})",
    }[fits]
    told = [_memory_text(there, more, memory_term, verdict), time_text(ratio, time_term)]
    return {
        "axis": step.axis,
        "change": step.text,
        "legal": True,
        **layout_facts(step.choice.layout, step.choice.micro_batch, step.choice.recompute),
        "fits": fits,
        "verdict": verdict,
        "step_time_s": there.step_s,
        "step_time_ratio": ratio,
        "time_change": {"term": time_term[0], "seconds": time_term[1]},
        "peak_memory_bytes": peak,
        "memory_change_bytes": more,
        "memory_change": {"term": memory_term[0], "bytes": memory_term[1]},
        "text": f"{step.text}: {'; '.join(told)}",
    }


def leading(before: dict[str, Any], after: dict[str, Any], total: float) -> tuple[str, float]:
    """The term that changes most the way the total does, and by how much."""
    way = 1 if total >= 0 else -1
    changes = {term: float(after[term]) - float(before[term]) for term in before}
    term = max(changes, key=lambda one: way * changes[one])
    return term, changes[term]


def time_text(ratio: float, term: tuple[str, float]) -> str:
    """`6.1 % slower: cp communication +120 ms`."""
    if abs(ratio - 1) < NO_CHANGE:
        return "as fast"
    name, seconds = term
    how = f"{ratio - 1:.1%} slower" if ratio > 1 else f"{1 - ratio:.1%} faster"
    return f"{how}: {TERMS.get(name, name)} {'+' if seconds > 0 else '-'}{format_seconds(abs(seconds))}"


def _memory_text(there: Found, more: float, term: tuple[str, float], verdict: str) -> str:
    if more == 0:
        return f"memory as it is, {verdict}"
    ranks = len(there.memory.ranks)
    where = f" on pipeline rank {there.memory.peak_rank}" if ranks > 1 else ""
    reason = f" ({term[0]} {signed_bytes(term[1])})"
    return f"{signed_bytes(more)}{where}{reason}, {verdict}"


def signed_bytes(n_bytes: float) -> str:
    """`+11 GiB`."""
    return f"{'+' if n_bytes >= 0 else '-'}{format_bytes(abs(n_bytes))}"

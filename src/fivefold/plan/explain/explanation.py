"""All that is said of one layout, as one object: what `fivefold explain` prints, and what its page is drawn from."""

from __future__ import annotations

from typing import Any

from fivefold.core.model_counts import training_flops
from fivefold.estimate.recompute import Recompute
from fivefold.plan.clock import Choice, Clock
from fivefold.plan.explain.binding import binding, resources
from fivefold.plan.explain.steps import counterfactuals
from fivefold.plan.explain.why import reasoning
from fivefold.plan.question import Question
from fivefold.plan.result import layout_facts
from fivefold.plan.search import Answer, Found

COMMUNICATION = ("tp", "cp", "ep", "pp", "dp")
CANDIDATES = 24
"""Best plans of a search that are compared."""


def short(question: Question, clock: Clock, found: Found) -> dict[str, Any]:
    """The reasoning and what binds, without tables."""
    steps = counterfactuals(question, clock, found)
    return {
        "reasoning": reasoning(question, found),
        "binding": binding(resources(clock, found.choice), steps),
    }


def explain(question: Question, clock: Clock, found: Found, answer: Answer) -> dict[str, Any]:
    """Why a layout, and not another. `answer`: of a search of the same question, at least `CANDIDATES` plans."""
    from fivefold.plan.explain.alike import alike, alike_text, settling_runs
    from fivefold.plan.explain.axes import axes

    steps = counterfactuals(question, clock, found)
    best = answer.found[0] if answer.found else None
    others = alike(found, answer.found)
    return {
        "reasoning": reasoning(question, found),
        "binding": binding(resources(clock, found.choice), steps),
        "waterfall": waterfall(question, clock, found),
        "triangle": triangle(question, found),
        "axes": axes(question, clock, found),
        "counterfactuals": steps,
        "best": best and _best(found, best),
        "alike": others,
        "alike_text": alike_text(others, len(answer.found)),
        "runs": settling_runs(clock, answer.found[:CANDIDATES]),
    }


def _best(found: Found, best: Found) -> dict[str, Any]:
    choice = best.choice
    return {
        **layout_facts(choice.layout, choice.micro_batch, choice.recompute),
        "step_time_s": best.step_s,
        "step_time_ratio": best.step_s / found.step_s,
    }


def waterfall(question: Question, clock: Clock, found: Found) -> list[dict[str, Any]]:
    """Seconds of the step from what the peak would take to the whole; they add up to it exactly.

    Computation in three: the model's FLOPs at the device's peak, what recompute adds, and the rest: kernels below the
    peak, passes over memory, launches, stages with more than their share.
    """
    node = question.node
    peaks = node.peak_flops_per_s or {}
    half = next(peaks[name] for name in ("bfloat16", "float16") if name in peaks)
    flops = question.global_batch * question.seq_len * training_flops(question.spec, question.seq_len)
    compute = found.terms["compute"]
    ideal = min(compute, flops / (half * question.devices))
    again = min(compute - ideal, _again(clock, found))
    rows = [("at peak", ideal), ("computed again", again), ("below peak", compute - ideal - again)]
    rows += [(axis, found.terms[axis]) for axis in COMMUNICATION]
    rows += [(term, found.terms[term]) for term in ("bubble", "optimizer", "fixed")]
    begun, listed = 0.0, []
    for term, seconds in rows:
        listed.append({"term": term, "seconds": seconds, "from_s": begun, "share": seconds / found.step_s})
        begun += seconds
    return listed


def _again(clock: Clock, found: Found) -> float:
    """Seconds of computation that recompute adds."""
    choice = found.choice
    if choice.recompute == Recompute():
        return 0.0
    plain = Choice(choice.layout, choice.micro_batch, Recompute())
    times = clock.times([choice, plain]).compute
    return found.terms["compute"] * max(0.0, 1 - float(times[1] / times[0]))


def triangle(question: Question, found: Found) -> dict[str, Any]:
    """Where the layout sits between memory, computation and communication.

    How full the device is, and which shares of the step compute and communicate; `at`
    are the three divided by their sum.
    """
    full = float(found.memory.peak.total()) / question.capacity_bytes
    shares = {
        "memory": full,
        "compute": found.terms["compute"] / found.step_s,
        "communication": sum(found.terms[axis] for axis in COMMUNICATION) / found.step_s,
    }
    total = sum(shares.values())
    idle = 1 - shares["compute"] - shares["communication"]
    text = (
        f"memory {full:.0%} full, {shares['compute']:.0%} of the step computes, {shares['communication']:.0%} "
        f"communicates, {idle:.0%} is bubble, optimizer and fixed costs"
    )
    return {**shares, "at": {name: share / total for name, share in shares.items()}, "text": text}

"""What is said of one layout: the object that `--json` prints, and the sentences that explain it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fivefold.core.layout import DEFAULT_ORDER, Layout
from fivefold.core.model_counts import training_flops
from fivefold.core.model_spec import ModelSpec
from fivefold.estimate.memory import BAND, MemoryEstimate, estimate
from fivefold.estimate.recompute import Recompute, feed_forward_words
from fivefold.plan.question import Question
from fivefold.units import GIGA, MEGA, format_bytes

if TYPE_CHECKING:
    from fivefold.plan.search import Found


def memory_facts(question: Question, memory: MemoryEstimate) -> dict[str, Any]:
    """Memory of the fullest rank by term, of all ranks in all, and the verdict."""
    peak = memory.peak
    return {
        "peak_memory_bytes": peak.total(),
        "peak_rank": memory.peak_rank,
        "memory": {term: float(n) for term, n in peak.terms.items()},
        "state_bytes": mean_state_bytes(memory),
        "rank_memory_bytes": [float(rank.total()) for rank in memory.ranks],
        "capacity_bytes": question.capacity_bytes,
        "band": BAND,
        "fits": memory.fits(question.capacity_bytes),
    }


def layout_facts(layout: Layout, micro_batch: int, recompute: Recompute) -> dict[str, Any]:
    return {"layout": str(layout), "micro_batch": micro_batch, "recompute": str(recompute)}


def speed_facts(
    question: Question, step_s: float, low_s: float, high_s: float, terms: dict[str, float]
) -> dict[str, Any]:
    """Step time with its 10th and 90th percentile and by term, and the rates that follow from it.

    Formula: tokens = global batch x S; MFU = model FLOPs (causal, without recompute) / (step x devices x 16-bit peak).
    Source:  Chowdhery et al. 2022, PaLM, arXiv:2204.02311, appendix B.
    """
    tokens = question.global_batch * question.seq_len
    peaks = question.node.peak_flops_per_s or {}
    half = next((peaks[name] for name in ("bfloat16", "float16") if name in peaks), None)
    flops = tokens * training_flops(question.spec, question.seq_len)
    return {
        "step_time_s": step_s,
        "step_time_p10_s": low_s,
        "step_time_p90_s": high_s,
        "tokens_per_s_per_gpu": tokens / step_s / question.devices,
        "mfu": flops / (step_s * question.devices * half) if half else None,
        "time": terms,
    }


def plan_facts(question: Question, found: Found) -> dict[str, Any]:
    """All of one layout: how it is cut, its time and rates, its memory, its price, and the reasons in words."""
    choice = found.choice
    facts = {
        **layout_facts(choice.layout, choice.micro_batch, choice.recompute),
        **speed_facts(question, found.step_s, found.low_s, found.high_s, found.terms),
        **memory_facts(question, found.memory),
    }
    price = question.node.price_per_hour
    if price is not None:
        tokens_per_hour = facts["tokens_per_s_per_gpu"] * 3600
        facts["price_per_million_tokens"] = price / tokens_per_hour * MEGA
    facts["reasons"] = [
        *memory_reasons(question, found.memory),
        state_reason(question, choice.layout, found.memory),
        *unpriced(choice.layout),
    ]
    return facts


def recompute_choices(spec: ModelSpec, asked: Recompute) -> list[Recompute]:
    """What may be computed again in this model, with what was asked for."""
    feed = feed_forward_words(spec)
    texts = ("none", "attention", "+".join(feed), "+".join(("attention", *feed)), "full/2", "full")
    choices = [Recompute.parse(text) for text in texts]
    return choices if asked in choices else [*choices, asked]


def recompute_facts(found: Sequence[Found]) -> list[dict[str, Any]]:
    """What each choice of recompute takes, on the rank that is the fullest with it."""
    return [
        {
            "recompute": str(one.choice.recompute),
            "activations_bytes": float(one.memory.peak.terms["activations"]),
            "peak_memory_bytes": one.memory.peak.total(),
            "step_time_s": one.step_s,
        }
        for one in found
    ]


def unpriced(layout: Layout) -> list[str]:
    """What of a layout its step time does not know."""
    found = []
    if layout.zero_group is not None:
        found.append(
            f"the step time is that of zero{layout.zero} over all {layout.data} data ranks, not in groups of "
            f"{layout.zero_group}; memory knows the groups"
        )
    if layout.order != DEFAULT_ORDER:
        found.append(
            f"the step time is that of rank order {'-'.join(DEFAULT_ORDER)}, not {'-'.join(layout.order)}"
        )
    return found


def memory_reasons(question: Question, memory: MemoryEstimate) -> list[str]:
    """The verdict in words, with its numbers."""
    need, have = memory.peak.total(), question.capacity_bytes
    where = (
        f"pipeline rank {memory.peak_rank} of {len(memory.ranks)}" if len(memory.ranks) > 1 else "each rank"
    )
    share = f"{format_bytes(need)} of the {format_bytes(have)} that a program gets on {question.node.device}"
    verdict = memory.fits(have)
    if verdict == "yes":
        return [f"fits: {where} needs {share}"]
    if verdict == "no":
        return [f"does not fit: {where} needs {share}, {format_bytes(need - have)} too much"]
    return [f"may not fit: {where} needs {share}, and the estimate is good to {BAND:.0%}"]


def mean_state_bytes(memory: MemoryEstimate) -> float:
    """Weights, gradients and optimizer of a device, on average over the pipeline."""
    states = [
        sum(rank.terms[term] for term in ("parameters", "gradients", "optimizer")) for rank in memory.ranks
    ]
    return float(sum(states)) / len(states)


def state_reason(question: Question, layout: Layout, memory: MemoryEstimate) -> str:
    """What weights, gradients and optimizer take per parameter and on a device."""
    n = question.numerics
    shared = ("none of it shared", "the optimizer's", "gradients and optimizer", "all of it")[layout.zero]
    zero = f"{shared} shared over {layout.data_shards} data ranks" if layout.zero else "without ZeRO"
    zero += ", the optimizer's in the host's memory" if question.offload else ""
    return (
        f"states: {mean_state_bytes(memory) / GIGA:.3g} GB a device ({zero}); {n.states:g} bytes a parameter: "
        f"{n.weight:g} for the weight, {n.gradient:g} for its gradient, {n.optimizer:g} for {question.optimizer}"
    )


def nearest_that_fits(
    question: Question, layout: Layout, micro_batch: int, recompute: Recompute
) -> tuple[str, MemoryEstimate] | None:
    """The smallest change of a layout that makes it fit surely, in words, and its memory; None where none does."""
    full = Recompute(("full",))
    zeros = [stage for stage in (1, 2, 3) if stage > layout.zero]
    changes = [(layout.replace(zero=stage), micro_batch, recompute) for stage in zeros]
    changes.append((layout, micro_batch, full))
    changes += [(layout.replace(zero=stage), micro_batch, full) for stage in zeros]
    changes += [(other, 1, again) for other, _, again in changes if micro_batch > 1]
    for other, size, again in changes:
        if question.why_not(other, size):
            continue
        memory = estimate(question.memory_job(other, size, again))
        if memory.fits(question.capacity_bytes) == "yes":
            parts = [str(other)]
            parts += [f"micro-batch {size}"] if size != micro_batch else []
            parts += [f"recompute {again}"] if again != recompute else []
            return ", ".join(parts), memory
    return None

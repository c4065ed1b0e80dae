"""The order in which a layout is reasoned out: what does not fit, the fast domain, the sequence, what is left.

Every sentence is made of numbers of the estimate; its facts stand beside it under their own keys.
"""

from __future__ import annotations

from math import ceil, prod
from typing import Any

from fivefold.core.layout import Layout
from fivefold.core.model_counts import parameter_counts
from fivefold.errors import UserError
from fivefold.estimate.memory import estimate
from fivefold.estimate.recompute import Recompute
from fivefold.plan.clock import Choice
from fivefold.plan.question import Question
from fivefold.plan.search import Found
from fivefold.units import GIGA, format_bytes, format_count

FULL = Recompute(("full",))


def reasoning(question: Question, found: Found) -> list[dict[str, Any]]:
    """Steps in an expert's order, each with `step`, `text` and its numbers."""
    return [
        one_device(question),
        fast_domain(question, found.choice.layout),
        sequence(question, found.choice),
        throughput(question, found),
    ]


def one_device(question: Question) -> dict[str, Any]:
    """What training takes without any cut: micro-batch 1 and full recompute, so as little as one device can do."""
    terms = estimate(question.memory_job(Layout(), 1, FULL)).peak.terms
    need, have = float(sum(terms.values())), question.capacity_bytes
    states = sum(float(terms[term]) for term in ("parameters", "gradients", "optimizer"))
    count = parameter_counts(question.spec)["total_parameters"]
    held = (
        f"{format_count(count)} parameters x {question.numerics.states:g} bytes = {_gigabytes(states)} of states"
        if not question.offload
        else f"{format_count(count)} parameters take {_gigabytes(states)}, the optimizer in the host's memory"
    )
    least = ceil(need / have)
    device = f"the {format_bytes(have)} of {question.node.device}"
    verdict = (
        f"{format_bytes(need - have)} more than {device}: at least {least} parts"
        if need > have
        else f"it fits {device}: cutting serves speed only"
    )
    return {
        "step": "one device",
        "text": f"{held}, {format_bytes(need)} in all with full recompute; {verdict}",
        "needed_bytes": need,
        "state_bytes": states,
        "capacity_bytes": have,
        "over_bytes": max(0.0, need - have),
        "least_parts": least,
    }


def _gigabytes(n_bytes: float) -> str:
    gb = n_bytes / GIGA
    return f"{gb:,.0f} GB" if gb >= 100 else f"{gb:.3g} GB"


def spans(layout: Layout) -> dict[str, tuple[int, int]]:
    """Axis -> (ranks of a group, how many consecutive ranks the group spans), of axes that are cut."""
    found = {}
    for i, axis in enumerate(layout.order):
        if axis != "dp" or layout.cp == 1:
            found[str(axis)] = (
                layout.degree(axis),
                prod(layout.degree(inner) for inner in layout.order[: i + 1]),
            )
    if layout.cp > 1:
        outer = max(layout.order.index(axis) for axis in ("dp", "cp"))
        found["data"] = layout.data, prod(layout.degree(axis) for axis in layout.order[: outer + 1])
    if layout.ep > 1:
        found["ep"] = layout.ep, layout.etp * layout.ep
    if layout.etp > 1:
        found["etp"] = layout.etp, layout.etp
    return {axis: (degree, span) for axis, (degree, span) in found.items() if degree > 1}


def fast_domain(question: Question, layout: Layout) -> dict[str, Any]:
    """Which groups stay where devices reach each other through the device link."""
    node, domain = question.node, question.domain
    link, network = node.intra_node_bytes_per_s, node.inter_node_bytes_per_s
    inside = {axis: degree for axis, (degree, span) in spans(layout).items() if span <= domain}
    beyond = {axis: degree for axis, (degree, span) in spans(layout).items() if span > domain}
    speed = f" at {format_count(link)}B/s" if link else ""
    if question.several_nodes and link and network:
        speed += f", {format_count(network)}B/s beyond ({link / network:.2g} times less)"
    told = [f"{text}: {_listed(part)}" for text, part in (("inside", inside), ("across", beyond)) if part]
    return {
        "step": "fast domain",
        "text": f"{min(domain, question.devices)} {node.device}{speed}; {'; '.join(told) or 'nothing is cut'}",
        "domain": domain,
        "inside": inside,
        "across": beyond,
        "link_bytes_per_s": link,
        "network_bytes_per_s": network,
    }


def _listed(degrees: dict[str, int]) -> str:
    return ", ".join(f"{axis}{degree}" for axis, degree in degrees.items())


def sequence(question: Question, choice: Choice) -> dict[str, Any]:
    """Whether the sequence needs context parallelism, and how many ranks the batch leaves to other axes."""
    layout, batch, devices = choice.layout, question.global_batch, question.devices
    least = least_cp(question, layout)
    tokens = f"{question.seq_len} tokens"
    if least == 1:
        forced = f"{tokens} fit uncut at tp{layout.tp} pp{layout.pp}"
        forced += f": cp{layout.cp} is not forced" if layout.cp > 1 else ""
    elif least is None:
        forced = f"{tokens} fit with no cp at tp{layout.tp} pp{layout.pp}"
    else:
        forced = f"{tokens} need cp of at least {least} at tp{layout.tp} pp{layout.pp}"
    others = ceil(devices / batch)
    ranks = f"{batch} sequences a step feed at most {batch} data ranks"
    ranks += f": {devices} devices need other axes of at least {others}" if others > 1 else ""
    return {
        "step": "sequence",
        "text": f"{forced}; {ranks}",
        "least_cp": least,
        "most_dp": batch,
        "least_other_axes": others,
    }


def least_cp(question: Question, layout: Layout) -> int | None:
    """The least cp at which this tp, pp and ZeRO fit with micro-batch 1 and full recompute. None: no legal one."""
    ranks = layout.dp * layout.cp
    for cp in (d for d in range(1, ranks + 1) if ranks % d == 0 and d <= question.seq_len):
        for method in ("ring", "ulysses", "gather") if cp > 1 else ("ring",):
            try:
                other = layout.replace(cp=cp, dp=ranks // cp, cp_method=method)
            except UserError:
                continue
            if question.why_not(other, 1):
                continue
            if estimate(question.memory_job(other, 1, FULL)).fits(question.capacity_bytes) == "yes":
                return cp
            break
    return None


def throughput(question: Question, found: Found) -> dict[str, Any]:
    """What data ranks, microbatches and memory are left once the model fits."""
    layout, size = found.choice.layout, found.choice.micro_batch
    count = question.global_batch // (layout.dp * size)
    free = question.capacity_bytes - float(found.memory.peak.total())
    tokens = question.global_batch * question.seq_len / question.devices
    memory = f"{format_bytes(free)} of memory are free" if free > 0 else f"{format_bytes(-free)} are missing"
    return {
        "step": "throughput",
        "text": (
            f"dp{layout.dp} with {count} microbatch{'es' if count > 1 else ''} of {size} "
            f"sequence{'s' if size > 1 else ''}, {tokens:,.0f} tokens of a step for each device, "
            f"recompute {found.choice.recompute}; {memory}"
        ),
        "dp": layout.dp,
        "microbatches": count,
        "tokens_per_device": tokens,
        "free_bytes": free,
    }

"""The five axes for this model and layout: what each cuts, what it sends, what memory it saves, how far it can go."""

from __future__ import annotations

from math import lcm
from typing import Any

from fivefold.core.layout import Layout
from fivefold.core.layout_checks import divisors
from fivefold.core.model_spec import AttentionSpec, GatedDeltaSpec
from fivefold.errors import UserError
from fivefold.estimate.memory import estimate
from fivefold.estimate.volumes import sent_bytes
from fivefold.plan.clock import Clock
from fivefold.plan.lattice import routed, tp_breaks
from fivefold.plan.question import Question
from fivefold.plan.search import Found

AXES = ("dp", "tp", "pp", "cp", "ep")
SHARED = (
    "nothing of the states",
    "the optimizer",
    "gradients and optimizer",
    "weights, gradients and optimizer",
)
"""What the ZeRO stages cut."""


def axes(question: Question, clock: Clock, found: Found) -> list[dict[str, Any]]:
    """One row for each axis."""
    layout = found.choice.layout
    sent = {axis: float(column[0]) for axis, column in sent_bytes(clock.jobs([found.choice])).items()}
    return [
        {
            "axis": axis,
            "degree": int(getattr(layout, axis)),
            "cuts": cuts(question, layout, axis),
            "sent_bytes": sent[axis],
            "exposed_s": found.terms[axis],
            "saved_bytes": saved_bytes(question, found, axis),
            "most": most(question, layout, axis),
            "limit": limit(question, layout, axis),
        }
        for axis in AXES
    ]


def cuts(question: Question, layout: Layout, axis: str) -> str:
    """What this model has along the axis, and the part that a rank gets."""
    spec, degree = question.spec, int(getattr(layout, axis))

    def cut(name: str, n: int, part: str) -> str:
        return f"{name} {n} -> {part}" if degree > 1 else f"{name} {n}"

    if axis == "dp":
        zero = f"; zero{layout.zero}: {SHARED[layout.zero]} over {layout.data_shards}" if layout.zero else ""
        return cut("batch", question.global_batch, str(question.global_batch // degree)) + zero
    if axis == "tp":
        return ", ".join(cut(name, n, f"{n / degree:g}") for name, n in _widths(question))
    if axis == "pp":
        chunks = f" x {layout.chunks} chunks" if layout.chunks > 1 else ""
        return cut("layers", spec.layers, f"{-(-spec.layers // layout.stages)}{chunks}")
    if axis == "cp":
        return cut("sequence", question.seq_len, str(question.seq_len // degree))
    experts = {moe.experts for moe in routed(spec)}
    return ", ".join(cut("experts", n, str(n // degree)) for n in sorted(experts)) or "no experts"


def _widths(question: Question) -> list[tuple[str, int]]:
    """What tp divides in the layer that comes most often."""
    blocks = question.spec.blocks
    block = max(dict.fromkeys(blocks), key=blocks.count)
    a, m = block.attention, block.mlp
    heads = a.value_heads if isinstance(a, GatedDeltaSpec) else a.heads
    found = [("heads", heads)]
    if isinstance(a, AttentionSpec) and a.kv_heads != a.heads:
        found.append(("KV heads", a.kv_heads))
    width = getattr(m, "shared_ffn", 0) or (0 if routed(question.spec) else m.ffn)
    return [*found, *([("MLP", width)] if width else []), ("vocabulary", question.spec.vocab)]


def saved_bytes(question: Question, found: Found, axis: str) -> float | None:
    """Peak memory without the axis less that with it, all else as it is; dp: without its ZeRO. None: never legal."""
    choice = found.choice
    try:
        other = choice.layout.replace(zero=0) if axis == "dp" else choice.layout.without(axis)  # type: ignore[arg-type]
    except UserError:
        return None
    if other == choice.layout:
        return 0.0
    memory = estimate(question.memory_job(other, choice.micro_batch, choice.recompute))
    return float(memory.peak.total() - found.memory.peak.total())


def most(question: Question, layout: Layout, axis: str) -> int:
    """The largest degree that the model, the sequence or the batch allows, however many devices there are."""
    spec = question.spec
    if axis == "dp":
        return question.global_batch
    if axis == "pp":
        return spec.layers
    if axis == "ep":
        return max((moe.experts for moe in routed(spec)), default=1)
    if axis == "cp":
        tp = layout.tp if layout.sequence_parallel else 1
        return max(
            d for d in divisors(question.seq_len) if d == 1 or question.seq_len % lcm(d * tp, 2 * d) == 0
        )
    a = spec.blocks[0].attention
    heads = a.value_heads if isinstance(a, GatedDeltaSpec) else a.heads
    return max(d for d in divisors(heads) if not tp_breaks(spec, d))


def limit(question: Question, layout: Layout, axis: str) -> str:
    """What sets that degree, in words."""
    reason = {
        "dp": "sequences of a step",
        "tp": "heads and widths divide",
        "pp": "layers",
        "cp": "tokens, in two parts a rank",
        "ep": "experts",
    }[axis]
    return f"{most(question, layout, axis)} ({reason})"

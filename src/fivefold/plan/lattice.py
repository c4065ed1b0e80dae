"""All layouts of a question as a grid of numbers: which are legal, and what each of them needs in memory.

One group of the lattice has a number of pipeline ranks, a schedule and its chunks; within it the axes

    T tp    C cp    M micro-batch    E ep    H etp    Z ZeRO stage    (and the parts of a layer to recompute)

span a grid, and every rule and every byte is an array that spreads over the axes it depends on. dp follows from the
number of devices. A point is legal exactly where `legality.check` lets its layout pass.

Left out, since another point is never slower and never needs more memory: gpipe and bfs (1f1b), zero0 where there are
data ranks (zero1), nosp where sequence parallelism is legal, and other methods of context parallelism than the first
that is legal of ring, ulysses, gather and ring x ulysses, whose volumes are alike. Of interleaved schedules it has
1, 2, 4 and 8 chunks, and other numbers up to 8 where all stages get as many layers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import gcd, lcm
from typing import TYPE_CHECKING, Any, NamedTuple

from fivefold.core.layout import Layout
from fivefold.core.layout_checks import divisors
from fivefold.core.model_counts import attention_flops, attention_weights, block_flops
from fivefold.core.model_spec import AttentionSpec, BlockSpec, ModelSpec, MoESpec
from fivefold.estimate.memory import Cut, Kinds, Stage, kinds_of, stage_of, state_terms, work_terms
from fivefold.estimate.recompute import Recompute, feed_forward_words
from fivefold.plan.legality import MOST_MICROBATCHES, SPLIT_BACKWARD, context_heads, other_heads
from fivefold.plan.question import Question
from fivefold.strategies.context.rules import legal_ulysses
from fivefold.strategies.pipeline.placement import stage_layers

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Array = NDArray[np.float64]
    Mask = NDArray[np.bool_]

LARGEST_MICRO_BATCH = 64
MOST_CHUNKS = 8
LARGEST_ETP = 8
"""Experts are cut in more parts only where that is fixed."""


class Method(NamedTuple):
    """How the tokens of a sequence are spread, for one tp and cp."""

    name: str
    ring: int
    ulysses: int
    sp: bool


class Group(NamedTuple):
    """One number of pipeline ranks with its schedule."""

    pp: int
    schedule: str
    chunks: int


@dataclass(frozen=True, kw_only=True)
class Fixed:
    """What of the answer is given: fields of a layout, the micro-batch, the recompute."""

    layout: Mapping[str, Any] = field(default_factory=dict)
    micro_batch: int | None = None
    recompute: Recompute | None = None

    def allows(self, name: str, value: Any) -> bool:
        return name not in self.layout or self.layout[name] == value


@dataclass(frozen=True)
class Lattice:
    """The axes of a question. `fixed` holds some of them to one value."""

    question: Question
    fixed: Fixed = field(default_factory=Fixed)

    # Axes

    @cached_property
    def tp(self) -> list[int]:
        spec = self.question.spec
        return [
            d
            for d in divisors(self.question.devices)
            if self.fixed.allows("tp", d) and not tp_breaks(spec, d)
        ]

    @cached_property
    def cp(self) -> list[int]:
        return [
            d
            for d in divisors(self.question.devices)
            if self.question.seq_len % d == 0 and self.fixed.allows("cp", d)
        ]

    @cached_property
    def micro_batch(self) -> list[int]:
        """Divisors of the batch that are powers of two, or the odd ones where it is odd."""
        if self.fixed.micro_batch:
            return [self.fixed.micro_batch]
        fitting = [d for d in divisors(self.question.global_batch) if d <= LARGEST_MICRO_BATCH]
        even = self.question.global_batch % 2 == 0
        return [d for d in fitting if not even or d & (d - 1) == 0]

    @cached_property
    def ep(self) -> list[int]:
        moes = routed(self.question.spec)
        experts = gcd(*(moe.experts for moe in moes)) if moes else 1
        return [d for d in divisors(experts) if self.fixed.allows("ep", d)]

    @cached_property
    def etp(self) -> list[int]:
        moes = routed(self.question.spec)
        width = gcd(*(moe.ffn for moe in moes)) if moes else 1
        known = [d for d in divisors(width) if d <= LARGEST_ETP or "etp" in self.fixed.layout]
        return [d for d in known if self.fixed.allows("etp", d)]

    @cached_property
    def zero(self) -> list[int]:
        """Unless it is fixed: 1, which stands for 0 where there is nothing to share, 2 and 3."""
        return [self.fixed.layout["zero"]] if "zero" in self.fixed.layout else [1, 2, 3]

    @cached_property
    def recompute(self) -> list[Recompute]:
        """From that which computes least again."""
        if self.fixed.recompute is not None:
            return [self.fixed.recompute]
        spec = self.question.spec
        options = [
            Recompute(), Recompute(("attention",)), Recompute(feed_forward_words(spec)), Recompute(("full",))
        ]  # fmt: skip
        return sorted(options, key=lambda option: recomputed_share(spec, option, self.question.seq_len))

    def groups(self) -> Iterator[Group]:
        """Every number of stages, schedule and chunks that the layers allow."""
        layers = self.question.spec.layers
        for pp in divisors(self.question.devices):
            if pp > layers or not self.fixed.allows("pp", pp):
                continue
            for schedule, chunks in schedules(pp, layers):
                if self.fixed.allows("schedule", schedule) and self.fixed.allows("chunks", chunks):
                    yield Group(pp, schedule, chunks)

    @cached_property
    def methods(self) -> list[list[Method | None]]:
        """For each tp and cp the first way that is legal; None where none is."""
        return [[self._method(tp, cp) for cp in self.cp] for tp in self.tp]

    def _method(self, tp: int, cp: int) -> Method | None:
        seq_len = self.question.seq_len
        heads = [(n // tp, max(1, k // tp)) for n, k in context_heads(self.question.spec)]
        for sp in (True, False) if tp > 1 else (True,):
            if not self.fixed.allows("sp", sp):
                continue
            for method in cp_methods(cp, sp):
                unit = lcm(cp * (tp if sp else 1), 2 * method.ring if method.ring > 1 else 1)
                if seq_len % unit or not self._allows(method):
                    continue
                if all(legal_ulysses(n, k, method.ulysses) for n, k in heads):
                    return method
        return None

    def _allows(self, method: Method) -> bool:
        if method.ring * method.ulysses == 1:
            return True
        fixed = self.fixed
        mixed = method.name != "ring_ulysses" or fixed.allows("cp_ring", method.ring)
        return fixed.allows("cp_method", method.name) and mixed

    @cached_property
    def kinds(self) -> Kinds:
        return kinds_of(self.question.spec)

    # The grid of a group

    @cached_property
    def shape(self) -> tuple[int, ...]:
        return tuple(len(axis) for axis in (self.tp, self.cp, self.micro_batch, self.ep, self.etp, self.zero))

    @cached_property
    def axes(self) -> dict[str, Array]:
        """The values of each axis, spread along it."""
        import numpy as np

        names = ("tp", "cp", "micro_batch", "ep", "etp", "zero")
        spread = {}
        for place, name in enumerate(names):
            along = [1] * len(names)
            along[place] = -1
            spread[name] = np.array(getattr(self, name), dtype=np.float64).reshape(along)
        return spread

    @cached_property
    def sp(self) -> Array:
        """1 where sequence parallelism is on, [T, C]."""
        import numpy as np

        on = [[method is not None and method.sp for method in row] for row in self.methods]
        return np.array(on, dtype=np.float64).reshape(len(self.tp), len(self.cp), 1, 1, 1, 1)

    def dp(self, group: Group) -> Array:
        """Data ranks [T, C]; not whole where the devices do not divide."""
        return self.question.devices / (group.pp * self.axes["tp"] * self.axes["cp"])

    def microbatches(self, group: Group) -> Array:
        """[T, C, M]; not whole where the batch does not divide."""
        found: Array = self.question.global_batch / (self.dp(group) * self.axes["micro_batch"])
        return found

    def legal(self, group: Group) -> Mask:
        """Where the layout can be formed."""
        import numpy as np

        a = self.axes
        dp, count = self.dp(group), self.microbatches(group)
        known = np.array([[m is not None for m in row] for row in self.methods], dtype=bool)
        fine = known.reshape(len(self.tp), len(self.cp), 1, 1, 1, 1) & (dp == np.floor(dp))
        if "dp" in self.fixed.layout:
            fine = fine & (dp == self.fixed.layout["dp"])
        fine = fine & (count == np.floor(count)) & (count <= MOST_MICROBATCHES)
        inner, parts = dp * a["cp"] * a["tp"], a["ep"] * a["etp"]
        fine = fine & (np.floor(inner / parts) * parts == inner)
        alone = (a["tp"] > 1) & (self.sp == 0)  # the tp ranks have the same tokens
        if routed(self.question.spec):
            fine = fine & (~alone | (a["etp"] == a["tp"]))
        shards = np.maximum(dp * a["cp"], np.floor(inner / parts) if routed(self.question.spec) else 1)
        if "zero" not in self.fixed.layout:
            fine = fine & ((a["zero"] == 1) | (shards > 1))
        if group.schedule in SPLIT_BACKWARD:
            fine = fine & ((a["zero"] < 2) | (shards == 1))
        return np.broadcast_to(fine, self.shape)

    def stages(self, group: Group, recompute: Recompute) -> dict[Stage, list[int]]:
        """What the pipeline ranks hold, and which ranks hold the same."""
        layout = group_layout(group)
        layers = stage_layers(self.question.spec, layout, self.question.seq_len)
        found: dict[Stage, list[int]] = {}
        for rank in range(group.pp):
            stage = stage_of(self.kinds, layout.virtual_stages_of(rank), layers, recompute)
            found.setdefault(stage, []).append(rank)
        return found

    def cut(self, group: Group) -> Cut:
        import numpy as np

        a = self.axes
        data = self.question.devices / (group.pp * a["tp"])
        edp = np.maximum(1, np.floor(self.question.devices / (group.pp * a["ep"] * a["etp"])))
        some = a["zero"] > 0
        return Cut(
            tp=a["tp"], cp=a["cp"], ep=a["ep"], etp=a["etp"], zero=a["zero"], sp=self.sp, pp=group.pp,
            shards=np.where(some, data, 1), expert_shards=np.where(some, edp, 1),
        )  # fmt: skip

    def limit(self, bytes_of_device: float) -> float:
        """What `needed` may be where so many bytes of a device are enough."""
        of = self.question.stack
        return (bytes_of_device - of.context_bytes) / (1 + of.fragmentation) - of.static_bytes

    def peak_bytes(self, needed: Any) -> Any:
        """The memory of a device, as `memory.estimate` has it, from what is `needed`."""
        of = self.question.stack
        return (needed + of.static_bytes) * (1 + of.fragmentation) + of.context_bytes

    def needed(self, group: Group) -> Iterator[Array]:
        """For each recompute in order, at every point: bytes that are in use on the fullest rank, workspaces apart."""
        import numpy as np

        q = self.question
        cut, count = self.cut(group), self.microbatches(group)
        tokens = self.axes["micro_batch"] * q.seq_len
        base = q.memory_job(Layout(), 1, Recompute())
        states: dict[tuple[bool, bool, frozenset[tuple[BlockSpec, int]]], Any] = {}
        for option in self.recompute:
            job = replace(base, recompute=option)
            peak: Any = 0.0
            for stage, ranks in self.stages(group, option).items():
                content = (stage.first, stage.last, frozenset((block, n) for block, _, n in stage.layers))
                if content not in states:
                    states[content] = sum(state_terms(job, stage, cut).values())
                held = held_at_most(group, ranks, np.maximum(1, count))
                work = sum(work_terms(job, stage, cut, held, tokens).values())
                peak = np.maximum(peak, states[content] + work)
            yield np.broadcast_to(peak, self.shape)


def held_at_most(group: Group, ranks: list[int], m: Array) -> Array:
    """The most chunks' microbatches that any of these ranks holds: `schedules.in_flight_bound`, for arrays of m."""
    import numpy as np

    p, v = group.pp, group.chunks
    if group.schedule == "zbh1":
        return np.minimum(m, p)
    if group.schedule in ("zbv", "dualpipev"):
        most: Array = np.zeros_like(m)
        for r in ranks:
            held = np.minimum(m, 2 * p - r - 1) + np.minimum(m, r + 1)
            most = np.maximum(most, held + ((group.schedule == "dualpipev") & (m >= 2 * p - r)))
        return most
    r = min(ranks)
    if v == 1:
        return np.minimum(m, p - r)
    largest = np.ceil(m / np.maximum(1, np.floor(m / p)))
    interleaved: Array = np.minimum(m * v, 2 * (p - r - 1) + (v - 1) * largest + 1)
    return interleaved


def layout_at(lattice: Lattice, group: Group, point: tuple[int, ...]) -> Layout:
    """The layout of one legal point of a group's grid."""
    t, c, _, e, h, z = point
    tp, cp, method = lattice.tp[t], lattice.cp[c], lattice.methods[t][c]
    assert method is not None, "the point is legal"
    fields: dict[str, Any] = {"sp": method.sp}
    if cp > 1:
        fields["cp_method"] = method.name
        if method.name == "ring_ulysses":
            fields |= {"cp_ring": method.ring, "cp_ulysses": method.ulysses}
    if group.pp > 1:
        fields |= {"schedule": group.schedule, "chunks": group.chunks}
    dp = lattice.question.devices // (group.pp * tp * cp)
    layout = Layout(
        dp=dp, tp=tp, pp=group.pp, cp=cp, ep=lattice.ep[e], etp=lattice.etp[h], zero=lattice.zero[z], **fields
    )
    shared = layout.data > 1 or (layout.edp > 1 and routed(lattice.question.spec))
    return layout if shared or "zero" in lattice.fixed.layout else layout.replace(zero=0)


def group_layout(group: Group) -> Layout:
    """The plainest layout of a group."""
    if group.pp == 1:
        return Layout()
    return Layout(pp=group.pp, schedule=group.schedule, chunks=group.chunks)  # type: ignore[arg-type]


def schedules(pp: int, layers: int) -> list[tuple[str, int]]:
    """(schedule, chunks) of so many pipeline ranks."""
    if pp == 1:
        return [("1f1b", 1)]
    most = min(MOST_CHUNKS, layers // pp)
    found = [("1f1b", v) for v in range(1, most + 1) if v in (1, 2, 4, 8) or layers % (pp * v) == 0]
    found.append(("zbh1", 1))
    return found + ([("zbv", 2), ("dualpipev", 2)] if 2 * pp <= layers else [])


def cp_methods(cp: int, sp: bool) -> list[Method]:
    """Ways to spread a sequence, the preferred one first."""
    if cp == 1:
        return [Method("ring", 1, 1, sp)]
    mixed = [Method("ring_ulysses", r, cp // r, sp) for r in reversed(divisors(cp)) if 1 < r < cp]
    return [Method("ring", cp, 1, sp), Method("ulysses", 1, cp, sp), Method("gather", cp, 1, sp), *mixed]


def tp_breaks(spec: ModelSpec, tp: int) -> bool:
    """Whether tp does not divide something that it cuts: the rules of `strategies.tensor`, and other kinds of heads."""
    if tp == 1:
        return False
    for block in dict.fromkeys(spec.blocks):
        a, m = block.attention, block.mlp
        if isinstance(a, AttentionSpec) and (a.heads % tp or (a.kv_heads % tp and tp % a.kv_heads)):
            return True
        if (m.shared_ffn if isinstance(m, MoESpec) else m.ffn) % tp:
            return True
    return any(heads % tp for heads, _ in other_heads(spec))


def routed(spec: ModelSpec) -> list[MoESpec]:
    """The kinds of routed layers."""
    return list(dict.fromkeys(b.mlp for b in dict.fromkeys(spec.blocks) if isinstance(b.mlp, MoESpec)))


def recomputed_share(spec: ModelSpec, recompute: Recompute, seq_len: int) -> float:
    """FLOPs that are computed again, of all forward FLOPs of the layers."""
    again = total = 0.0
    kinds = Counter((block, recompute.takes(i)) for i, block in enumerate(spec.blocks))
    for (block, takes), n in kinds.items():
        whole = n * block_flops(spec, block, seq_len)
        total += whole
        if not takes:
            continue
        core = attention_flops(block.attention, seq_len) + 2 * attention_weights(block.attention, spec.hidden)
        feed = whole - n * core
        word = "moe" if isinstance(block.mlp, MoESpec) else "mlp"
        if "full" in recompute.words:
            again += whole
        else:
            again += (whole - feed) * ("attention" in recompute.words) + feed * (word in recompute.words)
    return again / total

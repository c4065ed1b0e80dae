"""Bytes on every pipeline rank at the moment of its step when it holds most, by term.

    parameters, gradients, optimizer   what the table of parameters puts on the rank (`weights`), as ZeRO leaves it
    activations    what the layers of its chunks keep (`saved`, `recompute`) x microbatches in flight (the schedule's)
    logits         at the loss: T V/tp x `logit_bytes` and the gradient of the head's input T D x, on the last stage; or
                   instead, if that is more,
    working        in backward: what one layer computes again, and the gradients of its activations
    buffers        what ZeRO-3 gathers, gradients before they are scattered, messages, gathered and dispatched tokens
    framework      workspaces that the framework allocates whatever is run
    fragmentation  what the allocator reserves beyond all of these
    context        what the driver takes outside the allocator

allocated = the first seven; reserved adds fragmentation; device adds the context. Letters as in `saved`.
Degrees may be numbers or numpy arrays: then so are all bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from fivefold.core.layout import Layout
from fivefold.core.model_spec import BlockSpec, ModelSpec, MoESpec
from fivefold.estimate.recompute import Recompute, larger, layer_kept
from fivefold.estimate.saved import Share
from fivefold.estimate.stacks import DEFAULT, Stack, stack
from fivefold.estimate.weights import Elements, embedding_matrices, head_matrices, local_elements, matrices_of
from fivefold.strategies.pipeline.placement import stage_layers
from fivefold.strategies.pipeline.schedules import in_flight_bound

TERMS = (
    "parameters", "gradients", "optimizer", "activations", "logits", "working", "buffers", "framework",
    "fragmentation", "context",
)  # fmt: skip

BAND = 0.06
"""Feasibility is given with so much on either side: what measured runs differ from the estimate by."""

USABLE = 0.99
"""Share of a device's stated memory that a program can get: the driver keeps the rest (A100 80 GB: 79.2 GiB)."""

Measure = Literal["allocated", "reserved", "device"]


@dataclass(frozen=True, kw_only=True)
class Numerics:
    """Bytes per parameter."""

    weight: float
    gradient: float
    optimizer: float
    """Master weights and moments."""
    element: int
    """Bytes of an activation."""

    @property
    def states(self) -> float:
        return self.weight + self.gradient + self.optimizer


def numerics(
    precision: str = "bfloat16",
    grad_dtype: str = "bfloat16",
    optimizer: str = "adamw",
    of: Stack | None = None,
) -> Numerics:
    """Bytes per parameter of mixed precision: 16-bit weights, gradients of `grad_dtype`, float32 masters and moments.

    Formula: Adam 2 + 2 + 12 = 16 (Rajbhandari et al. 2020, arXiv:1910.02054, section 3.1), 18 with float32 gradients;
             float32 4 + 4 + 8; sgd has no moments. FSDP: float32 shards of weights, which are the masters.
    """
    of = of or stack(DEFAULT)
    moments = of.moment_bytes if optimizer == "adamw" else 0.0
    if precision == "float32":
        return Numerics(weight=4, gradient=4, optimizer=moments, element=4)
    if of.wide_shards:
        return Numerics(weight=4, gradient=4, optimizer=moments, element=2)
    wide = grad_dtype == "float32"
    master = of.fp16_optimizer - 8 if precision == "float16" and not wide else 4.0
    return Numerics(
        weight=2, gradient=4 + of.extra_gradient if wide else 2, optimizer=master + moments, element=2
    )


@dataclass(frozen=True, kw_only=True)
class Cut:
    """The degrees that parameters and activations are divided by; numbers or arrays."""

    tp: Any = 1
    cp: Any = 1
    ep: Any = 1
    etp: Any = 1
    shards: Any = 1
    """Data ranks of a sharding group; 1 without ZeRO."""
    expert_shards: Any = 1
    zero: Any = 0
    sp: Any = False
    pp: Any = 1

    @classmethod
    def of(cls, layout: Layout) -> Cut:
        return cls(
            tp=layout.tp, cp=layout.cp, ep=layout.ep, etp=layout.etp, zero=layout.zero, pp=layout.pp,
            shards=layout.data_shards, expert_shards=max(1, layout.expert_shards),
            sp=layout.sequence_parallel,
        )  # fmt: skip


@dataclass(frozen=True)
class Stage:
    """What one pipeline rank holds."""

    layers: tuple[tuple[BlockSpec, bool, int], ...]
    """Kinds of layers: the block, whether it recomputes, how many."""
    chunks: int
    first: bool
    last: bool


@dataclass(frozen=True)
class Kinds:
    """The layers of a model by kind, worked out once: comparing blocks takes longer than counting numbers."""

    blocks: tuple[BlockSpec, ...]
    of_layer: tuple[int, ...]


def kinds_of(spec: ModelSpec) -> Kinds:
    """The different blocks of a model, and which of them each layer is."""
    numbers: dict[BlockSpec, int] = {}
    of_layer = tuple(numbers.setdefault(block, len(numbers)) for block in spec.blocks)
    return Kinds(tuple(numbers), of_layer)


def stage_of(kinds: Kinds, chunks: Sequence[int], layers: Sequence[range], again: Recompute) -> Stage:
    """The stage of these virtual stages, of which all are `layers`."""
    counts = Counter((kinds.of_layer[i], again.takes(i)) for chunk in chunks for i in layers[chunk])
    return Stage(
        tuple((kinds.blocks[kind], takes, n) for (kind, takes), n in counts.items()),
        len(chunks), first=0 in chunks, last=len(layers) - 1 in chunks,
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Job:
    """What memory follows from, of one layout."""

    spec: ModelSpec
    layout: Layout
    seq_len: int
    micro_batch: int
    microbatches: int
    recompute: Recompute = field(default_factory=Recompute)
    numerics: Numerics = field(default_factory=numerics)
    stack: Stack = field(default_factory=lambda: stack(DEFAULT))
    imbalance: float = 1.0
    """Tokens of the fullest expert rank over the mean."""
    offload: bool = False
    """The optimizer's states are in host memory."""
    offload_activations: bool = False
    """What layers keep is in host memory."""
    in_flight: float = 1.0
    """Times the microbatches of the layout's schedule, for schedules that a layout cannot name."""
    stages: tuple[range, ...] | None = None
    """Layers of each virtual stage; None: those of the layout's placement."""


@dataclass(frozen=True)
class RankMemory:
    """Bytes of one pipeline rank by term."""

    terms: dict[str, Any]

    def total(self, measure: Measure = "device") -> Any:
        left_out = {"allocated": ("fragmentation", "context"), "reserved": ("context",), "device": ()}[
            measure
        ]
        return sum(n for term, n in self.terms.items() if term not in left_out)


@dataclass(frozen=True)
class MemoryEstimate:
    """All pipeline ranks of a layout."""

    ranks: tuple[RankMemory, ...]

    @property
    def peak_rank(self) -> int:
        return max(range(len(self.ranks)), key=lambda r: self.ranks[r].total())

    @property
    def peak(self) -> RankMemory:
        return self.ranks[self.peak_rank]

    def fits(self, capacity_bytes: float) -> Literal["yes", "no", "unsure"]:
        """Whether the fullest rank fits, given the band of the estimate."""
        need = self.peak.total()
        return (
            "yes"
            if need * (1 + BAND) <= capacity_bytes
            else "no"
            if need * (1 - BAND) > capacity_bytes
            else "unsure"
        )


def estimate(job: Job) -> MemoryEstimate:
    """Memory of every pipeline rank. Ranks of equal content share one computation.

    Raises: LayoutError for a placement that does not hold the layers.
    """
    layout = job.layout
    layers = job.stages or stage_layers(job.spec, layout, job.seq_len)
    cut, kinds = Cut.of(layout), kinds_of(job.spec)
    known: dict[tuple[Stage, float], RankMemory] = {}
    ranks = []
    for rank in range(layout.pp):
        stage = stage_of(kinds, layout.virtual_stages_of(rank), layers, job.recompute)
        held = _held(job, rank)
        if (stage, held) not in known:
            known[stage, held] = RankMemory(rank_terms(job, stage, cut, held, job.micro_batch * job.seq_len))
        ranks.append(known[stage, held])
    return MemoryEstimate(tuple(ranks))


def _held(job: Job, rank: int) -> float:
    """Microbatches of a chunk that the rank holds at most.

    Zero bubble: until W, which reads nearly all that is kept (Qi et al. 2023, arXiv:2401.10241, table 1: 32 of 34 sbh).
    """
    bound = in_flight_bound(job.layout, rank, job.microbatches)
    return min(bound.stashed * job.in_flight, job.microbatches * job.layout.chunks)


def rank_terms(job: Job, stage: Stage, cut: Cut, held: Any, tokens: Any) -> dict[str, Any]:
    """Bytes by term of a rank that holds `stage` and at most `held` chunks' microbatches of `tokens` tokens.

    `job`: model, sequence length, precision and software only; the degrees are those of `cut`.
    """
    terms = state_terms(job, stage, cut) | work_terms(job, stage, cut, held, tokens)
    terms["buffers"] = terms.pop("zero_buffers") + terms["buffers"]
    terms["framework"] = job.stack.static_bytes
    terms["fragmentation"] = job.stack.fragmentation * sum(terms.values())
    terms["context"] = job.stack.context_bytes
    return {term: terms[term] for term in TERMS}


def state_terms(job: Job, stage: Stage, cut: Cut) -> dict[str, Any]:
    """What does not depend on the microbatch: parameters, gradients, optimizer, and the buffers of ZeRO.

    ZeRO cuts the optimizer's states from stage 1 on, gradients from 2 and parameters from 3 (Rajbhandari et al. 2020,
    section 5).
    """
    e, largest = _elements(job.spec, stage, cut)
    whole, shard = e.dense + e.expert, e.shard_dense + e.shard_expert

    def held(zero: int) -> Any:
        return shard * (cut.zero >= zero) + whole * (cut.zero < zero)

    return {
        "parameters": job.numerics.weight * held(3),
        "gradients": job.numerics.gradient * held(2),
        "optimizer": job.numerics.optimizer * held(1) * (not job.offload),
        "zero_buffers": _zero_buffers(job.spec, stage, largest, cut, job),
    }


def work_terms(job: Job, stage: Stage, cut: Cut, held: Any, tokens: Any) -> dict[str, Any]:
    """What microbatches take: activations, logits or working memory, messages and gathered tokens."""
    spec, of, element = job.spec, job.stack, job.numerics.element
    local = tokens / cut.cp
    share = Share(
        tokens=local, mine=local / (1 + (cut.tp - 1) * cut.sp), seq_len=job.seq_len, tp=cut.tp, etp=cut.etp,
        imbalance=job.imbalance,
    )  # fmt: skip
    kept, working, rows = _layers(job, stage, share)
    wide = share.mine * spec.hidden * element
    dropped = share.mine * spec.hidden * int(of.dropout) if stage.first else 0
    head = 2 * wide if stage.last else 0  # the inputs of the final norm and of the head
    activations = held * (kept + dropped) / stage.chunks * (not job.offload_activations) + head
    per_token = spec.vocab / cut.tp * of.logit_bytes + spec.hidden * element
    logits = local * per_token if stage.last else 0 * local
    at_loss = logits > working
    gathered = local * spec.hidden * element * (cut.tp > 1) * cut.sp
    messages = 4 * wide * (cut.pp > 1)
    dispatched = 2 * rows * spec.hidden * element * (cut.ep * cut.etp > 1)
    return {
        "activations": activations,
        "logits": logits * at_loss,
        "working": working * (1 - at_loss),
        "buffers": gathered + messages + dispatched,
    }


def _layers(job: Job, stage: Stage, share: Share) -> tuple[Any, Any, Any]:
    """Kept by all layers of one microbatch; the most that one needs for a moment; dispatched rows of tokens."""
    kernels = job.stack.kernels(job.numerics.element)
    kept: Any = 0
    working: Any = 0 * share.tokens
    rows: Any = 0
    for block, takes, n in stage.layers:
        one = layer_kept(block, job.spec.hidden, share, kernels, job.recompute.words if takes else ("none",))
        kept = kept + n * one.kept
        working = larger(working, one.moment)
        if isinstance(block.mlp, MoESpec):
            rows = share.mine * block.mlp.top_k * job.imbalance
    return kept, working, rows


def _elements(spec: ModelSpec, stage: Stage, cut: Cut) -> tuple[Elements, Any]:
    """Elements of all parameters of the rank, and of its largest layer."""

    def of(matrices: Any) -> Elements:
        return local_elements(
            matrices, tp=cut.tp, ep=cut.ep, etp=cut.etp, shards=cut.shards, expert_shards=cut.expert_shards
        )

    counts: Counter[BlockSpec] = Counter()
    for block, _, n in stage.layers:
        counts[block] += n
    parts = [(of(matrices_of(spec, block)), n) for block, n in counts.items()]
    largest: Any = 0
    for one, _ in parts:
        largest = larger(largest, one.dense + one.expert)
    if stage.first:
        parts.append((of(embedding_matrices(spec)), 1))
    if stage.last:
        parts.append((of(head_matrices(spec, tied_here=spec.tied_embeddings and stage.first)), 1))
    sums = [sum(getattr(one, name) * n for one, n in parts) for name in Elements.__dataclass_fields__]
    return Elements(*sums), largest


def _zero_buffers(spec: ModelSpec, stage: Stage, layer: Any, cut: Cut, job: Job) -> Any:
    """ZeRO-3: gathered layers, and embedding and head, which are read all the time; ZeRO-2 and 3: a layer's gradients.

    `layer`: elements of the largest layer.
    """
    ends = stage.first + (stage.last and not (spec.tied_embeddings and stage.first))
    table = ends * spec.vocab * spec.hidden / cut.tp
    gathered = (job.stack.gathered_layers * layer + table) * job.numerics.element
    several = cut.shards > 1
    return several * (gathered * (cut.zero >= 3) + layer * job.numerics.gradient * (cut.zero >= 2))

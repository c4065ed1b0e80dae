"""What two layouts are compared on: a small workload that both can run, and a small model in place of a large one."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from math import gcd, lcm

from fivefold.core.cluster import Cluster
from fivefold.core.execution import DType, Execution
from fivefold.core.experts import ExpertsConfig
from fivefold.core.layout import Layout
from fivefold.core.loss_scale import LossScaleConfig
from fivefold.core.model_spec import (
    AttentionSpec,
    BlockSpec,
    GatedDeltaSpec,
    MLASpec,
    MLPSpec,
    ModelSpec,
    MoESpec,
)
from fivefold.core.optimizer import OptimizerConfig
from fivefold.core.plan import Plan
from fivefold.core.router import RouterConfig
from fivefold.core.workload import Workload
from fivefold.errors import ConfigError
from fivefold.strategies import compose
from fivefold.strategies.expert.rules import routed_layers
from fivefold.strategies.pipeline.actions import microbatches_of
from fivefold.verify.overflow import SCALE

BOUNDS = {"float64": 1e-10, "float32": 1e-5}
"""Largest error that is rounding. AdamW weights are judged in float64: the mere order of microbatches moves them."""

MICRO_BATCH, MICROBATCHES, SHORTEST = 2, 3, 16
SHORT_WINDOW, LONGEST_WINDOW = 64, 512
"""Attention windows that the sequence always exceeds, and up to which it does where that is affordable."""
AFFORDABLE = 2**24
"""Elements of logits and activations of a global batch that each layout may keep for the sake of a window."""
SMALL_SCALE = LossScaleConfig(initial=1024)
"""In float16: small gradients do not vanish, and those of a new model do not overflow."""
CLIP_NORM = 0.5
"""Below the usual first gradient norm, so that clipping acts and the weights depend on the norm."""

ROUTER = RouterConfig(balance_coefficient=0.05, z_coefficient=0.01, bias_speed=0.01)
"""Far stronger than in training, so that a fault in any of them shows. Biases move no further than scores differ."""
ROUTERS = (
    ROUTER,
    ROUTER.replace(balance="batch"),
    ROUTER.replace(capacity_factor=1.1),
    ROUTER.replace(balance="batch", capacity_factor=0.9, capacity="pad"),
)
"""What routers are asked for in a walk over many layouts: each layout has one of these."""

HIDDEN, HEAD_DIM, FFN, WINDOW = 64, 8, 64, 24
"""Widths of a shrunk model: the FFN at least this, heads and windows at most."""
EXPERTS, EXPERT_FFN = 64, 8
"""Number and width of experts of a shrunk model, or a little more."""


def common_plans(
    spec: ModelSpec,
    layout: Layout,
    against: Layout,
    dtype: DType,
    *,
    actions: tuple[str, ...] | None = None,
    documents: bool = False,
    check: Callable[[Plan], None] = compose.check,
    overflow: bool = False,
    recompute: str = "none",
    router: RouterConfig | None = None,
    experts: ExpertsConfig | None = None,
) -> tuple[Plan, Plan]:
    """A small workload that is legal for both layouts, and the two plans.

    Two sequences a microbatch, at least two microbatches on every data rank, the same global batch; a sequence that
    both can cut and that is longer than the attention windows, where that is affordable and the model has so many
    positions (`idle_windows` tells where not). `actions`: the custom schedule of `layout`, which says how many
    microbatches there are. `documents`: tokens attend within their own document, of which a sample has several.
    `check`: whether the model can be run under a plan.
    `overflow`: `layout` gets a loss scale, the other one none.
    `recompute`: what `layout` computes again in backward.
    `router`: what routers of experts are asked for; None: `ROUTER`.
    `experts`: when `layout` places experts anew; the other one never does.
    """
    if dtype not in (*BOUNDS, "bfloat16", "float16"):
        raise ConfigError(f"verify compares in {', '.join(BOUNDS)}, bfloat16 and float16, not in {dtype!r}")
    count = MICROBATCHES if actions is None else microbatches_of(actions)
    global_batch = MICRO_BATCH * count * lcm(layout.dp, against.dp)
    unit = lcm(*(2 * cut.tp * cut.cp for cut in (layout, against)))
    lengths = [w + w // 2 for w in windows(spec) if w <= SHORT_WINDOW or _affordable(spec, w, global_batch)]
    longest = spec.max_positions // unit * unit or unit
    seq_len = min(-(-max(SHORTEST, *lengths, 0) // unit) * unit, longest)
    plans = [
        Plan(
            model=spec,
            cluster=Cluster.parse("cpu"),
            workload=Workload(seq_len=seq_len, global_batch=global_batch, separate_documents=documents),
            layout=cut,
            execution=Execution(
                micro_batch=MICRO_BATCH,
                dtype=dtype,
                loss_scale=SMALL_SCALE
                if dtype == "float16"
                else SCALE
                if overflow and cut is layout
                else None,
                optimizer=OptimizerConfig(clip_norm=CLIP_NORM),
                router=_for_model(router or ROUTER, spec),
                experts=(experts if cut is layout else None) or ExpertsConfig(),
                actions=lines,
                recompute=again,
            ),
        )
        for cut, lines, again in ((layout, actions, recompute), (against, None, "none"))
    ]
    for plan in plans:
        check(plan)
    return plans[0], plans[1]


def _for_model(router: RouterConfig, spec: ModelSpec) -> RouterConfig:
    """What of these settings acts in the model."""
    moes = routed_layers(spec).values()
    if not moes:
        return RouterConfig()
    return router if any(moe.selection_bias for moe in moes) else router.replace(bias_speed=0.0)


def windows(spec: ModelSpec) -> list[int]:
    """The attention windows of a model, each size once, the shortest first."""
    attentions = [b.attention for b in spec.blocks if isinstance(b.attention, AttentionSpec)]
    return sorted({attention.window for attention in attentions if attention.window})


def idle_windows(plan: Plan) -> list[int]:
    """Windows that hide nothing, since no token has so many before it: a fault in them would not show."""
    return [window for window in windows(plan.model) if window >= plan.workload.seq_len]


def _affordable(spec: ModelSpec, window: int, global_batch: int) -> bool:
    kept_per_token = spec.vocab + (spec.layers + 1) * spec.hidden
    tokens = (window + window // 2) * global_batch
    return window <= LONGEST_WINDOW and tokens * kept_per_token <= AFFORDABLE


def shrink(spec: ModelSpec) -> ModelSpec:
    """The same heads, layers and features with small widths, for verifying a layout of a large model.

    A degree of tensor parallelism that is legal for one of them is legal for the other; so is one of experts up to
    `EXPERTS`, and one inside an expert up to `EXPERT_FFN`.
    """
    blocks = []
    for block in spec.blocks:
        attention = block.attention
        mlp = _small_mlp(block)
        if isinstance(attention, AttentionSpec):
            attention = attention.replace(
                head_dim=HEAD_DIM,
                rope_dim=attention.rope_dim and min(attention.rope_dim, HEAD_DIM),
                window=attention.window and min(attention.window, WINDOW),
            )
        if isinstance(attention, MLASpec):
            ranks = {
                "q_rank": attention.q_rank and min(attention.q_rank, FFN),
                "kv_rank": min(attention.kv_rank, FFN),
            }
            parts = {
                name: min(getattr(attention, name), HEAD_DIM)
                for name in ("nope_dim", "rope_dim", "value_dim")
            }
            attention = attention.replace(**ranks, **parts)
        blocks.append(block.replace(attention=attention, mlp=mlp))
    vocab = min(spec.vocab, 512 + spec.vocab % 512)
    return spec.replace(name=f"{spec.name} (shrunk)", hidden=HIDDEN, vocab=vocab, blocks=tuple(blocks))


def _small_mlp(block: BlockSpec) -> MLPSpec | MoESpec:
    mlp, attention = block.mlp, block.attention
    heads = attention.value_heads if isinstance(attention, GatedDeltaSpec) else attention.heads
    if isinstance(mlp, MLPSpec):
        return mlp.replace(ffn=_small_ffn(mlp.ffn, heads))
    common = gcd(mlp.experts, EXPERTS * mlp.groups)
    experts = next(n for n in count(common, common) if n >= min(mlp.experts, EXPERTS) and _holds(mlp, n))
    return mlp.replace(
        experts=experts,
        ffn=next(w for w in count(1) if w % gcd(mlp.ffn, EXPERT_FFN) == 0 and w >= min(mlp.ffn, EXPERT_FFN)),
        shared_ffn=_small_ffn(mlp.shared_ffn, heads) if mlp.shared_ffn else 0,
    )


def _holds(mlp: MoESpec, experts: int) -> bool:
    """Whether so many experts can be grouped and chosen from in the same way."""
    return experts % mlp.groups == 0 and mlp.top_k <= experts // mlp.groups * mlp.topk_groups


def _small_ffn(ffn: int, heads: int) -> int:
    """The smallest width of at least 64 that the same degrees of tensor parallelism divide.

    A degree has to divide the heads as well, so it divides both exactly if it divides their greatest common divisor,
    which is kept. Powers of two are kept beyond it as far as 64 has room for them.
    """
    common = unit = gcd(ffn, heads)
    while unit < FFN and ffn % (2 * unit) == 0:
        unit *= 2
    return next(w for w in count(unit, unit) if w >= min(ffn, FFN) and gcd(w, heads) == common)

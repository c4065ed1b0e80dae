"""Are two layouts the same model? Same weights, same data, every quantity of every rank compared.

verdict = verify(spec, Layout.parse("dp2 tp2 pp2"))
verdict.passed, verdict.max_rel_err, verdict.cause
"""

from __future__ import annotations

from math import lcm
from typing import Any, Literal

from pydantic import ConfigDict

from fivefold.core.cluster import Cluster
from fivefold.core.events import difference, without_setup
from fivefold.core.execution import DType, Execution
from fivefold.core.layout import Layout
from fivefold.core.model_spec import AttentionSpec, ModelSpec
from fivefold.core.optimizer import OptimizerConfig
from fivefold.core.plan import Plan
from fivefold.core.value import Value
from fivefold.core.workload import Workload
from fivefold.data.batches import SyntheticDataset
from fivefold.engine.size import check_size
from fivefold.errors import ConfigError
from fivefold.runtime.launch import run_ranks
from fivefold.strategies import compose
from fivefold.verify.cause import find_cause, name_axis
from fivefold.verify.compare import QUANTITIES, Key, Whole, assemble, compare
from fivefold.verify.observe import Observation, observe

BOUNDS = {"float64": 1e-10, "float32": 1e-5}
"""Largest error that is rounding. AdamW weights are judged in float64: the mere order of microbatches moves them."""

MICRO_BATCH, MICROBATCHES, SHORTEST = 2, 3, 16
HIDDEN, HEAD_DIM = 64, 8
"""Widths of a shrunk model."""
SHRINK = "use --shrink, which keeps heads, layers and features and makes everything else small"
KEPT_COPIES = 8
"""Parameters, gradients, moments, and what is kept of each to be compared."""
CLIP_NORM = 0.5
"""Below the usual first gradient norm, so that clipping acts and the weights depend on the norm."""


class Verdict(Value):
    """The outcome of comparing `layout` with `against`."""

    passed: bool
    max_rel_err: float
    """The largest error of the quantities that are judged at this dtype."""
    layout: Layout
    against: Layout
    model: str
    dtype: str
    bound: float
    steps: int
    seq_len: int
    global_batch: int
    quantities: dict[str, float]
    """Error of each quantity; 0 for one that the model does not have (`absent`)."""
    absent: tuple[str, ...]
    not_judged: tuple[str, ...]
    events_match: bool
    """Whether every rank dispatched exactly the communication that the strategies predict."""
    event_differences: tuple[str, ...] = ()
    first_module: str | None = None
    ratio: float | None = None
    cause: str | None = None

    model_config = ConfigDict(allow_inf_nan=True)


def verify(
    spec: ModelSpec,
    layout: Layout,
    against: Layout | None = None,
    *,
    dtype: Literal["float64", "float32"] = "float64",
    steps: int = 1,
    seed: int = 0,
    device: str = "auto",
    find_axis: bool = True,
) -> Verdict:
    """Compare two layouts (default: with one device) on this machine.

    Raises: UserError if one of them cannot be run at all; RankFailure if a rank breaks.
    """
    against = against or Layout.parse("dp1")
    plan, reference_plan = common_plans(spec, layout, against, dtype)
    reference = Reference(reference_plan, steps=steps, seed=seed, device=device)
    return reference.judge(plan, find_axis=find_axis)


class Reference:
    """What one layout saw, against which any number of others are judged on the same data."""

    def __init__(self, plan: Plan, *, steps: int, seed: int, device: str) -> None:
        check_size(plan, what="verifying", advice=SHRINK, copies=KEPT_COPIES)
        self.plan, self.steps, self.seed, self.device = plan, steps, seed, device
        self.wholes: dict[Key, Whole] = assemble(self._run(plan))

    def judge(self, plan: Plan, *, find_axis: bool = True) -> Verdict:
        """Run `plan` on the same data and compare; on failure, say why."""
        check_size(plan, what="verifying", advice=SHRINK, copies=KEPT_COPIES)
        observations = self._run(plan)
        verdict = judge(plan, observations, self.wholes, against=self.plan.layout, steps=self.steps)
        if verdict.passed or not find_axis or plan.layout.world_size == 1:
            return verdict

        def still_fails(layout: Layout) -> bool:
            return not self.judge(plan.replace(layout=layout), find_axis=False).passed

        return verdict.replace(cause=f"{verdict.cause}. Guilty: {name_axis(plan.layout, still_fails)}")

    def _run(self, plan: Plan) -> list[Observation]:
        dataset = SyntheticDataset(plan.model.vocab, plan.workload.seq_len, self.seed)
        result: list[Any] = run_ranks(
            lambda rank: observe(rank, plan, dataset, seed=self.seed, steps=self.steps),
            ranks=plan.layout.world_size,
            device=self.device,
        )
        return result


def judge(
    plan: Plan,
    observations: list[Observation],
    reference: dict[Key, Whole],
    *,
    against: Layout | None = None,
    steps: int,
) -> Verdict:
    """Compare what the ranks of `plan` saw with a reference on the same data; on failure, say what is known of why."""
    errors = compare(observations, reference)
    lines = event_differences(plan, observations)
    dtype = plan.execution.dtype
    bound = BOUNDS[dtype]
    not_judged = ("weights_adamw",) if dtype == "float32" else ()
    quantities = {quantity: errors.of(quantity) for quantity in QUANTITIES}
    worst = max(error for quantity, error in quantities.items() if quantity not in not_judged)
    passed = worst <= bound and not lines
    cause = None if passed else find_cause(errors, bound, _counts(plan), lines, not_judged)
    return Verdict(
        passed=passed,
        max_rel_err=worst,
        layout=plan.layout,
        against=against or Layout(),
        model=plan.model.name,
        dtype=dtype,
        bound=bound,
        steps=steps,
        seq_len=plan.workload.seq_len,
        global_batch=plan.workload.global_batch,
        quantities=quantities,
        absent=tuple(q for q in QUANTITIES if not errors.present(q)),
        not_judged=not_judged,
        events_match=not lines,
        event_differences=tuple(lines),
        first_module=cause.first_module if cause else None,
        ratio=cause.ratio if cause else None,
        cause=cause.text if cause else None,
    )


def common_plans(spec: ModelSpec, layout: Layout, against: Layout, dtype: DType) -> tuple[Plan, Plan]:
    """A small workload that is legal for both layouts, and the two plans.

    Two sequences a microbatch, at least two microbatches on every data rank, the same global batch; a sequence that
    both can cut and that is longer than a short attention window, where the model has so many positions.
    """
    if dtype not in BOUNDS:
        raise ConfigError(f"verify knows the bounds of {' and '.join(BOUNDS)}, not of {dtype!r}")
    unit = lcm(*(2 * cut.tp * cut.cp for cut in (layout, against)))
    windows = [
        b.attention.window
        for b in spec.blocks
        if isinstance(b.attention, AttentionSpec) and b.attention.window
    ]
    wanted = max(SHORTEST, *(w + w // 2 for w in windows if w <= 64), 0)
    longest = spec.max_positions // unit * unit or unit
    seq_len = min(-(-wanted // unit) * unit, longest)
    global_batch = MICRO_BATCH * MICROBATCHES * lcm(layout.dp, against.dp)
    plans = [
        Plan(
            model=spec,
            cluster=Cluster.parse("cpu"),
            workload=Workload(seq_len=seq_len, global_batch=global_batch),
            layout=cut,
            execution=Execution(
                micro_batch=MICRO_BATCH, dtype=dtype, optimizer=OptimizerConfig(clip_norm=CLIP_NORM)
            ),
        )
        for cut in (layout, against)
    ]
    for plan in plans:
        compose.check(plan)
    return plans[0], plans[1]


def event_differences(plan: Plan, observations: list[Observation]) -> list[str]:
    """Lines of what some rank dispatched and the strategies do not predict, or the other way round."""
    lines = []
    for rank, seen in enumerate(observations):
        found = difference(compose.predict_events(plan, rank), without_setup(seen.events))
        lines += [f"rank {rank}: {line}" for line in found]
    return lines


def shrink(spec: ModelSpec) -> ModelSpec:
    """The same heads, layers and features with small widths, for verifying a layout of a large model."""
    blocks = []
    for block in spec.blocks:
        attention = block.attention
        if isinstance(attention, AttentionSpec):
            attention = attention.replace(
                head_dim=HEAD_DIM,
                rope_dim=attention.rope_dim and min(attention.rope_dim, HEAD_DIM),
                window=attention.window and min(attention.window, 24),
            )
        mlp = block.mlp.replace(ffn=block.mlp.ffn // _smallest_unit(block.mlp.ffn))
        blocks.append(block.replace(attention=attention, mlp=mlp))
    vocab = min(spec.vocab, 512 + spec.vocab % 512)
    return spec.replace(name=f"{spec.name} (shrunk)", hidden=HIDDEN, vocab=vocab, blocks=tuple(blocks))


def _smallest_unit(ffn: int) -> int:
    """The largest odd or power-of-two factor to divide a width by that leaves at least 64 and keeps powers of two."""
    unit = 1
    for factor in range(2, ffn // 64 + 1):
        rest = ffn // factor
        if ffn % factor == 0 and (rest & -rest) >= min(ffn & -ffn, 64):
            unit = factor
    return unit


def _counts(plan: Plan) -> dict[str, int]:
    layout = plan.layout
    microbatches = plan.workload.global_batch // (layout.dp * plan.execution.micro_batch)
    return {
        "the number of microbatches": microbatches,
        **{axis: layout.degree(axis) for axis in ("dp", "tp", "pp", "cp")},
        "dp x microbatches": layout.dp * microbatches if layout.dp > 1 else 1,
        "dp x tp": layout.dp * layout.tp if min(layout.dp, layout.tp) > 1 else 1,
    }

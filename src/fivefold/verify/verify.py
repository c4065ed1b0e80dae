"""Are two layouts the same model? Same weights, same data, every quantity of every rank compared.

verdict = verify(spec, Layout.parse("dp2 tp2 pp2"))
verdict.passed, verdict.max_rel_err, verdict.cause
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
from pydantic import ConfigDict

from fivefold.core.experts import ExpertsConfig
from fivefold.core.layout import Layout
from fivefold.core.model_spec import ModelSpec
from fivefold.core.plan import Plan
from fivefold.core.router import RouterConfig
from fivefold.core.sharding import parameters
from fivefold.core.value import Value
from fivefold.data.batches import SyntheticDataset
from fivefold.engine.own import OwnModel
from fivefold.engine.size import check_size
from fivefold.errors import ConfigError
from fivefold.runtime.device import check_device_count, device_kind
from fivefold.runtime.launch import run_ranks
from fivefold.strategies.expert.rules import routed_layers
from fivefold.strategies.legal import Case
from fivefold.verify.cause import experts_in_norm, find_cause
from fivefold.verify.communication import event_differences
from fivefold.verify.compare import QUANTITIES, Key, Whole, assemble, compare
from fivefold.verify.guilty import find_guilty
from fivefold.verify.observe import MOMENTS, Observation, kept_moments, observe, required
from fivefold.verify.overflow import STEPS as OVERFLOW_STEPS
from fivefold.verify.routes import Choices, choices_of
from fivefold.verify.workload import BOUNDS, common_plans, idle_windows

STEPS = 2
"""Many faults act from the second step only: a gradient that was not zeroed, a moment that was not kept."""

SHRINK = "use --shrink, which keeps heads, layers and features and makes everything else small"
KEPT_COPIES = 14
"""Parameters, gradients, moments, and what is kept of the first and the last step to be compared."""


class Verdict(Value):
    """The outcome of comparing `layout` with `against`."""

    passed: bool
    max_rel_err: float
    """The largest error of the quantities that are judged at this dtype."""
    layout: Layout
    recompute: str = "none"
    """What `layout` computes again in backward; `against` keeps all activations."""
    experts: ExpertsConfig = ExpertsConfig()
    """When `layout` places its experts anew; `against` never does."""
    against: Layout
    router: RouterConfig = RouterConfig()
    """What routers of experts were asked for, under both."""
    model: str
    dtype: str
    bound: float
    steps: int
    seq_len: int
    global_batch: int
    quantities: dict[str, float]
    """Error of each quantity; 0 for one that the model does not have (`absent`)."""
    own_errors: dict[str, float] | None = None
    """In 16 bits: what one device's own error against float64 is; `quantities` are errors against float64 as well."""
    bounds: dict[str, float] | None = None
    """In 16 bits: the bound of each quantity; else `bound` holds for all."""
    absent: tuple[str, ...]
    not_judged: tuple[str, ...]
    events_match: bool
    """Whether every rank dispatched exactly the communication that the strategies predict, in every step."""
    event_differences: tuple[str, ...] = ()
    against_faults: tuple[str, ...] = ()
    """What is wrong with the layout compared with, by itself."""
    limits: tuple[str, ...] = ()
    """What this comparison cannot show, whatever its outcome."""
    first_module: str | None = None
    ratio: float | None = None
    cause: str | None = None

    model_config = ConfigDict(allow_inf_nan=True)

    @property
    def case(self) -> Case:
        """What was judged."""
        return Case(self.layout, self.recompute)


def verify(
    spec: ModelSpec,
    layout: Layout,
    against: Layout | None = None,
    *,
    dtype: Literal["float64", "float32"] = "float64",
    steps: int = STEPS,
    seed: int = 0,
    device: str = "auto",
    find_axis: bool = True,
    actions: tuple[str, ...] | None = None,
    documents: bool = False,
    overflow: bool = False,
    recompute: str = "none",
    rebalance: int | None = None,
) -> Verdict:
    """Compare two layouts (default: with one device) on this machine.

    `actions`: the action list of a layout with the schedule `custom`, a line for each pipeline rank.
    `documents`: samples of several documents that do not see one another, and of padding.
    `overflow`: `layout` has a loss scale, the other one has none, and the third of at least four steps overflows.
    `recompute`: what `layout` computes again in backward, such as `full`; the other keeps all activations.
    `rebalance`: `layout` places its experts anew after so many steps, with copies, for at least twice and a step more.
    Raises: UserError if one of them cannot be run at all; RankFailure if a rank breaks.
    """
    if dtype not in BOUNDS:
        raise ConfigError(
            f"verify judges {' and '.join(BOUNDS)}, not {dtype!r}; for 16 bits: rounding.verify_rounding"
        )
    against, steps = against or Layout.parse("dp1"), max(steps, OVERFLOW_STEPS) if overflow else steps
    steps = max(steps, 2 * (rebalance or 0) + 1)
    check_device_count(device_kind(device), max(layout.world_size, against.world_size))
    plan, reference_plan = common_plans(
        spec, layout, against, dtype, actions=actions, documents=documents, overflow=overflow, recompute=recompute,
        experts=ExpertsConfig(rebalance_every=rebalance),
    )  # fmt: skip
    reference = Reference(reference_plan, steps=steps, seed=seed, device=device, overflow=overflow)
    return reference.judge(plan, find_axis=find_axis)


class Reference:
    """What one layout saw, against which any number of others are judged on the same data."""

    def __init__(
        self,
        plan: Plan,
        *,
        steps: int = STEPS,
        seed: int,
        device: str,
        make_own: Callable[[], OwnModel] | None = None,
        overflow: bool = False,
    ) -> None:
        """`make_own`: makes the module that is judged; None: our decoder of the plan's sizes.

        `overflow`: the third of at least four steps has an infinite gradient.
        """
        self.plan, self.steps, self.seed, self.device, self.make_own = plan, steps, seed, device, make_own
        self.overflow = overflow
        self._check_size(plan)
        self.replay: Choices | None = None
        observations = self._run(plan)
        self.wholes: dict[Key, Whole] = assemble(observations)
        if plan.execution.dtype != "float64":  # rounding decides ties
            self.replay = choices_of(self.wholes) or None
        self.faults = own_faults(plan, observations, self.wholes, steps=steps, overflow=overflow)

    def judge(self, plan: Plan, *, find_axis: bool = True) -> Verdict:
        """Run `plan` on the same data and compare; on failure, say why."""
        self._check_size(plan)
        observations = self._run(plan)
        verdict = judge(
            plan, observations, self.wholes, against=self.plan.layout, steps=self.steps, faults=self.faults
        )
        if verdict.passed or not find_axis or plan.layout.world_size == 1 or self.faults:
            return verdict
        guilty = find_guilty(self, plan, verdict, observations, _counts(plan))
        return verdict.replace(cause=f"{verdict.cause}. Guilty: {guilty}")

    def with_router(self, router: RouterConfig) -> Reference:
        """The same with other demands on the routers of experts."""
        plan = self.plan.replace(execution=self.plan.execution.replace(router=router))
        return Reference(
            plan, steps=self.steps, seed=self.seed, device=self.device, make_own=self.make_own,
            overflow=self.overflow,
        )  # fmt: skip

    def _check_size(self, plan: Plan) -> None:
        advice = "give a smaller module" if self.make_own else SHRINK
        check_size(plan, what="verifying", advice=advice, copies=KEPT_COPIES)

    def _run(self, plan: Plan) -> list[Observation]:
        workload = plan.workload
        dataset = SyntheticDataset(
            plan.model.vocab, workload.seq_len, self.seed, documents=workload.separate_documents
        )
        result: list[Any] = run_ranks(
            lambda rank: observe(
                rank,
                plan,
                dataset,
                seed=self.seed,
                steps=self.steps,
                make_own=self.make_own,
                overflow=self.overflow,
                replay=self.replay,
            ),
            ranks=plan.layout.world_size,
            device=self.device,
        )
        return result


def judge(
    plan: Plan,
    observations: Sequence[Observation],
    reference: dict[Key, Whole],
    *,
    against: Layout | None = None,
    steps: int,
    faults: tuple[str, ...] = (),
) -> Verdict:
    """Compare what the ranks of `plan` saw with a reference on the same data; on failure, say what is known of why.

    `faults`: what is wrong with the reference by itself (`own_faults`); nothing passes against one that has any.
    """
    against = against or Layout()
    errors = compare(observations, reference)
    lines = event_differences(plan, observations)
    bound, not_judged = BOUNDS[plan.execution.dtype], _not_judged(plan)
    quantities = {quantity: errors.of(quantity) for quantity in QUANTITIES}
    worst = max(error for quantity, error in quantities.items() if quantity not in not_judged)
    agrees = worst <= bound and not lines
    cause = None if agrees else find_cause(errors, bound, _counts(plan), lines, not_judged)
    more = ""
    if cause and cause.quantity == "grad_norm":
        rows = observations[0].rows or parameters(plan.model)
        experts = [row.name for row in rows if row.mesh == "expert"]
        more = experts_in_norm(assemble(observations), reference, experts, bound, _counts(plan))
    texts = (
        [f"the layout compared with, {against}, is itself at fault: {'; '.join(faults)}"] if faults else []
    )
    texts += [cause.text + more] if cause else []
    return Verdict(
        passed=agrees and not faults,
        max_rel_err=worst,
        layout=plan.layout,
        recompute=plan.execution.recompute,
        experts=plan.execution.experts,
        against=against,
        router=plan.execution.router,
        model=plan.model.name,
        dtype=plan.execution.dtype,
        bound=bound,
        steps=steps,
        seq_len=plan.workload.seq_len,
        global_batch=plan.workload.global_batch,
        quantities=quantities,
        absent=tuple(q for q in QUANTITIES if not errors.present(q)),
        not_judged=not_judged,
        events_match=not lines,
        event_differences=tuple(lines),
        against_faults=faults,
        limits=limits_of(plan, against, steps),
        first_module=cause.first_module if cause else None,
        ratio=cause.ratio if cause else None,
        cause=". Between the two, ".join(texts) or None,
    )


def own_faults(
    plan: Plan,
    observations: Sequence[Observation],
    wholes: dict[Key, Whole],
    *,
    steps: int,
    overflow: bool = False,
) -> tuple[str, ...]:
    """What is wrong with what one layout saw, by itself.

    Something that a model has and no rank saw (both layouts may lack it), numbers that are not finite, replicas that
    differ, communication that is not as predicted. `wholes`: the observations assembled.
    """
    faults = []
    errors = compare(observations, wholes)
    errors.missing = [
        key
        for key in required(plan, steps, observations[0].rows, overflow=overflow)
        if key not in wholes or not wholes[key].covered.all()
    ]
    not_finite = [key for key, whole in wholes.items() if not np.isfinite(whole.values).all()]
    bound, not_judged = BOUNDS[plan.execution.dtype], _not_judged(plan)
    worst = max(
        (e for (quantity, _), e in errors.by_tensor.items() if quantity not in not_judged), default=0.0
    )
    if errors.missing:
        faults.append(find_cause(errors, bound, {}, []).text)
    elif not_finite:
        quantity, name = not_finite[0]
        faults.append(f"{len(not_finite)} of its tensors are not finite, the first is {name} ({quantity})")
    elif not worst <= bound:
        faults.append(f"its own ranks disagree: {find_cause(errors, bound, {}, [], not_judged).text}")
    lines = event_differences(plan, observations)
    if lines:
        faults.append(f"its communication is not as predicted: {'; '.join(lines[:3])}")
    return tuple(faults)


def _not_judged(plan: Plan) -> tuple[str, ...]:
    return ("weights_adamw",) if plan.execution.dtype == "float32" else ()


def limits_of(plan: Plan, against: Layout, steps: int) -> tuple[str, ...]:
    """What a comparison of these two cannot show, in words."""
    length = plan.workload.seq_len
    limits = [f"the window of {window} was not exercised: sequence {length}" for window in idle_windows(plan)]
    if plan.layout.cp > 1 and not plan.workload.separate_documents:
        limits.append("masks of separate documents were not exercised: ask for documents")
    if plan.execution.dtype != "float64" and routed_layers(plan.model):
        limits.append(
            f"in {plan.execution.dtype} tokens go to the experts that {against} chose: rounding decides ties"
        )
    if kept_moments(plan, steps) != MOMENTS:
        limits.append(f"in {plan.execution.dtype} moments are judged after the first step only")
    if plan.layout == against and plan.execution.recompute == "none":
        limits.append(f"{against} was compared with itself: only what differs from run to run can show")
    elif against.world_size > 1:
        limits.append(f"a fault that {plan.layout} and {against} share does not show: neither is one device")
    return tuple(limits)


def _counts(plan: Plan) -> dict[str, int]:
    layout = plan.layout
    scaling = plan.execution.scaling
    microbatches = plan.workload.global_batch // (layout.dp * plan.execution.micro_batch)
    return {
        "the number of microbatches": microbatches,
        "the loss scale": 1 if scaling is None else scaling.initial,
        **{axis: layout.degree(axis) for axis in ("dp", "tp", "pp", "cp", "ep", "etp")},
        "edp": layout.edp if layout.ep * layout.etp > 1 else 1,
        "dp x microbatches": layout.dp * microbatches if layout.dp > 1 else 1,
        "dp x cp": layout.data if min(layout.dp, layout.cp) > 1 else 1,
        "dp x tp": layout.dp * layout.tp if min(layout.dp, layout.tp) > 1 else 1,
    }

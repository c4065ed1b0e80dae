"""The verdict on what ranks saw, made by hand: what passes, what does not, and what is said of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest

from fivefold.core.events import Event
from fivefold.core.layout import Layout
from fivefold.core.model_spec import AttentionSpec, BlockSpec, MLPSpec, ModelSpec
from fivefold.core.plan import Plan
from fivefold.verify.compare import QUANTITIES, assemble
from fivefold.verify.observe import Observation, Piece, kept_steps, required
from fivefold.verify.verify import Verdict, judge, own_faults
from fivefold.verify.workload import common_plans


def plan(text: str = "dp1", dtype: str = "float64", window: int | None = None) -> Plan:
    attention = AttentionSpec(heads=8, kv_heads=2, head_dim=8, window=window)
    blocks = (BlockSpec(attention=attention, mlp=MLPSpec(ffn=32)),) * 2
    spec = ModelSpec(name="m", hidden=32, vocab=50, blocks=blocks)
    return common_plans(spec, Layout.parse(text), Layout(), dtype)[0]  # type: ignore[arg-type]


def observation(gradient: float = 1.0, adamw: float = 1.0, events: int = 0) -> Observation:
    values = dict.fromkeys(QUANTITIES, 1.0) | {"gradients": gradient, "weights_adamw": adamw}
    del values["buffers"], values["routed_experts"]
    pieces = [Piece(q, "a.weight", (), (), np.asarray(v)) for q, v in values.items()]
    extra = Event("backward", "tp", "all_reduce", "float64", 8)
    return Observation(pieces, {"sgd step 1": Counter(), "sgd step 2": Counter({extra: events})})


def verdict(
    seen: Observation, dtype: str = "float64", *, faults: tuple[str, ...] = (), against: str = "dp1"
) -> Verdict:
    return judge(
        plan(dtype=dtype),
        [seen],
        assemble([observation()]),
        against=Layout.parse(against),
        steps=2,
        faults=faults,
    )


def test_verdict_of_equals() -> None:
    same = verdict(observation())
    assert (same.passed, same.cause, same.max_rel_err, same.events_match) == (True, None, 0.0, True)
    assert set(same.quantities) == set(QUANTITIES)
    assert same.absent == ("buffers", "routed_experts")


def test_verdict_of_a_wrong_gradient() -> None:
    wrong = verdict(observation(gradient=3.0))
    assert (wrong.passed, wrong.max_rel_err, wrong.first_module) == (False, 2.0, "a")
    assert wrong.ratio == pytest.approx(3.0)
    assert wrong.cause is not None
    assert wrong.cause.endswith("exactly 3.000x, which is the number of microbatches")


@pytest.mark.parametrize(("dtype", "bound"), [("float64", 1e-10), ("float32", 1e-5)])
def test_the_bound_depends_on_the_dtype(dtype: str, bound: float) -> None:
    assert verdict(observation(gradient=1 + 0.9 * bound), dtype).passed
    assert not verdict(observation(gradient=1 + 1.1 * bound), dtype).passed


def test_adamw_weights_are_judged_in_float64_only() -> None:
    assert not verdict(observation(adamw=1.1)).passed
    in_float32 = verdict(observation(adamw=1.1), "float32")
    assert in_float32.passed
    assert in_float32.not_judged == ("weights_adamw",)
    assert in_float32.quantities["weights_adamw"] == pytest.approx(0.1)
    assert in_float32.max_rel_err == 0.0


def test_unexpected_communication_is_a_failure() -> None:
    chatty = verdict(observation(events=2))
    assert (chatty.passed, chatty.events_match, chatty.max_rel_err) == (False, False, 0.0)
    event = "backward tp all_reduce float64 8 B: predicted none, recorded 2 (unexpected)"
    line = f"rank 0, sgd step 2: {event}"
    assert chatty.event_differences == (line,)
    assert chatty.cause == f"the numbers agree, the communication does not: {line}"


def test_nothing_passes_against_a_layout_that_is_at_fault() -> None:
    """Even if the two agree; what else differs is told as well."""
    faulty = verdict(observation(), faults=("its own ranks disagree: x", "y"), against="tp2")
    assert (faulty.passed, faulty.max_rel_err, faulty.first_module) == (False, 0.0, None)
    assert faulty.cause == "the layout compared with, tp2, is itself at fault: its own ranks disagree: x; y"
    assert faulty.against_faults == ("its own ranks disagree: x", "y")
    both = verdict(observation(gradient=3.0), faults=("x",))
    assert both.cause is not None
    assert both.cause.startswith(
        "the layout compared with, dp1, is itself at fault: x. Between the two, the gradient"
    )
    assert both.first_module == "a"


def test_what_a_comparison_cannot_show_is_told() -> None:
    def limits(text: str, against: str, *, dtype: str = "float64", window: int | None = None) -> str:
        seen, wholes = [observation()] * Layout.parse(text).world_size, assemble([observation()])
        one = plan(text, dtype, window)
        return "; ".join(judge(one, seen, wholes, against=Layout.parse(against), steps=2).limits)

    assert limits("tp2", "dp1") == ""
    assert limits("tp2", "dp1", window=24) == ""
    assert limits("tp2", "dp1", window=4096) == "the window of 4096 was not exercised: sequence 16"
    assert limits("tp2", "pp2") == "a fault that tp2 and pp2 share does not show: neither is one device"
    assert "dp1 was compared with itself" in limits("dp1", "dp1")
    assert limits("tp2", "dp1", dtype="float32") == "in float32 moments are judged after the first step only"


# ---------------------------------------------------------------------------------------------------------------------


def complete(one: Plan, leave_out: str = "-", **values: float) -> Iterator[Piece]:
    """A number for each thing that must have been seen, but for names with `leave_out`; `values` by quantity."""
    for quantity, name in required(one, 2):
        if leave_out not in name:
            yield Piece(quantity, name, (1,), (slice(0, 1),), np.asarray([values.get(quantity, 1.0)]))


def faults(one: Plan, *ranks: Observation) -> str:
    return "; ".join(own_faults(one, ranks, assemble(ranks), steps=2))


def test_a_whole_layout_has_no_faults() -> None:
    assert faults(plan(), Observation(list(complete(plan())))) == ""


@pytest.mark.parametrize(
    ("part", "named"),
    [
        ("layers.1", "layers.1 step 1 (activations)"),
        ("layers.0.mlp.down.weight", "layers.0.mlp.down.weight step 1 (gradients)"),
        ("head step", "head step 1 (logits)"),
        ("adamw step 2", "adamw step 2 (loss)"),
        ("norm.weight updates step 2", "norm.weight updates step 2 (moments)"),
    ],
)
def test_what_no_rank_saw_is_a_fault_also_if_both_layouts_lack_it(part: str, named: str) -> None:
    seen = Observation(list(complete(plan(), leave_out=part)))
    assert judge(plan(), [seen], assemble([seen]), steps=2).passed  # against itself, nothing is missing
    assert "no rank holds all of" in faults(plan(), seen)
    assert named in faults(plan(), seen)


def test_a_part_that_no_rank_saw_is_a_fault() -> None:
    half = Piece("gradients", "norm.weight step 2", (2,), (slice(0, 1),), np.ones(1))
    seen = Observation([*complete(plan(), leave_out="norm.weight step 2"), half])
    assert "norm.weight step 2 (gradients)" in faults(plan(), seen)


def test_replicas_that_differ_are_a_fault() -> None:
    good, bad = Observation(list(complete(plan()))), Observation(list(complete(plan(), weights_sgd=1.5)))
    assert faults(plan("dp2"), good, good) == ""
    for ranks in ((good, bad), (bad, good)):
        assert "its own ranks disagree: the weight after an SGD step of" in faults(plan("dp2"), *ranks)
    close = Observation(list(complete(plan(), weights_sgd=1 + 1e-11)))
    assert faults(plan("dp2"), good, close) == ""


@pytest.mark.parametrize(("dtype", "found"), [("float64", True), ("float32", False)])
def test_adamw_weights_of_replicas_are_judged_in_float64_only(dtype: str, found: bool) -> None:
    one = plan("dp2", dtype)
    ranks = [Observation(list(complete(one, weights_adamw=value))) for value in (1.0, 1 + 2e-5)]
    assert ("after an AdamW step" in faults(one, *ranks)) == found
    assert bool(faults(one, *ranks)) == found


def test_what_is_not_finite_is_a_fault() -> None:
    seen = Observation(list(complete(plan(), loss=float("nan"))))
    assert faults(plan(), seen) == ("4 of its tensors are not finite, the first is sgd step 1 (loss)")


def test_communication_that_is_not_predicted_is_a_fault() -> None:
    extra = Event("backward", "tp", "all_reduce", "float64", 8)
    seen = Observation(list(complete(plan())), {"sgd step 1": Counter(), "sgd step 2": Counter({extra: 1})})
    assert faults(plan(), seen) == (
        "its communication is not as predicted: rank 0, sgd step 2: backward tp all_reduce float64 8 B: "
        "predicted none, recorded 1 (unexpected)"
    )


def test_whole_tensors_are_kept_of_the_first_and_the_last_step() -> None:
    assert [kept_steps(n) for n in (1, 2, 7)] == [(1,), (1, 2), (1, 7)]

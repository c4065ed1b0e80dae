"""Naming a cause from errors made by hand."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from fivefold.core.layout import Layout
from fivefold.verify.cause import Cause, experts_in_norm, find_cause, name_axis
from fivefold.verify.compare import Errors, Key, Whole

BOUND = 1e-10
COUNTS = {
    "the number of microbatches": 3,
    "dp": 4,
    "tp": 2,
    "pp": 1,
    "cp": 1,
    "dp x microbatches": 12,
    "dp x tp": 8,
}


def cause(
    by_tensor: dict[Key, float],
    *,
    shares: dict[Key, tuple[float, float]] | None = None,
    missing: tuple[Key, ...] = (),
    events: tuple[str, ...] = (),
    not_judged: tuple[str, ...] = (),
) -> Cause:
    return find_cause(Errors(by_tensor, list(missing), shares or {}), BOUND, COUNTS, list(events), not_judged)


def test_missing_tensors_come_first() -> None:
    missing = tuple((q, n) for q, n in zip(["gradients"] * 5, "abcde"))
    found = cause({("loss", "sgd step 1"): 1.0}, missing=missing)
    assert found.text == "no rank holds all of a (gradients), b (gradients), c (gradients) and 2 more"
    assert found.first_module == "a"


def test_the_first_module_in_forward_order() -> None:
    found = cause(
        {
            ("activations", "embedding"): 0.0,
            ("activations", "layers.2"): 0.5,
            ("activations", "layers.10"): 0.5,
            ("logits", "head"): 0.5,
            ("gradients", "layers.0.mlp.down.weight"): 0.5,
            ("loss", "sgd step 1"): 0.5,
        }
    )
    assert found.first_module == "layers.2"  # by number, not as text
    assert found.text.startswith("the output of layers.2 is the first to differ (2 of 3 differ, worst 0.5)")


def test_the_first_module_in_backward_order() -> None:
    """If the forward pass agrees: from the head down; names without `.weight`."""
    names = ["embedding.weight", "layers.2.attention.qkv.q.bias", "layers.10.mlp.down.weight", "norm.weight"]
    found = cause({("gradients", name): 0.1 for name in names} | {("activations", "layers.0"): 1e-12})
    assert found.first_module == "norm"
    assert "(all 4 differ, worst 0.1)" in found.text
    found = cause({("gradients", name): 0.1 for name in names[:3]})
    assert found.first_module == "layers.10.mlp.down"
    found = cause({("gradients", name): 0.1 for name in names[:2]})
    assert found.first_module == "layers.2.attention.qkv.q"


@pytest.mark.parametrize(
    ("ratio", "meaning"),
    [
        (3.0, "exactly 3.000x, which is the number of microbatches"),
        (4.0, "exactly 4.000x, which is dp"),
        (0.25, "exactly 0.250x, which is 1 / dp"),
        (12.0, "exactly 12.000x, which is dp x microbatches"),
        (1 / 8, "exactly 0.125x, which is 1 / dp x tp"),
        (1.7, "exactly 1.700x"),
    ],
)
def test_a_clean_ratio_and_what_it_counts(ratio: float, meaning: str) -> None:
    keys: list[Key] = [("gradients", f"layers.{i}.mlp.up.weight") for i in range(3)]
    found = cause(dict.fromkeys(keys, 1.0), shares=dict.fromkeys(keys, (ratio, 1e-16)))
    assert found.ratio == pytest.approx(ratio)
    assert found.text.endswith(meaning)


@pytest.mark.parametrize(
    ("ratio", "said"),
    [
        (1.0001, "exactly 1.0001x"),
        (1 - 2e-5, "exactly 0.99998x"),
        (1 + 3e-8, "exactly 1.00000003x"),
        (2.0003, "exactly 2.0003x"),  # not 2.000x, which would be tp
        (-1.0, "exactly -1.000x"),
        (1 / 3, "exactly 0.333x, which is 1 / the number of microbatches"),
        (1 / 7, "exactly 0.142857143x"),
        (3e-5, "exactly 0.00003x"),
    ],
)
def test_a_ratio_has_the_decimals_that_it_needs(ratio: float, said: str) -> None:
    """Never `exactly 1.000x`, and never a name for a number that it is not."""
    key: Key = ("gradients", "a.weight")
    assert cause({key: 0.5}, shares={key: (ratio, 1e-16)}).text.endswith(f": {said}")


@pytest.mark.parametrize(
    "shares",
    [
        [(3.0, 0.5), (3.0, 0.0)],  # one tensor is not a multiple
        [(3.0, 0.0), (2.0, 0.0)],  # two different ratios
        [(1.0, 0.0), (1.0, 0.0)],  # nothing to explain
        [(float("nan"), float("inf")), (3.0, 0.0)],
    ],
)
def test_no_ratio_is_claimed_that_does_not_explain_all(shares: list[tuple[float, float]]) -> None:
    keys: list[Key] = [("gradients", "a"), ("gradients", "b")]
    found = cause(dict.fromkeys(keys, 1.0), shares=dict(zip(keys, shares)))
    assert found.ratio is None
    assert "exactly" not in found.text


def test_only_the_ratio_of_what_differs_counts() -> None:
    good, bad = ("gradients", "a"), ("gradients", "b")
    found = cause({good: 1e-15, bad: 1.0}, shares={good: (1.0, 0.0), bad: (2.0, 0.0)})
    assert found.text.endswith("exactly 2.000x, which is tp")
    assert "(1 of 2 differ" in found.text


def test_a_nan_differs() -> None:
    assert cause({("gradients", "a.weight"): float("nan")}).first_module == "a"


def test_scalars_are_named_as_such() -> None:
    key = ("grad_norm", "sgd step 1")
    text = "the gradient norm differs by 0.25 in sgd step 1"
    assert cause({key: 0.25}, shares={key: (0.75, 0.0)}).text == text  # two numbers always have some ratio
    assert (
        cause({key: 0.25}, shares={key: (0.25, 0.0)}).text
        == f"{text}; the gradient norm: exactly 0.250x, which is 1 / dp"
    )


def test_order_of_cause_and_effect() -> None:
    keys = [
        ("gradients", "a"),
        ("grad_norm", "sgd step 1"),
        ("weights_sgd", "a"),
        ("moments", "a"),
        ("weights_adamw", "a"),
    ]
    words = ["gradient of a", "gradient norm", "after an SGD step", "moment of a", "after an AdamW step"]
    for first, word in enumerate(words):
        assert word in cause(dict.fromkeys(keys[first:], 1.0)).text


def test_an_earlier_step_comes_before_an_earlier_part_of_a_step() -> None:
    late = {("activations", "layers.0 step 2"): 0.5, ("gradients", "a.weight step 2"): 0.5}
    early = {("weights_adamw", "layers.1.mlp.up.weight step 1"): 0.5}
    good = {("gradients", "a.weight step 1"): 0.0}
    text = "the weight after an AdamW step of layers.1.mlp.up in step 1 is the first to differ (1 of 1 differ"
    assert cause({**late, **early, **good}).text.startswith(text)
    found = cause({**late, **good, ("gradients", "b.weight step 10"): 0.5})
    assert found.text.startswith("the output of layers.0 in step 2 is the first to differ (1 of 1")
    assert found.first_module == "layers.0"
    del late["activations", "layers.0 step 2"]
    assert "the gradient of a in step 2 is the first to differ (1 of 1" in cause({**late, **good}).text


def test_scalars_name_their_runs() -> None:
    found = cause({("loss", f"{name} step {n}"): n / 10 for name in ("sgd", "adamw") for n in (0, 2, 3)})
    assert found.text == "the loss differs by 0.2 in adamw step 2 and sgd step 2"
    assert found.first_module is None


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("exp_avg", "the first moment"),
        ("exp_avg_sq", "the second moment"),
        ("updates", "the count of updates"),
    ],
)
def test_kinds_of_moments_are_told_apart(kind: str, said: str) -> None:
    found = cause({("moments", f"layers.2.mlp.up.weight {kind} step 2"): 0.5})
    assert found.text.startswith(f"{said} of layers.2.mlp.up in step 2 is the first to differ")


def test_what_is_not_judged_is_no_cause() -> None:
    found = cause(
        {("weights_adamw", "a"): 1.0}, events=("rank 0: x", "y", "z", "u"), not_judged=("weights_adamw",)
    )
    assert found.text == "the numbers agree, the communication does not: rank 0: x; y; z"
    assert cause({}).text == "no single tensor stands out"


def test_what_the_ranks_started_from_and_read_comes_first() -> None:
    later = {("activations", "embedding step 1"): 0.5, ("inputs", "labels step 1"): 0.5}
    read = {**later, ("inputs", "positions step 1"): 0.25, ("inputs", "tokens step 1"): 0.0}
    assert cause(read).text == "the ranks read other labels and positions in step 1 (worst 0.5)"
    assert cause({**read, ("initial", "layers.1.mlp.up.weight"): 0.5}).text == (
        "the initial value of layers.1.mlp.up is the first to differ (1 of 1 differ, worst 0.5)"
    )


def test_ranks_are_named_where_others_are_right() -> None:
    """Only ranks that hold a part of what differs count."""
    bad, good = ("gradients", "a.weight step 1"), ("gradients", "b.weight step 1")
    errors = Errors({bad: 0.5, good: 0.0})
    errors.by_rank = {bad: {0: 0.0, 1: 0.5, 3: 0.5}, good: {2: 0.0}}
    assert find_cause(errors, BOUND, COUNTS, []).text.endswith(
        "(1 of 2 differ, worst 0.5, on ranks 1 and 3 only)"
    )
    errors.by_rank = {bad: {1: 0.5, 3: 0.5}, good: {0: 0.0}}
    assert find_cause(errors, BOUND, COUNTS, []).text.endswith("(1 of 2 differ, worst 0.5)")
    scalar = ("loss", "sgd step 1")
    errors = Errors({scalar: float("nan")}, by_rank={scalar: {0: 0.0, 1: float("nan")}})
    assert find_cause(errors, BOUND, COUNTS, []).text.endswith("in sgd step 1, on rank 1 only")


def test_communication_is_told_beside_numbers() -> None:
    text = cause({("gradients", "a.weight"): 0.5}, events=("rank 0: x", "rank 1: y")).text
    assert text.endswith("worst 0.5); nor is the communication as predicted: rank 0: x and 1 more")


@pytest.mark.parametrize(
    ("text", "fails", "said"),
    [
        (
            "pp2:zbv tp2",
            lambda cut: cut.schedule == "zbv",
            "axis pp: with pp = 1 the difference is gone, and so it is with 1f1b",
        ),
        (
            "pp2:zbh1@1+2",
            lambda cut: cut.schedule == "zbh1",
            "axis pp: with pp = 1 the difference is gone, and so it is with 1f1b",
        ),
        (
            "tp2 dp2",
            lambda cut: cut.tp > 1 and cut.sp,
            "axis tp: with tp = 1 the difference is gone, and so it is with nosp",
        ),
        (
            "cp4:ulysses dp2 zero2/2",
            lambda cut: cut.cp_ulysses > 1 and cut.zero > 0,
            "axis cp: with cp = 1 the difference is gone, and so it is with gather or zero0",
        ),
        (
            "dp4 zero1/2",
            lambda cut: cut.zero_group == 2,
            "axis dp: with dp = 1 the difference is gone, and so it is with zero1 without groups or zero0",
        ),
        ("dp2 zero1", lambda cut: cut.dp > 1, "axis dp: with dp = 1 the difference is gone"),
        ("tp2 ep2", lambda cut: cut.tp > 1, "axis tp: with tp = 1 the difference is gone"),
    ],
)
def test_the_guilty_option(text: str, fails: Callable[[Layout], bool], said: str) -> None:
    assert name_axis(Layout.parse(text), fails) == said


@pytest.mark.parametrize(
    ("text", "fails", "said"),
    [
        ("dp2 tp2 pp2", lambda cut: cut.tp > 1, "axis tp: with tp = 1 the difference is gone"),
        ("dp2 tp2", lambda cut: cut.tp > 1 and cut.dp > 1, "axes tp and dp together"),
        ("dp2 tp2", lambda cut: True, "the difference stays whichever of tp, dp is set to 1"),
        ("dp2 ep2", lambda cut: cut.ep > 1, "axis ep: with ep = 1 the difference is gone"),
        ("dp2 tp2 ep2", lambda cut: cut.ep > 1 and cut.tp > 1, "axes tp and ep together"),
        ("dp2", lambda cut: False, "axis dp: with dp = 1 the difference is gone"),
        ("dp2", lambda cut: True, "not axis dp: with dp = 1 the difference stays"),
    ],
)
def test_the_guilty_axis(text: str, fails: Callable[[Layout], bool], said: str) -> None:
    assert name_axis(Layout.parse(text), fails).startswith(said)


def test_the_choice_of_experts_comes_before_the_output_of_its_layer() -> None:
    choice: Key = ("routed_experts", "layers.1.mlp.router sgd step 1")
    outputs: list[Key] = [("activations", f"layers.{i} step 1") for i in (1, 2)]
    found = cause(dict.fromkeys([*outputs, choice], 0.5))
    assert found.text.startswith(
        "the choice of experts of layers.1.mlp.router in step 1 is the first to differ (1 of 1"
    )
    earlier: Key = ("activations", "layers.0 step 1")
    assert cause(dict.fromkeys([earlier, choice], 0.5)).first_module == "layers.0"


def test_inside_a_layer_backward_goes_from_its_end() -> None:
    names = [
        "attention.output",
        "attention_norm",
        "mlp_norm",
        "mlp.router",
        "mlp.experts.down",
        "mlp.shared.down",
    ]
    keys: list[Key] = [("gradients", f"layers.3.{name}.weight step 1") for name in names]
    firsts = []
    while keys:
        firsts.append(cause(dict.fromkeys(keys, 0.5)).first_module)
        keys = [key for key in keys if not key[1].startswith(f"{firsts[-1]}.")]
    order = [
        "mlp.experts.down",
        "mlp.router",
        "mlp.shared.down",
        "mlp_norm",
        "attention.output",
        "attention_norm",
    ]
    assert firsts == [f"layers.3.{name}" for name in order]


def test_which_number_of_a_router_is_told_wrongly() -> None:
    keys: list[Key] = [("routing", f"layers.{i}.mlp.router z sgd step 1") for i in (2, 5)]
    assert cause(dict.fromkeys(keys, 0.5)).text.startswith(
        "what is told of layers.2.mlp.router (z) in step 1 is"
    )


@pytest.mark.parametrize(
    ("counted", "said"),
    [
        (0.0, "exactly 0.000x"),
        (2.0, "exactly 2.000x, which is tp"),
        (0.25, "exactly 0.250x, which is 1 / dp"),
        (1.3, ""),
    ],
)
def test_how_often_a_norm_counts_experts(counted: float, said: str) -> None:
    """Dense gradients of 2 and 3, experts of 1 and 4; nothing is said of a number that counts nothing."""
    experts = np.array([1.0, 4.0])

    def of_norm(norm: float) -> dict[Key, Whole]:
        one = np.ones((), dtype=bool)
        return {("grad_norm", "sgd step 1"): Whole(np.array(norm), one, "")}

    reference = of_norm((13 + 17) ** 0.5) | {("gradients", "e step 1"): Whole(experts, experts > 0, "")}
    told = experts_in_norm(of_norm((13 + counted * 17) ** 0.5), reference, ["e"], BOUND, COUNTS)
    assert told == (f"; in it the squares of experts count {said}" if said else "")
    assert experts_in_norm(of_norm(1.0), of_norm(2.0), [], BOUND, COUNTS) == ""

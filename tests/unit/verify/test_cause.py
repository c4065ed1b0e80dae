"""Naming a cause from errors made by hand."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from fivefold.core.layout import Layout
from fivefold.verify.cause import Cause, find_cause, name_axis
from fivefold.verify.compare import Errors, Key

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
    found = cause({("loss", "step 0"): 1.0}, missing=missing)
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
            ("loss", "sgd step 0"): 0.5,
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
    key = ("grad_norm", "step 0")
    assert cause({key: 0.25}, shares={key: (0.75, 0.0)}).text.startswith("the gradient norm differs by 0.25")


def test_order_of_cause_and_effect() -> None:
    keys = [
        ("gradients", "a"),
        ("grad_norm", "step 0"),
        ("weights_sgd", "a"),
        ("moments", "a"),
        ("weights_adamw", "a"),
    ]
    words = ["gradient of a", "gradient norm", "after an SGD step", "moment of a", "after an AdamW step"]
    for first, word in enumerate(words):
        assert word in cause(dict.fromkeys(keys[first:], 1.0)).text


def test_what_is_not_judged_is_no_cause() -> None:
    found = cause(
        {("weights_adamw", "a"): 1.0}, events=("rank 0: x", "y", "z", "u"), not_judged=("weights_adamw",)
    )
    assert found.text == "the numbers agree, the communication does not: rank 0: x; y; z"
    assert cause({}).text == "no single tensor stands out"


@pytest.mark.parametrize(
    ("text", "fails", "said"),
    [
        ("dp2 tp2 pp2", lambda cut: cut.tp > 1, "axis tp: with tp = 1 the difference is gone"),
        ("dp2 tp2", lambda cut: cut.tp > 1 and cut.dp > 1, "axes tp and dp together"),
        ("dp2 tp2", lambda cut: True, "the difference stays whichever of tp, dp is set to 1"),
        ("dp2", lambda cut: False, "axis dp: with dp = 1 the difference is gone"),
        ("dp2", lambda cut: True, "not axis dp: with dp = 1 the difference stays"),
    ],
)
def test_the_guilty_axis(text: str, fails: Callable[[Layout], bool], said: str) -> None:
    assert name_axis(Layout.parse(text), fails).startswith(said)

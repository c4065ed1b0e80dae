"""The fixture that projects verify their layouts with: pytest finds it, it passes, and it fails with the cause."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import entry_points

import pytest

from fivefold.errors import LayoutError
from fivefold.strategies.data.apply import Replicated
from fivefold.verify import pytest_plugin
from fivefold.verify.verify import Verdict

from .models import PLAIN

Check = Callable[..., Verdict]


def test_pytest_finds_it() -> None:
    (found,) = [point for point in entry_points(group="pytest11") if point.name == "fivefold"]
    assert found.load() is pytest_plugin


def test_it_passes(fivefold_verify: Check) -> None:
    verdict = fivefold_verify(PLAIN, "dp2", device="cpu", steps=1)
    assert verdict.passed
    assert (str(verdict.layout), str(verdict.against), verdict.steps) == ("dp2", "dp1", 1)


def test_presets_and_shrinking(fivefold_verify: Check) -> None:
    verdict = fivefold_verify("tiny-llama", "tp2", "pp2", shrink=True, device="cpu", steps=1, dtype="float32")
    assert (verdict.model, verdict.dtype) == ("tiny-llama (shrunk)", "float32")


def test_it_fails_with_the_cause(fivefold_verify: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    wait = Replicated.wait

    def faulty(self: Replicated) -> None:
        wait(self)
        for bucket in self._all_buckets():
            bucket.flat /= self.axis.degree

    monkeypatch.setattr(Replicated, "wait", faulty)
    with pytest.raises(pytest.fail.Exception) as caught:
        fivefold_verify(PLAIN, "dp2", device="cpu", steps=1)
    said = str(caught.value)
    assert said.startswith("dp2 is not the model of dp1: the gradient of head")
    assert "exactly 0.500x, which is 1 / dp" in said
    assert "axis dp" in said


def test_what_cannot_be_run_is_an_error_not_a_failure(fivefold_verify: Check) -> None:
    with pytest.raises(LayoutError, match="heads = 4 is not divisible by 3"):
        fivefold_verify(PLAIN, "tp3", device="cpu")

"""bfloat16: a layout rounds no worse than twice one device, and what does is told."""

from __future__ import annotations

import pytest

from fivefold.core.layout import Layout
from fivefold.strategies.data.replicated import Replicated
from fivefold.verify.compare import QUANTITIES
from fivefold.verify.rounding import HALF_UNIT, verify_bfloat16

from .command_line import CommandLine
from .models import HARD, PLAIN

LONG = pytest.mark.exhaustive
LAYOUTS = ["dp2 tp2", pytest.param("tp2 pp2 nosp", marks=LONG), pytest.param("dp2 zero1", marks=LONG)]
LAYOUTS += [
    pytest.param(text, marks=LONG) for text in ("cp2:ring", "cp2:ulysses", "dp2 zero3", "pp2:zbh1", "tp4")
]


@pytest.mark.parametrize("text", LAYOUTS)
@pytest.mark.parametrize("spec", [HARD, pytest.param(PLAIN, marks=LONG)], ids=lambda spec: spec.name)
def test_no_worse_than_one_device(spec, text: str) -> None:
    verdict = verify_bfloat16(spec, Layout.parse(text), device="cpu")
    assert verdict.passed, verdict.cause
    assert verdict.own_errors is not None
    assert verdict.bounds is not None
    assert 1e-3 < verdict.own_errors["gradients"] < 0.1, "one device in bfloat16 is far from float64"
    assert all(verdict.bounds[q] >= HALF_UNIT for q in QUANTITIES if q not in verdict.not_judged)


def test_what_is_worse_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    wait = Replicated.wait

    def faulty(self: Replicated) -> None:
        wait(self)
        for bucket in self._all_buckets():
            bucket.flat *= 1.5

    monkeypatch.setattr(Replicated, "wait", faulty)
    verdict = verify_bfloat16(PLAIN, Layout.parse("dp2"), steps=1, device="cpu")
    assert not verdict.passed
    assert verdict.cause is not None
    assert "gradients: error" in verdict.cause
    assert "one device's own is" in verdict.cause


def test_command(fivefold: CommandLine) -> None:
    ended = fivefold(
        "verify", "--model", "tiny-llama", "--layout", "tp2", "--dtype", "bfloat16", "--steps", "1"
    )
    assert ended.code == 0, ended.err
    assert "rounds no worse than one device" in ended.out

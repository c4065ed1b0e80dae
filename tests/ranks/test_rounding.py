"""16 bits: a layout rounds no worse than twice one device, and what does is told."""

from __future__ import annotations

import pytest

from fivefold.catalog.models import preset
from fivefold.core.layout import Layout
from fivefold.core.loss_scale import LossScaleConfig
from fivefold.strategies.data.replicated import Replicated
from fivefold.verify import workload
from fivefold.verify.compare import QUANTITIES
from fivefold.verify.rounding import HALF_UNIT, Narrow, verify_rounding

from .command_line import CommandLine
from .models import HARD, PLAIN

LONG = pytest.mark.exhaustive
LAYOUTS = ["dp2 tp2", pytest.param("tp2 pp2 nosp", marks=LONG), pytest.param("dp2 zero1", marks=LONG)]
LAYOUTS += [
    pytest.param(text, marks=LONG) for text in ("cp2:ring", "cp2:ulysses", "dp2 zero3", "pp2:zbh1", "tp4")
]


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=LONG)])
@pytest.mark.parametrize("text", LAYOUTS)
@pytest.mark.parametrize("spec", [HARD, pytest.param(PLAIN, marks=LONG)], ids=lambda spec: spec.name)
def test_no_worse_than_one_device(spec, text: str, dtype: Narrow) -> None:
    verdict = verify_rounding(spec, Layout.parse(text), dtype=dtype, device="cpu")
    assert verdict.passed, verdict.cause
    assert verdict.own_errors is not None
    assert verdict.bounds is not None
    less, more = {"bfloat16": (1e-3, 0.1), "float16": (1e-4, 1e-2)}[dtype]
    assert less < verdict.own_errors["gradients"] < more, "one device is far from float64"
    assert all(verdict.bounds[q] >= HALF_UNIT[dtype] for q in QUANTITIES if q not in verdict.not_judged)


ROUTED = [
    "dp2 ep2", "tp2 ep2", "tp2 etp2", "cp2 ep2", "dp4 ep4 zero1", "dp2 tp2 ep2 etp2 zero3", "dp2 pp2:zbh1 ep2",
    "dp2 tp2 nosp etp2",
]  # fmt: skip


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("text", ROUTED)
@pytest.mark.parametrize("name", ["tiny-moe", "tiny-qwen-moe", "tiny-mla-moe"])
def test_experts_chosen_alike(name: str, text: str, dtype: Narrow) -> None:
    verdict = verify_rounding(preset(name), Layout.parse(text), dtype=dtype, device="cpu")
    assert verdict.passed, verdict.cause
    assert verdict.quantities["routed_experts"] == 0, "one device's choices are replayed"
    assert any("tokens go to the experts that dp1 chose" in limit for limit in verdict.limits)


def test_what_is_worse_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    wait = Replicated.wait

    def faulty(self: Replicated) -> None:
        wait(self)
        for bucket in self._all_buckets():
            bucket.flat *= 1.5

    monkeypatch.setattr(Replicated, "wait", faulty)
    verdict = verify_rounding(PLAIN, Layout.parse("dp2"), steps=1, device="cpu")
    assert not verdict.passed
    assert verdict.cause is not None
    assert "gradients: error" in verdict.cause
    assert "one device's own is" in verdict.cause


def test_one_device_that_overflows_is_no_measure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workload, "SMALL_SCALE", LossScaleConfig(initial=2**24))
    verdict = verify_rounding(PLAIN, Layout.parse("dp2"), dtype="float16", steps=1, device="cpu")
    assert not verdict.passed
    assert verdict.cause is not None
    assert "one device itself overflows, so nothing is known: " in verdict.cause


@pytest.mark.parametrize("dtype", ["float16", pytest.param("bfloat16", marks=LONG)])
def test_command(fivefold: CommandLine, dtype: str) -> None:
    ended = fivefold("verify", "--model", "tiny-llama", "--layout", "tp2", "--dtype", dtype, "--steps", "1")
    assert ended.code == 0, ended.err
    words = (
        f"tp2, and one device, in {dtype} against float64", "one device's own",
        "rounds no worse than one device: nearest to its bound is ",
    )  # fmt: skip
    for word in words:
        assert word in ended.out
    assert ("no step overflowed: verify --overflow" in ended.out) == (dtype == "float16")

"""The precision report of a job: the same numbers at every layout, recorded and shown."""

from __future__ import annotations

import pytest

from fivefold.core.layout import Layout
from fivefold.core.optimizer import OptimizerConfig
from fivefold.data.batches import SyntheticDataset
from fivefold.runtime.launch import Rank, run_ranks
from fivefold.train.precision import Look, joined
from fivefold.train.trainer import Trainer

from .command_line import CommandLine
from .models import HARD, PLAIN, ROUTED
from .resuming import SEQ_LEN, Job

LONG = pytest.mark.exhaustive
SPECS = {"hard": HARD, "plain": PLAIN, "routed": ROUTED}


def looks_of(layout: str, spec: str) -> Look:
    def look(rank: Rank) -> list[Look]:
        plan = Job(SPECS[spec], OptimizerConfig(lr=1e-2), 4, "float64").plan(layout)
        data = SyntheticDataset(plan.model.vocab, SEQ_LEN, seed=5)
        trainer = Trainer(plan, rank, data, steps=2, seed=3, look_every=2)
        trainer.step(0)
        trainer.step(1)
        return trainer.precision.take()

    (whole,) = joined(run_ranks(look, ranks=Layout.parse(layout).world_size, device="cpu"))
    return whole


@pytest.mark.parametrize(
    ("layout", "spec"),
    [
        ("tp2 pp2", "hard"),
        pytest.param("dp2 zero1", "plain", marks=LONG),
        pytest.param("dp2 zero3", "plain", marks=LONG),
        pytest.param("dp4 zero2/2", "hard", marks=LONG),
        pytest.param("cp2 tp2", "hard", marks=LONG),
        pytest.param("pp2:zbv dp2", "plain", marks=LONG),
        pytest.param("pp2:zbh1", "plain", marks=LONG),
        pytest.param("dp2 pp2 ep2", "routed", marks=LONG),
        pytest.param("dp2 tp2 ep2 etp2 zero2", "routed", marks=LONG),
        pytest.param("tp2 nosp etp2", "routed", marks=LONG),
    ],
)
def test_every_layout_reports_the_same(layout: str, spec: str) -> None:
    one, many = looks_of("dp1", spec), looks_of(layout, spec)
    assert many.squared_norm.keys() == one.squared_norm.keys()
    for block, squared in one.squared_norm.items():
        assert many.squared_norm[block] == pytest.approx(squared, rel=1e-9), block
    for block, (value, _) in one.largest.items():
        assert many.largest[block][0] == pytest.approx(value, rel=1e-9), block


def test_a_run_in_float16_has_it(fivefold: CommandLine) -> None:
    settings = ("layout=dp2", "dtype=float16", "log.precision=2", "steps=12", "loss_scale.initial=16777216")
    ended = fivefold("train", "train.yaml", *settings, "loss_scale.grow_every=3")
    assert ended.code == 0, ended.err
    report = fivefold.last_run()["results"]["precision"]
    assert report["dtype"] == "float16"
    assert report["overflow_steps"][0] == 1
    assert report["scales"][:2] == [[1, 2**24], [2, 2**23]]
    assert [look["step"] for look in report["layers"]] == [2, 4, 6, 8, 10, 12]
    for look in report["layers"]:
        assert (
            list(look["grad_norm"]) == list(look["largest"]) == ["embedding", "layers.0", "layers.1", "head"]
        )
    lines = fivefold.metrics()
    assert [line["loss_scale"] for line in lines][:2] == [2**24, 2**23]
    assert lines[-1]["overflows"] == lines[-1]["skipped"] == len(report["overflow_steps"])

    shown = fivefold("runs", "show", "last").out
    for words in (
        "overflows: step",
        "loss scale: 16777216 from step 1, 8388608 from step 2",
        "layers.1",
        "float16's",
    ):
        assert words in shown
    assert "{" not in shown, "no JSON"
    assert "loss_scale.grow_every" in shown


@LONG
def test_a_run_without_it_says_nothing(fivefold: CommandLine) -> None:
    assert fivefold("train", "train.yaml", "steps=2").code == 0
    assert "precision" not in fivefold.last_run()["results"]
    assert "loss_scale" not in fivefold.metrics()[0]
    assert "{" not in fivefold("runs", "show", "last").out

"""Verify must fail on planted faults, name the first module, a clean ratio and the axis; and pass when none is planted.

A fault is a patch made before the ranks are forked, active only where the layout has the axis concerned, as in the
systems that shipped it.
"""

from __future__ import annotations

import pytest
import torch

from fivefold.core.layout import Layout
from fivefold.engine.engine import Engine
from fivefold.errors import ConfigError, LayoutError
from fivefold.strategies.data.apply import Replicated
from fivefold.strategies.pipeline.apply import Pipeline
from fivefold.strategies.tensor import apply as tensor
from fivefold.strategies.tensor.vocabulary import VocabularyLoss
from fivefold.verify.verify import Verdict, shrink, verify

from .models import HARD, PLAIN

Patch = pytest.MonkeyPatch


def judge(text: str, spec=HARD) -> Verdict:
    return verify(spec, Layout.parse(text), device="cpu")


def scale_by_microbatches(patch: Patch) -> None:
    run = Pipeline.run

    def faulty(self, microbatches, scale):
        return run(self, microbatches, scale * len(microbatches) if self.last_stage > 0 else scale)

    patch.setattr(Pipeline, "run", faulty)


def mean_over_data(patch: Patch) -> None:
    wait = Replicated.wait

    def faulty(self):
        wait(self)
        for bucket in self._all_buckets():
            bucket.flat /= self.axis.degree

    patch.setattr(Replicated, "wait", faulty)


def one_bucket_not_reduced(patch: Patch) -> None:
    wait = Replicated.wait

    def faulty(self):
        before = [bucket.flat.clone() for bucket in self._all_buckets()]
        wait(self)
        for bucket, old in list(zip(self._all_buckets(), before))[:1]:
            bucket.flat.copy_(bucket.flat / self.axis.degree + 0 * old)

    patch.setattr(Replicated, "wait", faulty)


def norms_not_summed(patch: Patch) -> None:
    patch.setattr(tensor, "sum_gradients", lambda gradients, mesh: None)


def padding_in_softmax(patch: Patch) -> None:
    init = VocabularyLoss.__init__
    patch.setattr(VocabularyLoss, "__init__", lambda self, axis, vocab: init(self, axis, 10**9))


def tied_not_summed(patch: Patch) -> None:
    complete = Engine._complete_gradients

    def faulty(self):
        axis = self.mesh.axis
        self.mesh.axis = lambda name, size=None: axis("cp") if name == "tie" else axis(name, size)
        try:
            return complete(self)
        finally:
            self.mesh.axis = axis

    patch.setattr(Engine, "_complete_gradients", faulty)


def norm_per_stage(patch: Patch) -> None:
    from fivefold.engine import engine

    def faulty(gradients, mesh):
        counted = [g for row, g in gradients if row.counts_once_here(mesh.coordinate)]
        squared = torch.nn.utils.get_total_norm(counted).double() ** 2
        return mesh.axis("tp").all_reduce(squared).sqrt()

    patch.setattr(engine, "global_norm", faulty)


def extra_collective(patch: Patch) -> None:
    step = Engine.step

    def faulty(self, load, lr):
        result = step(self, load, lr)
        self.mesh.phase = "backward"
        self.mesh.axis("tp").all_reduce(torch.zeros(7))
        return result

    patch.setattr(Engine, "step", faulty)


FAULTS = [
    # fault, layout, model, what the cause must say
    (scale_by_microbatches, "dp2 tp2 pp2", HARD, ["exactly 3.000x", "the number of microbatches", "axis pp"]),
    (mean_over_data, "dp4 tp2", HARD, ["exactly 0.250x", "1 / dp", "axis dp"]),
    (one_bucket_not_reduced, "dp2 pp2", PLAIN, ["the gradient of", "exactly 0.500x", "axis dp"]),
    (norms_not_summed, "dp2 tp2", HARD, ["norm", "axis tp"]),
    (padding_in_softmax, "tp2 pp2", HARD, ["the gradient of", "axis tp"]),
    (tied_not_summed, "tp2 pp2", HARD, ["the gradient of embedding", "axis pp"]),
    (norm_per_stage, "dp2 pp2", HARD, ["gradient norm", "axis pp"]),
    (
        extra_collective,
        "dp2 tp2",
        PLAIN,
        ["communication", "backward tp all_reduce", "predicted none, recorded 1", "axis tp"],
    ),
]


@pytest.mark.parametrize(
    ("fault", "text", "spec", "words"), FAULTS, ids=lambda value: getattr(value, "__name__", None)
)
def test_planted_fault_is_caught_and_named(monkeypatch: Patch, fault, text, spec, words) -> None:
    fault(monkeypatch)
    verdict = judge(text, spec)
    assert not verdict.passed
    assert verdict.cause is not None
    for word in words:
        assert word in verdict.cause, verdict.cause


def test_loss_alone_misses_most_of_them(monkeypatch: Patch) -> None:
    """The loss of the first step does not see a wrong gradient: why verify compares every gradient."""
    mean_over_data(monkeypatch)
    verdict = judge("dp2")
    assert verdict.quantities["loss"] <= 1e-12
    assert verdict.quantities["gradients"] > 0.4


def test_two_layouts_against_each_other() -> None:
    verdict = verify(HARD, Layout.parse("tp2 pp2"), Layout.parse("dp2 tp4"), device="cpu", steps=2)
    assert verdict.passed
    assert verdict.max_rel_err > 0.0  # they really differ in the order of their sums


def test_user_mistakes() -> None:
    with pytest.raises(LayoutError, match="heads = 8 is not divisible by 3"):
        judge("tp3")
    with pytest.raises(LayoutError, match="zero1 cannot be run yet"):
        judge("dp2 zero1")
    with pytest.raises(ConfigError, match="bfloat16"):
        verify(HARD, Layout.parse("dp2"), dtype="bfloat16")  # type: ignore[arg-type]
    big = HARD.replace(hidden=2**16, vocab=10**6)
    with pytest.raises(ConfigError, match="--shrink"):
        verify(big, Layout.parse("dp2"), device="cpu")
    small = shrink(big)
    assert (small.hidden, small.blocks[0].attention.heads) == (64, 8)

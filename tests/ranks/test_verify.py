"""Verify must fail on planted faults, name the first module, a clean ratio and the axis; and pass when none is planted.

A fault is a patch made before the ranks are forked, active only where the layout has the axis concerned, as in the
systems that shipped it.
"""

from __future__ import annotations

import pytest
import torch

from fivefold.core.layout import Layout
from fivefold.core.model_spec import AttentionSpec, BlockSpec, MLPSpec
from fivefold.engine.engine import Engine
from fivefold.errors import ConfigError, LayoutError
from fivefold.nn.attention import AttentionCore
from fivefold.strategies.data.apply import Replicated
from fivefold.strategies.pipeline.apply import Pipeline
from fivefold.strategies.tensor import apply as tensor
from fivefold.strategies.tensor.vocabulary import VocabularyLoss
from fivefold.verify.verify import STEPS, Reference, Verdict, verify
from fivefold.verify.workload import common_plans, shrink

from .models import HARD, PLAIN

Patch = pytest.MonkeyPatch


_references: dict[tuple[str, int, int], Reference] = {}


def judge(text: str, spec=HARD, *, steps: int = STEPS, find_axis: bool = True) -> Verdict:
    """Against one device, where no fault below acts: it is run once for many tests."""
    plan, one = common_plans(spec, Layout.parse(text), Layout(), "float64")
    key = spec.name, one.workload.global_batch, steps
    if key not in _references or _references[key].plan != one:
        _references[key] = Reference(one, steps=steps, seed=0, device="cpu")
    return _references[key].judge(plan, find_axis=find_axis)


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


def bucket_not_zeroed(patch: Patch) -> None:
    forget = Replicated.forget_gradients

    def faulty(self):
        kept = [bucket.flat.clone() for bucket in self._all_buckets()]
        forget(self)
        for bucket, old in zip(self._all_buckets(), kept):
            bucket.flat.copy_(old)

    patch.setattr(Replicated, "forget_gradients", faulty)


def rescaled_from_the_second_step(patch: Patch) -> None:
    """All gradients alike: clipping hides it from the weights."""
    wait = Replicated.wait

    def faulty(self):
        wait(self)
        for bucket in self._all_buckets() if self.updates else ():
            bucket.flat *= self.axis.degree

    patch.setattr(Replicated, "wait", faulty)


def state_not_advanced(patch: Patch) -> None:
    """On the last data rank, the second update leaves the moments where they were."""
    step = Replicated.step

    def faulty(self, lr):
        kept = [(value, value.clone()) for state in self.state().values() for value in state.values()]
        step(self, lr)
        for value, old in kept if self.updates == 2 and self.axis.index == self.axis.degree - 1 > 0 else ():
            value.copy_(old)

    patch.setattr(Replicated, "step", faulty)


def count_not_advanced(patch: Patch) -> None:
    """Only the count: weights follow it in the third step, by a wrong bias correction."""
    step = Replicated.step

    def faulty(self, lr):
        step(self, lr)
        for state in self.state().values() if self.updates == 2 and self.axis.index > 0 else ():
            if "step" in state:
                state["step"] -= 1

    patch.setattr(Replicated, "step", faulty)


def extra_collective_late(patch: Patch) -> None:
    step = Engine.step

    def faulty(self, load, lr):
        result = step(self, load, lr)
        if self.data.updates == 2 and self.plan.execution.optimizer.name == "adamw":
            self.mesh.phase = "reduce"
            self.mesh.axis("data").all_reduce(torch.zeros(7))
        return result

    patch.setattr(Engine, "step", faulty)


def drifting(patch: Patch) -> None:
    """The last data rank goes its own way a little in the second update: the first replica is right."""
    step = Replicated.step

    def faulty(self, lr):
        step(self, lr)
        if self.updates == 2 and self.axis.index == self.axis.degree - 1 > 0:
            with torch.no_grad():
                self.triples[-1][1].mul_(1 + 1e-6)

    patch.setattr(Replicated, "step", faulty)


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
    verdict = judge(text, spec, steps=1)
    assert not verdict.passed
    assert verdict.cause is not None
    for word in words:
        assert word in verdict.cause, verdict.cause


LATE_FAULTS = [
    (bucket_not_zeroed, ["the gradient of", "in step 2 is the first to differ"]),
    (
        rescaled_from_the_second_step,
        ["the gradient of head in step 2", "(all", "exactly 2.000x, which is dp"],
    ),
    (state_not_advanced, ["the first moment of", "in step 2"]),
    (count_not_advanced, ["the count of updates of", "in step 2", "worst 0.5"]),
    (
        extra_collective_late,
        ["every rank, adamw step 2: reduce data all_reduce float32 28 B: predicted none, recorded 1"],
    ),
]


@pytest.mark.parametrize(("fault", "words"), LATE_FAULTS, ids=lambda value: getattr(value, "__name__", None))
def test_a_fault_that_acts_from_the_second_step_is_caught_by_default(
    monkeypatch: Patch, fault, words
) -> None:
    fault(monkeypatch)
    assert judge("dp2", PLAIN, steps=1).passed  # the first step does not show it
    verdict = judge("dp2", PLAIN, find_axis=False)
    assert not verdict.passed
    assert verdict.cause is not None
    for word in words:
        assert word in verdict.cause, verdict.cause


def test_loss_alone_misses_most_of_them(monkeypatch: Patch) -> None:
    """The loss of the first step does not see a wrong gradient: why verify compares every gradient.

    Later ones follow wrong weights, and hardly see it.
    """
    mean_over_data(monkeypatch)
    verdict = judge("dp2", steps=1, find_axis=False)
    assert verdict.quantities["loss"] <= 1e-12
    assert verdict.quantities["gradients"] > 0.4


def test_a_layout_compared_with_whose_ranks_differ_is_itself_at_fault(monkeypatch: Patch) -> None:
    """Its first replica is right: by that alone, the two agree."""
    drifting(monkeypatch)
    verdict = verify(PLAIN, Layout.parse("tp2"), Layout.parse("dp2"), device="cpu")
    assert verdict.max_rel_err <= verdict.bound
    assert verdict.events_match
    assert not verdict.passed
    said = "its own ranks disagree: the weight after an SGD step of head in step 2 is the first to differ"
    assert verdict.cause is not None
    assert verdict.cause.startswith(f"the layout compared with, dp2, is itself at fault: {said}")


def test_a_long_window_is_exercised(monkeypatch: Patch) -> None:
    """A fault at the edge of a window of 200, on tp ranks alone, needs a sequence longer than that to show."""
    block = BlockSpec(
        attention=AttentionSpec(heads=2, kv_heads=2, head_dim=4, window=200), mlp=MLPSpec(ffn=8)
    )
    spec = PLAIN.replace(hidden=8, blocks=(block,))
    forward = AttentionCore.forward

    def faulty(self, q, k, v, valid):
        self.window = 200 - (q.shape[1] == 1)
        return forward(self, q, k, v, valid)

    monkeypatch.setattr(AttentionCore, "forward", faulty)
    verdict = judge("tp2", spec, find_axis=False)
    assert (verdict.passed, verdict.seq_len, verdict.first_module) == (False, 300, "layers.0")


def test_a_model_whose_heads_share_a_3() -> None:
    """9 heads, 3 KV heads and a width of 1536, as SmolLM2-135M, under tp3."""
    block = BlockSpec(attention=AttentionSpec(heads=9, kv_heads=3, head_dim=64), mlp=MLPSpec(ffn=1536))
    small = shrink(PLAIN.replace(name="smol", hidden=576, vocab=49152, blocks=(block,) * 2))
    verdict = judge("tp3", small)
    assert verdict.passed, verdict.cause
    assert verdict.limits == ()


def test_two_layouts_against_each_other() -> None:
    verdict = verify(HARD, Layout.parse("tp2 pp2"), Layout.parse("dp2 tp4"), device="cpu", steps=2)
    assert verdict.passed
    assert verdict.max_rel_err > 0.0  # they really differ in the order of their sums


def test_user_mistakes() -> None:
    with pytest.raises(LayoutError, match="heads = 8 is not divisible by 3"):
        judge("tp3")
    with pytest.raises(LayoutError, match="ep2 etp1 cannot be run yet"):
        judge("dp2 ep2")
    with pytest.raises(ConfigError, match="bfloat16"):
        verify(HARD, Layout.parse("dp2"), dtype="bfloat16")  # type: ignore[arg-type]
    big = HARD.replace(hidden=2**16, vocab=10**6)
    with pytest.raises(ConfigError, match="--shrink"):
        verify(big, Layout.parse("dp2"), device="cpu")
    small = shrink(big)
    assert (small.hidden, small.blocks[0].attention.heads) == (64, 8)

"""Verify on models and layouts of its own choice; what it finds of planted faults is in tests/museum."""

from __future__ import annotations

import pytest
import torch

from fivefold.catalog.models import preset
from fivefold.core.layout import Layout
from fivefold.core.model_spec import AttentionSpec, BlockSpec, MLPSpec
from fivefold.errors import ConfigError, LayoutError
from fivefold.nn.attention import AttentionCore
from fivefold.strategies.data.apply import Replicated
from fivefold.verify.verify import STEPS, Reference, Verdict, verify
from fivefold.verify.workload import common_plans, shrink

from .models import HARD, PLAIN

Patch = pytest.MonkeyPatch


def judge(text: str, spec=HARD, *, steps: int = STEPS, documents: bool = False) -> Verdict:
    """Against one device, where no fault below acts."""
    plan, one = common_plans(spec, Layout.parse(text), Layout(), "float64", documents=documents)
    return Reference(one, steps=steps, seed=0, device="cpu").judge(plan, find_axis=False)


def drifting(patch: Patch) -> None:
    """The last data rank goes its own way a little in the second update: the first replica is right."""
    step = Replicated.step

    def faulty(self, lr):
        step(self, lr)
        if self.updates == 2 and self.axis.index == self.axis.degree - 1 > 0:
            with torch.no_grad():
                self.triples[-1][1].mul_(1 + 1e-6)

    patch.setattr(Replicated, "step", faulty)


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
    assert "on rank 1 only" in verdict.cause


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
    verdict = judge("tp2", spec)
    assert (verdict.passed, verdict.seq_len, verdict.first_module) == (False, 300, "layers.0")


def test_a_model_whose_heads_share_a_3() -> None:
    """9 heads, 3 KV heads and a width of 1536, as SmolLM2-135M, under tp3."""
    block = BlockSpec(attention=AttentionSpec(heads=9, kv_heads=3, head_dim=64), mlp=MLPSpec(ffn=1536))
    small = shrink(PLAIN.replace(name="smol", hidden=576, vocab=49152, blocks=(block,) * 2))
    verdict = judge("tp3", small)
    assert verdict.passed, verdict.cause
    assert verdict.limits == ()


def test_two_layouts_against_each_other() -> None:
    verdict = verify(HARD, Layout.parse("tp2 pp2"), Layout.parse("dp2 tp2"), device="cpu", steps=2)
    assert verdict.passed
    assert verdict.max_rel_err > 0.0  # they really differ in the order of their sums


@pytest.mark.parametrize("text", ["cp2", "cp2:gather pp2"])
def test_separate_documents(text: str) -> None:
    """They change the model, and are told where they were not exercised."""
    verdict = judge(text, documents=True, steps=1)
    assert verdict.passed, verdict.cause
    assert verdict.limits == ()
    assert judge(text, steps=1).limits == (
        "masks of separate documents were not exercised: ask for documents",
    )


def test_user_mistakes() -> None:
    with pytest.raises(LayoutError, match="heads = 8 is not divisible by 3"):
        judge("tp3")
    with pytest.raises(LayoutError, match="has no experts, which ep2 etp1 would cut"):
        judge("dp2 ep2")
    with pytest.raises(ConfigError, match="bfloat16"):
        verify(HARD, Layout.parse("dp2"), dtype="bfloat16")  # type: ignore[arg-type]
    big = HARD.replace(hidden=2**16, vocab=10**6)
    with pytest.raises(ConfigError, match="--shrink"):
        verify(big, Layout.parse("dp2"), device="cpu")
    small = shrink(big)
    assert (small.hidden, small.blocks[0].attention.heads) == (64, 8)


@pytest.mark.parametrize("name", ["tiny-uneven", "tiny-moe"])
def test_a_list_may_take_microbatches_in_any_order(name: str) -> None:
    """What is seen of a microbatch is held against the same one on one device."""
    lines = ("0F0, 0F1, 0B1, 0B0", "1F1, 1B1, 1F0, 1B0")
    verdict = verify(preset(name), Layout.parse("pp2:custom"), steps=1, device="cpu", actions=lines)
    assert verdict.passed, verdict.cause

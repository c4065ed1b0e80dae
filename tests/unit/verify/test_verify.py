"""The workload that verify chooses, the small model that it makes of a large one, and its verdict."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from fivefold.catalog.models import names, preset
from fivefold.core.events import Event
from fivefold.core.execution import microbatches
from fivefold.core.layout import Layout
from fivefold.core.model_counts import parameter_counts
from fivefold.core.model_spec import AttentionSpec, BlockSpec, MLPSpec, ModelSpec, beyond_plain_decoder
from fivefold.engine.size import check_size
from fivefold.errors import ConfigError, LayoutError
from fivefold.strategies import compose
from fivefold.verify.compare import QUANTITIES, assemble
from fivefold.verify.observe import Observation, Piece
from fivefold.verify.verify import SHRINK, common_plans, judge, shrink


def model(heads: int = 8, layers: int = 6, window: int | None = None, max_positions: int = 4096) -> ModelSpec:
    attention = AttentionSpec(heads=heads, kv_heads=2, head_dim=8, window=window)
    block = BlockSpec(attention=attention, mlp=MLPSpec(ffn=32))
    return ModelSpec(name="m", hidden=32, vocab=50, blocks=(block,) * layers, max_positions=max_positions)


def plans(one: str, other: str = "dp1", spec: ModelSpec | None = None, dtype: str = "float64"):
    return common_plans(spec or model(), Layout.parse(one), Layout.parse(other), dtype)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("dp1", "dp1"),
        ("dp4", "dp1"),
        ("dp2", "dp3"),
        ("dp6 tp2", "dp4"),
        ("tp8 pp3", "dp5"),
        ("pp6:gpipe", "tp4"),
    ],
)
def test_the_workload_is_legal_for_both_and_shows_faults(one: str, other: str) -> None:
    first, second = plans(one, other)
    assert first.workload == second.workload
    for plan in (first, second):
        compose.check(plan)
        assert plan.execution.micro_batch >= 2
        assert microbatches(plan.workload, plan.layout, plan.execution) >= 2
        assert plan.workload.seq_len >= 16
        assert plan.execution.optimizer.clip_norm is not None
    assert (first.layout, second.layout) == (Layout.parse(one), Layout.parse(other))


@pytest.mark.parametrize(("window", "shortest"), [(7, 16), (24, 36), (64, 96), (4096, 16)])
def test_the_sequence_is_longer_than_a_short_window(window: int, shortest: int) -> None:
    """A window that no sequence reaches would hide a fault in it; a long one would take too long."""
    seq_len = plans("tp2", spec=model(window=window))[0].workload.seq_len
    assert shortest <= seq_len < shortest + 4
    assert seq_len % 4 == 0


def test_a_model_with_few_positions() -> None:
    assert plans("tp2", spec=model(max_positions=11))[0].workload.seq_len == 8
    with pytest.raises(LayoutError, match="16 exceeds the 11 positions"):
        plans("tp8", spec=model(max_positions=11))


def test_bounds_are_known_for_two_dtypes() -> None:
    with pytest.raises(ConfigError, match="float64 and float32, not of 'bfloat16'"):
        plans("tp2", dtype="bfloat16")


RUNNABLE = [name for name in names() if not beyond_plain_decoder(preset(name))]


@pytest.mark.parametrize("name", RUNNABLE)
def test_a_shrunk_model_keeps_what_a_layout_cuts(name: str) -> None:
    large = preset(name)
    small = shrink(large)
    assert parameter_counts(small)["total_parameters"] < 25e6
    assert (small.layers, small.tied_embeddings) == (large.layers, large.tied_embeddings)
    for mine, theirs in zip(small.blocks, large.blocks, strict=True):
        assert isinstance(mine.attention, AttentionSpec)
        assert isinstance(theirs.attention, AttentionSpec)
        for field in ("heads", "kv_heads", "qkv_bias", "output_bias", "qk_norm"):
            assert getattr(mine.attention, field) == getattr(theirs.attention, field)
        assert (mine.attention.window is None) == (theirs.attention.window is None)
    check_size(plans("tp2", spec=small)[0], what="verifying", advice=SHRINK)


@pytest.mark.parametrize("name", RUNNABLE)
@pytest.mark.parametrize("text", ["tp2", "tp4", "tp8", "tp3", "pp2", "pp7"])
def test_a_shrunk_model_is_legal_where_the_large_one_is(name: str, text: str) -> None:
    def legal(spec: ModelSpec) -> bool:
        try:
            plans(text, spec=spec)
        except LayoutError:
            return False
        return True

    assert legal(shrink(preset(name))) == legal(preset(name))


@pytest.mark.parametrize("name", names())
def test_any_preset_can_be_shrunk(name: str) -> None:
    """Also those that cannot be run, so that the reason why is told, and not that of shrinking."""
    assert beyond_plain_decoder(shrink(preset(name))) == beyond_plain_decoder(preset(name))


def test_a_rotation_wider_than_a_shrunk_head() -> None:
    block = BlockSpec(
        attention=AttentionSpec(heads=4, kv_heads=4, head_dim=80, rope_dim=32), mlp=MLPSpec(ffn=64)
    )
    small = shrink(model().replace(blocks=(block,)))
    assert beyond_plain_decoder(small) == ("rotation of a part of the head",)


def test_what_does_not_fit_is_refused_with_the_numbers() -> None:
    plan = plans("dp4", spec=preset("llama-3.1-70b"))[0]
    with pytest.raises(ConfigError, match=r"70\.6 G parameters\) under dp4 .* free here") as caught:
        check_size(plan, what="verifying", advice=SHRINK)
    assert str(caught.value).endswith(SHRINK)


def observation(gradient: float = 1.0, adamw: float = 1.0, events: int = 0) -> Observation:
    values = dict.fromkeys(QUANTITIES, 1.0) | {"gradients": gradient, "weights_adamw": adamw}
    del values["buffers"], values["routed_experts"]
    pieces = [Piece(q, "a.weight", (), (), np.asarray(v)) for q, v in values.items()]
    extra = Event("backward", "tp", "all_reduce", "float64", 8)
    return Observation(pieces, Counter({extra: events} if events else {}))


def verdict(seen: Observation, dtype: str = "float64"):
    return judge(plans("dp1", dtype=dtype)[0], [seen], assemble([observation()]), steps=1)


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
    line = "rank 0: backward tp all_reduce float64 8 B: predicted none, recorded 2 (unexpected)"
    assert chatty.event_differences == (line,)
    assert chatty.cause == f"the numbers agree, the communication does not: {line}"

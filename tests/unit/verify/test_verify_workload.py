"""The workload that verify chooses, and the small model that it makes of a large one."""

from __future__ import annotations

from types import SimpleNamespace

import psutil
import pytest

from fivefold.catalog.models import names, preset
from fivefold.core.cluster import Cluster
from fivefold.core.execution import Execution, microbatches
from fivefold.core.layout import Layout
from fivefold.core.model_counts import parameter_counts
from fivefold.core.model_spec import AttentionSpec, BlockSpec, MLPSpec, ModelSpec, beyond_plain_decoder
from fivefold.core.plan import Plan
from fivefold.core.workload import Workload
from fivefold.engine.size import check_size
from fivefold.errors import ConfigError, LayoutError
from fivefold.strategies import compose
from fivefold.strategies.pipeline.actions import format_actions
from fivefold.strategies.pipeline.schedules import computations
from fivefold.strategies.tensor import rules as tensor_rules
from fivefold.verify.verify import SHRINK
from fivefold.verify.workload import common_plans, idle_windows, shrink


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


@pytest.mark.parametrize(
    ("window", "shortest", "idle"),
    [
        (7, 16, False),
        (24, 36, False),
        (64, 96, False),
        (128, 192, False),
        (512, 768, False),
        (513, 16, True),
        (4096, 16, True),
    ],
)
def test_the_sequence_is_longer_than_the_window(window: int, shortest: int, idle: bool) -> None:
    """A window that no sequence exceeds would hide a fault in it; for a long one that takes too long."""
    plan = plans("tp2", spec=model(window=window))[0]
    assert shortest <= plan.workload.seq_len < shortest + 4
    assert plan.workload.seq_len % 4 == 0
    assert idle_windows(plan) == ([window] if idle else [])


def test_a_long_window_of_a_model_with_a_large_vocabulary() -> None:
    """Its logits for 768 tokens of 6 sequences are 2.4 GB in float64: not for the sake of a window."""
    plan = plans("tp2", spec=model(window=512).replace(vocab=65536))[0]
    assert (plan.workload.seq_len, idle_windows(plan)) == (16, [512])


def test_windows_of_several_sizes() -> None:
    blocks = [block for window in (8, 256, 4096, None) for block in model(window=window).blocks[:1]]
    plan = plans("tp2", spec=model().replace(blocks=tuple(blocks)))[0]
    assert (plan.workload.seq_len, idle_windows(plan)) == (384, [4096])


def test_a_window_that_the_positions_do_not_reach() -> None:
    plan = plans("tp2", spec=model(window=24, max_positions=22))[0]
    assert (plan.workload.seq_len, idle_windows(plan)) == (20, [24])


def test_a_model_with_few_positions() -> None:
    assert plans("tp2", spec=model(max_positions=11))[0].workload.seq_len == 8
    with pytest.raises(LayoutError, match="16 exceeds the 11 positions"):
        plans("tp8", spec=model(max_positions=11))


def test_dtypes_that_are_compared() -> None:
    with pytest.raises(ConfigError, match="float64, float32, bfloat16 and float16, not in 'float8'"):
        plans("tp2", dtype="float8")


RUNNABLE = [name for name in names() if not beyond_plain_decoder(preset(name))]


@pytest.mark.parametrize("name", RUNNABLE)
def test_a_shrunk_model_keeps_what_a_layout_cuts(name: str) -> None:
    large = preset(name)
    small = shrink(large)
    assert parameter_counts(small)["total_parameters"] < 50e6
    assert (small.layers, small.tied_embeddings) == (large.layers, large.tied_embeddings)
    for mine, theirs in zip(small.blocks, large.blocks, strict=True):
        assert mine.attention.kind == theirs.attention.kind
        for field in ("heads", "kv_heads", "qkv_bias", "output_bias", "qk_norm", "bias", "rope_interleaved"):
            assert getattr(mine.attention, field, None) == getattr(theirs.attention, field, None)
        for optional in ("window", "q_rank"):
            small_one, large_one = (
                getattr(attention, optional, None) for attention in (mine.attention, theirs.attention)
            )
            assert (small_one is None) == (large_one is None)
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


@pytest.mark.parametrize(
    ("text", "dense", "experts"),
    [
        ("dp4", 4.0, 4.0),
        ("dp4 ep4", 4.0, 1.0),
        ("dp4 ep2", 4.0, 2.0),
        ("dp2 tp2 ep2 etp2", 2.0, 1.0),
        ("dp4 ep2 zero3", 1.0, 1.0),
        ("dp4 ep2 zero2", 4 * (0.25 + 0.75 / 4), 2 * (0.25 + 0.75 / 2)),
    ],
)
def test_experts_are_held_by_the_ranks_that_share_none(
    monkeypatch: pytest.MonkeyPatch, text: str, dense: float, experts: float
) -> None:
    spec = preset("tiny-moe")
    plan = Plan(
        model=spec, cluster=Cluster.parse("cpu"), layout=Layout.parse(text),
        workload=Workload(seq_len=2, global_batch=4), execution=Execution(),
    )  # fmt: skip
    counts = parameter_counts(spec)
    routed = counts["by_component"]["experts"]
    assert 0 < routed < counts["total_parameters"]
    states = 4 * 4 * (dense * (counts["total_parameters"] - routed) + experts * routed)
    activations = plan.layout.dp * 2 * 4 * (spec.layers * spec.hidden + spec.vocab)
    for free, fits in ((states + activations, True), (states + activations - 4, False)):
        monkeypatch.setattr(psutil, "virtual_memory", lambda free=free: SimpleNamespace(available=free))
        if fits:
            check_size(plan, what="training", advice="")
        else:
            with pytest.raises(ConfigError, match="takes at least"):
                check_size(plan, what="training", advice="")


@pytest.mark.parametrize(("text", "held"), [("pp2:custom", None), ("pp2:gpipe", 24), ("pp2", 2)])
def test_what_a_schedule_holds_must_fit(monkeypatch: pytest.MonkeyPatch, text: str, held: int | None) -> None:
    """24 microbatches at a time need 12 times what 2 do: 1F1B and a list of the same order fit, GPipe does not."""
    count, spec = 24, preset("tiny-llama").replace(vocab=1)
    layout = Layout.parse(text)
    order = computations(Layout.parse("pp2"), count)
    plan = Plan(
        model=spec, cluster=Cluster.parse("cpu"), layout=layout,
        workload=Workload(seq_len=1024, global_batch=count),
        execution=Execution(actions=format_actions(order) if held is None else None),
    )  # fmt: skip
    chunk_bytes = 1024 * spec.hidden * 4 * spec.layers // 2
    states = 4 * 4 * parameter_counts(spec)["total_parameters"]
    free = states + 3 * chunk_bytes
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=free))
    if held != count:
        check_size(plan, what="training", advice="")
        return
    with pytest.raises(ConfigError, match=r"up to 24 microbatches of chunks at a time on pipeline rank 0"):
        check_size(plan, what="training", advice="")


def small_like(heads: int, kv_heads: int, ffn: int) -> tuple[ModelSpec, ModelSpec]:
    block = BlockSpec(
        attention=AttentionSpec(heads=heads, kv_heads=kv_heads, head_dim=64), mlp=MLPSpec(ffn=ffn)
    )
    large = model().replace(hidden=576, blocks=(block,))
    return large, shrink(large)


SIZES = [
    (9, 3, 1536),  # SmolLM2-135M: 3 divides both
    (15, 5, 2560),  # SmolLM2-360M: 5
    (14, 2, 4864),  # Qwen2.5-0.5B: 7 divides the heads and not the width
    (28, 4, 18944),
    (40, 40, 13824),
    (128, 16, 53248),
    (71, 1, 18176),
    (48, 8, 32768),
    (9, 9, 1000),
    (12, 12, 66),
    (4, 4, 24),
    (6, 6, 9973),  # a prime: nothing to keep, nothing to add
]


@pytest.mark.parametrize(("heads", "kv_heads", "ffn"), SIZES)
def test_shrinking_changes_the_legality_of_no_degree(heads: int, kv_heads: int, ffn: int) -> None:
    """Every degree up to the heads, by the rule of the strategy itself: 3 and 5 as well as powers of two."""
    large, small = small_like(heads, kv_heads, ffn)
    for tp in range(1, heads + 1):
        assert refused(small, tp) == refused(large, tp), tp


def refused(spec: ModelSpec, tp: int) -> bool:
    try:
        tensor_rules.check(spec, Layout(tp=tp), seq_len=2 * tp)
    except LayoutError:
        return True
    return False


def test_a_shrunk_width_is_small() -> None:
    """96 = 3 x 32, 80 = 5 x 16: odd parts that heads share, then powers of two; 71 heads: 71, not 71 x 256."""
    widths = [small_like(*sizes)[1].blocks[0].mlp.ffn for sizes in SIZES]
    assert widths == [96, 80, 64, 64, 64, 128, 71, 64, 64, 66, 24, 65]

"""ZeRO on real ranks: the same model, less memory, and states that move between all its forms."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from fivefold.core.layout import Layout
from fivefold.core.model_spec import AttentionSpec, BlockSpec, MLPSpec, ModelSpec
from fivefold.core.optimizer import OptimizerConfig
from fivefold.core.plan import Plan
from fivefold.core.sharding import ParameterRow
from fivefold.data.batches import SyntheticDataset
from fivefold.engine.engine import Engine
from fivefold.engine.feed import feed
from fivefold.nn.hub import HFCheckpoint
from fivefold.runtime.launch import Rank, run_ranks
from fivefold.runtime.memory import LiveBytes
from fivefold.runtime.mesh import Mesh
from fivefold.strategies.data import rules
from fivefold.strategies.data.shards import Bucket
from fivefold.train.export import export_hf
from fivefold.train.trainer import Trainer
from fivefold.verify.verify import Reference
from fivefold.verify.workload import common_plans

from .live_memory import settled
from .models import HARD, PLAIN
from .resuming import SEQ_LEN, Job, Ran, Recorded, train, whole

LONG = pytest.mark.exhaustive
LEVELS = ("zero1", "zero2", "zero3")

# The same model, the predicted communication

LEAN = ["dp3 zero1", "dp4 zero1/2", "dp2 tp2 pp2 zero2 nosp", "dp3 zero3", "dp2 tp2 pp2:gpipe zero3"]
SHAPES = ["dp2", "dp3", "dp4", "dp2 tp2", "dp2 tp2 nosp", "dp2 pp2:gpipe", "dp2 pp2", "dp2 tp2 pp2"]
REST = [f"{shape} {level}" for shape in SHAPES for level in LEVELS]
REST += [f"{shape} {level}/2" for shape in ("dp4", "dp4 tp2", "dp4 pp2", "dp8") for level in LEVELS]
REST += [
    "dp2 pp2:zbh1 zero1",
    "dp2 pp2:1f1b*2 zero2",
    "dp2 pp2:1f1b*2 zero3",
    "dp2 cp2 zero1",
    "dp2 cp2 zero3/2",
]
REST += ["dp2 tp2 zero2 order=dp-tp-cp-pp", "dp16 zero2", "dp16 zero3"]  # more ranks than a norm has elements
_references: dict[tuple[str, int, int], Reference] = {}


def verdict_of(text: str, name: str, gather: str = "microbatch") -> Any:
    layout = Layout.parse(text)
    plan, one = common_plans({"hard": HARD, "plain": PLAIN}[name], layout, Layout(), "float64")
    execution = plan.execution.replace(zero3_gather=gather)
    key = (name, one.workload.seq_len, one.workload.global_batch)
    if key not in _references:
        _references[key] = Reference(one, seed=0, device="cpu")
    return _references[key].judge(plan.replace(execution=execution), find_axis=False)


@pytest.mark.parametrize(
    ("text", "name", "gather"),
    [
        *((text, "hard", "microbatch") for text in LEAN),
        ("dp2 zero3", "plain", "step"),
        *(
            pytest.param(text, name, "microbatch", marks=LONG)
            for text in REST
            for name in ("hard", "plain")
            if not (name == "hard" and "*2" in text)  # it has three layers
        ),
        pytest.param("dp2 pp2 zero3", "hard", "step", marks=LONG),
        pytest.param("dp4 tp2 zero3/2", "hard", "step", marks=LONG),
    ],
)
def test_the_same_model_and_the_predicted_communication(text: str, name: str, gather: str) -> None:
    verdict = verdict_of(text, name, gather)
    assert verdict.passed, f"{verdict.cause}; {verdict.quantities}"
    assert verdict.events_match


# Memory


def live_after_each_microbatch(mesh: Mesh, level: str) -> dict[str, Any]:
    """Bytes on this rank above those at the start of the step, whenever a microbatch's backward has ended."""
    job = Job(PLAIN, OptimizerConfig(lr=1e-2, warmup_steps=0), 2, "float32", 1)
    plan = job.plan(str(mesh.layout))
    engine = Engine(plan, mesh, seed=1)
    load = feed(SyntheticDataset(plan.model.vocab, SEQ_LEN, seed=2), plan, mesh, 0)
    batches = [load(j) for j in range(engine.microbatches)]
    held = engine.tensors()
    with LiveBytes(
        [*held, *(t for b in batches for t in vars(b).values() if isinstance(t, torch.Tensor))]
    ) as live:
        before, seen = live.live_bytes, []
        backward = engine.pipeline._b

        def watched(chunk: int, j: int) -> None:
            backward(chunk, j)
            seen.append(settled(live) - before)

        engine.pipeline._b = watched  # type: ignore[method-assign]
        engine.step(lambda j: batches[j], 1e-2)
    parameters = sum(math.prod(row.shape) for pairs in engine.parameters.values() for row, _ in pairs) * 4
    buckets = [bucket for chunk in engine.data.held.values() for bucket in chunk]  # type: ignore[attr-defined]
    return {
        "seen": seen,
        "peak": live.peak_bytes - before,
        "start": before,
        "P": parameters,
        "bucket": max(b.n * b.S for b in buckets) * 4,
        "shard": sum(b.S for b in buckets) * 4,
    }


SMALL = 2048
"""Losses, positions and other small numbers of a step."""


def test_zero2_keeps_shards_and_one_bucket(on_mesh: Callable[..., Any]) -> None:
    """Gradients after each microbatch: what is kept, and at most one bucket that is still on its way."""
    for found in on_mesh(live_after_each_microbatch, "dp4 zero2", "zero2"):
        assert len(found["seen"]) == 2
        assert max(found["seen"]) <= found["shard"] + found["bucket"] + found["bucket"] // 4 + SMALL
        assert found["shard"] + 2 * found["bucket"] < found["P"], "whole gradients would be seen"


def test_zero1_keeps_whole_gradients(on_mesh: Callable[..., Any]) -> None:
    """What the previous test would see of gradients that are not let go."""
    for found in on_mesh(live_after_each_microbatch, "dp4 zero1", "zero1"):
        assert max(found["seen"]) >= found["P"]


def test_zero3_keeps_neither_parameters_nor_gradients(on_mesh: Callable[..., Any]) -> None:
    """At the start of a step: weights and two moments of the shards. After each microbatch: as ZeRO-2."""
    for found in on_mesh(live_after_each_microbatch, "dp4 zero3", "zero3"):
        assert found["start"] <= 3 * found["shard"] + 64 * 1024
        assert max(found["seen"]) <= found["shard"] + found["bucket"] + found["bucket"] // 4 + SMALL


def test_evaluating_leaves_nothing_gathered(on_mesh: Callable[..., Any]) -> None:
    def losses(mesh: Mesh) -> tuple[float, int]:
        plan = Job(HARD, OptimizerConfig(), 1).plan(str(mesh.layout))
        engine = Engine(plan, mesh, seed=1)
        data = SyntheticDataset(plan.model.vocab, SEQ_LEN, seed=2)
        loss, _ = engine.evaluate(feed(data, plan, mesh, 0))
        pairs = [pair for chunk in engine.parameters.values() for pair in chunk]
        left = sum(p.untyped_storage().nbytes() for _, p in pairs)
        result = engine.step(feed(data, plan, mesh, 0), 1e-2)
        assert loss == pytest.approx(result.loss * result.valid_tokens, rel=1e-12)
        return loss, left

    sharded = on_mesh(losses, "dp2 zero3")
    assert {left for _, left in sharded} == {0}
    assert sharded[0][0] == pytest.approx(on_mesh(losses, "dp2")[0][0], rel=1e-12)


# bfloat16, with masters in float32


@pytest.mark.parametrize("layout", ["dp2 zero1", "dp2 zero2", "dp2 zero3", "dp2 pp2:zbh1 zero1"])
def test_bfloat16_gradients_are_added_in_float32(layout: str) -> None:
    """Weights and moments after a step of four microbatches, as with ZeRO-0: only the order of float32 sums differs."""
    job = Job(HARD, OptimizerConfig(lr=1e-2, warmup_steps=0), 1, "bfloat16")
    plain = str(Layout.parse(layout).replace(zero=0))
    state, expected = whole(train(job, layout)), whole(train(job, plain))
    assert {values.dtype for values in state.values()} == {torch.float32}
    assert_same(state, expected, 2e-6)  # a gradient rounded to bfloat16 would be 2e-3 off


def assert_same(state: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], bound: float) -> None:
    assert state.keys() == expected.keys()
    for key, values in expected.items():
        assert float((state[key] - values).abs().max()) <= bound * float(values.abs().max()), key


# Checkpoints

JOB = Job(HARD, OptimizerConfig(lr=3e-3, warmup_steps=4), 6)
SAVED_UNDER = ("dp4 zero1", "dp2 tp2 zero3", "dp4 zero2/2")
RESUMED_UNDER = ("dp1", "dp2 tp2 pp2 zero1", "dp2 zero3", "dp4 zero3/2")


@cache
def uninterrupted(layout: str) -> tuple[list[Ran], Path]:
    folder = Path(mkdtemp(prefix="fivefold-test-"))
    return train(JOB, layout, folder=folder, every=3), folder / "step-00000003"


@pytest.mark.parametrize(
    ("saved", "resumed"),
    [
        ("dp4 zero1", "dp2 zero3"), ("dp2 tp2 zero3", "dp2 tp2 pp2 zero1"),
        *(pytest.param(a, b, marks=LONG) for a in SAVED_UNDER for b in (*RESUMED_UNDER, "tp4", "dp8 zero2")),
        pytest.param("dp1", "dp4 zero3/2", marks=LONG),
    ],
)  # fmt: skip
def test_a_run_goes_on_under_any_other_form(saved: str, resumed: str) -> None:
    straight, start = uninterrupted(saved)
    ranks = train(JOB, resumed, start=start)
    for ran in ranks:
        assert ran.losses == pytest.approx(straight[0].losses[3:], rel=1e-10)
        assert ran.norms == pytest.approx(straight[0].norms[3:], rel=1e-10)
        assert ran.bytes_loaded == ran.bytes_held, "every rank reads its own part, no more"
    assert_same(whole(ranks), whole(straight), 1e-10)


# Weights in and out


def test_export_and_back(on_mesh: Callable[..., Any], tmp_path: Path) -> None:
    """The same file as one device writes, bit for bit; read back, every rank reads only what it holds."""
    attention = AttentionSpec(heads=8, kv_heads=2, head_dim=6, qk_norm=True, qkv_bias=True, output_bias=True)
    blocks = (BlockSpec(attention=attention, mlp=MLPSpec(ffn=24)),) * 2
    spec = ModelSpec(name="own", hidden=32, vocab=53, blocks=blocks, tied_embeddings=True)

    def engine_of(mesh: Mesh, **options: Any) -> tuple[Engine, Plan]:
        plan = Job(spec, OptimizerConfig(), 1, "float32").plan("dp1")
        workload = plan.workload.replace(global_batch=mesh.layout.dp)
        plan = plan.replace(layout=mesh.layout, workload=workload)
        return Engine(plan, mesh, **options), plan

    def written(mesh: Mesh, name: str) -> None:
        engine, plan = engine_of(mesh, seed=4, noise=0.1)
        pairs = [(row, values) for kind, row, values in engine.data.persistent() if kind == "weights"]
        export_hf(tmp_path / name, plan, pairs, mesh)

    def read_back(mesh: Mesh) -> tuple[int, int]:
        checkpoint = HFCheckpoint.open(tmp_path / "one")
        before = checkpoint.bytes_read
        engine, _ = engine_of(mesh, seed=99, weights=checkpoint.read)
        own, _ = engine_of(mesh, seed=4, noise=0.1)
        for (_, row, a), (_, _, b) in zip(engine.data.persistent(), own.data.persistent()):
            assert torch.equal(a, b), row.name
        regions = [
            row.region(mesh.layout, mesh.coordinate)
            for kind, row, _ in own.data.persistent()
            if kind == "weights"
        ]
        held = sum(math.prod(r.stop - r.start for r in region) for region in regions) * 4
        return checkpoint.bytes_read - before, held

    on_mesh(written, "dp1", "one")
    expected = load_file(tmp_path / "one" / "model.safetensors")
    for name, layout in {"a": "dp4 zero1/2", "b": "dp3 tp2 zero3", "c": "dp2 pp2 zero2"}.items():
        on_mesh(written, layout, name)
        got = {k: v for path in (tmp_path / name).glob("*.safetensors") for k, v in load_file(path).items()}
        assert got.keys() == expected.keys()
        assert all(torch.equal(got[key], expected[key]) for key in expected)
    for asked, held in on_mesh(read_back, "dp3 tp2 zero3"):
        assert asked == held


# A step that is not finite


def diverge(rank: Rank, layout: str) -> tuple[list[int], bool, bool]:
    """An infinite gradient on rank 1 alone, at the second step; whether anything changed, and it went on after."""
    plan = Job(PLAIN, OptimizerConfig(lr=1e-2), 4).plan(layout)
    data = SyntheticDataset(PLAIN.vocab, SEQ_LEN, seed=5)
    trainer = Trainer(plan, rank, data, steps=4, seed=3, skip_nonfinite=True)
    seen = [trainer.step(0).skipped]
    hook = None
    if rank.rank == 1:
        pairs = [pair for chunk in trainer.engine.parameters.values() for pair in chunk]
        hook = pairs[1][1].register_hook(lambda gradient: gradient + math.inf)
    before = [values.clone() for *_, values in trainer.engine.data.persistent()]
    seen.append(trainer.step(1).skipped)
    unchanged = all(torch.equal(a, b) for a, (*_, b) in zip(before, trainer.engine.data.persistent()))
    if hook is not None:
        hook.remove()
    after = trainer.step(2)
    seen.append(after.skipped)
    return seen, unchanged, math.isfinite(after.loss) and math.isfinite(after.grad_norm)


@pytest.mark.parametrize("layout", ["dp2 zero1", "dp2 zero2", "dp2 zero3"])
def test_a_skipped_step_changes_nothing(layout: str) -> None:
    for seen, unchanged, goes_on in run_ranks(diverge, layout, ranks=2, device="cpu"):
        assert seen == [0, 1, 1]
        assert unchanged
        assert goes_on


def test_the_cause_is_found_in_shards(on_mesh: Callable[..., Any]) -> None:
    """A NaN in a weight, under ZeRO-3, where no rank has the parameter between steps."""

    def told(rank: Rank) -> str:
        plan = Job(PLAIN, OptimizerConfig(lr=1e-2), 4).plan("dp2 zero3")
        trainer = Trainer(plan, rank, Recorded(PLAIN.vocab, SEQ_LEN, seed=5), steps=4, seed=3)
        trainer.dataset.asked = []  # type: ignore[attr-defined]
        if rank.rank == 1:
            weights = {row.name: v for kind, row, v in trainer.engine.data.persistent() if kind == "weights"}
            weights["layers.3.mlp.down.weight"][0, 0] = math.nan
        try:
            trainer.step(0)
        except Exception as error:
            return str(error)
        return "nothing"

    lines = set(run_ranks(told, ranks=2, device="cpu"))
    assert len(lines) == 1
    assert "rank 1: the parameter layers.3.mlp.down.weight itself has a NaN" in lines.pop()


# The arithmetic of one bucket


def add_up(mesh: Mesh) -> bool:
    """Gradients of parameters of every awkward size, in two microbatches, as one sum over ranks."""
    shapes = [(1,), (7,), (2, 3), (3, 1), (5, 2), (4, 2), (6, 2, 2)]
    generator = torch.Generator().manual_seed(1)
    gradients = [
        [[torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes] for _ in range(2)]
        for _ in range(mesh.layout.dp)
    ]
    pairs = [
        (
            rules.place(ParameterRow(f"p{i}", "up", shape), mesh.layout),
            torch.nn.Parameter(torch.rand(shape).double()),
        )
        for i, shape in enumerate(shapes)
    ]
    start = [p.detach().clone() for _, p in pairs]
    bucket = Bucket(0, pairs, mesh, keep=False)
    bucket.cut()
    bucket.let_go()
    bucket.gather_start()
    bucket.gather_wait()
    assert all(torch.equal(p.detach(), before) for (_, p), before in zip(pairs, start))
    for microbatch in gradients[mesh.rank]:
        for i, gradient in enumerate(microbatch):
            bucket.add(i, gradient)
    bucket.reduce_start()
    bucket.reduce_wait()
    bucket.hand_out()
    for i, (row, _) in enumerate(pairs):
        total = sum(microbatch[i] for rank in gradients for microbatch in rank)
        region = row.held.region(mesh.layout, mesh.coordinate)
        mine = bucket.masters[i].grad
        assert mine is not None
        kept = region[0].stop - region[0].start
        torch.testing.assert_close(mine[:kept], total[region], rtol=1e-14, atol=1e-14)  # type: ignore[index]
        assert not mine[kept:].any()
    return True


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_a_bucket_of_awkward_sizes(on_mesh: Callable[..., Any], ranks: int) -> None:
    assert all(on_mesh(add_up, f"dp{ranks} zero2"))

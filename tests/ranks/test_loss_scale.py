"""float16 with a loss scale: every rank skips the same steps, has the same scale, and keeps it in a checkpoint."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from fivefold.catalog.models import preset
from fivefold.core.events import without_setup
from fivefold.core.layout import Layout
from fivefold.core.loss_scale import LossScaleConfig
from fivefold.core.optimizer import OptimizerConfig
from fivefold.core.plan import Plan
from fivefold.data.batches import SyntheticDataset
from fivefold.engine.engine import Engine
from fivefold.engine.feed import feed
from fivefold.errors import FivefoldError
from fivefold.runtime.launch import Rank, run_ranks
from fivefold.runtime.ledger import Ledger
from fivefold.runtime.mesh import Mesh
from fivefold.strategies import compose
from fivefold.train.saver import Saver, load_checkpoint
from fivefold.train.sections import CheckpointConfig
from fivefold.train.trainer import StepMetrics, Trainer

from .models import HARD, PLAIN
from .resuming import SEQ_LEN, Job

OPTIMIZER = OptimizerConfig(lr=1e-2, warmup_steps=0)
LONG = pytest.mark.exhaustive


def plan_of(layout: str, *, initial: int = 1024, grow_every: int = 2000, spec=PLAIN, dtype="float16") -> Plan:
    plan = Job(spec, OPTIMIZER, 8, dtype).plan(layout)
    scale = LossScaleConfig(initial=initial, grow_every=grow_every)
    return plan.replace(execution=plan.execution.replace(loss_scale=scale))


def trainer_of(rank: Rank, plan: Plan, steps: int = 8) -> Trainer:
    return Trainer(plan, rank, SyntheticDataset(plan.model.vocab, SEQ_LEN, seed=5), steps=steps, seed=3)


def state(trainer: Trainer) -> list[Tensor]:
    return [values.clone() for _, _, values in trainer.engine.data.persistent()]


class Skipped(NamedTuple):
    """What one rank saw of four steps, the second of which overflows on one rank only."""

    scales: list[int | None]
    skipped: list[int]
    overflows: list[int | None]
    norms: list[float]
    losses: list[float]
    untouched: bool
    updates: int


def overflow_on_one_rank(rank: Rank, plan: Plan, broken: int, name: str) -> Skipped:
    """One element of a weight's gradient in one microbatch of one rank, as the chain rule would overflow."""
    trainer = trainer_of(rank, plan)
    seen: list[StepMetrics] = [trainer.step(0)]
    before, hook = state(trainer), None
    if rank.rank == broken:
        pairs = [pair for chunk in trainer.engine.parameters.values() for pair in chunk]
        parameter = next(p for row, p in pairs if row.name == name)

        def overflow(gradient: Tensor) -> Tensor:
            far = gradient.clone()
            far.view(-1)[-1] = 2 * 65504.0  # infinite in float16
            return far

        hook = parameter.register_hook(overflow)
    seen.append(trainer.step(1))
    untouched = all(torch.equal(a, b) for a, b in zip(before, state(trainer), strict=True))
    if hook is not None:
        hook.remove()
    seen += [trainer.step(2), trainer.step(3)]
    return Skipped(
        [m.loss_scale for m in seen],
        [m.skipped for m in seen],
        [m.overflows for m in seen],
        [m.grad_norm for m in seen],
        [m.loss for m in seen],
        untouched,
        trainer.engine.data.updates,
    )


CASES = [
    ("tp2 pp2", 1, "layers.0.mlp.inputs.up.weight"),
    pytest.param("pp2", 1, "layers.3.mlp.down.weight", marks=LONG),  # the first stage only hears of it
    pytest.param("dp2 zero1", 1, "layers.0.attention.output.weight", marks=LONG),
    pytest.param("dp2 zero3", 0, "layers.1.mlp.down.weight", marks=LONG),
    pytest.param("dp2 zero2 tp2", 3, "norm.weight", marks=LONG),
    pytest.param("cp2 pp2:gpipe", 2, "layers.3.attention.qkv.v.weight", marks=LONG),
    pytest.param("pp2:zbv", 0, "embedding.weight", marks=LONG),
    pytest.param("dp4 ep4", 2, "layers.1.mlp.experts.down", marks=LONG),  # an expert that nobody else has
]


@pytest.mark.parametrize(("layout", "broken", "name"), CASES)
def test_an_overflow_on_one_rank_skips_the_step_on_all(layout: str, broken: int, name: str) -> None:
    plan = plan_of(layout, grow_every=2, spec=preset("tiny-moe") if "experts" in name else PLAIN)
    everyone: list[Skipped] = run_ranks(
        overflow_on_one_rank, plan, broken, name, ranks=plan.layout.world_size, device="cpu"
    )
    for seen in everyone:
        assert seen == everyone[0] or [*map(str, seen)] == [*map(str, everyone[0])], "as NaN is not itself"
        assert seen.scales == [1024, 1024, 512, 512]
        assert (seen.skipped, seen.overflows) == ([0, 1, 1, 1], [0, 1, 1, 1])
        assert seen.untouched, "weights and moments"
        assert seen.updates == 3
        assert not math.isfinite(seen.norms[1])
        assert all(math.isfinite(n) for i, n in enumerate(seen.norms) if i != 1)
        assert all(math.isfinite(loss) for loss in seen.losses)


@LONG
def test_it_goes_on_as_if_only_that_batch_were_missing() -> None:
    """Against one device in float32, which leaves the step out."""
    plan = plan_of("tp2 pp2")
    seen = run_ranks(overflow_on_one_rank, plan, 1, "layers.0.mlp.inputs.up.weight", ranks=4, device="cpu")[0]

    def left_out(rank: Rank) -> list[tuple[float, float]]:
        trainer = trainer_of(rank, Job(PLAIN, OPTIMIZER, 8, "float32").plan("dp1"))
        return [(m.loss, m.grad_norm) for m in map(trainer.step, (0, 2, 3))]

    (reference,) = run_ranks(left_out, ranks=1, device="cpu")
    for (loss, norm), (exact_loss, exact_norm) in zip(
        [(seen.losses[i], seen.norms[i]) for i in (0, 2, 3)], reference, strict=True
    ):
        assert loss == pytest.approx(exact_loss, rel=2e-3)
        assert norm == pytest.approx(exact_norm, rel=2e-2), "unscaled"


def natural(rank: Rank, plan: Plan) -> tuple[list[int | None], list[float], list[int], bool]:
    trainer = trainer_of(rank, plan, steps=14)
    seen = [trainer.step(step) for step in range(14)]
    masters = all(bool(torch.isfinite(values).all()) for values in state(trainer))
    return [m.loss_scale for m in seen], [m.loss for m in seen], trainer.precision.overflow_steps, masters


@LONG
@pytest.mark.parametrize("layout", ["dp2 pp2", "dp1"])
def test_a_scale_that_is_too_large_comes_down_by_itself(layout: str) -> None:
    plan = plan_of(layout, initial=2**24, grow_every=3)
    everyone = run_ranks(natural, plan, ranks=plan.layout.world_size, device="cpu")
    for scales, losses, overflowed, finite in everyone:
        assert (scales, losses, overflowed) == everyone[0][:3]
        assert finite
        assert overflowed[:2] == [1, 2], "real gradients overflow in float16 at this scale"
        for step, (before, after) in enumerate(pairwise(scales), 1):
            assert after in ({before // 2} if step in overflowed else {before, 2 * before})
        assert len(overflowed) < 14, "it finds a scale that fits"
        assert losses[-1] < losses[0]


def at_the_least(rank: Rank, plan: Plan) -> str:
    trainer = trainer_of(rank, plan)
    parameter = trainer.engine.parameters[0][0][1]
    parameter.register_hook(lambda gradient: gradient + math.inf)
    assert trainer.step(0).loss_scale == 2
    with pytest.raises(FivefoldError) as caught:
        trainer.step(1)
    return str(caught.value)


def test_no_scale_mends_an_overflow_at_scale_one() -> None:
    (said,) = run_ranks(at_the_least, plan_of("dp1", initial=2), ranks=1, device="cpu")
    assert said.startswith("step 2: loss ")
    assert "training diverged" in said
    assert "the gradient of embedding.weight is the first that is not" in said


# ---------------------------------------------------------------------------------------------------------------------


def ledger_of_a_step(mesh: Mesh, name: str, dtype: str) -> tuple[Counter[Any], Counter[Any]]:
    plan = plan_of(str(mesh.layout), spec={"hard": HARD, "plain": PLAIN}[name], dtype=dtype)
    engine = Engine(plan, mesh, seed=1)
    data = SyntheticDataset(plan.model.vocab, SEQ_LEN, seed=2)
    with Ledger(mesh) as ledger:
        engine.step(feed(data, plan, mesh, 0), 1e-2)
    return without_setup(ledger.events), compose.predict_events(plan, mesh.rank)


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("hard", "dp2 tp2 pp2"),
        pytest.param("plain", "dp2 zero3", marks=LONG),
        pytest.param("plain", "cp2 tp2", marks=LONG),
    ],
)
def test_the_flag_is_predicted(on_mesh: Callable[..., Any], name: str, layout: str) -> None:
    for recorded, predicted in on_mesh(ledger_of_a_step, layout, name, "float16"):
        assert recorded == predicted
        flags = {event: count for event, count in recorded.items() if event.axis == "world"}
        assert [(e.phase, e.op, e.bytes, n) for e, n in flags.items()] == [("norm", "all_reduce", 4, 1)]


def test_one_device_agrees_with_nobody(on_mesh: Callable[..., Any]) -> None:
    ((recorded, predicted),) = on_mesh(ledger_of_a_step, "dp1", "plain", "float16")
    assert recorded == predicted == Counter()


def exact(mesh: Mesh, scaled: bool) -> list[Tensor]:
    plan = plan_of(str(mesh.layout), dtype="float64")
    if not scaled:
        plan = plan.replace(execution=plan.execution.replace(loss_scale=None))
    engine = Engine(plan, mesh, seed=1)
    data = SyntheticDataset(plan.model.vocab, SEQ_LEN, seed=2)
    for step in range(2):
        engine.step(feed(data, plan, mesh, step), 1e-2)
    return [values.clone() for _, _, values in engine.data.persistent()]


@pytest.mark.parametrize("layout", ["dp1", pytest.param("dp2 zero1 tp2", marks=LONG)])
def test_a_power_of_two_changes_no_digit(on_mesh: Callable[..., Any], layout: str) -> None:
    for with_scale, without in zip(on_mesh(exact, layout, True), on_mesh(exact, layout, False), strict=True):
        for a, b in zip(with_scale, without, strict=True):
            assert torch.equal(a, b)


# ---------------------------------------------------------------------------------------------------------------------


def part_of_a_run(
    rank: Rank, plan: Plan, start: Path | None, folder: Path, end: int
) -> tuple[list[tuple[int | None, float, int]], list[Tensor]]:
    trainer = trainer_of(rank, plan)
    if start is not None:
        load_checkpoint(start, trainer, rank, data="samples")
    config = CheckpointConfig(folder=str(folder), asynchronous=False)
    saver = Saver(config, trainer, rank, data="samples", warn=pytest.fail)
    seen = [trainer.step(step) for step in range(trainer.start, end)]
    saver.save(end)
    saver.wait()
    return [(m.loss_scale, m.loss, m.overflows or 0) for m in seen], state(trainer)


@pytest.mark.parametrize("then", ["tp2", pytest.param("dp2 zero1", marks=LONG)])
def test_a_resumed_run_goes_on_with_the_scale(tmp_path: Path, then: str) -> None:
    """It overflows, comes down and is about to grow when it is saved; another layout goes on."""
    plan = plan_of("tp2", initial=2**24, grow_every=3)
    whole, _ = run_ranks(part_of_a_run, plan, None, tmp_path / "whole", 8, ranks=2, device="cpu")[0]
    first, _ = run_ranks(part_of_a_run, plan, None, tmp_path / "parts", 4, ranks=2, device="cpu")[0]
    other = plan.replace(layout=Layout.parse(then))
    start = tmp_path / "parts" / "step-00000004"
    rest = run_ranks(part_of_a_run, other, start, tmp_path / "rest", 8, ranks=2, device="cpu")
    for seen, _ in rest:
        assert [scale for scale, *_ in first] + [scale for scale, *_ in seen] == [
            scale for scale, *_ in whole
        ]
        assert seen[-1][2] == whole[-1][2], "overflows are counted on"
        if then == "tp2":
            assert [*first, *seen] == whole, "bit for bit"
    assert whole[4][0] != 2**24, "so this test can fail"


@LONG
@pytest.mark.parametrize("layout", ["dp1", "dp2 tp2", "pp2"])
def test_the_curve_is_that_of_float32(layout: str) -> None:
    def curve(rank: Rank, dtype: str) -> list[float]:
        job = Job(PLAIN, OptimizerConfig(lr=3e-3, warmup_steps=5), 80, dtype, micro_batch=2)
        plan = job.plan(layout)
        data = SyntheticDataset(PLAIN.vocab, SEQ_LEN, seed=5)
        trainer = Trainer(plan, rank, data, steps=80, seed=3)
        return [trainer.step(step).loss for step in range(80)]

    ranks = Layout.parse(layout).world_size
    wide = run_ranks(curve, "float32", ranks=ranks, device="cpu")[0]
    narrow = run_ranks(curve, "float16", ranks=ranks, device="cpu")[0]
    assert all(math.isfinite(loss) for loss in narrow)
    apart = [abs(a - b) / b for a, b in zip(narrow, wide, strict=True)]
    assert max(apart) < 2e-2
    assert sum(apart) / len(apart) < 5e-3

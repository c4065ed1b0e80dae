"""bfloat16 with float32 masters: what is exact about it, written out by hand, and what travels."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fivefold.core.events import without_setup
from fivefold.core.layout import Layout
from fivefold.core.optimizer import OptimizerConfig
from fivefold.core.sharding import ParameterRow
from fivefold.data.batches import SyntheticDataset
from fivefold.engine.engine import Engine
from fivefold.engine.feed import feed
from fivefold.engine.optimizer import make_optimizer
from fivefold.errors import FivefoldError
from fivefold.runtime.device import Device
from fivefold.runtime.launch import Rank, run_ranks
from fivefold.runtime.ledger import Ledger
from fivefold.runtime.mesh import Mesh
from fivefold.strategies import compose
from fivefold.strategies.data.apply import Replicated
from fivefold.train.trainer import Trainer

from .models import HARD, PLAIN
from .resuming import SEQ_LEN, Job, Recorded

ROWS, WIDTH, MICROBATCHES, STEPS, LR = 3, 6, 5, 3, 0.05
ADAMW = OptimizerConfig(lr=LR, weight_decay=0.1)


def weights() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(WIDTH, WIDTH, generator=generator).bfloat16() for _ in range(2)]


def inputs(rank: int, step: int, microbatch: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * rank + 10 * step + microbatch)
    scale = 10.0 ** (microbatch - 2)  # a bfloat16 sum would lose the small ones
    return (scale * torch.randn(ROWS, WIDTH, generator=generator)).bfloat16()


def backward(parameters: list[nn.Parameter], x: Tensor) -> None:
    for parameter in parameters:
        x = (x @ parameter).tanh()
    x.sum().backward()


def by_hand(ranks: int) -> tuple[list[list[Tensor]], list[Tensor], list[Tensor]]:
    """Masters and moments in float32, by torch's own AdamW: gradients per step, final masters, first moments."""
    masters = [nn.Parameter(w.float()) for w in weights()]
    optimizer = torch.optim.AdamW(masters, lr=LR, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    gradients = []
    for step in range(STEPS):
        per_rank = []
        for rank in range(ranks):
            total = [torch.zeros(WIDTH, WIDTH) for _ in masters]
            for j in range(MICROBATCHES):
                narrow = [nn.Parameter(m.detach().bfloat16()) for m in masters]
                backward(narrow, inputs(rank, step, j))
                for sum_, parameter in zip(total, narrow, strict=True):
                    assert parameter.grad is not None
                    assert parameter.grad.dtype == torch.bfloat16
                    sum_ += parameter.grad.float()
            per_rank.append(total)
        sums = [torch.stack(parts).sum(0) for parts in zip(*per_rank, strict=True)]
        gradients.append(sums)
        for master, gradient in zip(masters, sums, strict=True):
            master.grad = gradient.clone()
        optimizer.step()
    return gradients, [m.detach() for m in masters], [optimizer.state[m]["exp_avg"] for m in masters]


def train(mesh: Mesh) -> dict[str, Any]:
    pairs = [(ParameterRow(f"w{i}", "up", (WIDTH, WIDTH)), nn.Parameter(w)) for i, w in enumerate(weights())]
    data = Replicated({0: pairs}, mesh, lambda given: make_optimizer(ADAMW, given), bucket_bytes=10**9)
    parameters = [p for _, p in pairs]
    seen: dict[str, Any] = {"gradients": []}
    for step in range(STEPS):
        for j in range(MICROBATCHES):
            if j == MICROBATCHES - 1:
                data.watch(0)
            backward(parameters, inputs(mesh.rank, step, j))
            assert all(p.grad is None for p in parameters), "no narrow gradient outlives its microbatch"
        data.reduce(0)
        data.wait()
        seen["gradients"].append([g.clone() for _, g in data.local_gradients()])
        data.step(LR)
        masters = [values for kind, _, values in data.persistent() if kind == "weights"]
        for parameter, master in zip(parameters, masters, strict=True):
            assert (parameter.dtype, master.dtype) == (torch.bfloat16, torch.float32)
            assert torch.equal(parameter.detach(), master.bfloat16()), "the parameter is the master, rounded"
    seen["masters"] = [values.clone() for kind, _, values in data.persistent() if kind == "weights"]
    seen["moments"] = [values.clone() for kind, _, values in data.persistent() if kind == "exp_avg"]
    return seen


@pytest.mark.parametrize("ranks", [1, 2])
def test_accumulation_and_update_are_float32_exactly(on_mesh: Callable[..., Any], ranks: int) -> None:
    """Bit for bit: a sum of two ranks has one order only."""
    gradients, masters, moments = by_hand(ranks)
    narrow = [torch.stack([g.bfloat16().float() for g in step]) for step in gradients]
    assert any(not torch.equal(a, torch.stack(b)) for a, b in zip(narrow, gradients, strict=True)), (
        "rounded gradients would differ, so this test can fail"
    )
    for seen in on_mesh(train, f"dp{ranks}"):
        for got, expected in zip(seen["gradients"], gradients, strict=True):
            for a, b in zip(got, expected, strict=True):
                assert a.dtype == torch.float32
                assert torch.equal(a, b)
        for key, expected in (("masters", masters), ("moments", moments)):
            for a, b in zip(seen[key], expected, strict=True):
                assert torch.equal(a, b), key


def test_small_updates_are_not_lost() -> None:
    """A thousandth of a bfloat16 step at a time: the master moves, and the parameter with it in the end."""
    row = ParameterRow("w", "up", (1,))
    parameter = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    mesh = Mesh(Layout(), 0, Device(torch.device("cpu")))
    sgd = OptimizerConfig(name="sgd", weight_decay=0.0)
    data = Replicated({0: [(row, parameter)]}, mesh, lambda given: make_optimizer(sgd, given), bucket_bytes=1)
    for _ in range(1000):
        parameter.sum().backward()
        data.step(1e-5)
    assert float(parameter.detach()) == pytest.approx(0.99, abs=0.004)
    assert float(data.persistent()[0][2]) == pytest.approx(
        0.99, abs=1000 * 2**-25
    )  # half a step of float32 each


def ledger_of_a_step(
    mesh: Mesh, name: str
) -> tuple[Counter[Any], Counter[Any], set[torch.dtype], list[float]]:
    """What was recorded and what was predicted; the dtypes of gradients as clipping sees them; losses."""
    job = Job({"hard": HARD, "plain": PLAIN}[name], OptimizerConfig(lr=1e-2, warmup_steps=0), 2, "bfloat16")
    plan = job.plan(str(mesh.layout))
    engine = Engine(plan, mesh, seed=1)
    dtypes: set[torch.dtype] = set()
    engine.after_backward = lambda gradients: dtypes.update(g.dtype for _, g in gradients)
    data = SyntheticDataset(plan.model.vocab, SEQ_LEN, seed=2)
    losses = []
    for step in range(3):
        with Ledger(mesh) as ledger:
            losses.append(engine.step(feed(data, plan, mesh, step), 1e-2).loss)
        masters = {row.name: m for kind, row, m in engine.data.persistent() if kind == "weights"}
        for chunk in engine.parameters.values():
            for row, parameter in chunk:
                assert torch.equal(parameter.detach(), masters[row.name].bfloat16())
    return without_setup(ledger.events), compose.predict_events(plan, mesh.rank), dtypes, losses


@pytest.mark.parametrize(("name", "layout"), [("hard", "dp2 tp2 pp2"), ("plain", "dp2 tp2")])
def test_reductions_are_float32_and_as_predicted(on_mesh: Callable[..., Any], name: str, layout: str) -> None:
    everyone = on_mesh(ledger_of_a_step, layout, name)
    for recorded, predicted, dtypes, losses in everyone:
        assert recorded == predicted
        assert dtypes == {torch.float32}
        assert {e.dtype for e in recorded if e.phase == "reduce"} == {"float32"}
        assert {e.dtype for e in recorded if e.op in ("send", "recv", "reduce_scatter")} == {"bfloat16"}
        assert losses == everyone[0][3]
        assert all(math.isfinite(loss) for loss in losses)


# ---------------------------------------------------------------------------------------------------------------------


def diverge(rank: Rank, where: str, skip: bool) -> tuple[list[tuple[float, int]], str, bool]:
    """A NaN in one weight of one layer on rank 3, or an infinity in its gradient; what this rank is told."""
    plan = Job(PLAIN, OptimizerConfig(lr=1e-2), 4).plan("tp2 pp2")
    trainer = Trainer(
        plan, rank, Recorded(PLAIN.vocab, SEQ_LEN, seed=5), steps=4, seed=3, skip_nonfinite=skip
    )
    trainer.dataset.asked = []  # type: ignore[attr-defined]
    seen = [(m.loss, m.skipped) for m in (trainer.step(0),)]
    hook = None
    if rank.rank == 3:
        pairs = [pair for chunk in trainer.engine.parameters.values() for pair in chunk]
        parameter = next(p for row, p in pairs if row.name == "layers.3.mlp.down.weight")
        if where == "weight":
            parameter.data[0, 0] = math.nan
        else:
            hook = parameter.register_hook(lambda gradient: gradient + math.inf)
    before = [values.clone() for *_, values in trainer.engine.data.persistent()]
    line = ""
    try:
        seen += [(m.loss, m.skipped) for m in (trainer.step(1), trainer.step(2))]
    except FivefoldError as error:
        line = str(error)
    after = [values for *_, values in trainer.engine.data.persistent()]
    unchanged = all(torch.equal(a.nan_to_num(7), b.nan_to_num(7)) for a, b in zip(before, after, strict=True))
    if hook is not None:
        hook.remove()
    if where == "gradient" and skip:
        seen.append((trainer.step(3).loss, trainer.skipped))
    return seen, line, unchanged


@pytest.mark.parametrize(
    ("where", "words"),
    [
        ("weight", "rank 3: the parameter layers.3.mlp.down.weight itself has a NaN or an infinity"),
        ("gradient", "rank 3: all outputs are finite, the gradient of layers.3.mlp.down.weight is the first"),
    ],
)
def test_one_rank_diverges(where: str, words: str) -> None:
    """All ranks say the same: step, rank and module. `down` is summed over tp, so its output is bad on both ranks."""
    everyone = run_ranks(diverge, where, False, ranks=4, device="cpu")
    lines = {line for _, line, _ in everyone}
    assert len(lines) == 1
    (line,) = lines
    assert line.startswith("step 2: loss ")
    assert words in line
    assert all(unchanged for *_, unchanged in everyone)


def test_all_ranks_skip_the_same_steps() -> None:
    everyone = run_ranks(diverge, "gradient", True, ranks=4, device="cpu")
    for seen, line, unchanged in everyone:
        assert (line, unchanged) == ("", True)
        assert [skipped for _, skipped in seen] == [0, 1, 2, 2]
        assert seen == everyone[0][0]
        assert all(math.isfinite(loss) for loss, _ in seen)

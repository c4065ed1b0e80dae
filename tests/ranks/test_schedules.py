"""Every schedule in the real runtime: exact, as idle as its simulation says, and holding as much as its bound says."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fivefold.core.layout import Layout
from fivefold.estimate.timeline import simulate
from fivefold.runtime.deferred import DeferredGradients
from fivefold.runtime.mesh import Mesh
from fivefold.strategies.pipeline.apply import Pipeline, Trace
from fivefold.strategies.pipeline.schedules import Action, InFlight, all_actions, in_flight_bound
from fivefold.strategies.tensor.linear import Cut, RowParallel

from .test_pipeline import SCALE, SHAPE, Chunk, microbatch

NAMES = ("gpipe", "1f1b", "1f1b*2", "1f1b*3", "bfs*2", "zbh1", "zbv", "dualpipev")
COUNTS = (1, 2, 5, 8)


class Stage(Chunk):
    """A chunk whose weight gradient may come later, and which notes what is held when it runs."""

    def __init__(self, stage: int, deferred: DeferredGradients, mesh: Mesh) -> None:
        super().__init__(stage)
        self.linear = RowParallel(self.linear, Cut(mesh.axis("tp"), False, deferred))  # type: ignore[assignment]
        self.deferred = deferred
        self.pipeline: Pipeline | None = None
        self.held = InFlight(0, 0)

    def forward(self, x: Tensor, positions: Tensor, mask: Any, tokens: Any) -> Tensor:
        assert self.pipeline is not None
        activations = len(self.pipeline.outputs) + 1
        stashed = activations + self.deferred.pending
        self.held = InFlight(max(self.held.activations, activations), max(self.held.stashed, stashed))
        return super().forward(x, positions, mask, tokens)


def run(
    mesh: Mesh, m: int, make: Callable[[int, DeferredGradients, Mesh], nn.Module] = Stage
) -> tuple[dict[int, Any], Tensor, Trace]:
    deferred = DeferredGradients()
    stages = mesh.layout.virtual_stages_of(mesh.coordinate["pp"])
    chunks: dict[int, Any] = {stage: make(stage, deferred, mesh) for stage in stages}
    pipeline = Pipeline(
        chunks,
        all_actions(mesh.layout, m),
        mesh,
        boundary=(SHAPE, torch.float64),
        before_last_backward=lambda chunk: None,
        on_reduce=lambda chunk: None,
        deferred=deferred,
    )
    for chunk in chunks.values():
        chunk.pipeline = pipeline
    dist.barrier()
    loss, trace = pipeline.run([microbatch(j) for j in range(m)], SCALE)
    return chunks, loss, trace


def one_process(stages: int, m: int) -> tuple[float, list[list[Tensor]]]:
    chunks = [Chunk(stage) for stage in range(stages)]
    total = 0.0
    for j in range(m):
        batch = microbatch(j)
        x = batch.tokens_BS
        for chunk in chunks:
            x = chunk(x, batch.positions, None, None)
        loss = chunks[-1].loss(x, batch.labels_BS, batch.mask_BS)
        (loss * SCALE).backward()
        total += loss.item()
    return total, [[p.grad for p in chunk.parameters() if p.grad is not None] for chunk in chunks]


@pytest.mark.parametrize("p", [2, 3, pytest.param(4, marks=pytest.mark.exhaustive)])
def test_exact_and_within_its_bound(on_mesh: Callable[..., Any], p: int) -> None:
    """Loss and every gradient of every chunk; the most that is held, counted, equals the closed form."""
    layouts = [Layout.parse(f"pp{p}:{name}") for name in NAMES]

    def measured(mesh: Mesh) -> list[Any]:
        found = []
        for layout in layouts:
            here = Mesh(layout, mesh.rank, mesh.device)
            for m in COUNTS:
                chunks, loss, _ = run(here, m)
                gradients = {s: [q.grad for q in c.parameters()] for s, c in chunks.items()}
                held = [c.held for c in chunks.values()]
                most = InFlight(max(h.activations for h in held), max(h.stashed for h in held))
                found.append((loss.item(), gradients, most))
        return found

    ranks = on_mesh(measured, f"pp{p}")
    expected = {(s, m): one_process(s, m) for s in {layout.stages for layout in layouts} for m in COUNTS}
    cases = [(layout, m) for layout in layouts for m in COUNTS]
    for i, (layout, m) in enumerate(cases):
        total, gradients = expected[layout.stages, m]
        assert sum(found[i][0] for found in ranks) == pytest.approx(total, rel=1e-12)
        for rank, found in enumerate(ranks):
            assert found[i][2] == in_flight_bound(layout, rank, m), f"{layout}, {m} microbatches, rank {rank}"
            for stage, mine in found[i][1].items():
                for a, b in zip(mine, gradients[stage], strict=True):
                    torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)


class Take(torch.autograd.Function):
    """Takes as long as it is told: forward, for the gradient of the input, and for that of the weights."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, stage: SleepingStage) -> Tensor:
        ctx.stage = stage
        time.sleep(stage.seconds["F"])
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        stage = ctx.stage
        time.sleep(stage.seconds["I"])

        def weight_gradients() -> list[Tensor | None]:
            time.sleep(stage.seconds["W"])
            return []

        if stage.deferred.collecting:
            stage.deferred.keep([], weight_gradients)
        else:
            weight_gradients()
        return grad, None


class SleepingStage(Stage):
    def __init__(
        self, stage: int, deferred: DeferredGradients, mesh: Mesh, seconds: dict[str, float]
    ) -> None:
        super().__init__(stage, deferred, mesh)
        self.seconds = seconds

    def forward(self, x: Tensor, positions: Tensor, mask: Any, tokens: Any) -> Tensor:
        return Take.apply(super().forward(x, positions, mask, tokens), self)  # type: ignore[no-any-return]


def bubbles(on_mesh: Callable[..., Any], p: int, m: int, unit_s: float) -> dict[str, tuple[float, float]]:
    """Schedule -> (measured, simulated) idle share; a rank's F, I and W take one unit each, over all its chunks."""
    layouts = {name: Layout.parse(f"pp{p}:{name}") for name in NAMES if "*3" not in name}

    def measured(mesh: Mesh) -> list[tuple[float, float]]:
        found = []
        for layout in layouts.values():
            seconds = dict.fromkeys("FIW", unit_s / layout.chunks)
            here = Mesh(layout, mesh.rank, mesh.device)
            *_, trace = run(here, m, lambda s, d, h, seconds=seconds: SleepingStage(s, d, h, seconds))  # type: ignore[misc]
            found.append((trace.busy_s, trace.total_s))
        return found

    ranks = on_mesh(measured, f"pp{p}")
    result = {}
    for i, (name, layout) in enumerate(layouts.items()):

        def cost(action: Action, layout: Layout = layout) -> float:
            return (2 if action.kind == "B" else 1) / layout.chunks

        busy, total = zip(*(found[i] for found in ranks))
        simulated = simulate(all_actions(layout, m), layout.owner_of, cost)
        result[name] = (1 - sum(busy) / (p * max(total)), simulated.bubble_frac)
    return result


@pytest.mark.parametrize(
    "p", [pytest.param(2, marks=pytest.mark.exhaustive), 4, pytest.param(8, marks=pytest.mark.exhaustive)]
)
def test_as_idle_as_simulated(on_mesh: Callable[..., Any], p: int) -> None:
    """Within 4 points of the timeline of the same list; zero bubble below 1F1B.

    A machine that is busy with something else wakes sleepers late, which only adds idle time: the least of several
    measurements counts, with longer stages each time.
    """
    found: dict[str, tuple[float, float]] = {}
    for unit_s in (0.03, 0.06, 0.12):
        for name, (real, theory) in bubbles(on_mesh, p, 2 * p, unit_s).items():
            found[name] = min(real, found.get(name, (1.0, theory))[0]), theory
        if all(abs(real - theory) <= 0.04 for real, theory in found.values()):
            break
    for name, (real, theory) in found.items():
        assert real == pytest.approx(theory, abs=0.04), f"{name}: {found}"
    assert found["zbh1"][0] < found["1f1b"][0]
    assert found["zbv"][0] < found["1f1b"][0]

"""The pipeline runtime with chunks that are not a decoder: exact, bounded in memory, and as idle as theory says."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fivefold.core.cluster import Cluster
from fivefold.core.events import without_setup
from fivefold.core.execution import Execution
from fivefold.core.layout import Layout
from fivefold.core.model_spec import AttentionSpec, BlockSpec, MLPSpec, ModelSpec
from fivefold.core.plan import Plan
from fivefold.core.workload import Workload
from fivefold.engine.build import build_chunks
from fivefold.engine.engine import Engine
from fivefold.runtime.device import Device
from fivefold.runtime.ledger import Ledger
from fivefold.runtime.memory import LiveBytes
from fivefold.runtime.mesh import Mesh
from fivefold.strategies.pipeline.apply import Microbatch, Pipeline, Trace
from fivefold.strategies.pipeline.schedules import all_actions, bubble_frac

SHAPE = (2, 3, 5)  # B, S, D, none of them a power of two
SCALE = torch.tensor(1 / 7, dtype=torch.float64)


class Chunk(nn.Module):
    """A stage of one linear map; the last one also measures the distance to the labels where the mask is set."""

    def __init__(self, stage: int) -> None:
        super().__init__()
        torch.manual_seed(stage)
        self.linear = nn.Linear(SHAPE[-1], SHAPE[-1], dtype=torch.float64)

    def forward(self, x: Tensor, positions: Tensor, mask: Any, tokens: Any) -> Tensor:
        return torch.tanh(self.linear(x)) + positions[..., None]

    def loss(self, out: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
        return ((out.sum(-1) - labels) ** 2 * mask).sum()


def microbatch(j: int) -> Microbatch:
    generator = torch.Generator().manual_seed(100 + j)
    x = torch.randn(SHAPE, generator=generator, dtype=torch.float64)
    mask = torch.arange(SHAPE[1]) <= j % SHAPE[1]  # a different number of tokens counts in each
    positions = torch.arange(SHAPE[1], dtype=torch.float64)[None] * 0.1
    return Microbatch(x, x.sum(-1) + j, mask.expand(SHAPE[:2]), positions)


def run(
    mesh: Mesh, m: int, make: Callable[[int], nn.Module] = Chunk, calls: list[str] | None = None
) -> tuple[Pipeline, nn.Module, Tensor, Trace]:
    """One step of m microbatches on this rank's stage."""
    stage = mesh.coordinate["pp"]
    module = make(stage)
    notes = [] if calls is None else calls
    pipeline = Pipeline(
        {stage: module},
        all_actions(mesh.layout, m),
        mesh,
        boundary=(SHAPE, torch.float64),
        before_last_backward=lambda chunk: notes.append(f"last backward of {chunk}"),
        on_reduce=lambda chunk: notes.append(f"reduce {chunk}"),
    )
    if mesh.layout.pp > 1:
        dist.barrier()
    loss, trace = pipeline.run([microbatch(j) for j in range(m)], SCALE)
    return pipeline, module, loss, trace


def one_process(p: int, m: int) -> tuple[float, list[list[Tensor]]]:
    """Loss, and each stage's gradients."""
    chunks = [Chunk(stage) for stage in range(p)]
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


@pytest.mark.parametrize("text", ["pp2", "pp2:gpipe", "pp3", "pp4", "pp4:gpipe"])
def test_a_custom_chunk_equals_one_process(on_mesh: Callable[..., Any], text: str) -> None:
    """Fewer, as many and more microbatches than stages."""

    def steps(mesh: Mesh) -> list[tuple[float, list[Tensor], list[str]]]:
        found = []
        for m in (1, 3, 6):
            calls: list[str] = []
            _, module, loss, _ = run(mesh, m, calls=calls)
            found.append((loss.item(), [p.grad for p in module.parameters() if p.grad is not None], calls))
        return found

    p = Layout.parse(text).pp
    ranks = on_mesh(steps, text)
    for i, m in enumerate((1, 3, 6)):
        total, gradients = one_process(p, m)
        assert [found[i][0] for found in ranks[:-1]] == [0.0] * (p - 1), "only the last stage has the loss"
        assert ranks[-1][i][0] == pytest.approx(total, rel=1e-12)
        for stage, found in enumerate(ranks):
            for a, b in zip(found[i][1], gradients[stage], strict=True):
                torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
            assert found[i][2] == [f"last backward of {stage}", f"reduce {stage}"]


def test_one_rank_runs_the_same_loop_without_communication() -> None:
    mesh = Mesh(Layout(), 0, Device(torch.device("cpu")))
    with Ledger(mesh) as ledger:
        _, module, loss, trace = run(mesh, 4)
    total, gradients = one_process(1, 4)
    assert not ledger.events
    assert loss.item() == pytest.approx(total, rel=1e-12)
    for p, expected in zip(module.parameters(), gradients[0], strict=True):
        torch.testing.assert_close(p.grad, expected, rtol=1e-12, atol=1e-12)
    kinds = [f"{action.kind}{action.microbatch}" for action, _, _ in trace.actions]
    assert kinds == ["F0", "B0", "F1", "B1", "F2", "B2", "F3", "B3", "REDUCE_GRAD-1"]
    assert 0 < trace.busy_s <= trace.total_s


class Sleep(torch.autograd.Function):
    """Identity that takes its time, forward and backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        time.sleep(ctx.seconds)
        return grad, None


class SleepyChunk(Chunk):
    """Costs `seconds` forward and as much backward, whatever else runs on this machine."""

    def __init__(self, stage: int, seconds: float) -> None:
        super().__init__(stage)
        self.seconds = seconds

    def forward(self, x: Tensor, positions: Tensor, mask: Any, tokens: Any) -> Tensor:
        return Sleep.apply(super().forward(x, positions, mask, tokens), self.seconds)  # type: ignore[no-any-return]


@pytest.mark.parametrize(("text", "m"), [("pp8", 16), ("pp8:gpipe", 8)])
def test_the_measured_bubble_is_the_theoretical_one(on_mesh: Callable[..., Any], text: str, m: int) -> None:
    """Idle share of all ranks from the common start to the end of the slowest: within 15 % of (p-1)/(p-1+m).

    A machine that is busy with something else wakes sleepers late, which adds idle time; then longer stages tell.
    """

    def measure(mesh: Mesh, stage_s: float) -> tuple[float, float]:
        *_, trace = run(mesh, m, lambda stage: SleepyChunk(stage, stage_s))
        return trace.busy_s, trace.total_s

    for stage_s in (0.03, 0.06, 0.12):
        times = on_mesh(measure, text, stage_s)
        p = len(times)
        idle = 1 - sum(busy for busy, _ in times) / (p * max(total for _, total in times))
        assert all(busy >= m * 2 * stage_s for busy, _ in times)
        if idle == pytest.approx(bubble_frac(p, m), rel=0.15):
            return
    assert idle == pytest.approx(bubble_frac(p, m), rel=0.15)


STAGE_S = 0.03


def test_waiting_is_not_work(on_mesh: Callable[..., Any]) -> None:
    """A quick stage behind a slow one is busy for as long as it computes, not for as long as it waits."""

    def measure(mesh: Mesh) -> Trace:
        slow = mesh.coordinate["pp"] == 0
        return run(mesh, 4, (lambda stage: SleepyChunk(stage, STAGE_S)) if slow else Chunk)[-1]

    slow, quick = on_mesh(measure, "pp2")
    assert slow.busy_s >= 8 * STAGE_S
    assert quick.busy_s < 0.3 * slow.busy_s
    for trace in (slow, quick):
        ends = [(start, end) for _, start, end in trace.actions]
        assert all(0 <= start <= end <= trace.total_s for start, end in ends)
        assert ends == sorted(ends)


def test_messages_are_let_go_of(on_mesh: Callable[..., Any]) -> None:
    """1F1B holds as much for 24 microbatches as for 6: sent messages do not pile up."""

    def peaks(mesh: Mesh) -> list[int]:
        found = []
        for m in (6, 24):
            with LiveBytes() as memory:
                pipeline, *_ = run(mesh, m)
            batches = m * sum(
                t.untyped_storage().nbytes() for t in (microbatch(0).tokens_BS, microbatch(0).labels_BS)
            )
            found.append(memory.peak_bytes - batches)
            assert len(pipeline.sends) <= 1
        return found

    message = 2 * 3 * 5 * 8
    for few, many in on_mesh(peaks, "pp2"):
        assert abs(many - few) < 24 * 64 + message, "only masks and positions of 18 more microbatches"


def test_phases_and_sizes_of_messages(on_mesh: Callable[..., Any]) -> None:
    def events(mesh: Mesh) -> dict[str, int]:
        with Ledger(mesh) as ledger:
            run(mesh, 5)
        sent = {
            f"{e.phase} {e.axis} {e.op} {e.bytes}": n
            for e, n in without_setup(ledger.events).items()
            if e.op != "barrier"
        }
        return sent

    size = 2 * 3 * 5 * 8
    first, middle, last = on_mesh(events, "pp3")
    assert first == {f"forward pp send {size}": 5, f"backward pp recv {size}": 5}
    assert last == {f"forward pp recv {size}": 5, f"backward pp send {size}": 5}
    assert middle == {**first, **last}


def tied_plan(text: str) -> Plan:
    attention = AttentionSpec(heads=4, kv_heads=2, head_dim=6)
    block = BlockSpec(attention=attention, mlp=MLPSpec(ffn=16))
    return Plan(
        model=ModelSpec(name="tied", hidden=8, vocab=13, blocks=(block,) * 3, tied_embeddings=True),
        cluster=Cluster.parse("cpu"),
        workload=Workload(seq_len=6, global_batch=6),
        layout=Layout.parse(text),
        execution=Execution(micro_batch=2, dtype="float64"),
    )


def tied_step(mesh: Mesh, text: str) -> tuple[float, float, dict[str, Tensor], dict[str, Tensor]]:
    """Loss, norm, gradients and updated weights of the copies of the embedding on this rank."""
    engine = Engine(tied_plan(text), mesh, seed=1)
    gradients: dict[str, Tensor] = {}

    def keep(pairs: Any) -> None:
        gradients.update({row.name: g.clone() for row, g in pairs if row.role == "embedding"})

    def load(j: int) -> Microbatch:
        tokens = (torch.arange(12).view(2, 6) * 5 + j) % 13
        return Microbatch(tokens, (tokens + 1) % 13, tokens != 3, torch.arange(6)[None])

    engine.after_backward = keep
    result = engine.step(load, 0.1)
    pairs = [pair for chunk in engine.parameters.values() for pair in chunk]
    weights = {row.name: p.detach() for row, p in pairs if row.role == "embedding"}
    return result.loss, result.grad_norm, gradients, weights


@pytest.mark.parametrize("text", ["pp2", "pp3:gpipe"])
def test_tied_embeddings_stay_one_parameter(on_mesh: Callable[..., Any], text: str) -> None:
    one = Mesh(Layout(), 0, Device(torch.device("cpu")))
    loss, norm, gradients, weights = tied_step(one, "dp1")
    found = on_mesh(lambda mesh: tied_step(mesh, text), text)
    for a, b, *_ in found:
        assert (a, b) == (pytest.approx(loss, rel=1e-12), pytest.approx(norm, rel=1e-10))
    names = {0: "embedding.weight", len(found) - 1: "head.weight"}
    for rank, (_, _, g, w) in enumerate(found):
        assert list(g) == ([names[rank]] if rank in names else [])
        for name in g:
            torch.testing.assert_close(g[name], gradients["embedding.weight"], rtol=1e-10, atol=1e-13)
            torch.testing.assert_close(w[name], weights["embedding.weight"], rtol=1e-8, atol=1e-10)
    assert torch.equal(found[0][3]["embedding.weight"], found[-1][3]["head.weight"]), "bit for bit"


def test_every_stage_holds_its_layers_and_no_others(on_mesh: Callable[..., Any]) -> None:
    """Five layers on three stages: 2 + 2 + 1, under their global names."""
    plan = tied_plan("pp3").replace(layout=Layout.parse("pp3"))
    spec = plan.model.replace(blocks=plan.model.blocks[:1] * 5, tied_embeddings=False)

    def names(mesh: Mesh) -> tuple[set[str], set[str]]:
        ((module, pairs),) = build_chunks(plan.replace(model=spec), mesh, seed=1).values()
        assert {name for name, _ in module.named_parameters()} == {row.name for row, _ in pairs}
        heads = {name.split(".")[0] for name, _ in module.named_parameters()}
        return heads, {
            name.split(".")[1] for name, _ in module.named_parameters() if name.startswith("layers")
        }

    assert on_mesh(names, "pp3") == [
        ({"embedding", "layers"}, {"0", "1"}),
        ({"layers"}, {"2", "3"}),
        ({"layers", "norm", "head"}, {"4"}),
    ]

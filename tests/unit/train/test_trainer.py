"""The training loop of one rank against a loop written out by hand, and what it says of a step."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from fivefold.core.cluster import Cluster
from fivefold.core.execution import DType, Execution
from fivefold.core.layout import Layout
from fivefold.core.model_spec import AttentionSpec, BlockSpec, MLPSpec, ModelSpec
from fivefold.core.optimizer import OptimizerConfig
from fivefold.core.plan import Plan
from fivefold.core.workload import Workload
from fivefold.data.batches import SyntheticDataset
from fivefold.errors import FivefoldError
from fivefold.nn.decoder import Decoder
from fivefold.runtime.device import Device
from fivefold.runtime.launch import Rank
from fivefold.train.trainer import Trainer

V, D, FFN, N, KV, H, LAYERS, S, G = 31, 16, 24, 4, 2, 4, 2, 10, 6
STEPS = 5


def llama(hidden: int, ffn: int) -> ModelSpec:
    block = BlockSpec(attention=AttentionSpec(heads=N, kv_heads=KV, head_dim=H), mlp=MLPSpec(ffn=ffn))
    return ModelSpec(name="tiny", hidden=hidden, vocab=V, blocks=(block,) * LAYERS)


def parameters(hidden: int, ffn: int) -> int:
    layer = 2 * hidden * N * H + 2 * hidden * KV * H + 3 * hidden * ffn + 2 * hidden
    return 2 * V * hidden + LAYERS * layer + hidden


SPEC = llama(D, FFN)
ADAMW = OptimizerConfig(lr=0.02, warmup_steps=2, clip_norm=0.5, weight_decay=0.1)
DATA = SyntheticDataset(V, S, seed=3)
RANK = Rank(0, 1, Device(torch.device("cpu")))


def make(
    optimizer: OptimizerConfig = ADAMW,
    *,
    steps: int = STEPS,
    spec: ModelSpec = SPEC,
    dtype: DType = "float64",
) -> Trainer:
    plan = Plan(
        model=spec,
        cluster=Cluster.parse("cpu"),
        workload=Workload(seq_len=S, global_batch=G),
        layout=Layout(),
        execution=Execution(micro_batch=2, dtype=dtype, optimizer=optimizer),
    )
    return Trainer(plan, RANK, DATA, steps=steps, seed=7)


def by_hand(weights: dict[str, torch.Tensor]) -> list[tuple[float, float]]:
    """(loss, gradient norm) of each step: the whole global batch at once, torch's AdamW, clip and cosine."""
    model = Decoder(SPEC).double()
    model.load_state_dict(weights)
    norms = [p for p in model.parameters() if p.ndim == 1]
    matrices = [p for p in model.parameters() if p.ndim == 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": norms, "weight_decay": 0.0}], betas=(0.9, 0.95)
    )
    lrs = [0.02 / 3, 0.04 / 3] + [0.02 * (0.1 + 0.45 * (1 + math.cos(math.pi * x))) for x in (0, 0.5, 1)]
    seen = []
    for step, lr in enumerate(lrs):
        batch = DATA.global_batch(step, G)
        tokens, labels, mask, positions = (
            torch.from_numpy(x)
            for x in (batch.tokens_BS, batch.labels_BS, batch.loss_mask_BS, batch.positions_BS)
        )
        loss = F.cross_entropy(model(tokens, positions)[mask], labels[mask])
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
        seen.append((loss.item(), norm.item()))
    return seen


def test_equals_a_loop_written_by_hand() -> None:
    trainer = make()
    weights = {k: v.clone() for k, v in trainer.engine.chunks[0].state_dict().items()}
    expected = by_hand(weights)
    got = [(m.loss, m.grad_norm) for m in trainer]
    assert len(got) == STEPS
    for mine, theirs in zip(got, expected, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-10)
    assert expected[0][1] > 0.5  # so that clipping acted


def test_the_profiled_step_changes_no_number() -> None:
    plain = make()
    plain._watched = plain._plain  # type: ignore[method-assign]
    assert [(m.loss, m.grad_norm) for m in plain] == [(m.loss, m.grad_norm) for m in make()]
    assert plain.profile is None


def test_no_communication_on_one_device() -> None:
    trainer = make()
    assert trainer.profile is None
    metrics = trainer.step(0)
    assert trainer.profile is None  # the first step makes the optimizer's state, the second one is watched
    assert (metrics.comm_s, metrics.comm_frac) == ({}, 0.0)
    trainer.step(1)
    assert trainer.profile is not None
    assert not trainer.profile.events


def test_memory_of_a_model_much_larger_than_its_batch() -> None:
    """Then it is what lives from step to step: weights, gradients and two moments, 16 bytes a parameter."""
    trainer = make(dtype="float32", spec=llama(512, 1024))
    trainer.step(0)
    trainer.step(1)
    assert trainer.profile is not None
    assert 1.0 <= trainer.profile.peak_memory_bytes / (16 * parameters(512, 1024)) < 1.1


def test_one_step_is_profiled_too() -> None:
    trainer = make(steps=1)
    list(trainer)
    assert trainer.profile is not None


def test_numbers_of_a_step() -> None:
    for number, metrics in enumerate(make(), 1):
        assert metrics.step == number
        assert metrics.valid_tokens == DATA.global_batch(number - 1, G).valid_tokens
        assert metrics.tokens_per_s == pytest.approx(G * S / metrics.step_s)
        assert metrics.flops_per_s / metrics.tokens_per_s == pytest.approx(3 * _flops_per_token(), rel=1e-12)
        assert 0 < metrics.busy_s <= metrics.pipeline_s <= metrics.step_s
        assert metrics.cpu_s > 0
        assert "comm_s" not in metrics.numbers()
        assert "step" not in metrics.numbers()
        assert all(isinstance(value, float | int) for value in metrics.numbers().values())


def _flops_per_token() -> float:
    """Multiply-adds x 2 of a forward pass: matrices, and causal scores and values over (S + 1) / 2 tokens."""
    matrices = LAYERS * (2 * D * N * H + 2 * D * KV * H + 3 * D * FFN) + V * D
    return 2 * (matrices + LAYERS * 2 * N * H * (S + 1) / 2)


def test_communication_is_named_by_axis() -> None:
    metrics = make().step(0)
    parallel = type(metrics)(**{**vars(metrics), "comm_s": {"tp": 0.25, "data": 0.5}})
    assert parallel.numbers()["comm_tp_s"] == 0.25
    assert parallel.numbers()["comm_data_s"] == 0.5


def test_divergence_is_one_line_with_the_learning_rate() -> None:
    optimizer = OptimizerConfig(name="sgd", lr=1e38, warmup_steps=0, clip_norm=None)
    with pytest.raises(
        FivefoldError, match=r"^step 2: loss .* diverged; .* than 1e\+38, or on_nonfinite=skip$"
    ):
        list(make(optimizer, dtype="float32"))

"""The precision report of one rank against gradients and outputs that are looked at by other means."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch

from fivefold.core.cluster import Cluster
from fivefold.core.execution import DType, Execution
from fivefold.core.layout import Layout
from fivefold.core.loss_scale import LossScaleConfig
from fivefold.core.model_spec import AttentionSpec, BlockSpec, MLPSpec, ModelSpec
from fivefold.core.optimizer import OptimizerConfig
from fivefold.core.plan import Plan
from fivefold.core.workload import Workload
from fivefold.data.batches import SyntheticDataset
from fivefold.nn.decoder import Decoder
from fivefold.runtime.device import Device
from fivefold.runtime.launch import Rank
from fivefold.train.precision import MOST_LOOKS, Look, as_result, block_of, joined, merge_largest, thinned
from fivefold.train.trainer import Trainer

BLOCK = BlockSpec(attention=AttentionSpec(heads=2, kv_heads=2, head_dim=4), mlp=MLPSpec(ffn=12))
SPEC = ModelSpec(name="tiny", hidden=8, vocab=17, blocks=(BLOCK,) * 2)
BLOCKS = ["embedding", "layers.0", "layers.1", "head"]


def make(every: int | None, dtype: DType = "float64", scale: LossScaleConfig | None = None) -> Trainer:
    plan = Plan(
        model=SPEC,
        cluster=Cluster.parse("cpu"),
        workload=Workload(seq_len=6, global_batch=4),
        layout=Layout(),
        execution=Execution(
            micro_batch=2, dtype=dtype, loss_scale=scale, optimizer=OptimizerConfig(lr=0.01, warmup_steps=0)
        ),
    )
    data = SyntheticDataset(SPEC.vocab, 6, seed=1)
    return Trainer(plan, Rank(0, 1, Device(torch.device("cpu"))), data, steps=20, seed=2, look_every=every)


@pytest.mark.parametrize("scale", [None, LossScaleConfig()])
def test_a_look_is_what_autograd_says(scale: LossScaleConfig | None) -> None:
    """One whole batch through a plain model, in place of microbatches; unscaled under a scale."""
    trainer = make(1, scale=scale)
    model = Decoder(SPEC).double()
    model.load_state_dict(trainer.engine.chunks[0].state_dict())
    batch = trainer.dataset.microbatch(0, 0, dp_rank=0, dp=1, micro_batch=4, global_batch=4)
    arrays = (batch.tokens_BS, batch.labels_BS, batch.loss_mask_BS, batch.positions_BS)
    tokens, labels, mask, positions = map(torch.from_numpy, arrays)
    largest: dict[str, float] = {}

    def keep(name: str):
        def hook(_module, _inputs, out):
            for part in out if isinstance(out, tuple) else (out,):
                largest[name] = max(largest.get(name, 0.0), float(part.detach().abs().max()))

        return hook

    for name, module in model.named_modules():
        if name and name not in ("loss", "rope"):
            module.register_forward_hook(keep(name))
    (model.loss(model(tokens, positions), labels, mask) / mask.sum()).backward()

    metrics = trainer.step(0)
    (look,) = trainer.precision.take()
    assert look.step == 1
    assert sum(look.squared_norm.values()) == pytest.approx(metrics.grad_norm**2, rel=1e-12)
    for block in BLOCKS:
        gradients = [p.grad for name, p in model.named_parameters() if block_of(name) == block]
        expected = sum(float((g**2).sum()) for g in gradients if g is not None)
        assert look.squared_norm[block] == pytest.approx(expected, rel=1e-10)
        value, module = look.largest[block]
        assert value == pytest.approx(largest[module], rel=1e-12)
        inside = [v for name, v in largest.items() if block_of(name) == block and "." not in name[9:]]
        assert value >= max(inside, default=0.0) * (1 - 1e-12)
    assert trainer.precision.take() == []


def test_looks_come_every_so_often_and_leave_nothing() -> None:
    trainer, plain = make(3), make(None)
    losses = [trainer.step(step).loss for step in range(7)]
    assert [look.step for look in trainer.precision.take()] == [3, 6]
    assert all(not part._forward_hooks for part in trainer.engine.chunks[0].modules())
    assert trainer.engine.after_backward is None
    assert losses == [plain.step(step).loss for step in range(7)], "looking changes nothing"
    assert plain.precision.take() == []
    assert (plain.precision.told, trainer.precision.told) == (False, True)


def test_the_scale_over_time() -> None:
    trainer = make(None, "float16", LossScaleConfig(initial=64, grow_every=2))
    parameter, hooks = trainer.engine.parameters[0][0][1], []
    for step in range(6):
        if step == 3:
            hooks.append(parameter.register_hook(lambda gradient: gradient + math.inf))
        trainer.step(step)
        while hooks:
            hooks.pop().remove()
    told = as_result(trainer.precision, [])
    assert told["scales"] == [[1, 64], [3, 128], [5, 64]]
    assert told["overflow_steps"] == [4]
    assert (told["dtype"], told["largest_number"], told["layers"]) == ("float16", 65504.0, [])


def test_ranks_are_joined() -> None:
    one = Look(2, {"layers.0": 9.0}, {"layers.0": (1.0, "layers.0"), "embedding": (5.0, "embedding")})
    two = Look(2, {"layers.0": 16.0, "head": 1.0}, {"layers.0": (2.0, "layers.0.mlp.down")})
    (whole,) = joined([[one], [two], []])
    assert whole.squared_norm == {"layers.0": 25.0, "head": 1.0}
    assert whole.largest == {"layers.0": (2.0, "layers.0.mlp.down"), "embedding": (5.0, "embedding")}
    assert [look.step for look in joined([[Look(4), Look(8)], [Look(8), Look(4)]])] == [4, 8]
    told = as_result(make(1).precision, [whole])["layers"][0]
    assert told["grad_norm"] == {"layers.0": 5.0, "head": 1.0}
    assert list(told["largest"]) == ["embedding", "layers.0"]


def test_what_is_no_number_is_largest() -> None:
    largest: dict[str, tuple[float, str]] = {}
    for found in ((3.0, "a"), (math.inf, "b"), (4.0, "c")):
        merge_largest(largest, "x", found)
    assert largest["x"] == (math.inf, "b")
    merge_largest(largest, "x", (math.nan, "d"))
    merge_largest(largest, "x", (math.inf, "e"))
    assert largest["x"][1] == "d"


def test_looks_are_thinned_and_cover_the_run() -> None:
    looks = [Look(step) for step in range(1, MOST_LOOKS + 1)]
    assert thinned(looks) == looks
    kept: list[Look] = []
    for step in range(1, 5000):
        kept = thinned([*kept, Look(step)])
        assert len(kept) <= MOST_LOOKS
        assert (kept[0].step, kept[-1].step) == (1, step)
    steps = [look.step for look in kept]
    gaps = [b - a for a, b in pairwise(steps)]
    assert min(gaps) >= 1
    assert max(gaps) <= 4 * 5000 / MOST_LOOKS, "no part of the run is forgotten"


@pytest.mark.parametrize(
    ("name", "block"),
    [
        ("layers.11.mlp.down.weight", "layers.11"),
        ("embedding", "embedding"),
        ("norm.weight", "head"),
        ("head", "head"),
        ("rope", None),
        ("loss", None),
        ("layers", None),
        ("", None),
    ],
)
def test_blocks(name: str, block: str | None) -> None:
    assert block_of(name) == block

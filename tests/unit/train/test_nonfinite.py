"""What is said of a NaN, from the findings of all ranks; and a step that has one changes nothing."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from fivefold.core.cluster import Cluster
from fivefold.core.execution import DType, Execution
from fivefold.core.layout import Layout
from fivefold.core.model_spec import AttentionSpec, BlockSpec, MLPSpec, ModelSpec
from fivefold.core.optimizer import OptimizerConfig
from fivefold.core.plan import Plan
from fivefold.core.workload import Workload
from fivefold.data.batches import SyntheticDataset
from fivefold.errors import FivefoldError
from fivefold.runtime.device import Device
from fivefold.runtime.launch import Rank
from fivefold.train.nonfinite import Findings, say
from fivefold.train.trainer import Trainer

BLOCK = BlockSpec(attention=AttentionSpec(heads=2, kv_heads=2, head_dim=4), mlp=MLPSpec(ffn=12))
SPEC = ModelSpec(name="tiny", hidden=8, vocab=17, blocks=(BLOCK,) * 2)


def make(*, skip: bool = False, dtype: DType = "float32", steps: int = 5) -> Trainer:
    plan = Plan(
        model=SPEC,
        cluster=Cluster.parse("cpu"),
        workload=Workload(seq_len=6, global_batch=4),
        layout=Layout(),
        execution=Execution(micro_batch=2, dtype=dtype, optimizer=OptimizerConfig(lr=0.01, warmup_steps=0)),
    )
    data = SyntheticDataset(SPEC.vocab, 6, seed=1)
    rank = Rank(0, 1, Device(torch.device("cpu")))
    return Trainer(plan, rank, data, steps=steps, seed=2, skip_nonfinite=skip)


def parameter(trainer: Trainer, name: str) -> torch.nn.Parameter:
    return next(p for row, p in trainer.engine.parameters[0] if row.name == name)


def break_gradient(trainer: Trainer, name: str, value: float = math.inf) -> Any:
    """From now on this gradient has one element that is not finite."""

    def hook(gradient: torch.Tensor) -> torch.Tensor:
        broken = gradient.clone()
        broken.view(-1)[1] = value
        return broken

    return parameter(trainer, name).register_hook(hook)


def state(trainer: Trainer) -> list[torch.Tensor]:
    return [values.clone() for _, _, values in trainer.engine.data.persistent()]


# ---------------------------------------------------------------------------------------------------------------------

NOTHING = Findings()


@pytest.mark.parametrize(
    ("everyone", "line"),
    [
        ([NOTHING, NOTHING], "all outputs and gradients of single ranks are finite: their sum overflowed"),
        # Reduced over tp, a bad weight's output is bad on all ranks: the weight tells whose it is.
        (
            [Findings(outputs=[(0, "layers.1.mlp.down")]), Findings([(0, "layers.1.mlp.down.weight")])],
            "rank 1: the parameter layers.1.mlp.down.weight itself has a NaN or an infinity",
        ),
        # A later stage only passes on what the earlier one computed.
        (
            [
                Findings(outputs=[(1, "layers.2.attention_norm")]),
                Findings(outputs=[(0, "layers.0.mlp.down")]),
            ],
            "rank 1: the output of layers.0.mlp.down is the first with a NaN or an infinity",
        ),
        (
            [Findings(gradients=[(0, "norm.weight")]), Findings(outputs=[(1, "head")])],
            "rank 1: the output of head",
        ),
        # Backward runs the other way.
        (
            [
                Findings(gradients=[(0, "layers.1.mlp.down.weight")]),
                Findings(gradients=[(1, "layers.2.x.weight")]),
            ],
            "rank 1: all outputs are finite, the gradient of layers.2.x.weight is the first that is not",
        ),
        (
            [NOTHING, Findings(gradients=[(0, "b")]), Findings(gradients=[(0, "a")])],
            "rank 1: all outputs are finite, the gradient of b",
        ),
    ],
)
def test_the_first_cause(everyone: list[Findings], line: str) -> None:
    assert say(everyone).startswith(line)


def test_a_weight() -> None:
    trainer = make()
    trainer.step(0)
    parameter(trainer, "layers.1.mlp.inputs.up.weight").data[3, 2] = math.nan
    before = state(trainer)
    with pytest.raises(FivefoldError) as caught:
        trainer.step(1)
    line = str(caught.value)
    assert line.startswith("step 2: loss nan, gradient norm nan: training diverged; ")
    assert "rank 0: the parameter layers.1.mlp.inputs.up.weight itself has a NaN or an infinity" in line
    assert "nothing was updated or saved since" in line
    assert "\n" not in line
    for old, new in zip(before, state(trainer), strict=True):
        assert torch.equal(old.nan_to_num(77), new.nan_to_num(77)), "nothing was updated"


def test_an_output() -> None:
    """Finite weights, and more than that where one element is above its root mean square."""
    trainer = make()
    parameter(trainer, "layers.1.mlp_norm.weight").data.fill_(3e38)
    with pytest.raises(FivefoldError, match=r"rank 0: the output of layers\.1\.mlp_norm is the first"):
        trainer.step(0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_gradient_alone(dtype: DType) -> None:
    """The loss is finite; of two bad gradients the one of the later layer came first."""
    trainer = make(dtype=dtype)
    for name in ("layers.0.attention.output.weight", "layers.1.attention.qkv.k.weight"):
        break_gradient(trainer, name)
    words = (
        r"step 1: loss \d.*, gradient norm inf: .* rank 0: all outputs are finite, "
        r"the gradient of layers\.1\.attention\.qkv\.k\.weight is the first that is not"
    )
    with pytest.raises(FivefoldError, match=words):
        trainer.step(0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_skipped_steps_are_counted_and_change_nothing(dtype: DType, value: float) -> None:
    """Afterwards all goes on as if only the batch of that step had been left out."""
    trainer = make(skip=True, dtype=dtype)
    first = trainer.step(0)
    hook = break_gradient(trainer, "norm.weight", value)
    before = state(trainer)
    for step in (1, 2):
        metrics = trainer.step(step)
        assert metrics.skipped == step
        assert not math.isfinite(metrics.grad_norm)
    for old, new in zip(before, state(trainer), strict=True):
        assert torch.equal(old, new)
    hook.remove()
    last = trainer.step(3)

    other = make(dtype=dtype)
    assert other.step(0).loss == first.loss
    assert other.step(3).loss == last.loss
    assert (last.skipped, trainer.engine.data.updates, other.engine.data.updates) == (2, 2, 2)
    for a, b in zip(state(trainer), state(other), strict=True):
        assert torch.equal(a, b), "the optimizer counts updates, not steps"


def test_looking_leaves_no_hook_behind() -> None:
    trainer = make()
    hook = break_gradient(trainer, "norm.weight")
    with pytest.raises(FivefoldError):
        trainer.step(0)
    hook.remove()
    assert all(not p._backward_hooks for _, p in trainer.engine.parameters[0])
    assert all(not part._forward_hooks for part in trainer.engine.chunks[0].modules())
    assert trainer.step(0).loss == make().step(0).loss, "and no gradient"

"""What one rank saw of a training step: pieces of global tensors, each with the global region that it covers.

Names of quantities follow the error measure: loss, logits, gradients, grad_norm, weights_sgd, weights_adamw, moments;
`activations` (the output of the embedding and of every layer) serve to find the first module that differs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor, nn

from fivefold.core.events import Event
from fivefold.core.optimizer import OptimizerConfig
from fivefold.core.plan import Plan
from fivefold.core.sharding import ParameterRow
from fivefold.data.batches import Dataset
from fivefold.engine.engine import Engine
from fivefold.engine.feed import feed
from fivefold.nn.roles import modules_with_role
from fivefold.runtime.launch import Rank
from fivefold.runtime.ledger import Ledger
from fivefold.runtime.mesh import Mesh

Region = tuple[slice, ...]
Array = npt.NDArray[Any]

LEARNING_RATE = {"sgd": 0.1, "adamw": 1e-3}
NOISE = 0.1
"""Spread of norms around 1 and of biases around 0, so that a fault in them shows."""


@dataclass(frozen=True)
class Piece:
    """A part of the tensor `name` of a quantity: `values` are those of `region` in a tensor of `shape`."""

    quantity: str
    name: str
    shape: tuple[int, ...]
    region: Region
    values: Array
    block: str = ""


@dataclass
class Observation:
    """Everything that one rank saw."""

    pieces: list[Piece] = field(default_factory=list)
    events: Counter[Event] = field(default_factory=Counter)
    """The ledger of the first step."""
    modules: tuple[str, ...] = ()
    """The modules of this rank, in forward order."""


def observe(rank: Rank, plan: Plan, dataset: Dataset, *, seed: int, steps: int) -> Observation:
    """Train `steps` steps with SGD and, from the same start, with AdamW; look at everything on the way."""
    seen = Observation()
    mesh = Mesh(plan.layout, rank.rank, rank.device)
    for name in ("sgd", "adamw"):
        optimizer = OptimizerConfig(name=name, momentum=0.0, clip_norm=plan.execution.optimizer.clip_norm)
        execution = plan.execution.replace(optimizer=optimizer)
        engine = Engine(plan.replace(execution=execution), mesh, seed=seed, noise=NOISE)
        for step in range(steps):
            with ExitStack() as stack:
                if name == "sgd" and step == 0:
                    ledger = stack.enter_context(Ledger(mesh))
                    stack.enter_context(_watching(engine, seen, dataset))
                result = engine.step(feed(dataset, plan, mesh, step), LEARNING_RATE[name])
                if name == "sgd" and step == 0:
                    seen.events = ledger.events
                    seen.pieces.append(_scalar("grad_norm", f"step {step}", result.grad_norm))
            seen.pieces.append(_scalar("loss", f"{name} step {step}", result.loss))
        seen.pieces += _parameters(f"weights_{name}", engine, lambda _, p: p.detach())
        if name == "adamw":
            for moment in ("exp_avg", "exp_avg_sq"):
                seen.pieces += _parameters(
                    "moments", engine, _moment(engine.data.state(), moment), f" {moment}"
                )
        seen.modules = tuple(n for chunk in engine.chunks.values() for n, _ in chunk.named_modules())
    return seen


def _moment(
    state: dict[str, dict[str, Tensor]], moment: str
) -> Callable[[ParameterRow, nn.Parameter], Tensor]:
    return lambda row, _: state[row.name][moment]


def _scalar(quantity: str, name: str, value: float) -> Piece:
    return Piece(quantity, name, (), (), np.asarray(value, dtype=np.float64))


def _parameters(
    quantity: str, engine: Engine, value: Callable[[ParameterRow, nn.Parameter], Tensor], suffix: str = ""
) -> list[Piece]:
    pairs = [pair for chunk in engine.parameters.values() for pair in chunk]
    return [_parameter_piece(quantity, row, value(row, p), engine, suffix) for row, p in pairs]


def _parameter_piece(
    quantity: str, row: ParameterRow, local: Tensor, engine: Engine, suffix: str = ""
) -> Piece:
    region = row.region(engine.plan.layout, engine.mesh.coordinate)
    inside = tuple(slice(0, part.stop - part.start) for part in region)
    return Piece(
        quantity, (row.tied_to or row.name) + suffix, row.shape, region, _numpy(local[inside]), row.block
    )


def _numpy(x: Tensor) -> Array:
    return x.detach().to(device="cpu", copy=True).contiguous().numpy()


class _watching:
    """Collects the gradients, logits and activations of one step through hooks that touch nothing."""

    def __init__(self, engine: Engine, seen: Observation, dataset: Dataset) -> None:
        self.engine, self.seen, self.dataset = engine, seen, dataset
        self.counts: Counter[str] = Counter()
        self.hooks: list[Any] = []

    def __enter__(self) -> None:
        self.engine.after_backward = self._keep_gradients
        for module in self.engine.chunks.values():
            for role in ("embedding", "layer"):
                for name, part in modules_with_role(module, role):
                    self.hooks.append(part.register_forward_hook(self._keep("activations", name)))
            for name, part in modules_with_role(module, "head"):
                self.hooks.append(part.register_forward_hook(self._keep("logits", name)))

    def __exit__(self, *_: Any) -> None:
        self.engine.after_backward = None
        for hook in self.hooks:
            hook.remove()

    def _keep_gradients(self, gradients: list[tuple[ParameterRow, Tensor]]) -> None:
        self.seen.pieces += [_parameter_piece("gradients", row, g, self.engine) for row, g in gradients]

    def _keep(self, quantity: str, name: str) -> Callable[[Any, Any, Tensor], None]:
        def hook(_module: Any, _inputs: Any, out: Tensor) -> None:
            microbatch = self.counts[name]
            self.counts[name] += 1
            shape, region = self._where(quantity, microbatch, out)
            inside = tuple(slice(0, part.stop - part.start) for part in region)
            self.seen.pieces.append(Piece(quantity, name, shape, region, _numpy(out[inside])))

        return hook

    def _where(self, quantity: str, microbatch: int, out: Tensor) -> tuple[tuple[int, ...], Region]:
        """Global shape and region of [rows, sequence, features]: rows by dp and microbatch, the rest by tp."""
        plan, layout, at = self.engine.plan, self.engine.plan.layout, self.engine.mesh.coordinate
        batch, rows = plan.workload.global_batch, plan.execution.micro_batch
        first = at["dp"] * (batch // layout.dp) + microbatch * rows
        length, features = plan.workload.seq_len, out.shape[2]
        width = plan.model.vocab if quantity == "logits" else plan.model.hidden
        sequence = _part(at["tp"], out.shape[1], length, cut=out.shape[1] < length)
        columns = _part(at["tp"], features, width, cut=quantity == "logits" and layout.tp > 1)
        return (batch, length, width), (slice(first, first + rows), sequence, columns)


def _part(index: int, size: int, whole: int, *, cut: bool) -> slice:
    start = min(index * size, whole) if cut else 0
    return slice(start, min(start + size, whole))

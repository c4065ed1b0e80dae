"""What one rank saw of its training steps: pieces of global tensors, each with the global region that it covers.

Names of quantities follow the error measure: loss, logits, gradients, grad_norm, weights_sgd, weights_adamw, moments,
loss_scale where a step overflows (`overflow.py`: of that step neither gradients nor their norm are kept);
`initial` (weights before the first step), `inputs` (what the rank read) and `activations` (the output of the embedding
and of every layer) serve to find what differs first. Names of tensors end in the step:
`layers.0.mlp.up.weight step 2`, `head.weight exp_avg step 1`; of scalars in the run as well: `sgd step 2`. Steps count
from 1.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fivefold.core.events import Event
from fivefold.core.optimizer import OptimizerConfig
from fivefold.core.plan import Plan
from fivefold.core.sharding import ParameterRow, buffers, parameters
from fivefold.data.batches import Dataset
from fivefold.engine.build import ValueSource
from fivefold.engine.engine import Engine, LoadMicrobatch
from fivefold.engine.feed import feed
from fivefold.engine.own import OwnModel
from fivefold.engine.routers import LayerRouting
from fivefold.nn.roles import modules_with_role
from fivefold.runtime.launch import Rank
from fivefold.runtime.ledger import Ledger
from fivefold.runtime.mesh import Mesh
from fivefold.strategies.context.order import local_spans, section
from fivefold.strategies.expert.rules import routed_layers
from fivefold.strategies.pipeline.apply import Microbatch
from fivefold.verify.overflow import OVERFLOW_STEP, RESUMED_AFTER, expected_scale, overflowing, resumed
from fivefold.verify.routes import CHOICES, Choices, Routed, watching_routes, where

Region = tuple[slice, ...]
Array = npt.NDArray[Any]

OPTIMIZERS: Final[tuple[Literal["sgd", "adamw"], ...]] = ("sgd", "adamw")
LEARNING_RATE = {"sgd": 0.1, "adamw": 1e-3}
MOMENTS = ("exp_avg", "exp_avg_sq")
COUNT = "updates"
"""How often AdamW has updated a parameter, by the optimizer's own state: its bias correction depends on it."""
INPUTS = {"tokens": "tokens_BS", "labels": "labels_BS", "loss mask": "mask_BS", "positions": "positions"}
"""What a microbatch holds, by name: the field of `Microbatch`."""
ROUTING = ("chosen", "tokens", "dropped", "entropy", "balance", "z")
"""What is told of a router after a step."""
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
    events: dict[str, Counter[Event]] = field(default_factory=dict)
    """The ledger of every step, by run and step: `sgd step 1`."""
    routed: dict[str, Routed] = field(default_factory=dict)
    """The experts that the tokens of every step went to, by run and step."""
    chosen: dict[str, dict[int, tuple[int, ...]]] = field(default_factory=dict)
    """How often each expert of a layer was chosen in every step, by run and step: the whole job."""
    rows: tuple[ParameterRow, ...] | None = None
    """The parameters on one device, of a module that is not ours."""
    skipped: set[str] = field(default_factory=set)
    """Those that are meant to change nothing."""


def observe(
    rank: Rank,
    plan: Plan,
    dataset: Dataset,
    *,
    seed: int,
    steps: int,
    weights: ValueSource | None = None,
    make_own: Callable[[], OwnModel] | None = None,
    overflow: bool = False,
    replay: Choices | None = None,
) -> Observation:
    """Train `steps` steps with SGD and, from the same start, with AdamW; look at everything on the way.

    Loss, gradient norm and communication of every step; what is large (activations, logits, gradients, weights,
    moments) of the first step and of the last. `weights`: where the initial values come from; None: the seed.
    `make_own`: makes the module that is trained, with its own values; None: our decoder.
    `overflow`: a new engine goes on after the first step, and a gradient of the third is infinite.
    `replay`: the experts that tokens go to; None: those that the routers choose.
    """
    seen = Observation()
    mesh = Mesh(plan.layout, rank.rank, rank.device)
    for name in OPTIMIZERS:
        changed = with_optimizer(plan, name)

        def make(changed: Plan = changed) -> Engine:
            own = make_own() if make_own else None
            seen.rows = own.rows if own else None
            values = own.values if own else weights
            return Engine(changed, mesh, seed=seed, noise=NOISE, weights=values, model=own)

        engine = make()
        if name == "sgd":
            seen.pieces += [
                piece
                for row, w in engine.data.weights()
                for piece in _parameter_pieces("initial", row, w, engine, None)
            ]
        for step in range(1, steps + 1):
            kept, run = step in kept_steps(steps), f"{name} step {step}"
            broken = overflow and step == OVERFLOW_STEP
            load = feed(dataset, plan, mesh, step - 1)
            with ExitStack() as stack:
                ledger = stack.enter_context(Ledger(mesh))
                routes = stack.enter_context(watching_routes(engine, run, replay))
                if broken:
                    seen.skipped.add(run)
                    stack.enter_context(overflowing(engine))
                elif kept and name == "sgd":
                    load = stack.enter_context(_watching(engine, seen, step)).reading(load)
                result = engine.step(load, LEARNING_RATE[name])
            seen.events[run], seen.routed[run] = ledger.events, routes.routed
            seen.chosen[run] = {layer: told.chosen for layer, told in result.routing.items()}
            seen.pieces += _routing_pieces(engine, run, result.routing, routes)
            seen.pieces.append(_scalar("loss", run, result.loss))
            if overflow:
                scale = expected_scale(step) if result.loss_scale is None else result.loss_scale
                seen.pieces.append(_scalar("loss_scale", run, scale))
            if not broken:
                seen.pieces.append(_scalar("grad_norm", run, result.grad_norm))
            if kept or broken:
                seen.pieces += _updated(engine, name, step)
            if overflow and step == RESUMED_AFTER:
                engine = resumed(engine, make)
    return seen


def with_optimizer(plan: Plan, name: Literal["sgd", "adamw"]) -> Plan:
    """The plan of the runs with this optimizer."""
    optimizer = OptimizerConfig(name=name, momentum=0.0, clip_norm=plan.execution.optimizer.clip_norm)
    return plan.replace(execution=plan.execution.replace(optimizer=optimizer))


def kept_steps(steps: int) -> tuple[int, ...]:
    """The steps of which whole tensors are kept: memory does not grow with the number of steps."""
    return (1, steps) if steps > 1 else (1,)


def kept_moments(plan: Plan, step: int) -> tuple[str, ...]:
    """In float32 those of the first step only: later ones follow AdamW weights, which float32 leaves open to 1e-4.

    The first update is near lr x sign(g) (Kingma and Ba 2015, section 2.1), so rounding decides where g is near 0.
    """
    return MOMENTS if step == 1 or plan.execution.dtype == "float64" else ()


def required(
    plan: Plan, steps: int, rows: tuple[ParameterRow, ...] | None = None, *, overflow: bool = False
) -> Iterator[tuple[str, str]]:
    """(quantity, name) of all that the ranks of any layout must have seen together: a model has nothing less.

    `rows`: its parameters; None: those of our decoder.
    """
    names = [row.name for row in rows or parameters(plan.model)]
    for step in kept_steps(steps):
        yield from (("inputs", f"{name} step {step}") for name in INPUTS)
        for name in ("embedding", *(f"layers.{i}" for i in range(plan.model.layers))):
            yield "activations", f"{name} step {step}"
        yield "logits", f"head step {step}"
        yield from (("gradients", f"{name} step {step}") for name in names)
    for step in sorted({*kept_steps(steps), *([OVERFLOW_STEP] if overflow else [])}):
        for name in names:
            for optimizer in OPTIMIZERS:
                yield f"weights_{optimizer}", f"{name} step {step}"
            for kind in (*kept_moments(plan, step), COUNT):
                yield "moments", f"{name} {kind} step {step}"
    yield from (("initial", name) for name in names)
    for optimizer in OPTIMIZERS:
        for step in range(1, steps + 1):
            yield "loss", f"{optimizer} step {step}"
            if overflow:
                yield "loss_scale", f"{optimizer} step {step}"
            if not (overflow and step == OVERFLOW_STEP):
                yield "grad_norm", f"{optimizer} step {step}"
            yield from _required_routing(plan, f"{optimizer} step {step}")


def _required_routing(plan: Plan, run: str) -> Iterator[tuple[str, str]]:
    load = plan.execution.router.keeps_load
    for layer in routed_layers(plan.model):
        yield "routed_experts", f"layers.{layer}.mlp.router {run}"
        yield from (("routing", f"layers.{layer}.mlp.router {number} {run}") for number in ROUTING)
    yield from (("buffers", f"{row.name} {run}") for row in buffers(plan.model, load=load))


def _routing_pieces(
    engine: Engine, run: str, routing: Mapping[int, LayerRouting], routes: watching_routes
) -> list[Piece]:
    """The experts of every token; what is told of them, and what routers remember, after the step."""
    pieces: list[Piece] = []
    for quantity, of_routers in (("routed_experts", routes.experts), (CHOICES, routes.chosen)):
        for name, microbatches in of_routers.items():
            for microbatch, experts_BSK in microbatches.items():
                pieces += _expert_pieces(quantity, f"{name} {run}", engine, microbatch, experts_BSK)
    for layer, told in routing.items():
        for number in ROUTING:
            value = np.asarray(getattr(told, number), dtype=np.float64)
            name, region = (
                f"layers.{layer}.mlp.router {number} {run}",
                tuple(slice(0, n) for n in value.shape),
            )
            pieces.append(Piece("routing", name, value.shape, region, value))
    for row, kept in engine.routers.buffers() if engine.routers is not None else ():
        pieces.append(
            Piece("buffers", f"{row.name} {run}", row.shape, (slice(0, row.shape[0]),), _numpy(kept))
        )
    return pieces


def _expert_pieces(
    quantity: str, name: str, engine: Engine, microbatch: int, experts_BSK: Array
) -> Iterator[Piece]:
    workload, top_k, at = engine.plan.workload, experts_BSK.shape[2], 0
    shape = workload.global_batch, workload.seq_len, top_k
    for rows, places in where(engine, microbatch):
        part = experts_BSK[:, at : at + places.stop - places.start]
        yield Piece(quantity, name, shape, (rows, places, slice(0, top_k)), part)
        at += part.shape[1]


def _updated(engine: Engine, optimizer: str, step: int) -> list[Piece]:
    """Weights, and what AdamW remembers, after a step."""
    weights = engine.data.weights()
    pieces = [
        piece
        for row, value in weights
        for piece in _parameter_pieces(f"weights_{optimizer}", row, value, engine, step)
    ]
    if optimizer == "adamw":
        pieces += [
            piece
            for kind, row, value in engine.data.persistent()
            if kind in kept_moments(engine.plan, step)
            for piece in _parameter_pieces("moments", row, value, engine, step, kind)
        ]
        state = engine.data.state()
        pieces += [
            _scalar(
                "moments", f"{row.tied_to or row.name} {COUNT} step {step}", float(state[row.name]["step"])
            )
            for row, _ in weights
        ]
    return pieces


def _scalar(quantity: str, name: str, value: float) -> Piece:
    return Piece(quantity, name, (), (), np.asarray(value, dtype=np.float64))


def _parameter_pieces(
    quantity: str, row: ParameterRow, local: Tensor, engine: Engine, step: int | None, kind: str = ""
) -> list[Piece]:
    """Each kind of moment is judged by its own size: squares of gradients are far smaller than gradients."""
    suffix = f"{kind and ' '}{kind}" + ("" if step is None else f" step {step}")
    name, block = (row.tied_to or row.name) + suffix, row.block + suffix
    pieces = row.pieces(engine.plan.layout, engine.mesh.coordinate)
    return [Piece(quantity, name, row.shape, region, _numpy(local[part]), block) for part, region in pieces]


def _numpy(x: Tensor) -> Array:
    """A copy; numpy has no bfloat16, which float32 holds exactly."""
    dtype = torch.float32 if x.dtype == torch.bfloat16 else x.dtype
    return x.detach().to(device="cpu", dtype=dtype, copy=True).contiguous().numpy()


class _watching:
    """Collects the inputs, activations, logits and gradients of one step through hooks that touch nothing."""

    def __init__(self, engine: Engine, seen: Observation, step: int) -> None:
        self.engine, self.seen, self.step = engine, seen, step
        self.hooks: list[Any] = []

    def __enter__(self) -> _watching:
        self.engine.after_backward = self._keep_gradients
        for module in self.engine.chunks.values():
            for role in ("embedding", "layer"):
                for name, part in modules_with_role(module, role):
                    self.hooks.append(part.register_forward_hook(self._keep("activations", name)))
            for name, part in modules_with_role(module, "head"):
                self.hooks.append(part.register_forward_hook(self._keep("logits", name)))
        return self

    def __exit__(self, *_: Any) -> None:
        self.engine.after_backward = None
        for hook in self.hooks:
            hook.remove()

    def reading(self, load: LoadMicrobatch) -> LoadMicrobatch:
        """`load`, and keep what it gives."""

        def kept(index: int) -> Microbatch:
            batch = load(index)
            for name, field_name in INPUTS.items():
                self._keep_input(f"{name} step {self.step}", index, getattr(batch, field_name))
            return batch

        return kept

    def _keep_input(self, name: str, microbatch: int, values: Tensor) -> None:
        """Shapes: [B or 1, S/cp]; positions that are the same in every row come once."""
        plan, layout = self.engine.plan, self.engine.plan.layout
        length, rows = plan.workload.seq_len, self._rows(microbatch)
        shape = plan.workload.global_batch, length
        values = values.expand(rows.stop - rows.start, -1)
        for here, places in _placed(local_spans(length, layout, self.engine.mesh.coordinate["cp"])):
            self.seen.pieces.append(Piece("inputs", name, shape, (rows, places), _numpy(values[:, here])))

    def _keep_gradients(self, gradients: list[tuple[ParameterRow, Tensor]]) -> None:
        self.seen.pieces += [
            piece
            for row, gradient in gradients
            for piece in _parameter_pieces("gradients", row, gradient, self.engine, self.step)
        ]

    def _keep(self, quantity: str, name: str) -> Callable[[Any, Any, Tensor], None]:
        def hook(_module: Any, _inputs: Any, out: Tensor) -> None:
            microbatch = self.engine.pipeline.now.microbatch  # a list may take them in any order
            shape, (rows, tokens, columns) = self._where(quantity, microbatch, out)
            step, width = f"{name} step {self.step}", columns.stop - columns.start
            for here, places in tokens:
                region = rows, places, columns
                self.seen.pieces.append(Piece(quantity, step, shape, region, _numpy(out[:, here, :width])))

        return hook

    def _where(
        self, quantity: str, microbatch: int, out: Tensor
    ) -> tuple[tuple[int, ...], tuple[slice, list[tuple[slice, slice]], slice]]:
        """Global shape and region of [rows, sequence, features]: rows by dp and microbatch, the rest by tp and cp.

        The sequence comes in pieces, each as (place in `out`, place in the sequence).
        """
        plan, layout, at = self.engine.plan, self.engine.plan.layout, self.engine.mesh.coordinate
        length, features = plan.workload.seq_len, out.shape[2]
        width = plan.model.vocab if quantity == "logits" else plan.model.hidden
        local = length // layout.cp
        mine = _part(at["tp"], out.shape[1], local, cut=out.shape[1] < local)
        spans = section(local_spans(length, layout, at["cp"]), mine.start, mine.stop)
        columns = _part(at["tp"], features, width, cut=quantity == "logits" and layout.tp > 1)
        return (plan.workload.global_batch, length, width), (self._rows(microbatch), _placed(spans), columns)

    def _rows(self, microbatch: int) -> slice:
        """The rows of the global batch that a microbatch of this rank is."""
        plan, data_rank = self.engine.plan, self.engine.mesh.coordinate["dp"]
        rows = plan.execution.micro_batch
        first = data_rank * (plan.workload.global_batch // plan.layout.dp) + microbatch * rows
        return slice(first, first + rows)


def _placed(spans: tuple[range, ...]) -> list[tuple[slice, slice]]:
    """Each span of local tokens as (place in the local tensor, place in the sequence)."""
    placed, at = [], 0
    for span in spans:
        placed.append((slice(at, at + len(span)), slice(span.start, span.stop)))
        at += len(span)
    return placed


def _part(index: int, size: int, whole: int, *, cut: bool) -> slice:
    start = min(index * size, whole) if cut else 0
    return slice(start, min(start + size, whole))

"""One training step, the same for every layout.

1  count the valid tokens of the global batch                 (metrics: data)
2  run the schedule: forward, backward, send, receive         (forward, backward: tp, cp, pp)
3  sum gradients over data ranks, in buckets, overlapped      (reduce: data; zero3 gathers in 2)
   complete those of which each tp rank holds a part          (reduce: tp)
   add those of the two copies of a tied embedding            (reduce: tie)
4  under a loss scale: divide by it, agree on an overflow     (norm: world)
   one global norm                                            (norm: data where ZeRO shards, tp, pp; or world)
5  agree on the loss, and on what routers did                 (metrics: data, tp, pp)
6  clip and update what is held here, if both are finite and
   nothing overflowed                                         (optimizer: data where ZeRO-1 or 2 gathers)
7  every n steps place experts anew                           (optimizer: ep; edp where ZeRO shards)
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn

from fivefold.core.execution import microbatches
from fivefold.core.loss_scale import LossScaleState
from fivefold.core.plan import Plan
from fivefold.core.sharding import ParameterRow
from fivefold.engine.build import ValueSource, build_chunks, initial_value
from fivefold.engine.loss_scale import LossScaler
from fivefold.engine.model import Model, Native
from fivefold.engine.optimizer import clip, global_norm, make_optimizer
from fivefold.engine.rebalance import Rebalancing
from fivefold.engine.routers import LayerRouting, Routers
from fivefold.runtime.deferred import DeferredGradients
from fivefold.runtime.mesh import Mesh
from fivefold.strategies import compose
from fivefold.strategies.context import apply as context
from fivefold.strategies.data.apply import data_parallel
from fivefold.strategies.expert import rules as expert
from fivefold.strategies.pipeline.apply import Microbatch, Pipeline, Trace
from fivefold.strategies.pipeline.schedules import all_actions
from fivefold.strategies.tensor import apply as tensor
from fivefold.units import MIB

LoadMicrobatch = Callable[[int], Microbatch]


@dataclass(frozen=True)
class StepResult:
    """What one step did: equal on all ranks, except the times."""

    loss: float
    """Mean over all valid tokens of the global batch."""
    grad_norm: float
    """Before clipping, without the loss scale."""
    updated: bool
    """False where the loss or the norm was not finite: nothing was changed then, on any rank."""
    loss_scale: int | None
    """That the gradients of this step were multiplied by; None without one."""
    overflow: bool
    """A gradient was too large for the loss scale, which is now half of it: only this step is lost."""
    valid_tokens: int
    step_s: float
    comm_s: dict[str, float]
    """Axis -> seconds that this rank could do nothing but wait for communication."""
    trace: Trace = field(repr=False)
    routing: dict[int, LayerRouting]
    """What the routers did, by layer of the whole model; empty for a model without experts."""
    dispatch_bytes: int
    """Of this rank's all-to-alls over ep: of each, the larger of what went and what came."""


class Engine:
    """This rank's part of a model under a plan, ready to train.

    `model`: what is trained; None: our decoder of the plan's sizes.
    Raises: UserError before anything is built if the plan cannot be run.
    """

    def __init__(
        self,
        plan: Plan,
        mesh: Mesh,
        *,
        seed: int,
        noise: float = 0.0,
        weights: ValueSource | None = None,
        model: Model | None = None,
    ) -> None:
        model = model or Native(plan.model)
        model.check(plan)
        self.plan, self.mesh = plan, mesh
        self.table = compose.parameter_table(plan.model, plan.layout, plan.workload.seq_len, model.rows)
        """All parameters of the model under the plan's layout."""
        self._make_axes()
        self.microbatches = microbatches(plan.workload, plan.layout, plan.execution)
        lists = all_actions(plan.layout, self.microbatches, custom=plan.execution.actions)
        deferred = DeferredGradients() if any("W" in {a.kind for a in actions} for actions in lists) else None
        values = weights or partial(initial_value, seed=seed, noise=noise)
        built = build_chunks(plan, mesh, seed=seed, weights=values, deferred=deferred, model=model)
        self.chunks: dict[int, nn.Module] = {chunk: module for chunk, (module, _) in built.items()}
        self.parameters = {chunk: pairs for chunk, (_, pairs) in built.items()}
        optimizer = plan.execution.optimizer
        self.clip_norm = optimizer.clip_norm
        self.data = data_parallel(
            self.parameters,
            self.chunks,
            mesh,
            lambda pairs: make_optimizer(optimizer, pairs),
            lambda row: values(row, plan.layout, mesh.coordinate, plan.execution.dtype),
            bucket_bytes=int(plan.execution.bucket_mib * MIB),
            gather_once=plan.execution.zero3_gather == "step",
        )
        if deferred is not None:
            deferred.accumulate = self.data.accumulate
        self.dtype: torch.dtype = getattr(torch, plan.execution.dtype)
        self.pipeline = Pipeline(
            self.chunks,
            lists,
            mesh,
            boundary=(self._boundary_shape(), self.dtype),
            before_last_backward=self.data.watch if plan.layout.pp == 1 else lambda chunk: None,
            on_reduce=self._reduce,
            deferred=deferred,
        )
        first, last = 0, plan.layout.stages - 1
        self._tied = plan.model.tied_embeddings and plan.layout.pp > 1 and {first, last} <= self.chunks.keys()
        self._complete: set[int] = set()
        self._experts = bool(expert.routed_layers(plan.model))
        self.routers = Routers(plan, mesh, self.chunks) if self._experts else None
        self.rebalancing: Rebalancing | None = None
        if plan.execution.experts.rebalance_every is not None:
            self.rebalancing = Rebalancing(plan, mesh, self.chunks, self.data)
        scaling = plan.execution.scaling
        self.scaler = None if scaling is None else LossScaler(scaling, mesh)
        self.after_backward: Callable[[list[tuple[ParameterRow, Tensor]]], None] | None = None
        """Called with the complete gradients, unscaled, before clipping: where verification looks."""
        self.before_unscale: Callable[[list[tuple[ParameterRow, Tensor]]], None] | None = None
        """Called with the complete gradients, still scaled: where verification plants an overflow."""

    def step(self, load: LoadMicrobatch, lr: float) -> StepResult:
        """Train on one global batch; `load(j)` gives microbatch j of this data rank, on the device."""
        mesh = self.mesh
        started = time.perf_counter()
        mesh.clock.seconds(reset=True)
        batches = [load(j) for j in range(self.microbatches)]
        valid = self.count_valid(batches)
        scale = None if self.scaler is None else self.scaler.scale
        if self.routers is not None:
            self.routers.begin(scale=1.0 if scale is None else float(scale))
        loss, trace = self.pipeline.run(batches, self.gradient_scale(valid))
        gradients = self._complete_gradients()
        if self.before_unscale is not None:
            self.before_unscale(gradients)
        flag = None if self.scaler is None else self.scaler.unscale(gradients)
        if self.after_backward is not None:
            self.after_backward(gradients)
        norm = global_norm(gradients, mesh, experts=self._experts)
        total = self._agree_on_loss(loss)
        routing = {} if self.routers is None else self.routers.finish()
        mesh.phase = "optimizer"
        norm_value, loss_value = float(norm), float(total / valid)
        flagged = flag is not None and float(flag) > 0
        updated = math.isfinite(norm_value) and math.isfinite(loss_value) and not flagged
        if self.scaler is not None and math.isfinite(loss_value):
            self.scaler.update(overflow=flagged)
        if not updated:
            self.data.forget_gradients()
        else:
            if self.clip_norm is not None:
                clip(gradients, norm, self.clip_norm)
            self.data.step(lr)
            if self.routers is not None:
                self.routers.update()
        if self.rebalancing is not None:
            self.rebalancing.after_step(routing)
        mesh.device.synchronize()
        return StepResult(
            loss=loss_value,
            grad_norm=norm_value,
            updated=updated,
            loss_scale=scale,
            overflow=flagged and scale != 1 and math.isfinite(loss_value),
            valid_tokens=int(valid),
            step_s=time.perf_counter() - started,
            comm_s=mesh.clock.seconds(),
            trace=trace,
            routing=routing,
            dispatch_bytes=0 if self.routers is None else self.routers.dispatch_bytes,
        )

    def gradient_scale(self, valid: Tensor) -> Tensor:
        """What the loss is multiplied by in backward: loss scale / valid tokens of the global batch."""
        factor = 1.0 if self.scaler is None else float(self.scaler.scale)
        return factor / valid.to(torch.promote_types(self.dtype, torch.float32))

    def evaluate(self, load: LoadMicrobatch) -> tuple[float, int]:
        """Sum of token losses and number of valid tokens of one global batch; nothing changes.

        Comm: that of the forward passes, then the two sums over data and pp (phase metrics).
        """
        batches = [load(j) for j in range(self.microbatches)]
        loss = self.pipeline.evaluate(batches, torch.promote_types(self.dtype, torch.float32))
        self.data.reshard()
        if self.rebalancing is not None:
            self.rebalancing.forget_copies()
        self.mesh.phase = "metrics"
        valid = self.mesh.axis("data").all_reduce(_valid_tokens(batches))
        return float(self._agree_on_loss(loss)), int(valid)

    def persistent(self) -> list[tuple[str, ParameterRow, Tensor]]:
        """(kind, row, tensor) of weights, moments and buffers: what a checkpoint holds, and is loaded into in place."""
        kept = [] if self.routers is None else self.routers.buffers()
        kept += [] if self.rebalancing is None else self.rebalancing.buffers()
        return [*self.data.persistent(), *(("buffers", row, tensor) for row, tensor in kept)]

    @property
    def loss_scale(self) -> LossScaleState | None:
        """What a checkpoint keeps of the loss scale; None without one."""
        return None if self.scaler is None else self.scaler.state

    def restore(self, updates: int, loss_scale: LossScaleState | None, steps: int) -> None:
        """The persistent tensors were loaded: go on after so many updates and steps, with this loss scale."""
        self.data.loaded(updates)
        if self.rebalancing is not None:
            self.rebalancing.restore(steps)
        if self.scaler is not None and loss_scale is not None:
            self.scaler.loaded(loss_scale)

    def settle(self) -> None:
        """Every expert goes to its first home, where an export looks for it. Comm: as a step that places them anew."""
        if self.rebalancing is not None:
            self.rebalancing.settle()

    def tensors(self) -> list[Tensor]:
        """Parameters, gradients and optimizer state that live on this rank now."""
        parameters = [parameter for chunk in self.parameters.values() for _, parameter in chunk]
        return [*parameters, *self.data.tensors()]

    def _reduce(self, chunk: int) -> None:
        """The gradients of a chunk are complete; of a tied embedding whose two chunks are here, once both are."""
        ends = {0, self.plan.layout.stages - 1}
        if not self._tied or chunk not in ends:
            return self.data.reduce(chunk)
        self._complete.add(chunk)
        if self._complete == ends:
            self._complete.clear()
            for end in sorted(ends):
                self.data.reduce(end)

    def count_valid(self, batches: list[Microbatch]) -> Tensor:
        """Valid tokens of the global batch, at least 1; where routers need it, their tokens are counted as well."""
        self.mesh.phase = "metrics"
        counts = _valid_tokens(batches)
        if self.routers is None or not self.routers.counts_tokens:
            return self.mesh.axis("data").all_reduce(counts).clamp(min=1)
        tokens = sum(batch.tokens_BS.numel() - batch.padding for batch in batches)
        both = self.mesh.axis("data").all_reduce(torch.stack((counts, torch.full_like(counts, tokens))))
        self.routers.tokens = both[1].clamp(min=1)
        return both[0].clamp(min=1)

    def _complete_gradients(self) -> list[tuple[ParameterRow, Tensor]]:
        self.mesh.phase = "reduce"
        self.data.wait()
        gradients = self.data.local_gradients()
        tensor.sum_gradients(gradients, self.mesh)
        for row, gradient in gradients:
            if "tie" in row.sums:
                self.mesh.axis("tie").all_reduce(gradient)
        return gradients

    def _agree_on_loss(self, loss: Tensor) -> Tensor:
        """Sum of token losses over the global batch. The last stage has it; the others add zero."""
        self.mesh.phase = "metrics"
        total = loss.double()
        self.mesh.axis("data").all_reduce(total)
        return self.mesh.axis("pp").all_reduce(total)

    def _boundary_shape(self) -> tuple[int, ...]:
        layout, workload = self.plan.layout, self.plan.workload
        tokens = workload.seq_len // layout.cp
        sequence = tokens // layout.tp if layout.sequence_parallel else tokens
        return self.plan.execution.micro_batch, sequence, self.plan.model.hidden

    def _make_axes(self) -> None:
        """Make every process group now, the same ones in the same order on all ranks (see `Mesh`)."""
        layout = self.plan.layout
        for axis in ("tp", "data", "pp"):
            self.mesh.axis(axis)
        for size in sorted({row.sums["tp"] for row in self.table if row.sums.get("tp")}):  # type: ignore[type-var]
            self.mesh.axis("tp", size)
        self.mesh.axis("data", layout.data_shards)
        self.mesh.axis("data", layout.data_shards, across=True)
        context.axes(self.mesh)
        if any(row.mesh == "expert" for row in self.table):
            self._make_expert_axes()
        if any("tie" in row.sums for row in self.table):
            self.mesh.axis("tie")
        if self.plan.execution.scaling is not None:
            self.mesh.axis("world")

    def _make_expert_axes(self) -> None:
        shards = self.plan.layout.expert_shards
        for axis in ("ep", "etp", "edp", "world"):
            self.mesh.axis(axis)
        self.mesh.axis("edp", shards)
        self.mesh.axis("edp", shards, across=True)


def _valid_tokens(batches: list[Microbatch]) -> Tensor:
    """Labels of this rank's microbatches that count: int64 scalar."""
    return torch.stack([batch.mask_BS.sum() for batch in batches]).sum()

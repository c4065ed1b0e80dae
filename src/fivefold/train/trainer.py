"""The training loop of one rank, without any output: engine, data and learning rate give one `StepMetrics` a step."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from statistics import median

from fivefold.core.events import Events, without_setup
from fivefold.core.model_counts import training_flops
from fivefold.core.optimizer import lr_at
from fivefold.core.plan import Plan
from fivefold.data.batches import Dataset
from fivefold.data.validation import FirstSamples
from fivefold.engine.build import ValueSource
from fivefold.engine.engine import Engine, StepResult
from fivefold.engine.feed import feed
from fivefold.engine.routers import LayerRouting
from fivefold.errors import DataError, FivefoldError
from fivefold.runtime.launch import Rank
from fivefold.runtime.ledger import Ledger
from fivefold.runtime.memory import LiveBytes
from fivefold.runtime.mesh import Mesh
from fivefold.train.experts import ExpertCounts, ExpertNumbers, numbers_of
from fivefold.train.nonfinite import find_nonfinite
from fivefold.train.precision import Precision


@dataclass(frozen=True)
class StepMetrics:
    """One step as one rank saw it. `loss`, `grad_norm` and the throughput are those of the whole job."""

    step: int
    """From 1."""
    loss: float
    grad_norm: float
    lr: float
    valid_tokens: int
    step_s: float
    cpu_s: float
    """CPU time of this rank's process, all its threads."""
    tokens_per_s: float
    """Of the whole job, masked and padded positions included."""
    flops_per_s: float
    """Model FLOPs (forward and backward, causal attention, no recompute) of the whole job."""
    comm_frac: float
    """Share of the step in which this rank waited for communication."""
    comm_s: dict[str, float]
    pipeline_s: float
    """From the first action of the schedule to the last, sends included."""
    busy_s: float
    """Time inside forward and backward computations."""
    skipped: int = 0
    """Steps without an update so far."""
    loss_scale: int | None = None
    """That the gradients of this step were multiplied by; None without one."""
    overflows: int | None = None
    """Skipped steps so far that only overflowed their loss scale; None without one."""
    validation_loss: float | None = None
    """Mean over the valid tokens of the held-out samples, after this step; None where it was not measured."""
    experts: ExpertNumbers | None = None
    """What the routers did; None for a model without experts."""
    routing: Mapping[int, LayerRouting] = field(default_factory=dict)
    """All that is known of it, by layer of the model."""

    def numbers(self) -> dict[str, float]:
        """All numbers that there are but the step itself and `routing`, flat: what a record holds."""
        values = asdict(replace(self, routing={}))
        del values["routing"]
        parts = {f"comm_{axis}_s": seconds for axis, seconds in values.pop("comm_s").items()}
        parts.update(values.pop("experts") or {})
        del values["step"]
        return {key: value for key, value in {**values, **parts}.items() if value is not None}


@dataclass(frozen=True)
class Profile:
    """What the one step that is watched closely needed on this rank."""

    peak_memory_bytes: int
    """Live tensor bytes on the CPU, allocated bytes on an accelerator."""
    events: Events


class Trainer:
    """Trains one rank. Iterate over it; every rank of the job must take the same steps.

    The second step is profiled (see `Profile`) and therefore slower: leave it out of any timing.
    """

    def __init__(
        self,
        plan: Plan,
        rank: Rank,
        dataset: Dataset,
        *,
        steps: int,
        seed: int,
        skip_nonfinite: bool = False,
        look_every: int | None = None,
        weights: ValueSource | None = None,
        validation: FirstSamples | None = None,
    ) -> None:
        """`look_every`: steps between two looks at every layer, for the precision report; None: none."""
        self.plan, self.dataset, self.steps, self.seed = plan, dataset, steps, seed
        self.skip_nonfinite = skip_nonfinite
        self.validation = validation
        self.start = 0
        """The first step to take; a checkpoint that is loaded moves it."""
        self.bytes_loaded = 0
        self.skipped = 0
        """Steps whose loss or gradient norm was not finite, overflows of the loss scale among them."""
        self.mesh = Mesh(plan.layout, rank.rank, rank.device)
        self.engine = Engine(plan, self.mesh, seed=seed, weights=weights)
        self.precision = Precision(self.engine, look_every)
        self.experts = ExpertCounts(plan)
        self.tokens = plan.workload.tokens
        self.flops = training_flops(plan.model, plan.workload.seq_len) * self.tokens
        self.profile: Profile | None = None
        self._chunk_s: list[dict[int, float]] = []

    def __iter__(self) -> Iterator[StepMetrics]:
        for step in range(self.start, self.steps):
            yield self.step(step)

    def step(self, step: int) -> StepMetrics:
        """Train on global batch `step` (from 0).

        Raises: FivefoldError where the loss or the norm is not finite, unless it is an overflow that a smaller loss
                scale mends, or such steps are skipped.
        """
        lr = lr_at(step, self.plan.execution.optimizer, self.steps)
        cpu = time.process_time()
        watched = step == min(self.start + 1, self.steps - 1)
        with self.precision.watching(step + 1):
            result = self._watched(step, lr) if watched else self._plain(step, lr)
        cpu = time.process_time() - cpu
        if not watched:
            self._chunk_s.append(result.trace.chunk_s)
        self.precision.after(step + 1, result)
        self.experts.after(result.routing)
        if not result.updated:
            self.skipped += 1
            if not (result.overflow or self.skip_nonfinite):
                where = find_nonfinite(self.engine, feed(self.dataset, self.plan, self.mesh, step))
                raise FivefoldError(
                    f"step {step + 1}: loss {result.loss}, gradient norm {result.grad_norm}: training diverged; "
                    f"{where}; nothing was updated or saved since; try a smaller optimizer.lr than "
                    f"{self.plan.execution.optimizer.lr:g}, or on_nonfinite=skip"
                )
        return self._metrics(step, lr, cpu, result)

    def chunk_seconds(self) -> dict[int, float]:
        """Virtual stage -> seconds of its computations in a step: the median over the steps; empty after one step."""
        return {
            chunk: median(seconds[chunk] for seconds in self._chunk_s) for chunk in (self._chunk_s or [{}])[0]
        }

    def validate(self) -> float:
        """Mean token loss over the held-out samples; nothing changes. Comm: that of the forward passes."""
        assert self.validation is not None, "no validation samples were given"
        total, valid = 0.0, 0
        for number in range(self.validation.batches(self.plan.workload.global_batch)):
            loss, tokens = self.engine.evaluate(feed(self.validation, self.plan, self.mesh, number))
            total, valid = total + loss, valid + tokens
        if valid == 0:
            raise DataError(
                f"none of the {self.validation.describe()} has a label that counts: use more samples"
            )
        return total / valid

    def _plain(self, step: int, lr: float) -> StepResult:
        return self.engine.step(feed(self.dataset, self.plan, self.mesh, step), lr)

    def _watched(self, step: int, lr: float) -> StepResult:
        """The same step under the ledger and the count of live bytes: the same numbers, but slower."""
        device = self.mesh.device
        device.reset_peak_memory()
        ledger, live = Ledger(self.mesh), LiveBytes(self.engine.tensors())
        with live, ledger:
            result = self._plain(step, lr)
        self.profile = Profile(device.peak_memory_bytes() or live.peak_bytes, without_setup(ledger.events))
        return result

    def _metrics(self, step: int, lr: float, cpu_s: float, result: StepResult) -> StepMetrics:
        seconds, scaler = result.step_s, self.engine.scaler
        return StepMetrics(
            step=step + 1,
            loss=result.loss,
            grad_norm=result.grad_norm,
            lr=lr,
            valid_tokens=result.valid_tokens,
            skipped=self.skipped,
            loss_scale=result.loss_scale,
            overflows=None if scaler is None else scaler.state.overflows,
            step_s=seconds,
            cpu_s=cpu_s,
            tokens_per_s=self.tokens / seconds,
            flops_per_s=self.flops / seconds,
            comm_frac=min(1.0, sum(result.comm_s.values()) / seconds),
            comm_s=result.comm_s,
            pipeline_s=result.trace.total_s,
            busy_s=result.trace.busy_s,
            experts=numbers_of(self.plan, result.routing, result.dispatch_bytes),
            routing=result.routing,
        )

"""The lab: every layout of the grid in processes of its own, verified against one device, measured and recorded.

A layout that fails is recorded with its error, and the others go on. One device comes first: it is the reference for
the first step of every layout and for the losses of its first steps.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean, median
from typing import Any, Literal

from fivefold.core.cluster import Cluster
from fivefold.core.events import total_bytes
from fivefold.core.execution import Execution, microbatches
from fivefold.core.layout import Layout
from fivefold.core.model_counts import parameter_counts
from fivefold.core.model_spec import ModelSpec
from fivefold.core.optimizer import OptimizerConfig
from fivefold.core.plan import Plan
from fivefold.core.router import RouterConfig
from fivefold.core.workload import Workload
from fivefold.data.batches import PackedDataset
from fivefold.data.corpus import load_corpus
from fivefold.data.tokenizer import ByteTokenizer
from fivefold.errors import FivefoldError, RecordError
from fivefold.estimate.timeline import equal_chunks
from fivefold.lab.grid import AXES, check, grid, legal
from fivefold.lab.measure import RankReport, measure, timed
from fivefold.records.machine import load_average, machine_facts, versions
from fivefold.records.store import Store
from fivefold.report.lab_report import JUDGED_STEPS, LabResult, LayoutResult, write_report
from fivefold.runtime.device import device_kind
from fivefold.runtime.launch import refuse_launcher, run_ranks
from fivefold.strategies.expert.rules import routed_layers
from fivefold.train.trainer import StepMetrics
from fivefold.units import MIB
from fivefold.verify.compare import Key, Whole, assemble
from fivefold.verify.verify import judge
from fivefold.verify.workload import BOUNDS

SEQ_LEN, GLOBAL_BATCH, MICRO_BATCH, LEARNING_RATE = 128, 16, 2, 1e-3
BALANCE = 0.01
"""Strength of the balance loss of a model with experts, over each sequence: that of Switch Transformers."""

Say = Callable[[str], None]


class Lab:
    """Runs the grid for one model.

    Raises: UserError if the model cannot be trained even on one device, or a launcher started this process.
    """

    def __init__(
        self,
        spec: ModelSpec,
        *,
        max_ranks: int,
        axes: Sequence[str] = AXES,
        steps: int,
        out: Path,
        store: Store,
        device: str,
        seed: int = 0,
    ) -> None:
        """`axes`: those of the grid. A model with experts is trained in float64, and judged as that is."""
        refuse_launcher()
        ByteTokenizer().check_vocab(spec.vocab, model=spec.name)
        self.spec, self.steps, self.out, self.store, self.seed = spec, steps, out, store, seed
        self.device = device_kind(device)
        routed = bool(routed_layers(spec))
        self.dtype: Literal["float64", "float32"] = "float64" if routed else "float32"
        self.dataset = PackedDataset(load_corpus(limit_bytes=16 * MIB), SEQ_LEN, seed)
        self.plan = Plan(
            model=spec,
            cluster=Cluster.parse("cpu"),
            workload=Workload(seq_len=SEQ_LEN, global_batch=GLOBAL_BATCH),
            layout=Layout(),
            execution=Execution(
                micro_batch=MICRO_BATCH,
                dtype=self.dtype,
                optimizer=OptimizerConfig(lr=LEARNING_RATE),
                router=RouterConfig(balance_coefficient=BALANCE) if routed else RouterConfig(),
            ),
        )
        check(self.plan, self.device)
        self.layouts, self.refused = legal(self.plan, grid(max_ranks, axes), self.device)
        self.load_at_start = load_average()
        self.reference: dict[Key, Whole] | None = None
        self.reference_losses: list[float] = []

    def run(self, say: Say) -> LabResult:
        """All layouts, in order; `say` is told the outcome of each as it comes.

        The report is written at the end, also when the lab is stopped: it then holds what was measured so far.
        """
        try:
            self.out.mkdir(parents=True, exist_ok=True)
        except OSError as error:  # now, rather than after minutes of measuring
            raise RecordError(f"cannot write the report to {self.out}: {error.strerror or error}") from None
        results: list[LayoutResult] = []
        try:
            for layout in self.layouts:
                results.append(self._one(layout))
                say(_line(results[-1], len(results), len(self.layouts)))
        finally:
            if results:
                write_report(self.result(results), self.out)
        return self.result(results)

    def result(self, layouts: list[LayoutResult]) -> LabResult:
        """What was measured so far."""
        facts = machine_facts()
        return LabResult(
            model=self.spec.name,
            parameters=parameter_counts(self.spec)["total_parameters"],
            machine={
                "device": self.device,
                "cpu": facts["cpu"],
                "cores": facts["cores"],
                "memory": facts["memory_bytes"],
            },
            steps=self.steps,
            seq_len=SEQ_LEN,
            global_batch=GLOBAL_BATCH,
            lr=LEARNING_RATE,
            dtype=self.dtype,
            bound=BOUNDS[self.dtype],
            versions={name: version or "none" for name, version in versions().items()},
            load_at_start=self.load_at_start,
            date=datetime.now(UTC).strftime("%Y-%m-%d"),
            layouts=tuple(layouts),
        )

    def _one(self, layout: Layout) -> LayoutResult:
        """Run one layout and record it; a failure becomes part of the result."""
        plan = self.plan.replace(layout=layout)
        run = self.store.start(
            kind="lab", layout=str(layout), model=self.spec.name, plan=plan, machine={"device": self.device}
        )
        try:
            reports: list[RankReport] = run_ranks(
                lambda rank: measure(rank, plan, self.dataset, steps=self.steps, seed=self.seed),
                ranks=layout.world_size,
                device=self.device,
            )
            result = self._judge(plan, reports)
        except KeyboardInterrupt:
            run.finish("interrupted")
            raise
        except FivefoldError as error:
            run.finish("failed", str(error))
            return LayoutResult(
                layout=str(layout), passed=False, error=str(error), oversubscribed=self._oversubscribed(layout),
                **self._degrees(layout),
            )  # fmt: skip
        for rank, report in enumerate(reports):
            run.log_many([(m.step, rank, m.numbers()) for m in report.metrics])
        run.result("lab", result)
        run.finish("finished" if result.passed else "failed", result.reason)
        return result

    def _judge(self, plan: Plan, reports: list[RankReport]) -> LayoutResult:
        """Compare with one device (the first layout), and sum up the times."""
        observations = [report.observation for report in reports]
        if plan.layout.world_size == 1:
            self.reference = assemble(observations)
            self.reference_losses = [m.loss for m in reports[0].metrics]
        if self.reference is None:
            raise FivefoldError("not judged: the run on one device, which it is compared with, failed")
        verdict = judge(plan, observations, self.reference, steps=1)
        losses = [m.loss for m in reports[0].metrics]
        loss_error = max(
            abs(a - b) / abs(b) for a, b in zip(losses[:JUDGED_STEPS], self.reference_losses[:JUDGED_STEPS])
        )
        layout = plan.layout
        passed = verdict.passed and loss_error <= BOUNDS[self.dtype]
        return LayoutResult(
            layout=str(layout),
            passed=passed,
            error=verdict.cause,
            oversubscribed=self._oversubscribed(layout),
            microbatches=microbatches(plan.workload, layout, plan.execution),
            events_match=verdict.events_match,
            max_rel_err=verdict.max_rel_err,
            loss_max_rel_err=loss_error,
            losses=tuple(losses),
            **self._degrees(layout),
            **_times(plan, reports),
            **_experts(reports),
        )

    def _degrees(self, layout: Layout) -> dict[str, Any]:
        degrees = {axis: layout.degree(axis) for axis in ("dp", "tp", "pp", "cp", "ep")}
        return {"ranks": layout.world_size, "bound": BOUNDS[self.dtype], **degrees}

    def _oversubscribed(self, layout: Layout) -> bool:
        return self.device == "cpu" and layout.world_size > (os.cpu_count() or 1)


def _times(plan: Plan, reports: list[RankReport]) -> dict[str, Any]:
    """Throughput, memory, communication and bubble of the timed steps."""
    ranks = [timed(report.metrics) for report in reports]
    count = len(ranks[0])
    step_s = median(m.step_s for m in ranks[0])
    axes = sorted({axis for steps in ranks for m in steps for axis in m.comm_s})
    event_axes = sorted({event.axis for report in reports for event in report.events})
    cpu = tuple(sum(m.cpu_s for m in steps) / count for steps in ranks)
    layout = plan.layout
    return {
        "tokens_per_s": plan.workload.tokens / step_s,
        "step_time_s": step_s,
        "cpu_time_s_per_step": sum(cpu),
        "cpu_s": cpu,
        "wall_s": tuple(sum(m.step_s for m in steps) / count for steps in ranks),
        "peak_memory_bytes": tuple(report.peak_memory_bytes for report in reports),
        "comm_frac": sum(m.comm_frac for steps in ranks for m in steps) / (count * len(ranks)),
        "comm_s_by_axis": {
            axis: sum(m.comm_s.get(axis, 0.0) for steps in ranks for m in steps) / (count * len(ranks))
            for axis in axes
        },
        "comm_bytes_by_axis": {
            axis: sum(total_bytes(report.events, axis=axis) for report in reports) / len(reports)
            for axis in event_axes
        },
        "bubble_frac": _bubble(ranks) if layout.pp > 1 else None,
        "bubble_theory": equal_chunks(layout, microbatches(plan.workload, layout, plan.execution)).bubble_frac
        if layout.pp > 1
        else None,
    }


def _experts(reports: list[RankReport]) -> dict[str, Any]:
    """How uneven the load of experts was in the timed steps, and what each rank sent for it."""
    ranks = [[m.experts for m in timed(report.metrics) if m.experts is not None] for report in reports]
    if not ranks[0]:
        return {}
    busiest = [step.rank_imbalance for step in ranks[0] if step.rank_imbalance is not None]
    sent = [[step.dispatch_bytes for step in steps if step.dispatch_bytes is not None] for steps in ranks]
    return {
        "expert_imbalance": fmean(step.expert_imbalance for step in ranks[0]),
        "rank_imbalance": fmean(busiest) if busiest else None,
        "dispatch_bytes": tuple(fmean(steps) for steps in sent if steps),
    }


def _bubble(ranks: list[list[StepMetrics]]) -> float:
    """Mean over steps of 1 - (time in computations, mean over ranks) / (longest run of the schedule)."""
    shares: list[float] = []
    for moment in zip(*ranks):
        window = max(m.pipeline_s for m in moment)
        shares.append(1 - sum(m.busy_s for m in moment) / (len(moment) * window))
    return sum(shares) / len(shares)


def _line(result: LayoutResult, done: int, total: int) -> str:
    if not result.passed:
        return f"[{done}/{total}] {result.layout}: FAILED: {result.reason}"
    return (
        f"[{done}/{total}] {result.layout}: the same model, error {result.max_rel_err:.1e}, "
        f"{result.tokens_per_s or 0:,.0f} tokens/s"
    )

"""What the lab makes of the numbers of its ranks."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from fivefold.core.cluster import Cluster
from fivefold.core.events import Event
from fivefold.core.execution import Execution
from fivefold.core.layout import Layout
from fivefold.core.model_spec import AttentionSpec, BlockSpec, MLPSpec, ModelSpec
from fivefold.core.plan import Plan
from fivefold.core.workload import Workload
from fivefold.lab.lab import _bubble, _line, _times
from fivefold.lab.measure import RankReport, timed
from fivefold.report.lab_report import LayoutResult
from fivefold.train.trainer import StepMetrics
from fivefold.verify.observe import Observation


def step(number: int, **changes: Any) -> StepMetrics:
    values: dict[str, Any] = {
        "step": number, "loss": 1.0, "grad_norm": 1.0, "lr": 0.1, "valid_tokens": 4, "step_s": 1.0, "cpu_s": 0.5,
        "tokens_per_s": 1.0, "flops_per_s": 1.0, "comm_frac": 0.0, "comm_s": {}, "pipeline_s": 1.0, "busy_s": 1.0,
    }  # fmt: skip
    return StepMetrics(**{**values, **changes})


def plan(text: str) -> Plan:
    block = BlockSpec(attention=AttentionSpec(heads=4, kv_heads=4, head_dim=8), mlp=MLPSpec(ffn=32))
    return Plan(
        model=ModelSpec(name="m", hidden=32, vocab=259, blocks=(block, block)),
        cluster=Cluster.parse("cpu"),
        workload=Workload(seq_len=32, global_batch=8),
        layout=Layout.parse(text),
        execution=Execution(micro_batch=2),
    )


def report(metrics: list[StepMetrics], memory: int = 0, events: Counter[Event] | None = None) -> RankReport:
    return RankReport(Observation(), metrics, memory, events or Counter())


def test_the_first_two_steps_are_not_timed() -> None:
    steps = [step(n) for n in range(1, 6)]
    assert [m.step for m in timed(steps)] == [3, 4, 5]
    assert [m.step for m in timed(steps[:2])] == [2]  # a short run has nothing better
    assert [m.step for m in timed(steps[:1])] == [1]


def test_throughput_is_that_of_the_median_step() -> None:
    steps = [step(n, step_s=s) for n, s in enumerate((100.0, 100.0, 1.0, 2.0, 50.0), 1)]
    times = _times(plan("dp1"), [report(steps, memory=7)])
    assert times["step_time_s"] == 2.0
    assert times["tokens_per_s"] == 8 * 32 / 2.0
    assert times["wall_s"] == (pytest.approx(53 / 3),)
    assert times["peak_memory_bytes"] == (7,)
    assert (times["comm_frac"], times["comm_s_by_axis"], times["comm_bytes_by_axis"]) == (0.0, {}, {})
    assert (times["bubble_frac"], times["bubble_theory"]) == (None, None)


def test_communication_is_a_mean_over_ranks_and_steps() -> None:
    gather = Event("forward", "tp", "all_gather", "float32", 100)
    one = [step(n, comm_frac=f, comm_s={"tp": f}) for n, f in ((1, 9.0), (2, 9.0), (3, 0.2), (4, 0.4))]
    two = [step(n, comm_frac=0.0, comm_s={"data": 1.0}, cpu_s=1.5) for n in (1, 2, 3, 4)]
    reports = [report(one, 10, Counter({gather: 3})), report(two, 30)]
    times = _times(plan("tp2"), reports)
    assert times["comm_frac"] == pytest.approx(0.15)  # (0.2 + 0.4 + 0 + 0) / 4
    assert times["comm_s_by_axis"] == {"data": 0.5, "tp": pytest.approx(0.15)}
    assert times["comm_bytes_by_axis"] == {"tp": 150}
    assert times["peak_memory_bytes"] == (10, 30)
    assert times["cpu_s"] == (0.5, 1.5)
    assert times["cpu_time_s_per_step"] == 2.0


def test_bubble_of_an_ideal_pipeline() -> None:
    """Two stages, four microbatches, one second each: both are busy 4 of 5 seconds, as (p-1)/(p-1+m) = 1/5 says."""
    steps = [step(n, pipeline_s=5.0, busy_s=4.0) for n in (1, 2, 3)]
    times = _times(plan("pp2"), [report(steps), report(steps)])
    assert times["bubble_frac"] == pytest.approx(0.2)
    assert times["bubble_theory"] == pytest.approx(1 / 5)


def test_bubble_is_taken_over_the_longest_rank() -> None:
    early = [step(1, pipeline_s=2.0, busy_s=2.0), step(2, pipeline_s=4.0, busy_s=1.0)]
    late = [step(1, pipeline_s=4.0, busy_s=4.0), step(2, pipeline_s=2.0, busy_s=1.0)]
    assert _bubble([early, late]) == pytest.approx(np.mean([1 - 6 / 8, 1 - 2 / 8]))


def test_the_line_of_a_layout() -> None:
    good = LayoutResult(layout="tp2", ranks=2, passed=True, max_rel_err=1.5e-7, tokens_per_s=12345.6)
    assert _line(good, 1, 3) == "[1/3] tp2: the same model, error 1.5e-07, 12,346 tokens/s"
    bad = LayoutResult(layout="dp2", ranks=2, passed=False, error="rank 1 failed first: x")
    assert _line(bad, 2, 3) == "[2/3] dp2: FAILED: rank 1 failed first: x"

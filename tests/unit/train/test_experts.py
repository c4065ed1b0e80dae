"""What a run says of its experts, from what routers are told to have done."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from fivefold.catalog.models import preset
from fivefold.cli.progress import TrainProgress
from fivefold.core.cluster import Cluster
from fivefold.core.execution import Execution
from fivefold.core.layout import Layout
from fivefold.core.plan import Plan
from fivefold.core.router import RouterConfig
from fivefold.core.workload import Workload
from fivefold.engine.routers import LayerRouting
from fivefold.train.experts import ExpertCounts, ExpertNumbers, counts_of, numbers_of
from fivefold.train.trainer import StepMetrics

EVEN = LayerRouting((6, 6, 6, 6), 12, 0, math.log(4), 1.0, 0.5)
SKEWED = LayerRouting((9, 3, 12, 0), 12, 4, 0.5, 2.0, 1.5)
"""Busiest expert 12 of a mean of 6; of two ranks 12 and 12."""
LOPSIDED = LayerRouting((10, 8, 4, 2), 12, 0, 0.2, 1.5, 1.0)
"""18 and 6 of a mean of 12."""


def plan(layout: str = "dp2 ep2", router: RouterConfig | None = None) -> Plan:
    return Plan(
        model=preset("tiny-moe"),
        cluster=Cluster.parse("cpu"),
        workload=Workload(seq_len=8, global_batch=4),
        layout=Layout.parse(layout),
        execution=Execution(router=router or RouterConfig()),
    )


def numbers(plan: Plan, *layers: LayerRouting) -> ExpertNumbers | None:
    return numbers_of(plan, dict(enumerate(layers, start=1)), 77)


def metrics(**changes: Any) -> StepMetrics:
    values: dict[str, Any] = {
        "step": 1, "loss": 2.0, "grad_norm": 1.0, "lr": 0.1, "valid_tokens": 8, "step_s": 1.0, "cpu_s": 1.0,
        "tokens_per_s": 8.0, "flops_per_s": 1.0, "comm_frac": 0.0, "comm_s": {}, "pipeline_s": 1.0, "busy_s": 1.0,
    }  # fmt: skip
    return StepMetrics(**{**values, **changes})


def test_numbers_of_a_step_are_those_of_the_worst_layer_and_means_over_layers() -> None:
    router = RouterConfig(balance_coefficient=0.01, z_coefficient=0.001)
    found = numbers(plan(router=router), EVEN, SKEWED, LOPSIDED)
    assert found is not None
    assert found.expert_imbalance == 2.0
    assert found.rank_imbalance == 1.5
    assert found.dropped_choices == 4
    assert found.dropped_frac == 4 / sum(sum(layer.chosen) for layer in (EVEN, SKEWED, LOPSIDED))
    assert found.router_entropy == pytest.approx((math.log(4) + 0.7) / 3)
    assert (found.balance_loss, found.z_loss, found.dispatch_bytes) == (1.5, 1.0, 77)


def test_what_is_not_there_is_not_logged() -> None:
    assert numbers(plan()) is None
    assert not [name for name in metrics().numbers() if "expert" in name or "dispatch" in name]
    alone = metrics(experts=numbers(plan("dp2"), SKEWED)).numbers()
    assert alone["expert_imbalance"] == 2.0
    assert {"rank_imbalance", "balance_loss", "z_loss", "dispatch_bytes"}.isdisjoint(alone)
    assert {"step", "experts", "comm_s"}.isdisjoint(alone)


def test_counts_are_summed_over_steps() -> None:
    counts = ExpertCounts(plan())
    for step in (EVEN, SKEWED):
        counts.after({3: step})
    assert counts.as_result() == {
        "steps": 2,
        "ep": 2,
        "moved": False,
        "layers": [
            {
                "layer": 3,
                "chosen": [15, 9, 18, 6],
                "chosen_last_step": [9, 3, 12, 0],
                "ranks": [24, 24],
                "tokens": 24,
                "dropped": 4,
                "entropy": pytest.approx((math.log(4) + 0.5) / 2),
            }
        ],
    }


def test_counts_of_a_step_by_layer() -> None:
    assert counts_of(plan(), {3: SKEWED, 1: dataclasses.replace(EVEN, ranks=(7, 13))}) == [
        {"layer": 1, "chosen": [6, 6, 6, 6], "ranks": [7, 13], "dropped": 0},
        {"layer": 3, "chosen": [9, 3, 12, 0], "ranks": [12, 12], "dropped": 4},
    ]


def test_progress_says_it_in_a_few_words(capsys: pytest.CaptureFixture[str]) -> None:
    progress = TrainProgress()
    progress.update(metrics(experts=numbers(plan(), SKEWED)), None)
    progress.said = 0.0
    progress.update(metrics(), None)
    with_experts, without = capsys.readouterr().err.splitlines()
    assert with_experts.endswith("comm 0%  imbalance 2.00  dropped 16.7%")
    assert without.endswith("comm 0%")


def test_experts_that_are_placed_anew_load_the_ranks_that_computed_them() -> None:
    moved = dataclasses.replace(SKEWED, ranks=(7, 13))
    found = numbers(plan(), moved)
    assert found is not None
    assert found.rank_imbalance == 1.3
    counts = ExpertCounts(plan())
    counts.after({0: moved})
    counts.after({0: SKEWED})
    assert counts.as_result()["layers"][0]["ranks"] == [19, 25]

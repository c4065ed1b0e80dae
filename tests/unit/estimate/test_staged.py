"""The step of layouts stage by stage: against the closed form where stages are equal, and against one timeline."""

from __future__ import annotations

import numpy as np
import pytest

from fivefold.catalog import models
from fivefold.catalog.clusters import resolve
from fivefold.core.layout import Layout
from fivefold.estimate import comm, compute
from fivefold.estimate.recompute import Recompute
from fivefold.estimate.step import layers_of, step_times
from fivefold.estimate.timeline import simulate
from fivefold.plan.clock import Choice, Clock
from fivefold.plan.question import Question
from fivefold.strategies.pipeline.placement import stage_layers
from fivefold.strategies.pipeline.schedules import all_actions


def clock(model: str, devices: str, batch: int) -> Clock:
    return Clock(
        Question(spec=models.preset(model), cluster=resolve(devices), seq_len=4096, global_batch=batch)
    )


def choice(layout: str, again: str = "none") -> Choice:
    return Choice(Layout.parse(layout), 1, Recompute.parse(again))


def test_without_a_pipeline_it_is_the_closed_form() -> None:
    of = clock("deepseek-v3", "64 H100", 64)
    choices = [choice("dp64 ep8 zero3"), choice("dp8 tp8 ep64 zero1", "full")]
    closed, mine = step_times(of.jobs(choices), of.coefficients), of.times(choices)
    for name in ("compute", "tp", "ep", "dp", "bubble", "optimizer", "fixed"):
        assert getattr(mine, name) == pytest.approx(getattr(closed, name)), name


def test_equal_stages_are_close_to_the_closed_form() -> None:
    of = clock("llama-2-70b", "64 H100", 512)
    choices = [choice("dp4 tp4 pp4 zero1"), choice("dp2 tp4 pp8 zero1", "full"), choice("dp2 tp8 pp4:1f1b*5")]
    closed, mine = step_times(of.jobs(choices), of.coefficients).total, of.times(choices).total
    assert mine == pytest.approx(closed, rel=0.02)


@pytest.mark.parametrize(
    "layout", ["dp4 pp16:zbv ep4 zero1", "dp8 pp8:1f1b*3 ep8 zero1", "dp2 tp4 pp8:zbh1@flops ep8 zero1"]
)
def test_the_pipeline_is_the_timeline_of_its_own_stages(layout: str) -> None:
    """DeepSeek-V3: 61 layers, the first three dense; each stage with its own layers, embedding and head."""
    of, asked = clock("deepseek-v3", "64 H800", 64), choice(layout)
    made, spec = asked.layout, of.question.spec
    jobs = of.jobs([asked])
    c = of.coefficients.of(jobs)
    one = dict(zip(dict.fromkeys(spec.blocks), layers_of(jobs, c)))
    ends = compute.head(jobs, c)
    lookup = float((4 * comm.hidden_bytes(jobs) / (jobs.memory_bytes_per_s * c["memory"]))[0])
    fixed = float(c["fixed_microbatch"][0]) / made.chunks
    stages = []
    for number, held in enumerate(stage_layers(spec, made, 4096)):
        F, B = fixed / 3, fixed * 2 / 3
        W = 0.0
        for i in held:
            layer = one[spec.blocks[i]]
            F, B = F + float(layer.forward[0]), B + float(layer.backward[0])
            W += float((layer.backward * layer.weights)[0])
        if number == 0:
            F, B = F + lookup / 2, B + lookup / 2
        if number == made.stages - 1:
            F, B, W = F + float(ends.forward[0]), B + float(ends.backward[0]), W + float(ends.weights[0])  # type: ignore[index]
        stages.append({"F": F, "B": B, "I": B - W, "W": W})
    microbatches = int(jobs.microbatches[0])
    totals = [
        simulate(
            all_actions(made, microbatches),
            made.owner_of,
            lambda action: stages[action.chunk][action.kind],
            message_s=lambda send, s=message: s,  # type: ignore[misc]
        ).total_s
        for message in (0.0, float((c["pp_exposed"] * comm.message(jobs, c))[0]))
    ]
    ranks = [sum(stages[i]["F"] + stages[i]["B"] for i in made.virtual_stages_of(r)) for r in range(made.pp)]
    busy = microbatches * max(ranks)
    times = {
        name: float(getattr(of.times([asked]), name)[0])
        for name in ("compute", "tp", "cp", "ep", "bubble", "pp")
    }
    scale = float(c["stack"][0])
    assert times["bubble"] == pytest.approx(scale * float(c["bubble"][0]) * (totals[0] - busy))
    assert times["pp"] == pytest.approx(scale * (totals[1] - totals[0]))
    inside = sum(times[name] for name in ("compute", "tp", "cp", "ep"))
    assert inside == pytest.approx(scale * (busy - microbatches * float(c["fixed_microbatch"][0])))


def test_rows_of_one_list_are_as_each_alone() -> None:
    of = clock("llama-2-70b", "64 H100", 512)
    choices = [choice(f"dp{dp} tp{tp} pp8 zero1") for dp, tp in ((1, 8), (2, 4), (4, 2), (8, 1))]
    together = of.times(choices).total
    assert together.tolist() == pytest.approx([float(of.times([one]).total[0]) for one in choices], rel=1e-12)
    assert len(np.unique(together)) == 4


def test_uneven_stages_wait_for_the_fullest() -> None:
    of = clock("llama-2-70b", "64 H100", 512)
    even, uneven = of.times([choice("dp2 tp8 pp4"), choice("dp2 tp8 pp4@14+22+22+22")]).total
    assert 22 / 20 * 0.98 < uneven / even < 22 / 20 * 1.02

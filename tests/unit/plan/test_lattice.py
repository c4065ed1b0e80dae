"""The lattice against the strategies' rules and the exact memory, point by point."""

from __future__ import annotations

import random

import numpy as np
import pytest

from fivefold.catalog import models
from fivefold.catalog.clusters import resolve
from fivefold.core.cluster import Cluster
from fivefold.core.execution import Execution
from fivefold.core.layout import Layout
from fivefold.core.plan import Plan
from fivefold.core.workload import Workload
from fivefold.estimate.memory import estimate
from fivefold.plan.lattice import Fixed, Group, Lattice, held_at_most, layout_at
from fivefold.plan.legality import why_not
from fivefold.plan.question import Question
from fivefold.strategies.legal import legal_layouts
from fivefold.strategies.pipeline.schedules import in_flight_bound

RUNNABLE = ["tiny-llama", "tiny-uneven", "tiny-moe", "tiny-qwen-moe"]


def question(model: str, devices: str, seq_len: int, batch: int) -> Question:
    return Question(spec=models.preset(model), cluster=resolve(devices), seq_len=seq_len, global_batch=batch)


def points(lattice: Lattice) -> list[tuple[Group, tuple[int, ...], Layout]]:
    return [
        (group, tuple(map(int, place)), layout_at(lattice, group, tuple(map(int, place))))
        for group in lattice.groups()
        for place in np.argwhere(lattice.legal(group))
    ]


def random_cases(number: int) -> list[tuple[str, int, int, int]]:
    draw = random.Random(7)
    options = RUNNABLE, [1, 2, 3, 4, 6, 8], [8, 12, 16, 24, 48], [4, 6, 8]
    return [tuple(draw.choice(values) for values in options) for _ in range(number)]  # type: ignore[misc, attr-defined]


@pytest.mark.parametrize("case", random_cases(10), ids=str)
def test_legal_exactly_where_the_strategies_rules_say_so(case: tuple[str, int, int, int]) -> None:
    model, devices, seq_len, batch = case
    asked = question(model, f"1x{devices} H100", seq_len, batch)
    lattice = Lattice(asked)
    mine: dict[int, set[Layout]] = {size: set() for size in lattice.micro_batch}
    for _, place, layout in points(lattice):
        mine[lattice.micro_batch[place[2]]].add(layout)
    for size, found in mine.items():

        def make(layout: Layout, size: int = size) -> Plan:
            return Plan(
                model=asked.spec, cluster=Cluster.parse("cpu"), layout=layout, execution=Execution(micro_batch=size),
                workload=Workload(seq_len=seq_len, global_batch=batch),
            )  # fmt: skip

        theirs = set(legal_layouts(asked.spec, devices, make))
        searched = {layout for layout in theirs if is_searched(layout, lattice)}
        assert {layout for layout in found if layout.chunks <= 4} == searched, size


def is_searched(layout: Layout, lattice: Lattice) -> bool:
    """Whether a legal layout is none of those that the lattice leaves out on purpose."""
    method = lattice.methods[lattice.tp.index(layout.tp)][lattice.cp.index(layout.cp)]
    if method is None:
        return False
    chosen = layout.cp == 1 or layout.cp_method == method.name
    if layout.cp_method == "ring_ulysses":
        chosen = chosen and layout.cp_ring == method.ring
    shared = layout.data > 1 or (
        layout.edp > 1 and any(b.mlp.kind == "moe" for b in lattice.question.spec.blocks)
    )
    return (
        layout.schedule not in ("gpipe", "bfs")
        and layout.placement == "even"
        and (layout.zero > 0) == shared
        and layout.sp == method.sp
        and chosen
        and layout.etp in lattice.etp
        and (layout.pp, layout.schedule, layout.chunks) in list(lattice.groups())
    )


@pytest.mark.parametrize(
    ("model", "devices", "seq_len", "batch"),
    [
        ("deepseek-v3", "2048 H800", 4096, 15360), ("mixtral-8x7b", "64 H100", 4096, 256),
        ("llama-3.1-70b", "96 H100", 8192, 384), ("qwen3-next-80b-a3b", "64 H100", 4096, 128),
        ("gpt-oss-20b", "2x6 A100-80GB", 2048, 60), ("tiny-uneven", "12x1 A100-80GB", 24, 12),
    ],
)  # fmt: skip
def test_memory_is_that_of_single_layouts(model: str, devices: str, seq_len: int, batch: int) -> None:
    lattice = Lattice(question(model, devices, seq_len, batch))
    draw = np.random.default_rng(1)
    groups = [group for group in lattice.groups() if lattice.legal(group).any()]
    for _ in range(12):
        group = groups[draw.integers(len(groups))]
        places = np.argwhere(lattice.legal(group))
        place = tuple(map(int, places[draw.integers(len(places))]))
        layout, size = layout_at(lattice, group, place), lattice.micro_batch[place[2]]
        rule = why_not(lattice.question.spec, layout, seq_len=seq_len, global_batch=batch, micro_batch=size)
        assert rule is None
        for option, needed in zip(lattice.recompute, lattice.needed(group)):
            single = estimate(lattice.question.memory_job(layout, size, option)).peak.total()
            assert lattice.peak_bytes(needed[place]) == pytest.approx(single, rel=1e-9), (
                layout,
                size,
                option,
            )


@pytest.mark.parametrize("schedule", ["1f1b", "zbh1", "zbv", "dualpipev"])
def test_microbatches_in_flight_are_those_of_the_schedule(schedule: str) -> None:
    counts = np.arange(1.0, 40.0)
    for pp in (2, 3, 5, 8):
        for chunks in (1, 2, 3) if schedule == "1f1b" else (1,) if schedule == "zbh1" else (2,):
            layout = Layout(pp=pp, schedule=schedule, chunks=chunks)  # type: ignore[arg-type]
            for ranks in ([0], [pp - 1], list(range(pp))):
                found = held_at_most(Group(pp, schedule, chunks), ranks, counts)
                exact = [max(in_flight_bound(layout, r, int(m)).stashed for r in ranks) for m in counts]
                assert found.tolist() == exact


def test_what_is_fixed_stays() -> None:
    asked = question("mixtral-8x7b", "64 H100", 4096, 256)
    fixed = Fixed(layout={"tp": 4, "ep": 8, "zero": 0}, micro_batch=2)
    found = points(Lattice(asked, fixed))
    assert found
    assert {(one.tp, one.ep, one.zero) for _, _, one in found} == {(4, 8, 0)}


def test_recompute_comes_in_the_order_of_its_cost() -> None:
    for name in ("llama-3-8b", "deepseek-v3", "mixtral-8x7b"):
        options = [str(option) for option in Lattice(question(name, "8 H100", 4096, 8)).recompute]
        assert (options[0], options[-1]) == ("none", "full")
        assert len(options) == 4

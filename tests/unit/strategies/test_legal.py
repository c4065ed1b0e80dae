"""Which layouts are legal, and sets of few layouts in which every pair of options occurs."""

from __future__ import annotations

import json
from itertools import combinations

import pytest
from click.testing import CliRunner

from fivefold.catalog.models import preset
from fivefold.cli.layouts import command
from fivefold.core.cluster import Cluster
from fivefold.core.execution import Execution
from fivefold.core.layout import Layout
from fivefold.core.plan import Plan
from fivefold.core.workload import Workload
from fivefold.strategies.legal import covering, legal_layouts, shapes, traits, why_not

SPEC = preset("tiny-uneven")


def make(layout: Layout) -> Plan:
    return Plan(
        model=SPEC,
        cluster=Cluster.parse("cpu"),
        workload=Workload(seq_len=96, global_batch=8 * layout.dp * layout.pp),
        layout=layout,
        execution=Execution(micro_batch=2),
    )


@pytest.mark.parametrize("ranks", [1, 2, 6, 8, 12])
def test_every_shape_is_tried_once(ranks: int) -> None:
    brute = {
        (dp, tp, pp, cp)
        for dp in range(1, ranks + 1)
        for tp in range(1, ranks + 1)
        for pp in range(1, ranks + 1)
        for cp in range(1, ranks + 1)
        if dp * tp * pp * cp == ranks
    }
    found = list(shapes(ranks))
    assert len(found) == len(brute)
    assert set(found) == brute


def test_what_is_listed_is_legal_and_what_is_not_has_a_rule() -> None:
    listed = set(legal_layouts(SPEC, 4, make))
    assert Layout(dp=2, tp=2) in listed
    assert all(layout.world_size == 4 and why_not(layout, make) is None for layout in listed)
    assert not any(layout.pp == 4 for layout in listed), "three layers make no four stages"
    rule = why_not(Layout(pp=4), make)
    assert rule is not None
    assert "4 pipeline stages" in rule
    assert "3 layers" in rule
    tp5 = why_not(Layout(tp=5), make)
    assert tp5 is not None
    assert "heads = 8" in tp5
    assert "nearest legal tp: 4 or 8" in tp5


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_few_layouts_cover_every_shape_and_every_pair(ranks: int) -> None:
    candidates = list(legal_layouts(SPEC, ranks, make))
    chosen = covering(candidates)

    def pairs(layouts: list[Layout]) -> set[object]:
        return {pair for layout in layouts for pair in combinations(traits(layout), 2)}

    assert pairs(chosen) == pairs(candidates)
    assert len(chosen) <= len(candidates)
    assert {(c.dp, c.tp, c.pp, c.cp) for c in chosen} == {(c.dp, c.tp, c.pp, c.cp) for c in candidates}
    assert covering(candidates) == chosen, "the same each time"


def test_command_lists_and_explains() -> None:
    listed = CliRunner().invoke(command, ["-m", "tiny-uneven", "-n", "4", "--json"], standalone_mode=False)
    names = json.loads(listed.output)["layouts"]
    assert "dp2 tp2" in names
    assert "dp4" in names
    assert len(set(names)) == len(names)
    why = CliRunner().invoke(command, ["-m", "tiny-uneven", "--why", "tp5", "--json"], standalone_mode=False)
    assert why.return_value == 1
    assert "heads = 8" in json.loads(why.output)["rule"]
    table = CliRunner().invoke(command, ["-m", "tiny-uneven", "-n", "4"], standalone_mode=False)
    assert "dp2 tp2" in table.output
    assert f"{len(names)} layouts" in table.output

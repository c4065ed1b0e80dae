"""Which layouts are legal, and sets of few layouts in which every pair of options occurs."""

from __future__ import annotations

import json
from itertools import combinations
from pathlib import Path

import pytest
from click.testing import CliRunner

from fivefold.catalog.models import preset
from fivefold.cli.layouts import command
from fivefold.core.cluster import Cluster
from fivefold.core.execution import Execution
from fivefold.core.layout import Layout
from fivefold.core.model_spec import MoESpec
from fivefold.core.plan import Plan
from fivefold.core.recompute import Recompute, check
from fivefold.core.workload import Workload
from fivefold.strategies.legal import (
    covering,
    legal_layouts,
    recompute_options,
    shapes,
    traits,
    why_not,
    with_recompute,
)
from fivefold.strategies.pipeline import placement

SPEC = preset("tiny-uneven")
CONFIG = {
    "model_type": "llama", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 48, "vocab_size": 259,
}  # fmt: skip


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


def test_what_layouts_share_is_worked_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The split of 32 layers by FLOPs over so many stages: thousands of layouts ask for it."""
    asked: list[int] = []

    def counted(costs: placement.Costs, stages: int) -> list[int]:
        asked.append(stages)
        return placement.even_counts(len(costs.layers), stages)

    monkeypatch.setattr(placement, "balanced_counts", counted)
    spec = preset("llama-2-7b").replace(name="counted")
    found = list(legal_layouts(spec, 8, lambda layout: make(layout).replace(model=spec)))
    assert len(found) > 1000
    assert len(asked) == len(set(asked)) > 3


def test_a_refusal_of_a_huge_degree_is_quick() -> None:
    rule = why_not(Layout(tp=2**23), make)
    assert rule is not None
    assert rule.endswith("nearest legal tp: 8")


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


def test_the_length_of_its_own_choice_forbids_nothing(tmp_path: Path) -> None:
    """A model with 100 positions on 3 ranks: 96 tokens, which cp3 cuts; the model's 100 it could not."""
    config = {**CONFIG, "max_position_embeddings": 100}
    (tmp_path / "config.json").write_text(json.dumps(config))
    why = ["-m", str(tmp_path), "--why", "cp3"]
    assert CliRunner().invoke(command, why, standalone_mode=False).return_value == 0


def test_each_form_of_recompute_meets_each_trait_in_few_more_cases() -> None:
    layouts = covering([layout for ranks in (2, 4, 8) for layout in legal_layouts(SPEC, ranks, make)])
    options = recompute_options(SPEC)
    assert options == ["none", "attention", "mlp", "attention+mlp", "full", "full/2"]
    cases = with_recompute(layouts, options)
    met = {(case.recompute, trait) for case in cases for trait in traits(case.layout)}
    assert met == {(option, trait) for option in options for layout in layouts for trait in traits(layout)}
    assert set(layouts) == {case.layout for case in cases}
    assert len(set(map(str, cases))) == len(cases) < 1.5 * len(layouts)
    assert with_recompute(layouts, options) == cases, "the same each time"
    assert [case.layout.world_size for case in cases] == sorted(case.layout.world_size for case in cases)
    assert list(map(str, with_recompute(layouts[:2], ["none"]))) == list(map(str, layouts[:2]))


def test_forms_of_recompute_are_those_that_the_model_allows() -> None:
    routed = MoESpec(experts=4, top_k=2, ffn=8)
    all_routed = SPEC.replace(blocks=tuple(block.replace(mlp=routed) for block in SPEC.blocks))
    assert recompute_options(all_routed) == ["none", "attention", "moe", "attention+moe", "full", "full/2"]
    mixed = SPEC.replace(blocks=(SPEC.blocks[0], *all_routed.blocks[1:]))
    assert len(recompute_options(mixed)) == 2**3 + 2
    assert recompute_options(SPEC.replace(blocks=SPEC.blocks[:1]))[-1] == "full"
    for spec in (SPEC, all_routed, mixed):
        for option in recompute_options(spec):
            check(Recompute.parse(option), spec)

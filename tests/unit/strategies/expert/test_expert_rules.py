"""How experts are cut over the ranks of a stage, and what is refused."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest

from fivefold.core.layout import Layout
from fivefold.core.model_spec import AttentionSpec, BlockSpec, MLPSpec, ModelSpec, MoESpec
from fivefold.core.sharding import ParameterRow
from fivefold.errors import LayoutError
from fivefold.strategies.data import rules as data
from fivefold.strategies.expert import rules

E, F, D = 12, 18, 4
ROWS = (
    ParameterRow("layers.1.mlp.experts.gate", "expert_gate", (E, F, D), mesh="expert"),
    ParameterRow("layers.1.mlp.experts.down", "expert_down", (E, D, F), mesh="expert"),
)
LAYOUTS = [
    "dp1", "dp2 ep2", "dp4 ep2", "dp6 ep3", "tp2 dp3 ep3 etp2", "tp3 cp2 ep2 etp3", "dp2 cp3 ep2", "tp2 cp3 ep6",
    "dp4 ep2 zero1", "dp8 ep2 zero3/4", "dp4 tp2 ep2 zero2/2", "dp8 ep4 zero1/2", "tp2 zero1", "pp2 dp2 tp2 ep4",
    "dp2 tp2 cp2 ep2 etp2 order=dp-tp-cp-pp", "dp2 tp2 pp2 ep2 zero3 order=pp-tp-dp-cp", "dp2 tp2 nosp etp2 ep2",
]  # fmt: skip


def model(*, experts: int = E, ffn: int = F, routed: bool = True) -> ModelSpec:
    attention = AttentionSpec(heads=6, kv_heads=6, head_dim=4)
    moe = MoESpec(experts=experts, top_k=2, ffn=ffn)
    blocks = [BlockSpec(attention=attention, mlp=MLPSpec(ffn=24)), BlockSpec(attention=attention, mlp=moe)]
    return ModelSpec(name="t", hidden=D, vocab=8, blocks=tuple(blocks if routed else blocks[:1]))


def placed(row: ParameterRow, layout: Layout) -> ParameterRow:
    return data.place(rules.place(row, layout), layout)


@pytest.mark.parametrize(("text", "row"), list(product(LAYOUTS, ROWS)), ids=lambda x: getattr(x, "role", x))
def test_regions_tile_the_experts(text: str, row: ParameterRow) -> None:
    """Each element as often as there are edp ranks, over all ranks of a stage; written down once."""
    layout = Layout.parse(text)
    row = placed(row, layout)
    held, sharded, written = (np.zeros(row.shape, dtype=int) for _ in range(3))
    for rank in layout.stage_ranks(0):
        at = layout.coordinate(rank)
        region = row.region(layout, at)
        assert held[region].shape == row.local_shape(layout), "experts and their widths divide"
        held[region] += 1
        sharded[row.held.region(layout, at)] += 1
        written[row.held.region(layout, at)] += row.held.written_here(layout, at)
    assert (held == layout.edp).all()
    assert (sharded == layout.edp // layout.expert_shards).all()
    assert (written == 1).all()
    assert row.sums == ({"edp": None} if layout.edp > 1 else {})


@pytest.mark.parametrize("text", LAYOUTS)
def test_ep_cuts_whole_experts_and_etp_their_width(text: str) -> None:
    layout = Layout.parse(text)
    gate, down = (rules.place(row, layout) for row in ROWS)
    assert gate.local_shape(layout) == (E // layout.ep, F // layout.etp, D)
    assert down.local_shape(layout) == (E // layout.ep, D, F // layout.etp)
    for rank in layout.stage_ranks(0):
        at = layout.coordinate(rank)
        here = layout.group_of("ep", rank).index(rank)
        assert gate.region(layout, at)[0].start == here * E // layout.ep
        assert gate.region(layout, at)[1] == down.region(layout, at)[2]


@pytest.mark.parametrize(
    "text", [t for t in LAYOUTS if "/" in t] + ["dp4 zero1/2", "dp2 cp2 tp2 zero1/2 ep2"]
)
def test_zero_shards_experts_among_the_edp_ranks_inside_a_group(text: str) -> None:
    """Against the groups of ranks themselves."""
    layout = Layout.parse(text)
    size = layout.zero_group
    assert size is not None
    for group in layout.groups("edp"):
        inside = [layout.data_index(layout.coordinate(rank)) // size for rank in group]
        runs = [inside[i : i + layout.expert_shards] for i in range(0, len(inside), layout.expert_shards)]
        assert all(len(set(run)) == 1 for run in runs)
        assert len({run[0] for run in runs}) == len(runs), "no two runs of a group share a sharding group"


@pytest.mark.parametrize(
    ("text", "changes", "message"),
    [
        ("dp2 ep2", {"routed": False}, "t has no experts, which ep2 etp1 would cut"),
        ("dp8 ep8", {}, "12 experts are not divisible by 8; nearest legal ep: 4$"),
        ("dp4 etp4", {}, "the width 18 of an expert is not divisible by 4; nearest legal etp: 2$"),
        ("tp2 nosp", {}, "with etp1 and tp2 need sequence parallelism.*leave out nosp, or use etp2"),
        ("dp2 tp2 nosp etp2 order=dp-tp-cp-pp", {}, "order=dp-tp-cp-pp gives to dp"),
        ("dp6 ep2 zero1/3", {}, "a group of 3 x tp1 ranks holds no whole number of ep2.*nearest group: 2 or 6"),
    ],
)  # fmt: skip
def test_refusals(text: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(LayoutError, match=message) as caught:
        rules.check(model(**changes), Layout.parse(text))
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("text", LAYOUTS)
def test_what_can_be_run_is_accepted(text: str) -> None:
    rules.check(model(), Layout.parse(text))

"""Placement against brute force over all ways to cut the layers."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fivefold.catalog.models import preset
from fivefold.core.layout import Layout
from fivefold.core.model_counts import block_flops, head_flops
from fivefold.core.model_spec import AttentionSpec, BlockSpec, MLPSpec, ModelSpec
from fivefold.errors import LayoutError
from fivefold.strategies.pipeline.placement import (
    Costs,
    balanced_counts,
    even_counts,
    flops,
    measured_counts,
    split_seconds,
    stage_layers,
)


def model(layers: int, *, vocab: int = 100, wide: tuple[int, ...] = ()) -> ModelSpec:
    attention = AttentionSpec(heads=4, kv_heads=2, head_dim=8)
    blocks = [
        BlockSpec(attention=attention, mlp=MLPSpec(ffn=2000 if i in wide else 64)) for i in range(layers)
    ]
    return ModelSpec(name="tiny", hidden=32, vocab=vocab, blocks=tuple(blocks))


def cuts(layers: int, stages: int) -> list[list[int]]:
    """Every list of counts >= 1 that adds up to the layers."""
    result = []
    for inner in combinations(range(1, layers), stages - 1):
        edges = [0, *inner, layers]
        result.append([b - a for a, b in pairwise(edges)])
    return result


def worst(costs: Costs, counts: list[int]) -> float:
    edges = [sum(counts[:i]) for i in range(len(counts) + 1)]
    stages = [sum(costs.layers[a:b]) for a, b in pairwise(edges)]
    stages[0] += costs.first_extra
    stages[-1] += costs.last_extra
    return max(stages)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_balanced_is_optimal(data: st.DataObject) -> None:
    layers = data.draw(st.lists(st.integers(0, 20).map(float), min_size=1, max_size=9))
    stages = data.draw(st.integers(1, len(layers)))
    extras = [float(data.draw(st.integers(0, 40))) for _ in "fl"]
    costs = Costs(layers, *extras)
    counts = balanced_counts(costs, stages)
    assert len(counts) == stages
    assert sum(counts) == len(layers)
    assert min(counts) >= 1
    best = min(worst(costs, other) for other in cuts(len(layers), stages))
    assert worst(costs, counts) == max(costs.of_stages(counts)) == best


@pytest.mark.parametrize(("layers", "stages"), [(5, 2), (9, 4), (7, 7), (30, 4), (70, 12), (80, 64)])
def test_even_drops_no_layer(layers: int, stages: int) -> None:
    """Layers that do not divide are placed all the same, the remainder on the first stages."""
    placed = stage_layers(model(layers), Layout.parse(f"pp{stages}"), 16)
    assert [layer for part in placed for layer in part] == list(range(layers))
    sizes = [len(part) for part in placed]
    assert sizes == sorted(sizes, reverse=True)
    assert max(sizes) - min(sizes) <= 1


def test_flops_gives_fewer_layers_to_the_stage_with_a_heavy_head() -> None:
    spec = model(8, vocab=20_000)
    sizes = [len(part) for part in stage_layers(spec, Layout.parse("pp4@flops"), 16)]
    assert sizes[-1] == 1
    assert sum(sizes) == 8


@pytest.mark.parametrize("wide", [(), (0,), (4,), (1, 6), (0, 1, 2)])
@pytest.mark.parametrize("stages", [2, 3, 5])
def test_flops_is_optimal_in_the_models_own_flops(wide: tuple[int, ...], stages: int) -> None:
    spec = model(8, wide=wide)
    counts = [len(part) for part in stage_layers(spec, Layout.parse(f"pp{stages}@flops"), 16)]
    layers = [3 * block_flops(spec, block, 16) for block in spec.blocks]
    costs = Costs(layers, first_extra=spec.hidden, last_extra=3 * head_flops(spec))
    assert worst(costs, counts) == pytest.approx(min(worst(costs, other) for other in cuts(8, stages)))


@pytest.mark.parametrize("name", ["llama-3.1-70b", "tiny-llama", "qwen3-30b-a3b"])
def test_weighted_is_never_worse_than_even(name: str) -> None:
    spec = preset(name)
    costs = flops(spec, 2048)
    for stages in {2, 3, 4, 8, 16} & set(range(1, spec.layers + 1)):
        even = max(costs.of_stages(even_counts(spec.layers, stages)))
        assert max(costs.of_stages(balanced_counts(costs, stages))) <= even * (1 + 1e-12)


def test_stage_times_are_split_into_layers_and_extras() -> None:
    """Layers of 2 s, an embedding of 1 s, a head of 5 s, measured on stages of 3, 4, 4 and 2 layers."""
    costs = split_seconds([3 * 2 + 1, 4 * 2, 4 * 2, 2 * 2 + 5], [3, 4, 4, 2])
    assert costs == Costs([2.0] * 13, 1.0, 5.0)
    for stages in (2, 4, 5):
        counts = measured_counts([7, 8, 8, 9], [3, 4, 4, 2], stages)
        assert worst(costs, counts) == min(worst(costs, other) for other in cuts(13, stages))
        placed = stage_layers(model(13), Layout.parse(f"pp{stages}@measured"), 16, seconds=costs)
        assert [len(part) for part in placed] == counts


def test_layers_of_a_stage_share_its_time() -> None:
    """Unequal layers: 2 s each on stage 1, 4 s on stage 2; the ends are taken to be like their mean, 3 s."""
    costs = split_seconds([3.0, 4.0, 8.0, 7.0], [1, 2, 2, 2])
    assert costs == Costs([3.0, 2.0, 2.0, 4.0, 4.0, 3.0, 3.0], 0.0, 1.0)


def test_two_stages_leave_the_head_as_the_difference() -> None:
    assert split_seconds([8.0, 11.0], [4, 4]) == Costs([2.0] * 8, 0.0, 3.0)
    assert measured_counts([8.0, 12.0], [4, 4], 2) == [5, 3]


def test_a_fast_end_has_no_extra() -> None:
    assert split_seconds([1.0, 4.0, 3.0], [2, 2, 2]) == Costs([0.5, 0.5, 2.0, 2.0, 1.5, 1.5], 0.0, 0.0)


def test_explicit_placement_is_taken_as_told() -> None:
    placed = stage_layers(model(30), Layout.parse("pp3@9+11+10"), 16)
    assert placed == (range(0, 9), range(9, 20), range(20, 30))


@pytest.mark.parametrize(
    ("layers", "text", "message"),
    [
        (3, "pp4", "pp4 has 4 pipeline stages but tiny has 3 layers; at most 3 stages"),
        (3, "pp4@flops", "has 4 pipeline stages but tiny has 3 layers"),
        (29, "pp3@9+11+10", r"placement @9\+11\+10 places 30 layers but tiny has 29"),
        (4, "pp2@measured", "placement @measured needs measured stage times"),
    ],
)
def test_refusals_name_the_numbers(layers: int, text: str, message: str) -> None:
    with pytest.raises(LayoutError, match=message) as caught:
        stage_layers(model(layers), Layout.parse(text), 16)
    assert len(str(caught.value).splitlines()) == 1


def test_one_device_holds_all() -> None:
    assert stage_layers(model(5), Layout(), 16) == (range(5),)

"""Copies of experts: how choices are shared among them, against the least load that any sharing can have."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest

from fivefold.core.experts import ExpertsConfig
from fivefold.errors import ConfigError
from fivefold.strategies.expert.placement import contiguous, place_experts
from fivefold.strategies.expert.replicas import Replicas, place_replicas, placed_after, poured, share


def skewed(seed: int) -> list[float]:
    """64 experts; the most loaded of 8 ranks has 2.0 times the mean."""
    draw = random.Random(seed)
    counts = [draw.paretovariate(1.2) for _ in range(64)]
    mean, excess = sum(counts) / 64, contiguous(counts, 8).imbalance - 1
    return [mean + (count - mean) / excess for count in counts]


def least_maximum(total: Sequence[int], replicas: Replicas) -> float:
    """By the theorem of Hall, over all sets of ranks: what must stay inside them."""
    worst = 0.0
    ranks = range(len(replicas.slots))
    for size in range(1, len(replicas.slots) + 1):
        for some in itertools.combinations(ranks, size):
            inside = [
                e for e, copies in enumerate(replicas.copies) if {rank for rank, _ in copies} <= {*some}
            ]
            worst = max(worst, sum(total[e] for e in inside) / size)
    return worst


@pytest.mark.parametrize("seed", range(20))
def test_every_choice_goes_to_a_copy_and_ranks_are_as_even_as_can_be(seed: int) -> None:
    draw = random.Random(seed)
    ranks, each = draw.choice([2, 3, 4]), draw.choice([1, 2, 3])
    experts = ranks * each
    spare = draw.randint(0, experts - each)
    replicas = place_replicas([draw.paretovariate(1.0) for _ in range(experts)], ranks, spare)
    counts = [[int(draw.paretovariate(0.7)) % 60 for _ in range(experts)] for _ in range(ranks)]
    table = share(counts, replicas)
    for source, row in enumerate(table):
        for expert, copies in enumerate(replicas.copies):
            parts = [row[rank][slot] for rank, slot in copies]
            assert min(parts) >= 0
            assert sum(parts) == counts[source][expert]
    loads = [sum(sum(row[rank]) for row in table) for rank in range(ranks)]
    assert sum(loads) == sum(map(sum, counts))
    total = [sum(column) for column in zip(*counts)]
    assert max(loads) <= least_maximum(total, replicas) + experts  # to within one choice for each expert


def test_a_ranks_own_copy_takes_its_own_choices_first() -> None:
    replicas = Replicas(homes=((0,), (1,)), guests=((1,), (0,)))
    assert share([[6, 0], [6, 0]], replicas) == [[[6, 0], [0, 0]], [[0, 0], [0, 6]]]
    assert share([[6, 0], [2, 0]], replicas) == [[[4, 0], [0, 2]], [[0, 0], [0, 2]]]


@pytest.mark.parametrize("seed", range(4))
def test_homes_and_copies(seed: int) -> None:
    """Every expert has one home, as many on every rank; copies are elsewhere; lent is what others borrow."""
    replicas = place_replicas(skewed(seed), 8, 1)
    assert sorted(replicas.order) == list(range(64))
    assert all(len(homes) == 8 and len(guests) == 1 for homes, guests in zip(replicas.homes, replicas.guests))
    for rank in range(8):
        assert not {*replicas.homes[rank]} & {*replicas.guests[rank]}
        assert sum(replicas.borrowed(rank)) == 1
        assert [len(places) for places in replicas.lent(rank)] == [
            replicas.borrowed(other)[rank] for other in range(8)
        ]


@pytest.mark.parametrize("seed", range(6))
def test_twice_the_mean_becomes_a_tenth_more_at_most_in_a_run(seed: int) -> None:
    """Placed by what was chosen in the steps before, for 512 tokens of 8 choices on each rank that are drawn alike."""
    draw, wanted = random.Random(seed), skewed(seed)
    chosen = draw.choices(range(64), wanted, k=8 * 4096)
    replicas = place_replicas([chosen.count(expert) for expert in range(64)], 8, 1)
    sources = [draw.choices(range(64), wanted, k=4096) for _ in range(8)]
    counts = [[source.count(expert) for expert in range(64)] for source in sources]
    loads = [sum(sum(row[rank]) for row in share(counts, replicas)) for rank in range(8)]
    before = contiguous([sum(column) for column in zip(*counts)], 8).imbalance
    assert before > 1.9
    assert max(loads) / (sum(loads) / 8) <= 1.1


def test_pouring() -> None:
    assert poured([5, 1, 1], 4) == [0, 2, 2]
    assert poured([5, 1, 1], 3) == [0, 2, 1]
    assert poured([0, 0], 0) == [0, 0]
    assert poured([0, 9, 3], 15) == [9, 0, 6]


def test_places_follow_from_the_last_whole_window() -> None:
    config = ExpertsConfig(rebalance_every=2, spare_slots=0)
    history = [
        {0: counts} for counts in ([9, 9, 1, 1], [9, 9, 1, 1], [9, 1, 9, 1], [9, 1, 9, 1], [1, 9, 9, 1])
    ]
    assert placed_after(history[:1], config, 2) == {}
    first = placed_after(history[:3], config, 2)[0].homes
    assert {frozenset(homes) & {0, 1} for homes in first} == {frozenset({0}), frozenset({1})}
    second = placed_after(history, config, 2)[0].homes
    assert {frozenset(homes) & {0, 2} for homes in second} == {frozenset({0}), frozenset({2})}


def test_a_setting_that_does_nothing_is_refused() -> None:
    with pytest.raises((ConfigError, ValueError), match="spare_slots does nothing without rebalance_every"):
        ExpertsConfig(spare_slots=2)


def test_the_offline_plan_has_the_same_places() -> None:
    counts = skewed(1)
    placement, replicas = place_experts(counts, 8, 1), place_replicas(counts, 8, 1)
    assert placement.slots == tuple(tuple(sorted(held)) for held in replicas.slots)

"""Copies of experts in a run: who holds which, which copy a choice goes to, and what that communicates.

Each ep rank is the home of E/ep experts: their weights are parameters there, with their optimizer state. Beside them it
has `spare` slots with copies of experts that are at home elsewhere. Every so many steps homes and copies are placed
anew (`placement.py`), from how often each expert was chosen since the last time; homes move with all their state.

    a microbatch   ranks tell each other how many choices each expert has; all of them work out alike how many go to
                   each copy: as even as can be, a rank's own first
    a step         copies get their weights once, at the first forward; gradients go home after each backward

So nothing else need know of copies: a home's gradient is complete when its backward is done, as without them.

Communication of a rank on axis ep, for each routed layer; W = 3 D F/etp elements of an expert, c the larger of the
copies that the rank has and of those that others have of its experts:

    forward     all-gather of 8 E ep bytes, for the all-to-all of 8 E; once a step all-to-alls of c W elements
    backward    all-to-alls of c W elements, per microbatch
    optimizer   after a step that places anew: all-to-alls of E/ep W elements for weights and each moment, on axis edp
                before them all-gathers, where ZeRO cuts them

Letters: E experts, D hidden, F width of an expert.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from fivefold.core.events import Event, Events
from fivefold.core.experts import ExpertsConfig
from fivefold.core.layout import Layout
from fivefold.core.sharding import ParameterRow
from fivefold.strategies.expert.placement import place_experts

MOST_ROUNDS = 8
"""Of pouring every copied expert anew; most often nothing moves after two."""


@dataclass(frozen=True)
class Replicas:
    """Where the experts of one layer are. A slot is a home or a copy; a rank's homes come first."""

    homes: tuple[tuple[int, ...], ...]
    """By ep rank: the experts at home there, in the order of their weights."""
    guests: tuple[tuple[int, ...], ...]
    """By ep rank: the experts of which it has a copy, in the order of their homes; as many on every rank."""

    @cached_property
    def order(self) -> tuple[int, ...]:
        """The experts in the order in which the stacked weights of all ranks hold them."""
        return tuple(expert for homes in self.homes for expert in homes)

    @cached_property
    def slots(self) -> tuple[tuple[int, ...], ...]:
        """By ep rank: the experts that it computes."""
        return tuple((*homes, *guests) for homes, guests in zip(self.homes, self.guests))

    @cached_property
    def copies(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """By expert: (rank, slot of that rank) of its home and its copies, in ascending order."""
        found: list[list[tuple[int, int]]] = [[] for _ in self.order]
        for rank, held in enumerate(self.slots):
            for slot, expert in enumerate(held):
                found[expert].append((rank, slot))
        return tuple(map(tuple, found))

    def lent(self, rank: int) -> tuple[tuple[int, ...], ...]:
        """By ep rank: which of this rank's homes it has copies of, as places among them."""
        homes = self.homes[rank]
        return tuple(
            tuple(homes.index(expert) for expert in guests if expert in homes) for guests in self.guests
        )

    def borrowed(self, rank: int) -> tuple[int, ...]:
        """By ep rank: how many of this rank's copies are at home there."""
        return tuple(sum(expert in homes for expert in self.guests[rank]) for homes in self.homes)

    def travelling(self, rank: int) -> int:
        """The larger of the copies that a rank has and of those that others have of its experts."""
        return max(len(self.guests[rank]), sum(map(len, self.lent(rank))))


def place_replicas(counts: Sequence[float], ranks: int, spare: int) -> Replicas:
    """Homes and copies for experts that were chosen so often. Raises: LayoutError as `place_experts`."""
    found = place_experts(counts, ranks, spare)
    place = {expert: i for i, expert in enumerate(expert for homes in found.homes for expert in homes)}
    guests = (set(held) - set(homes) for held, homes in zip(found.slots, found.homes))
    return Replicas(found.homes, tuple(tuple(sorted(copies, key=place.__getitem__)) for copies in guests))


def share(counts: Sequence[Sequence[int]], replicas: Replicas) -> list[list[list[int]]]:
    """Which slots the choices of a microbatch go to. `counts`: [ep rank][expert]. -> [ep rank][ep rank][slot].

    First how many each copy gets: expert by expert, the busiest first, the least loaded copies are filled to one level,
    until nothing moves. Then whose: a rank's own copy takes of its own choices, the rest goes from the first rank on.
    """
    ranks = range(len(counts))
    table = [[[0] * len(held) for held in replicas.slots] for _ in ranks]
    total = [sum(column) for column in zip(*counts)]
    load, several = [0] * len(counts), []
    for expert, copies in enumerate(replicas.copies):
        if len(copies) > 1 and total[expert]:
            several.append(expert)
            continue
        home, slot = copies[0]
        load[home] += total[expert]
        for rank in ranks:
            table[rank][home][slot] = counts[rank][expert]
    several.sort(key=lambda expert: (-total[expert], expert))
    parts: dict[int, list[int]] = {expert: [0] * len(replicas.copies[expert]) for expert in several}
    for _ in range(MOST_ROUNDS):
        before = {expert: list(part) for expert, part in parts.items()}
        for expert in several:
            holders = [rank for rank, _ in replicas.copies[expert]]
            rest = [load[rank] - part for rank, part in zip(holders, parts[expert])]
            parts[expert] = poured(rest, total[expert])
            for rank, held, part in zip(holders, rest, parts[expert]):
                load[rank] = held + part
        if parts == before:
            break
    for expert in several:
        _deal(expert, [row[expert] for row in counts], parts[expert], replicas, table)
    return table


def poured(rest: Sequence[int], amount: int) -> list[int]:
    """What each of some vessels that hold `rest` gets of `amount`: the emptiest ones rise to one level, to within 1."""
    order = sorted(range(len(rest)), key=lambda i: (rest[i], i))
    held, number = amount, 0
    for i in order:
        if number and held <= rest[i] * number:
            break
        held, number = held + rest[i], number + 1
    level, more = divmod(held, number)
    found = [0] * len(rest)
    for nth, i in enumerate(order[:number]):
        found[i] = level + (nth < more) - rest[i]
    return found


def _deal(
    expert: int,
    wanted: list[int],
    room: Sequence[int],
    replicas: Replicas,
    table: list[list[list[int]]],
) -> None:
    """Enter in the table which ranks' choices (`wanted` of each rank) of one expert fill the room of its copies."""
    left = list(room)
    for i, (rank, slot) in enumerate(replicas.copies[expert]):
        own = min(wanted[rank], left[i])
        table[rank][rank][slot] = own
        wanted[rank], left[i] = wanted[rank] - own, left[i] - own
    i = 0
    for source, number in enumerate(wanted):
        while number:
            rank, slot = replicas.copies[expert][i]
            part = min(number, left[i])
            table[source][rank][slot] += part
            number, left[i] = number - part, left[i] - part
            i += not left[i]


def predict_copies(
    rows: Sequence[ParameterRow],
    layout: Layout,
    rank: int,
    replicas: Replicas,
    dtype: str,
    itemsize: int,
    times: int,
) -> Events:
    """Weights of copies and their gradients, in a step of one layer and `times` microbatches.

    `rows`: the stacked weights of its experts.
    """
    found: Events = Counter()
    ep_rank = layout.group_of("ep", rank).index(rank)
    if any(replicas.guests):
        for row in rows:
            one = row.local_elements(layout) // row.local_shape(layout)[0]
            size = replicas.travelling(ep_rank) * one * itemsize
            found[Event("forward", "ep", "all_to_all", dtype, size)] += 1
            found[Event("backward", "ep", "all_to_all", dtype, size)] += times
    return found


def predict_moves(
    rows: Sequence[ParameterRow], layout: Layout, dtype: str, itemsize: int, kinds: int
) -> Events:
    """Homes of one layer that are placed anew. `kinds`: of state, weights and moments, each in at least float32."""
    found: Events = Counter()
    for row in rows:
        if row.zero is not None:
            size = row.data_shards(layout) * row.held.local_elements(layout) * itemsize
            found[Event("optimizer", "edp", "all_gather", dtype, size)] += kinds
        size = row.local_elements(layout) * itemsize
        found[Event("optimizer", "ep", "all_to_all", dtype, size)] += kinds
    return found


def placed_after(
    history: Sequence[Mapping[int, Sequence[int]]], config: ExpertsConfig, ranks: int
) -> dict[int, Replicas]:
    """Where the experts of each layer are after some steps. `history`: by step, layer -> choices of each expert.

    Empty before experts were placed for the first time.
    """
    every = config.rebalance_every
    if every is None or len(history) < every:
        return {}
    last = len(history) // every * every
    window = history[last - every : last]
    return {
        layer: place_replicas(
            [sum(counts) for counts in zip(*(step[layer] for step in window))], ranks, config.spare_slots
        )
        for layer in window[0]
    }

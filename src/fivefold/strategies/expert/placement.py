"""Where copies of experts go, so that the most loaded rank is least loaded.

Routing is uneven: some experts are chosen far more often than others, and the slowest rank decides how long a layer
takes. A rank has `experts / ranks` slots and some spare ones. Hot experts get further copies in these, and the tokens
of an expert are shared among its copies.

    copies   the next copy goes to the expert with the most tokens per copy        (optimal for the largest copy)
    ranks    the largest copy first, to the least loaded rank that has a slot       (Graham 1969, LPT)
    homes    one copy of each expert is its home, where its optimizer state is: as many on every rank
    swaps    pairs of homes, or of other copies, change places while that lowers the most loaded rank
    shares   tokens of every expert fill its least loaded copies first, again and again until nothing moves

The first two are those of DeepSeek's balancer (DeepSeek-V3, arXiv:2412.19437, section 3.4). The last minimises the sum
of squared loads over all ways to share tokens among given copies: expert by expert it finds the minimum of a convex
function over a product of simplices (block coordinate descent), which has the smallest possible maximum as well.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from fivefold.errors import LayoutError, nearest_numbers

MOST_SWAPS = 200
MOST_ROUNDS = 200
SETTLED = 1e-9
"""Sharing ends where no expert moves more than this part of a rank's mean load."""


@dataclass(frozen=True)
class ExpertPlacement:
    """Which experts each rank holds, and what part of each one's tokens."""

    slots: tuple[tuple[int, ...], ...]
    """By rank: the experts that it holds, in ascending order."""
    homes: tuple[tuple[int, ...], ...]
    """By rank: those of them that are at home there, `experts / ranks` in ascending order."""
    shares: tuple[tuple[float, ...], ...]
    """By rank, in the order of `slots`: the part of that expert's tokens; over all copies they sum to 1."""
    loads: tuple[float, ...]
    """By rank: tokens."""

    @property
    def imbalance(self) -> float:
        """Largest load / mean load; 1 where nothing was counted."""
        return imbalance(self.loads)

    def copies(self, experts: int) -> tuple[int, ...]:
        """By expert: how many ranks hold it."""
        held = [expert for slots in self.slots for expert in slots]
        return tuple(held.count(expert) for expert in range(experts))


def imbalance(loads: Sequence[float]) -> float:
    """Largest / mean; 1 where all are zero."""
    total = math.fsum(loads)
    return max(loads) * len(loads) / total if total else 1.0


def contiguous(counts: Sequence[float], ranks: int) -> ExpertPlacement:
    """What expert parallelism does by itself: neighbouring experts on a rank, one copy of each."""
    each = _experts_of_a_rank(len(counts), ranks)
    slots = tuple(tuple(range(rank * each, (rank + 1) * each)) for rank in range(ranks))
    return _placement(slots, slots, [{expert // each: 1.0} for expert in range(len(counts))], counts)


def place_experts(counts: Sequence[float], ranks: int, spare: int = 0) -> ExpertPlacement:
    """Choose copies, their ranks and their shares. `counts`: tokens that chose each expert; deterministic.

    Raises: LayoutError where experts do not divide over ranks, or there are more spare slots than copies to fill them.
    """
    each = _experts_of_a_rank(len(counts), ranks) + spare
    if each > len(counts):
        raise LayoutError(
            f"{spare} spare slots on each of {ranks} ranks make {each} slots, more than the {len(counts)} experts; "
            f"at most {len(counts) - each + spare} spare"
        )
    copies = _copies(counts, ranks, spare * ranks)
    load = [count / number for count, number in zip(counts, copies)]
    slots = _pack(load, copies, ranks, each)
    homes = _homes(load, slots, each - spare)
    guests = [[expert for expert in held if homes[expert] != rank] for rank, held in enumerate(slots)]
    homed = [[expert for expert in held if homes[expert] == rank] for rank, held in enumerate(slots)]
    _swap(load, homed, guests)
    # Ranks are alike: an order that does not depend on how they were filled.
    pairs = sorted((sorted(at_home), sorted(others)) for at_home, others in zip(homed, guests))
    slots = [sorted([*at_home, *others]) for at_home, others in pairs]
    return _placement(
        tuple(map(tuple, slots)), tuple(tuple(home) for home, _ in pairs), _share(counts, slots), counts
    )


def _experts_of_a_rank(experts: int, ranks: int) -> int:
    if experts % ranks:
        legal = nearest_numbers(ranks, [n for n in range(1, experts + 1) if experts % n == 0])
        raise LayoutError(
            f"{experts} experts are not divisible by {ranks} ranks; nearest legal ranks: {legal}"
        )
    return experts // ranks


def _copies(counts: Sequence[float], ranks: int, more: int) -> list[int]:
    """Copies of each expert: one, and `more` further ones, each to the expert with the most tokens per copy."""
    copies = [1] * len(counts)
    queue = [(-count, expert) for expert, count in enumerate(counts)]
    heapify(queue)
    for _ in range(more):
        _, expert = heappop(queue)
        copies[expert] += 1
        if copies[expert] < ranks:  # a second copy on the same rank would share nothing
            heappush(queue, (-counts[expert] / copies[expert], expert))
    return copies


def _pack(load: Sequence[float], copies: Sequence[int], ranks: int, each: int) -> list[list[int]]:
    """Deal all copies to ranks of `each` slots. `load`: tokens of one copy of each expert.

    Experts with most copies first: every rank with a free slot can then take one, as those filled alike differ by one.
    """
    slots: list[list[int]] = [[] for _ in range(ranks)]
    total = [0.0] * ranks
    many = sorted((e for e in range(len(copies)) if copies[e] > 1), key=lambda e: (-copies[e], -load[e]))
    single = sorted((e for e in range(len(copies)) if copies[e] == 1), key=lambda e: -load[e])
    for expert in [*many, *single]:
        free = [rank for rank in range(ranks) if len(slots[rank]) < each]
        if (
            copies[expert] > 1
        ):  # never so unevenly that a later expert finds fewer free ranks than it has copies
            free.sort(key=lambda rank: (len(slots[rank]), total[rank]))
        else:
            free.sort(key=lambda rank: total[rank])
        for rank in free[: copies[expert]]:
            slots[rank].append(expert)
            total[rank] += load[expert]
    return slots


def _homes(load: Sequence[float], slots: list[list[int]], each: int) -> list[int]:
    """By expert: the rank of its home, `each` on every rank: a matching, by augmenting paths (Kuhn 1955).

    Where all copies of an expert are on ranks that are full of homes, one of them changes places with a copy of another
    expert on a rank that has too few: the one whose load differs least.
    """
    at_home: list[set[int]] = [set() for _ in slots]

    def settle(expert: int, tried: set[int]) -> bool:
        for rank, held in enumerate(slots):
            if expert not in held or rank in tried:
                continue
            tried.add(rank)
            if len(at_home[rank]) == each:
                other = next((one for one in sorted(at_home[rank]) if settle(one, tried)), None)
                if other is None:
                    continue
                at_home[rank].remove(other)
            at_home[rank].add(expert)
            return True
        return False

    copies = [sum(expert in held for held in slots) for expert in range(len(load))]
    for expert in sorted(range(len(load)), key=copies.__getitem__):
        if settle(expert, set()):
            continue
        _, here, there, guest = min(
            (abs(load[expert] - load[guest]), here, there, guest)
            for here, held in enumerate(slots) if expert in held
            for there, others in enumerate(slots) if expert not in others and len(at_home[there]) < each
            for guest in others if copies[guest] > 1 and guest not in held and guest not in at_home[there]
        )  # fmt: skip
        slots[here][slots[here].index(expert)] = guest
        slots[there][slots[there].index(guest)] = expert
        at_home[there].add(expert)
    return [next(rank for rank, homes in enumerate(at_home) if e in homes) for e in range(len(load))]


def _swap(load: Sequence[float], homed: list[list[int]], guests: list[list[int]]) -> None:
    """Let copies on the most loaded rank change places with smaller ones while the larger load of the two falls.

    A home changes places with a home, another copy with another copy.
    """
    ranks = range(len(homed))
    total = [math.fsum(load[expert] for expert in (*homed[rank], *guests[rank])) for rank in ranks]
    for _ in range(MOST_SWAPS):
        top = max(ranks, key=total.__getitem__)
        found = None
        for kind in (homed, guests):
            for other in ranks:
                for mine in kind[top] if other != top else ():
                    for theirs in kind[other]:
                        moved = load[mine] - load[theirs]
                        worst = max(total[top] - moved, total[other] + moved)
                        alone = mine not in (*homed[other], *guests[other]) and theirs not in (
                            *homed[top],
                            *guests[top],
                        )
                        if (
                            alone
                            and worst < total[top] * (1 - SETTLED)
                            and (found is None or worst < found[0])
                        ):
                            found = (worst, kind, other, mine, theirs, moved)
        if found is None:
            return
        _, kind, other, mine, theirs, moved = found
        kind[top][kind[top].index(mine)] = theirs
        kind[other][kind[other].index(theirs)] = mine
        total[top], total[other] = total[top] - moved, total[other] + moved


def _share(counts: Sequence[float], slots: Sequence[Sequence[int]]) -> list[dict[int, float]]:
    """By expert: rank -> the part of its tokens that go there."""
    homes: list[list[int]] = [[] for _ in counts]
    for rank, held in enumerate(slots):
        for expert in held:
            homes[expert].append(rank)
    tokens = [{rank: count / len(home) for rank in home} for count, home in zip(counts, homes)]
    total = _loads(tokens, len(slots))
    several = [expert for expert, home in enumerate(homes) if len(home) > 1 and counts[expert]]
    mean = math.fsum(counts) / len(slots)
    for _ in range(MOST_ROUNDS):
        moved = 0.0
        for expert in several:
            rest = {rank: total[rank] - part for rank, part in tokens[expert].items()}
            filled = _fill(rest, counts[expert])
            moved = max([moved, *(abs(filled[rank] - part) for rank, part in tokens[expert].items())])
            total.update({rank: rest[rank] + part for rank, part in filled.items()})
            tokens[expert] = filled
        if moved <= SETTLED * mean:
            break
    return [
        {rank: part / count if count else 1 / len(parts) for rank, part in parts.items()}
        for count, parts in zip(counts, tokens)
    ]


def _fill(rest: Mapping[int, float], amount: float) -> dict[int, float]:
    """Pour `amount` into vessels that hold `rest`: the emptiest ones rise to one level. Rank -> what it gets."""
    order = sorted(rest.values())
    for number in range(1, len(order) + 1):
        level = (math.fsum(order[:number]) + amount) / number
        if number == len(order) or level <= order[number]:
            break
    return {rank: max(0.0, level - held) for rank, held in rest.items()}


def _loads(tokens: Sequence[Mapping[int, float]], ranks: int) -> dict[int, float]:
    return {rank: math.fsum(parts.get(rank, 0.0) for parts in tokens) for rank in range(ranks)}


def _placement(
    slots: tuple[tuple[int, ...], ...],
    homes: tuple[tuple[int, ...], ...],
    shares: Sequence[Mapping[int, float]],
    counts: Sequence[float],
) -> ExpertPlacement:
    parts = tuple(tuple(shares[expert][rank] for expert in held) for rank, held in enumerate(slots))
    loads = tuple(
        math.fsum(counts[expert] * part for expert, part in zip(*pair, strict=True))
        for pair in zip(slots, parts, strict=True)
    )
    return ExpertPlacement(slots, homes, parts, loads)

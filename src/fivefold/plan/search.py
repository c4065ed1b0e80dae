"""The best layouts of a question: legality first, memory next, then time, over the whole lattice at once.

    1. every group of the lattice: which points are legal, and for each of them the recompute that fits and costs least
    2. the step time of those; the fastest few hundred
    3. these stage by stage through the lists of actions of their pipelines, corrected by a calibration if there is one;
       of the first also the placement that balances FLOPs, head and embedding counted
    4. the first of all through the exact functions for single layouts

Deterministic: of equal points the one that needs less memory comes first, then the plainer one.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from math import prod
from typing import TYPE_CHECKING, Any

from fivefold.estimate.memory import BAND, MemoryEstimate, estimate
from fivefold.plan.clock import Choice, Clock
from fivefold.plan.lattice import Fixed, Group, Lattice, layout_at
from fivefold.strategies.pipeline.placement import stage_layers

if TYPE_CHECKING:
    from fivefold.plan.question import Question

EXACT = 256
"""Points that are looked at once more."""

PLACED = 24
"""Points whose layers are placed by FLOPs as well."""

FEW = 20_000
"""Points of a group that are priced at one go; of more, those of one ZeRO stage are."""


@dataclass(frozen=True)
class Found:
    """One layout that fits, with what is expected of it."""

    choice: Choice
    step_s: float
    low_s: float
    """10th percentile."""
    high_s: float
    """90th percentile."""
    terms: dict[str, float]
    """Seconds by term; they add up to `step_s`."""
    memory: MemoryEstimate


@dataclass(frozen=True)
class Answer:
    """The best layouts, fastest first."""

    found: tuple[Found, ...]
    legal: int
    """Points of the lattice that could be formed."""
    evaluated: int
    """Points whose memory was worked out: legal ones with every recompute."""
    fitting: int
    least_bytes: float
    """Memory of the legal point that needs least; infinite where none is legal."""
    least: Choice | None


def search(question: Question, clock: Clock, fixed: Fixed | None = None, *, top: int = 10) -> Answer:
    """The `top` fastest layouts that fit surely: their memory and the band of its estimate within the device's."""
    lattice = Lattice(question, fixed or Fixed())
    limit = lattice.limit(question.capacity_bytes / (1 + BAND))
    best, stages = _Best(), len(lattice.zero)
    small = prod(lattice.shape) < FEW
    parts = [slice(0, stages)] if small else [slice(z, z + 1) for z in range(stages)]
    legal_points = evaluated = fitting = 0
    for number, group in enumerate(lattice.groups()):
        legal = lattice.legal(group)
        count = int(legal.sum())
        if not count:
            continue
        legal_points += count
        evaluated += count * len(lattice.recompute)
        left = legal
        for r, needed in enumerate(lattice.needed(group)):
            best.watch_least(needed, legal, (number, group, r))
            fits = left & (needed <= limit)
            if not fits.any():
                continue
            left = left & ~fits
            fitting += int(fits.sum())
            for part in parts:
                if fits[..., part].any():
                    zero = lattice.axes["zero"][..., part]
                    seconds = clock.grid(lattice, group, lattice.recompute[r], zero)
                    best.add(seconds, needed[..., part], fits[..., part], (number, group, r, part.start))
    timed = sorted(clock.timed([_choice(lattice, *place) for place in best.places()]), key=_seconds)
    if lattice.fixed.allows("placement", "flops"):
        moved = _placed(question, [choice for _, choice in timed[:PLACED]])
        timed = sorted([*timed, *clock.timed(moved)], key=_seconds)
    found = evaluate(question, clock, [choice for _, choice in timed[:top]])
    least = _choice(lattice, *best.least_place) if best.least_place else None
    return Answer(
        tuple(found[:top]), legal_points, evaluated, fitting, float(lattice.peak_bytes(best.least)), least
    )


def _seconds(timed: tuple[float, Choice]) -> float:
    """What is sorted by: of equal times, what came first stays first."""
    return timed[0]


class _Best:
    """The EXACT fastest points of all groups so far, and the one that needs least memory."""

    def __init__(self) -> None:
        self.bound = float("inf")
        self.parts: list[tuple[Any, Any, Any, tuple[int, Group, int, int], tuple[int, ...]]] = []
        self.least = float("inf")
        self.least_place: tuple[Group, tuple[int, ...], int] | None = None

    def add(self, seconds: Any, needed: Any, mask: Any, key: tuple[int, Group, int, int]) -> None:
        """Take in the points of one grid under the mask that may be among the fastest."""
        import numpy as np

        seconds = np.broadcast_to(seconds, mask.shape)
        places = np.flatnonzero(mask & (seconds <= self.bound))
        if not len(places):
            return
        values = seconds.ravel()[places] if seconds.flags.contiguous else seconds.flat[places]
        if len(places) > EXACT:
            bound = np.partition(values, EXACT - 1)[EXACT - 1]
            kept = (
                values <= bound
            )  # those that tie at the bound all stay: which come first is decided at the end
            places, values = places[kept], values[kept]
        self.parts.append((values, needed.flat[places], places, key, mask.shape))
        everything = np.concatenate([part[0] for part in self.parts])
        if len(everything) >= EXACT:
            self.bound = float(np.partition(everything, EXACT - 1)[EXACT - 1])

    def watch_least(self, needed: Any, legal: Any, key: tuple[int, Group, int]) -> None:
        import numpy as np

        masked = np.where(legal, needed, np.inf)
        place = int(masked.argmin())
        if masked.flat[place] < self.least:
            self.least = float(masked.flat[place])
            self.least_place = key[1], tuple(int(i) for i in np.unravel_index(place, masked.shape)), key[2]

    def places(self) -> list[tuple[Group, tuple[int, ...], int]]:
        """(group, place in its grid, recompute) of the fastest; of equals the one that needs less memory first."""
        import numpy as np

        listed = []
        for values, needed, places, (number, group, r, start), shape in self.parts:
            for i in np.flatnonzero(values <= self.bound):
                place = tuple(int(n) for n in np.unravel_index(int(places[i]), shape))
                place = (*place[:-1], place[-1] + start)
                listed.append((float(values[i]), float(needed[i]), number, place, r, group))
        listed.sort(key=lambda one: one[:5])
        return [(group, place, r) for _, _, _, place, r, group in listed[:EXACT]]


def _choice(lattice: Lattice, group: Group, place: tuple[int, ...], r: int) -> Choice:
    return Choice(layout_at(lattice, group, place), lattice.micro_batch[place[2]], lattice.recompute[r])


def _placed(question: Question, choices: list[Choice]) -> list[Choice]:
    """The same with stages of equal FLOPs, where that moves a layer and fits."""
    found = []
    for choice in choices:
        layout = choice.layout
        if layout.pp == 1:
            continue
        other = layout.replace(placement="flops")
        even, balanced = (stage_layers(question.spec, one, question.seq_len) for one in (layout, other))
        if even == balanced:
            continue
        memory = estimate(question.memory_job(other, choice.micro_batch, choice.recompute))
        if memory.fits(question.capacity_bytes) == "yes":
            found.append(Choice(other, choice.micro_batch, choice.recompute))
    return found


def evaluate(question: Question, clock: Clock, choices: list[Choice]) -> list[Found]:
    """What is expected of each choice, in their order."""
    if not choices:
        return []
    times = clock.times(choices)
    middle, low, high = clock.interval(choices, times)
    scale = (
        middle / times.total
    )  # a calibration corrects where runs are near; its share of each term is alike
    names = [f.name for f in fields(times)]
    return [
        Found(
            choice,
            float(middle[i]),
            float(low[i]),
            float(high[i]),
            {name: float(getattr(times, name)[i] * scale[i]) for name in names},
            estimate(question.memory_job(choice.layout, choice.micro_batch, choice.recompute)),
        )
        for i, choice in enumerate(choices)
    ]

"""Layouts one step away: one axis at the next degree or option, the data ranks taking up the difference."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from fivefold.core.layout import Layout
from fivefold.core.layout_checks import divisors
from fivefold.errors import UserError
from fivefold.plan.clock import Choice
from fivefold.plan.lattice import Lattice, cp_methods, routed, schedules
from fivefold.plan.question import Question

TAKES_UP = ("dp", "pp", "cp", "tp")
"""Which axis gets more or fewer ranks where another one changes: the first that divides."""
MOST_DEGREE = 65_536


@dataclass(frozen=True)
class Move:
    """One step: `axis` goes from `before` to `after`, and `other` takes up the devices."""

    axis: str
    before: str
    after: str
    choice: Choice | None
    """None where it cannot be formed."""
    rule: str | None = None
    """Why not."""
    other: tuple[str, int, int] | None = None

    @property
    def text(self) -> str:
        """`tp 8 -> 4, dp 2 -> 4`."""
        other = f", {self.other[0]} {self.other[1]} -> {self.other[2]}" if self.other else ""
        return f"{self.axis} {self.before} -> {self.after}{other}"


def moves(question: Question, choice: Choice) -> list[Move]:
    """All steps from a choice, axis by axis; also those that a rule forbids, with that rule."""
    lattice = Lattice(question)
    layout = choice.layout
    found = [
        *_degree(lattice, choice, "tp", lattice.tp),
        *_degree(lattice, choice, "pp", [d for d in divisors(question.devices) if d <= question.spec.layers]),
        *_degree(lattice, choice, "cp", lattice.cp),
    ]
    if routed(question.spec):
        found += [*_folded(lattice, choice, "ep", lattice.ep), *_folded(lattice, choice, "etp", lattice.etp)]
    if layout.data > 1:
        stages = [stage for stage in (layout.zero - 1, layout.zero + 1) if 0 <= stage <= 3]
        found += [_plain(lattice, choice, "zero", stage) for stage in stages]
    if layout.pp > 1:
        found += _schedules(lattice, choice)
    if layout.tp > 1:
        words = ("on", "off")
        found.append(
            _made(lattice, choice, "sp", *(words if layout.sp else words[::-1]), {"sp": not layout.sp})
        )
    return [*found, *_executions(lattice, choice)]


def around(value: int, known: list[int]) -> list[int]:
    """The next smaller and the next larger of the known values."""
    below, above = [n for n in known if n < value], [n for n in known if n > value]
    return [*below[-1:], *above[:1]]


def _degree(lattice: Lattice, choice: Choice, axis: str, known: list[int]) -> Iterator[Move]:
    """Steps of an axis whose ranks another one has to take up."""
    layout = choice.layout
    value = int(getattr(layout, axis))
    fitting = [d for d in known if _taken_up(layout, axis, d)]
    for degree in around(value, fitting):
        other = _taken_up(layout, axis, degree)
        assert other is not None
        changes = {axis: degree, other[0]: other[2]}
        yield _first(
            lattice, choice, axis, str(value), str(degree), _variants(lattice, layout, changes), other
        )


def _taken_up(layout: Layout, axis: str, degree: int) -> tuple[str, int, int] | None:
    """(axis, its degree, the one that keeps the number of devices) where a degree changes."""
    value = int(getattr(layout, axis))
    for other in TAKES_UP:
        ranks = int(getattr(layout, other)) * value
        if other != axis and ranks % degree == 0:
            return other, int(getattr(layout, other)), ranks // degree
    return None


def _variants(lattice: Lattice, layout: Layout, changes: dict[str, Any]) -> list[dict[str, Any]]:
    """The changes with what else has to follow: the schedule of other stages, the method of another cp."""
    changes = dict(changes)
    pp, cp = changes.get("pp", layout.pp), changes.get("cp", layout.cp)
    if pp != layout.pp:
        changes["placement"] = (
            layout.placement if layout.placement in ("even", "flops") and pp > 1 else "even"
        )
        options = schedules(pp, lattice.question.spec.layers)
        keeps = (layout.schedule, layout.chunks) in options and layout.pp > 1
        name, chunks = (layout.schedule, layout.chunks) if keeps else ("1f1b", 1)
        changes |= {"schedule": name} | ({"chunks": chunks} if chunks > 1 else {})
    if cp == layout.cp:
        return [changes]
    named = [method for method in cp_methods(cp, layout.sp) if method.name == layout.cp_method]
    methods = [*named, *cp_methods(cp, layout.sp)]
    found = []
    for method in methods:
        fields: dict[str, Any] = {"cp_method": method.name if cp > 1 else "ring"}
        if method.name == "ring_ulysses":
            fields |= {"cp_ring": method.ring, "cp_ulysses": method.ulysses}
        found.append(changes | fields)
    return found


def _folded(lattice: Lattice, choice: Choice, axis: str, known: list[int]) -> Iterator[Move]:
    value = int(getattr(choice.layout, axis))
    for degree in around(value, known):
        yield _plain(lattice, choice, axis, degree)


def _plain(lattice: Lattice, choice: Choice, axis: str, after: Any) -> Move:
    return _made(lattice, choice, axis, str(getattr(choice.layout, axis)), str(after), {axis: after})


def _made(
    lattice: Lattice, choice: Choice, axis: str, before: str, after: str, changes: dict[str, Any]
) -> Move:
    return _first(lattice, choice, axis, before, after, [changes], None)


def _first(
    lattice: Lattice,
    choice: Choice,
    axis: str,
    before: str,
    after: str,
    variants: list[dict[str, Any]],
    other: tuple[str, int, int] | None,
) -> Move:
    """The first of several ways to change a layout that is legal; else the rule that forbids the first one."""
    rules = []
    for changes in variants:
        try:
            layout = choice.layout.replace(**changes)
        except UserError as error:
            rules.append(str(error))
            continue
        rule = lattice.question.why_not(layout, choice.micro_batch)
        if rule is None:
            made = Choice(layout, choice.micro_batch, choice.recompute)
            return Move(axis, before, after, made, None, other)
        rules.append(rule)
    return Move(axis, before, after, None, rules[0], other)


def _schedules(lattice: Lattice, choice: Choice) -> list[Move]:
    """Every other schedule, and the next numbers of chunks of an interleaved one."""
    layout, options = choice.layout, schedules(choice.layout.pp, lattice.question.spec.layers)
    chunks = [v for name, v in options if name == "1f1b"]
    here = layout.chunks if layout.schedule == "1f1b" else 1
    near = {here, *around(here, chunks)}
    found = []
    for name, v in options:
        if (name, v) == (layout.schedule, layout.chunks) or (name == "1f1b" and v not in near):
            continue
        changes = {"schedule": name, "placement": "even", **({"chunks": v} if v > 1 else {})}
        before, after = _named(layout.schedule, layout.chunks), _named(name, v)
        found.append(_made(lattice, choice, "schedule", before, after, changes))
    return found


def _named(schedule: str, chunks: int) -> str:
    return f"{schedule}*{chunks}" if schedule in ("1f1b", "bfs") and chunks > 1 else schedule


def _executions(lattice: Lattice, choice: Choice) -> Iterator[Move]:
    """The next micro-batches, and the recomputes that cost next less and next more."""
    for size in around(choice.micro_batch, lattice.micro_batch):
        rule = lattice.question.why_not(choice.layout, size)
        made = None if rule else Choice(choice.layout, size, choice.recompute)
        yield Move("micro-batch", str(choice.micro_batch), str(size), made, rule)
    options = lattice.recompute
    here = options.index(choice.recompute) if choice.recompute in options else None
    near = (0, len(options) - 1) if here is None else (here - 1, here + 1)
    for i in near:
        if 0 <= i < len(options):
            made = Choice(choice.layout, choice.micro_batch, options[i])
            yield Move("recompute", str(choice.recompute), str(options[i]), made)

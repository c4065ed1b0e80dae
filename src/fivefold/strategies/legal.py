"""Every legal layout of a model on so many ranks, and the rule that forbids another. Torch-free.

Legality is what `compose.check` says: nothing is listed that could not be run, and nothing is forbidden twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, combinations, product

from fivefold.core.layout import Layout
from fivefold.core.layout_checks import divisors
from fivefold.core.model_spec import ModelSpec
from fivefold.core.plan import Plan
from fivefold.core.recompute import PARTS, Recompute
from fivefold.errors import UserError
from fivefold.strategies import compose
from fivefold.strategies.expert import rules as expert

MakePlan = Callable[[Layout], Plan]
"""The job that a layout is judged with: model, workload and execution."""

Shape = tuple[int, int, int, int]
"""(dp, tp, pp, cp)."""

MOST_CHUNKS = 4
"""Virtual stages per rank that are tried; more is rarely better, and a layout may still ask for it."""


def why_not(layout: Layout, make: MakePlan) -> str | None:
    """The rule that forbids a layout, in one line; None where it is legal."""
    try:
        compose.check(make(layout))
    except UserError as error:
        return str(error)
    return None


def legal_layouts(spec: ModelSpec, ranks: int, make: MakePlan) -> Iterator[Layout]:
    """All legal layouts of `ranks` ranks in the default rank order, the plainest of each shape first.

    Options: ZeRO stage; schedule with 2..4 chunks; placement even or by FLOPs; every cp method; with and without
    sequence parallelism; every ep and etp of a model with experts. Hybrid groups (`zero1/8`) and explicit placements
    are legal besides, and not listed.
    """
    for shape in shapes(ranks):
        yield from legal_options(spec, shape, make)


def legal_options(spec: ModelSpec, shape: Shape, make: MakePlan) -> Iterator[Layout]:
    """The legal layouts of one shape, the plainest first."""
    dp, tp, pp, cp = shape
    kinds = (True, False)[: 1 + (tp > 1)]
    experts = {sp: expert_options(spec, Layout(dp=dp, tp=tp, cp=cp, sp=sp)) for sp in kinds}
    for pipeline, context, sp in product(pipeline_options(spec, pp), context_options(cp), kinds):
        for cut in experts[sp]:
            edp = dp * cp * tp // (cut["ep"] * cut["etp"]) if cut else 1
            for zero in _zeros(max(dp * cp, edp)):
                options: dict[str, object] = {"zero": zero, **pipeline, **context, **cut}
                try:
                    layout = Layout(dp=dp, tp=tp, pp=pp, cp=cp, sp=sp, **options)  # type: ignore[arg-type]
                except UserError:
                    continue
                if why_not(layout, make) is None:
                    yield layout


def shapes(ranks: int) -> Iterator[Shape]:
    """Every (dp, tp, pp, cp) with that product."""
    for tp in divisors(ranks):
        for pp in divisors(ranks // tp):
            for cp in divisors(ranks // tp // pp):
                yield ranks // tp // pp // cp, tp, pp, cp


def pipeline_options(spec: ModelSpec, pp: int) -> list[dict[str, object]]:
    """Schedules with their chunks and placements."""
    if pp == 1:
        return [{}]
    chunked = range(2, min(MOST_CHUNKS, spec.layers // pp) + 1)
    schedules: list[dict[str, object]] = [
        {"schedule": name} for name in ("1f1b", "gpipe", "zbh1", "zbv", "dualpipev")
    ]
    schedules += [{"schedule": name, "chunks": n} for name in ("1f1b", "bfs") for n in chunked]
    return [{**one, "placement": placement} for placement in ("even", "flops") for one in schedules]


def context_options(cp: int) -> list[dict[str, object]]:
    """Methods of context parallelism, every split of ring x ulysses among them."""
    if cp == 1:
        return [{}]
    mixed: list[dict[str, object]] = [
        {"cp_method": "ring_ulysses", "cp_ring": ring, "cp_ulysses": cp // ring}
        for ring in divisors(cp)
        if 1 < ring < cp
    ]
    return [{"cp_method": "ring"}, {"cp_method": "ulysses"}, {"cp_method": "gather"}, *mixed]


def expert_options(spec: ModelSpec, stage: Layout) -> list[dict[str, int]]:
    """Every (ep, etp) of the ranks of one stage that a model's experts allow."""
    if not expert.routed_layers(spec):
        return [{}]
    found: list[dict[str, int]] = []
    ranks = stage.data * stage.tp
    for ep in divisors(ranks):
        for etp in divisors(ranks // ep):
            try:
                expert.check(spec, stage.replace(ep=ep, etp=etp))
            except UserError:
                continue
            found.append({"ep": ep, "etp": etp})
    return found


def _zeros(data: int) -> tuple[int, ...]:
    return (0, 1, 2, 3) if data > 1 else (0,)


Trait = tuple[str, object]


def traits(layout: Layout) -> tuple[Trait, ...]:
    """What a layout is made of, as (factor, value): the degrees and the options that act at these degrees."""
    found: list[Trait] = [("dp", layout.dp), ("tp", layout.tp), ("pp", layout.pp), ("cp", layout.cp)]
    if layout.data > 1:
        group = "all" if layout.zero_group is None else "groups"
        found.append(("zero", f"zero{layout.zero} {group}"))
    if layout.tp > 1:
        found.append(("sp", layout.sp))
    if layout.pp > 1:
        placement = layout.placement if isinstance(layout.placement, str) else "explicit"
        found += [("schedule", f"{layout.schedule}*{layout.chunks}"), ("placement", placement)]
    if layout.cp > 1:
        found.append(("cp method", f"{layout.cp_method} {layout.cp_ring}x{layout.cp_ulysses}"))
    if layout.ep * layout.etp > 1:
        found += [("ep", layout.ep), ("etp", layout.etp)]
    return tuple(found)


def covering(candidates: Iterable[Layout]) -> list[Layout]:
    """The fewest candidates, greedily, in which every shape occurs (with every cut of its experts) and every pair of
    traits that occurs in any.

    Deterministic; the next is always the one that adds most, the earlier of equals. Fewest ranks first in the result.
    """
    pairs = {layout: _pairs(layout) for layout in candidates}
    missing = set().union(*pairs.values()) if pairs else set()
    chosen: list[Layout] = []
    gain = {layout: len(found) for layout, found in pairs.items()}
    while missing:
        # What a layout adds only falls as others are chosen: an old count is an upper bound.
        best: Layout | None = None
        most = 0
        for layout in sorted(gain, key=lambda one: -gain[one]):
            if gain[layout] <= most:
                break
            gain[layout] = len(pairs[layout] & missing)
            if gain[layout] > most:
                best, most = layout, gain[layout]
        assert best is not None
        chosen.append(best)
        missing -= pairs[best]
        del gain[best]
    order = {layout: i for i, layout in enumerate(pairs)}
    return sorted(chosen, key=lambda layout: (layout.world_size, order[layout]))


def _pairs(layout: Layout) -> set[object]:
    shape = ("shape", layout.dp, layout.tp, layout.pp, layout.cp, layout.ep, layout.etp)
    return {shape, *combinations(traits(layout), 2)}


@dataclass(frozen=True)
class Case:
    """What is judged: a layout, and what it computes again in backward."""

    layout: Layout
    recompute: str = "none"

    def __str__(self) -> str:
        return str(self.layout) + ("" if self.recompute == "none" else f" recompute={self.recompute}")


def recompute_options(spec: ModelSpec) -> list[str]:
    """Every form of recompute that a model allows, the plainest first: of the k-th layers, every second whole one."""
    found = {region for block in spec.blocks for region in Recompute(PARTS).of(0, block)}
    parts = [part for part in PARTS if part in found]
    subsets = chain.from_iterable(combinations(parts, n) for n in range(len(parts) + 1))
    whole = [Recompute(("layer",), every) for every in range(1, min(2, spec.layers) + 1)]
    return [str(option) for option in [*map(Recompute, subsets), *whole]]


def with_recompute(layouts: Sequence[Layout], options: Sequence[str]) -> list[Case]:
    """The layouts, each with one option, and those that are needed besides so that each option meets each trait.

    Deterministic; each layout takes the option that meets most traits for the first time, the earlier of equals.
    """
    missing = {(option, trait) for layout in layouts for trait in traits(layout) for option in options}

    def new(case: Case) -> set[tuple[str, Trait]]:
        return missing & {(case.recompute, trait) for trait in traits(case.layout)}

    cases = []
    for layout in layouts:
        best = max((Case(layout, option) for option in options), key=lambda case: len(new(case)))
        cases.append(best)
        missing -= new(best)
    rest = [Case(layout, option) for layout in layouts for option in options]
    while missing:
        best = max(rest, key=lambda case: len(new(case)))
        cases.append(best)
        missing -= new(best)
    return sorted(cases, key=lambda case: case.layout.world_size)

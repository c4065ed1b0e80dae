"""How a job is cut: one frozen value with a text form that can be typed, read aloud and grepped.

    dpN  tpN  ppN[:gpipe|1f1b|bfs|zbh1|zbv|dualpipev|custom][*chunks][@even|@flops|@measured|@9+11+10]
    cpN[:ring|ulysses|gather|ringAxulyssesB]  epN  etpN  zeroK[/G]  nosp  order=tp-cp-dp-pp

Tokens may be typed in any order, once each. They are printed in this order with defaults left out, but the
cp method is always printed; one device is `dp1`. World size = dp * tp * pp * cp. Experts add no ranks: they
fold the dp*cp*tp ranks of a stage a second time, as (edp, ep, etp) with etp fastest.

A layout checks only itself. What needs the model, the cluster or the workload is for the strategies' rules.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from math import gcd, prod
from typing import Any, Literal, Self, get_args

from pydantic import ModelWrapValidatorHandler, ValidationError, model_serializer, model_validator

from fivefold.core.layout_checks import check, divisors, implied
from fivefold.core.layout_text import (
    DEFAULT_ORDER,
    SCHEDULES,
    V_SCHEDULES,
    MeshAxis,
    Schedule,
    print_layout,
    read_layout,
)
from fivefold.core.value import Value, describe
from fivefold.errors import LayoutError, nearest, nearest_numbers

__all__ = [
    "AXES",
    "DEFAULT_ORDER",
    "SCHEDULES",
    "V_SCHEDULES",
    "Axis",
    "CPMethod",
    "ExpertAxis",
    "Layout",
    "MeshAxis",
    "Schedule",
]

Axis = Literal["dp", "cp", "tp", "pp", "ep", "etp", "edp", "data", "tie", "world"]
ExpertAxis = Literal["etp", "ep", "edp"]
"""How the ranks of a stage are cut for experts."""
CPMethod = Literal["gather", "ring", "ulysses", "ring_ulysses"]
AXES: tuple[Axis, ...] = get_args(Axis)
_EXPERT_AXES = ("edp", "ep", "etp")


class Layout(Value):
    """How a job is cut. `Layout.parse(text)` and `str(layout)` are inverse; JSON and configs hold the text.

    Raises: LayoutError, one line with the numbers that broke the rule and the nearest legal choice.
    """

    dp: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1
    zero: int = 0
    """ZeRO stage 0 to 3 over the data ranks (dp x cp; for experts edp)."""
    zero_group: int | None = None
    """Hybrid sharding: shard inside groups of so many consecutive data ranks, replicate across. None: all."""
    schedule: Schedule = "1f1b"
    chunks: int = 1
    """Virtual stages per pipeline rank."""
    placement: Literal["even", "flops", "measured"] | tuple[int, ...] = "even"
    """How decoder layers are dealt to virtual stages; a tuple lists the layers of each."""
    cp_method: CPMethod = "ring"
    cp_ring: int = 1
    cp_ulysses: int = 1
    sp: bool = True
    """Sequence parallelism where tp > 1."""
    order: tuple[MeshAxis, ...] = DEFAULT_ORDER
    """Rank order, fastest axis first."""

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read the text form. Raises LayoutError naming the token and the nearest legal one."""
        return cls(**read_layout(text))

    @model_validator(mode="wrap")
    @classmethod
    def _make(cls, data: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        if isinstance(data, str):
            data = read_layout(data)
        if isinstance(data, dict):
            data = {**implied(data), **data}
        try:
            layout = handler(data)
        except ValidationError as error:
            raise LayoutError(f"layout: {describe(error, cls)}") from None
        check(layout)
        return layout

    @model_serializer
    def _as_text(self) -> str:
        return str(self)

    def __str__(self) -> str:
        return print_layout(self)

    def __repr__(self) -> str:
        return f"Layout({str(self)!r})"

    def replace(self, **changes: Any) -> Self:
        """A copy with some fields changed; what the old schedule or cp method implied is worked out anew."""
        values = {name: getattr(self, name) for name in type(self).model_fields}
        if "schedule" in changes:
            del values["chunks"]
        if {"cp", "cp_method"} & changes.keys():
            del values["cp_ring"], values["cp_ulysses"]
        return type(self)(**{**values, **changes})

    def without(self, axis: Literal["dp", "tp", "pp", "cp", "ep"]) -> Self:
        """The same layout with one axis at degree 1 and its options at their defaults.

        Fewer ranks may not divide by ep, etp or zero_group: these shrink to the greatest common divisor.
        """
        options: dict[str, dict[str, Any]] = {
            "pp": {"schedule": "1f1b", "placement": "even"},
            "cp": {"cp_method": "ring"},
            "tp": {"sp": True},
        }
        degrees = {name: getattr(self, name) for name in ("dp", "cp", "tp")} | {axis: 1}
        inner = degrees["dp"] * degrees["cp"] * degrees["tp"]
        same_tokens = self.tp > 1 and not self.sp  # then etp stays with tp
        etp = gcd(1 if axis == "tp" or (axis == "ep" and not same_tokens) else self.etp, inner)
        ep = 1 if axis == "ep" else gcd(self.ep, inner // etp)
        group = self.zero_group and gcd(self.zero_group, degrees["dp"] * degrees["cp"])
        changes = {axis: 1, **options.get(axis, {}), "ep": ep, "etp": etp, "zero_group": group}
        return self.replace(**changes)

    # Sizes

    @property
    def world_size(self) -> int:
        return self.dp * self.tp * self.pp * self.cp

    @property
    def data(self) -> int:
        """Ranks that hold the same dense parameters and see different tokens: dp * cp."""
        return self.dp * self.cp

    @property
    def data_shards(self) -> int:
        """Into how many parts ZeRO cuts what data ranks would hold alike: the ranks of a sharding group; 1 at zero0."""
        return (self.zero_group or self.data) if self.zero else 1

    @property
    def edp(self) -> int:
        """Ranks that hold the same expert parameters: dp * cp * tp / (ep * etp)."""
        return self.dp * self.cp * self.tp // (self.ep * self.etp)

    @property
    def expert_shards(self) -> int:
        """Into how many parts ZeRO cuts what edp ranks would hold alike: the edp ranks inside a sharding group.

        1 at zero0; 0 where the groups do not hold whole runs of edp ranks, which a rule of experts refuses.
        """
        if not self.zero or self.zero_group is None:
            return self.edp if self.zero else 1
        ranks = self.zero_group * self.tp  # consecutive in the stage, if the data axes inside tp fill a group
        inside = self.order[: self.order.index("tp")] if self.tp > 1 else ()
        run, block = prod(self.degree(axis) for axis in inside if axis != "pp"), self.ep * self.etp
        if self.zero_group % run or (ranks % block and block % ranks):
            return 0
        return max(1, ranks // block)

    @property
    def stages(self) -> int:
        """Virtual stages: pp * chunks."""
        return self.pp * self.chunks

    @property
    def sequence_parallel(self) -> bool:
        return self.sp and self.tp > 1

    def degree(self, axis: Axis) -> int:
        """The number of ranks in one group of the axis (tie: 1 where first and last stage share a rank)."""
        if axis == "world":
            return self.world_size
        if axis == "tie":
            return 2 if self.owner_of(0) != self.owner_of(self.stages - 1) else 1
        if axis not in AXES:
            raise LayoutError(f"unknown axis {axis!r}{nearest(axis, AXES)}")
        return int(getattr(self, axis))

    # Ranks and coordinates

    def coordinate(self, rank: int) -> dict[MeshAxis, int]:
        """Position of a rank on each mesh axis, fastest axis first."""
        self._check_rank(rank)
        position: dict[MeshAxis, int] = {}
        for axis in self.order:
            rank, position[axis] = divmod(rank, self.degree(axis))
        return position

    def rank(self, *, tp: int = 0, cp: int = 0, dp: int = 0, pp: int = 0) -> int:
        """The rank at a coordinate; the inverse of `coordinate`."""
        position: dict[MeshAxis, int] = {"tp": tp, "cp": cp, "dp": dp, "pp": pp}
        rank, stride = 0, 1
        for axis in self.order:
            degree = self.degree(axis)
            if not 0 <= position[axis] < degree:
                raise LayoutError(
                    f"{axis} coordinate {position[axis]} is not in 0..{degree - 1} of layout {self}"
                )
            rank, stride = rank + position[axis] * stride, stride * degree
        return rank

    def data_index(self, coordinate: Mapping[MeshAxis, int]) -> int:
        """The place of a coordinate in its group of axis data, which follows rank order."""
        index, stride = 0, 1
        for axis in self.order:
            if axis in ("dp", "cp"):
                index, stride = index + coordinate[axis] * stride, stride * self.degree(axis)
        return index

    def expert_place(self, coordinate: Mapping[MeshAxis, int]) -> dict[ExpertAxis, int]:
        """The place of a coordinate on the expert mesh of its stage, fastest axis first."""
        index, stride = 0, 1
        for axis in self.order:
            if axis != "pp":
                index, stride = index + coordinate[axis] * stride, stride * self.degree(axis)
        rest, etp = divmod(index, self.etp)
        edp, ep = divmod(rest, self.ep)
        return {"etp": etp, "ep": ep, "edp": edp}

    def expert_coordinate(self, rank: int) -> dict[ExpertAxis | Literal["pp"], int]:
        """Position of a rank on the expert mesh, fastest axis first."""
        coordinate = self.coordinate(rank)
        place = self.expert_place(coordinate)
        return {"etp": place["etp"], "ep": place["ep"], "edp": place["edp"], "pp": coordinate["pp"]}

    def stage_ranks(self, pp: int) -> tuple[int, ...]:
        """The dp*cp*tp ranks of one pipeline coordinate, ascending."""
        return _stage_ranks(self)[pp]

    # Groups

    def groups(
        self, axis: Axis, size: int | None = None, *, across: bool = False
    ) -> tuple[tuple[int, ...], ...]:
        """The process groups of an axis: a partition of all ranks, ordered by first member.

        Members follow the coordinate along the axis (data: rank order). `tie` joins the first and the last
        virtual stage of each (dp, cp, tp): it covers only their ranks, and nothing where one rank owns both.
        With `size`, groups are cut into runs of `size` consecutive members (hybrid sharding, replicated KV); with
        `across` as well, the groups are those of equal places in all runs of one group: every `size`-th member.
        """
        whole = _groups(self, axis)
        if size is None:
            return whole
        degree = self.degree(axis)
        if size < 1 or degree % size:
            legal = nearest_numbers(size, divisors(degree))
            raise LayoutError(
                f"groups of {size} do not divide {axis} = {degree} of layout {self}; nearest: {legal}"
            )
        if across:
            return tuple(sorted(group[i::size] for group in whole for i in range(size)))
        return tuple(sorted(group[i : i + size] for group in whole for i in range(0, len(group), size)))

    def group_of(
        self, axis: Axis, rank: int, size: int | None = None, *, across: bool = False
    ) -> tuple[int, ...]:
        """The group that a rank belongs to; empty for a rank without one (a middle stage has no tie)."""
        self._check_rank(rank)
        return next((group for group in self.groups(axis, size, across=across) if rank in group), ())

    def crossing(self, axis: Axis, devices_per_node: int) -> tuple[tuple[int, ...], ...]:
        """The groups of an axis that span more than one node, where consecutive ranks fill the nodes."""
        if devices_per_node < 1:
            raise LayoutError(f"devices_per_node must be at least 1, got {devices_per_node}")
        return tuple(g for g in self.groups(axis) if len({rank // devices_per_node for rank in g}) > 1)

    # Virtual stages

    def virtual_stages_of(self, pp: int) -> tuple[int, ...]:
        """Virtual stages of one pipeline coordinate, in chunk order.

        Loop placement (chunk * pp + coordinate), or V placement (zbv, dualpipev): down the ranks and back up.
        """
        if not 0 <= pp < self.pp:
            raise LayoutError(f"pp coordinate {pp} is not in 0..{self.pp - 1} of layout {self}")
        if self.schedule in V_SCHEDULES:
            return pp, 2 * self.pp - 1 - pp
        return tuple(chunk * self.pp + pp for chunk in range(self.chunks))

    def owner_of(self, stage: int) -> int:
        """The pipeline coordinate that holds a virtual stage."""
        if not 0 <= stage < self.stages:
            raise LayoutError(f"virtual stage {stage} is not in 0..{self.stages - 1} of layout {self}")
        if self.schedule in V_SCHEDULES and stage >= self.pp:
            return 2 * self.pp - 1 - stage
        return stage % self.pp

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self.world_size:
            raise LayoutError(f"rank {rank} is not in 0..{self.world_size - 1} of layout {self}")


@lru_cache(maxsize=64)
def _stage_ranks(layout: Layout) -> tuple[tuple[int, ...], ...]:
    stages: list[list[int]] = [[] for _ in range(layout.pp)]
    stride = prod(layout.degree(axis) for axis in layout.order[: layout.order.index("pp")])
    for rank in range(layout.world_size):
        stages[rank // stride % layout.pp].append(rank)
    return tuple(map(tuple, stages))


@lru_cache(maxsize=128)
def _groups(layout: Layout, axis: Axis) -> tuple[tuple[int, ...], ...]:
    if layout.degree(axis) == 1:
        return () if axis == "tie" else tuple((rank,) for rank in range(layout.world_size))
    if axis in _EXPERT_AXES:
        return _expert_groups(layout, axis)
    members: dict[tuple[int, ...], list[int]] = {}
    ends = {layout.owner_of(0), layout.owner_of(layout.stages - 1)}
    along = {"data": ("dp", "cp"), "world": DEFAULT_ORDER, "tie": ("pp",)}.get(axis, (axis,))
    for rank in range(layout.world_size):
        position = layout.coordinate(rank)
        if axis != "tie" or position["pp"] in ends:
            key = tuple(value for name, value in position.items() if name not in along)
            members.setdefault(key, []).append(rank)
    return tuple(sorted(map(tuple, members.values())))


def _expert_groups(layout: Layout, axis: Axis) -> tuple[tuple[int, ...], ...]:
    degree = layout.degree(axis)
    stride = {"etp": 1, "ep": layout.etp, "edp": layout.etp * layout.ep}[axis]
    groups = []
    for ranks in _stage_ranks(layout):
        for block in range(0, len(ranks), stride * degree):
            groups += [ranks[block + i : block + stride * degree : stride] for i in range(stride)]
    return tuple(sorted(groups))

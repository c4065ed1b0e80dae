"""Layouts: text round trip, groups against brute force, expert folding by hand, every refusal."""

from __future__ import annotations

import itertools
from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from fivefold.core.layout import AXES, Layout
from fivefold.core.value import Value
from fivefold.errors import LayoutError

CANONICAL = [
    "dp1",
    "dp4 tp2 pp2",
    "dp8 zero3",
    "dp2 tp4 pp4:1f1b*2@flops cp2:ring ep8 zero1",
    "pp3@9+11+10",
    "pp2:1f1b*2@1+2+3+4",
    "pp4:gpipe",
    "pp4:bfs",
    "pp4:bfs*3",
    "pp4:zbh1@measured",
    "pp2:zbv@1+2+3+4",
    "dp2 pp4:dualpipev",
    "pp4:custom",
    "cp4:gather",
    "cp8:ulysses",
    "cp8:ring2xulysses4",
    "tp4 ep2 etp2",
    "dp4 cp4:ring zero3/8",
    "tp4 nosp",
    "dp2 tp2 order=dp-tp-cp-pp",
]


@pytest.mark.parametrize("text", CANONICAL)
def test_canonical_text_survives(text: str) -> None:
    layout = Layout.parse(text)
    assert str(layout) == text
    assert Layout.parse(str(layout)) == layout


@pytest.mark.parametrize(
    ("typed", "printed"),
    [
        ("pp2 tp2 dp4", "dp4 tp2 pp2"),
        ("  zero0   dp1 tp1 pp1 cp1 ep1 etp1 ", "dp1"),
        ("cp2", "cp2:ring"),
        ("pp2:1f1b@even", "pp2"),
        ("pp2*2", "pp2:1f1b*2"),
        ("nosp ep4 tp4 etp4 dp4", "dp4 tp4 ep4 etp4 nosp"),
        ("order=tp-cp-dp-pp tp2", "tp2"),
        ("nosp", "dp1 nosp"),
    ],
)
def test_typed_forms_have_one_print(typed: str, printed: str) -> None:
    assert str(Layout.parse(typed)) == printed


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    degree = st.sampled_from([1, 2, 3, 4, 6])
    fields: dict[str, object] = {name: draw(degree) for name in ("dp", "tp", "pp", "cp")}
    if fields["pp"] != 1:
        fields["schedule"] = draw(
            st.sampled_from(["gpipe", "1f1b", "bfs", "zbh1", "zbv", "dualpipev", "custom"])
        )
        chunks = 2 if fields["schedule"] in ("zbv", "dualpipev") else 1
        if fields["schedule"] in ("1f1b", "bfs", "custom"):
            chunks = fields["chunks"] = draw(st.integers(1, 3))
        stages = fields["pp"] * chunks  # type: ignore[operator]
        listed = st.lists(st.integers(1, 99), min_size=stages, max_size=stages).map(tuple)
        fields["placement"] = draw(st.sampled_from(["even", "flops", "measured"]) | listed)
    cp = fields["cp"]
    if cp != 1:
        fields["cp_method"] = draw(st.sampled_from(["gather", "ring", "ulysses", "ring_ulysses"]))
        if fields["cp_method"] == "ring_ulysses":
            ring = draw(st.sampled_from([d for d in range(1, 7) if cp % d == 0]))  # type: ignore[operator]
            fields |= {"cp_ring": ring, "cp_ulysses": cp // ring}  # type: ignore[operator]
    data = fields["dp"] * cp  # type: ignore[operator]
    inner = data * fields["tp"]
    fields["etp"] = draw(st.sampled_from([d for d in (1, 2, 3, fields["tp"]) if inner % d == 0]))
    fields["ep"] = draw(st.sampled_from([d for d in (1, 2, 3, 4, 6, 8) if inner // fields["etp"] % d == 0]))
    fields["sp"] = fields["etp"] not in (fields["tp"],) or draw(st.booleans())
    fields["zero"] = draw(st.integers(0, 3))
    if fields["zero"]:
        fields["zero_group"] = draw(
            st.none() | st.sampled_from([d for d in range(1, data + 1) if data % d == 0])
        )
    fields["order"] = draw(st.permutations(["tp", "cp", "dp", "pp"]).map(tuple))
    return Layout(**fields)  # type: ignore[arg-type]


@settings(max_examples=300, deadline=None)
@given(layouts(), st.randoms())
def test_round_trip(layout: Layout, random: object) -> None:
    text = str(layout)
    assert Layout.parse(text) == layout
    tokens = text.split()
    random.shuffle(tokens)  # type: ignore[attr-defined]
    assert Layout.parse(" ".join(tokens)) == layout
    assert layout.replace() == layout
    assert hash(Layout.parse(text)) == hash(layout)


@settings(max_examples=100, deadline=None)
@given(layouts())
def test_groups_partition_the_ranks_and_agree_with_degrees(layout: Layout) -> None:
    world = set(range(layout.world_size))
    for axis in AXES:
        groups = layout.groups(axis)
        members = [rank for group in groups for rank in group]
        assert len(members) == len(set(members)), axis
        assert list(groups) == sorted(groups), axis
        if axis != "tie":
            assert set(members) == world, axis
        assert {len(group) for group in groups} <= {layout.degree(axis)}, axis
    assert layout.edp * layout.ep * layout.etp == layout.dp * layout.cp * layout.tp


@settings(max_examples=100, deadline=None)
@given(layouts())
def test_ranks_and_coordinates_against_the_odometer(layout: Layout) -> None:
    # Independent reference: itertools.product runs its last factor fastest.
    slowest_first = layout.order[::-1]
    odometer = itertools.product(*(range(getattr(layout, axis)) for axis in slowest_first))
    for rank, position in enumerate(odometer):
        expected = dict(zip(slowest_first, position, strict=True))
        assert layout.coordinate(rank) == expected
        assert layout.rank(**expected) == rank
        for axis in ("dp", "cp", "tp", "pp"):
            peers = [{**expected, axis: i} for i in range(getattr(layout, axis))]
            assert layout.group_of(axis, rank) == tuple(layout.rank(**peer) for peer in peers)
        if rank > 40:
            break


@settings(max_examples=60, deadline=None)
@given(layouts())
def test_composite_groups_against_brute_force(layout: Layout) -> None:
    where = [layout.coordinate(rank) for rank in range(layout.world_size)]
    expert = [layout.expert_coordinate(rank) for rank in range(layout.world_size)]

    def alike(rank: int, positions: list[dict[str, int]], along: set[str]) -> tuple[int, ...]:
        same = [
            other
            for other in range(layout.world_size)
            if all(positions[other][a] == v for a, v in positions[rank].items() if a not in along)
        ]
        return tuple(same)

    for rank in range(0, layout.world_size, max(1, layout.world_size // 7)):
        assert layout.group_of("data", rank) == alike(rank, where, {"dp", "cp"})  # type: ignore[arg-type]
        for axis in ("edp", "ep", "etp"):
            assert layout.group_of(axis, rank) == alike(rank, expert, {axis})  # type: ignore[arg-type]
        first, last = layout.owner_of(0), layout.owner_of(layout.stages - 1)
        column = {where[r]["pp"]: r for r in layout.group_of("pp", rank)}
        tied = {column[first], column[last]}
        expected = tuple(sorted(tied)) if len(tied) == 2 and rank in tied else ()
        assert layout.group_of("tie", rank) == expected
    assert layout.groups("world") == (tuple(range(layout.world_size)),)
    strides = {a: sum(e[a] for e in expert) for a in ("edp", "ep", "etp")}
    assert strides == {a: layout.world_size * (layout.degree(a) - 1) // 2 for a in ("edp", "ep", "etp")}  # type: ignore[arg-type]


def test_groups_by_hand() -> None:
    layout = Layout.parse("dp2 tp2 pp2")
    assert layout.coordinate(5) == {"tp": 1, "cp": 0, "dp": 0, "pp": 1}
    assert layout.groups("tp") == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert layout.groups("dp") == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert layout.groups("pp") == layout.groups("tie") == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert layout.groups("cp") == tuple((rank,) for rank in range(8))
    three = Layout.parse("tp2 pp3")
    assert three.groups("tie") == ((0, 4), (1, 5))
    assert three.group_of("tie", 2) == ()
    assert Layout.parse("pp3:zbv").groups("tie") == Layout.parse("dp4").groups("tie") == ()


def test_data_groups_by_hand_join_dp_and_cp_in_rank_order() -> None:
    layout = Layout.parse("dp2 tp2 cp2")
    assert layout.groups("data") == ((0, 2, 4, 6), (1, 3, 5, 7))
    assert layout.groups("data", size=2) == ((0, 2), (1, 3), (4, 6), (5, 7))


def test_expert_folding_by_hand() -> None:
    # 8 ranks of a stage, etp fastest, then ep, then edp.
    layout = Layout.parse("dp4 tp2 ep2 etp2")
    assert layout.edp == 2
    assert layout.groups("etp") == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert layout.groups("ep") == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert layout.groups("edp") == ((0, 4), (1, 5), (2, 6), (3, 7))
    # Two stages of 4 ranks: experts fold tp away (etp1), and never cross stages.
    layout = Layout.parse("dp2 tp2 pp2 ep4")
    assert layout.groups("ep") == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert layout.groups("edp") == tuple((rank,) for rank in range(8))
    # pp fastest: the ranks of a stage are every other one.
    layout = Layout.parse("dp2 tp2 pp2 ep2 order=pp-tp-dp-cp")
    assert layout.stage_ranks(0) == (0, 2, 4, 6)
    assert layout.groups("ep") == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert layout.groups("edp") == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert layout.expert_coordinate(7) == {"etp": 0, "ep": 1, "edp": 1, "pp": 1}


def test_size_cuts_groups_in_runs() -> None:
    layout = Layout.parse("tp4 dp2")
    assert layout.groups("tp", size=2) == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert layout.group_of("tp", 6, size=2) == (6, 7)
    assert layout.groups("tp", size=4) == layout.groups("tp")
    assert layout.groups("tp", size=2, across=True) == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert layout.group_of("tp", 6, size=2, across=True) == (4, 6)
    assert layout.groups("tp", size=4, across=True) == tuple((rank,) for rank in range(8))
    assert layout.groups("tp", size=1, across=True) == layout.groups("tp")
    with pytest.raises(LayoutError, match=r"groups of 3 do not divide tp = 4 .*nearest: 2 or 4"):
        layout.groups("tp", size=3)


def test_crossing_nodes() -> None:
    layout = Layout.parse("dp2 tp4 pp2")  # 16 ranks
    assert layout.crossing("tp", 8) == ()
    assert layout.crossing("tp", 2) == layout.groups("tp")
    assert layout.crossing("pp", 8) == layout.groups("pp")
    assert layout.crossing("dp", 8) == ()
    assert layout.crossing("tp", 6) == ((4, 5, 6, 7),)  # nodes end before ranks 6 and 12
    with pytest.raises(LayoutError, match="at least 1"):
        layout.crossing("tp", 0)


def test_virtual_stages() -> None:
    loop, v = Layout.parse("pp3:1f1b*2"), Layout.parse("pp3:zbv")
    assert [loop.virtual_stages_of(p) for p in range(3)] == [(0, 3), (1, 4), (2, 5)]
    assert [v.virtual_stages_of(p) for p in range(3)] == [(0, 5), (1, 4), (2, 3)]
    for layout in (loop, v, Layout.parse("pp4"), Layout.parse("dp2"), Layout.parse("pp2:bfs*3")):
        owners = {s: p for p in range(layout.pp) for s in layout.virtual_stages_of(p)}
        assert [layout.owner_of(s) for s in range(layout.stages)] == [owners[s] for s in range(layout.stages)]
        assert len(owners) == layout.stages == layout.pp * layout.chunks


def test_sizes() -> None:
    layout = Layout.parse("dp2 tp4 pp4:1f1b*2 cp2 ep8")
    assert (layout.world_size, layout.data, layout.edp, layout.stages) == (64, 4, 2, 8)
    assert layout.world_size == prod(layout.degree(a) for a in ("dp", "tp", "pp", "cp"))
    assert layout.sequence_parallel
    assert not Layout.parse("tp4 nosp").sequence_parallel
    assert not Layout.parse("dp4").sequence_parallel
    assert (layout.degree("tie"), Layout.parse("pp2:zbv").degree("tie")) == (2, 1)


def test_context_degrees_follow_the_method() -> None:
    pairs = {"ring": (8, 1), "ulysses": (1, 8), "gather": (1, 1), "ring2xulysses4": (2, 4)}
    for method, (ring, ulysses) in pairs.items():
        layout = Layout.parse(f"cp8:{method}")
        assert (layout.cp_ring, layout.cp_ulysses) == (ring, ulysses)


def test_replace_works_out_what_was_implied() -> None:
    assert str(Layout.parse("cp4").replace(cp=2)) == "cp2:ring"
    assert str(Layout.parse("cp4").replace(cp_method="ulysses")) == "cp4:ulysses"
    assert str(Layout.parse("pp2:zbv").replace(schedule="gpipe")) == "pp2:gpipe"
    assert str(Layout.parse("pp2").replace(schedule="zbv")) == "pp2:zbv"
    assert str(Layout.parse("pp2:1f1b*2").replace(dp=2)) == "dp2 pp2:1f1b*2"


@pytest.mark.parametrize(
    ("axis", "expected"),
    [
        ("dp", "tp2 pp2:gpipe@3+1 cp2:ulysses ep4 zero3/2"),
        ("tp", "dp4 pp2:gpipe@3+1 cp2:ulysses ep4 zero3/4"),
        ("pp", "dp4 tp2 cp2:ulysses ep4 zero3/4"),
        ("cp", "dp4 tp2 pp2:gpipe@3+1 ep4 zero3/4"),
        ("ep", "dp4 tp2 pp2:gpipe@3+1 cp2:ulysses zero3/4"),
    ],
)
def test_without_an_axis(axis: str, expected: str) -> None:
    layout = Layout.parse("dp4 tp2 pp2:gpipe@3+1 cp2:ulysses ep4 zero3/4")
    assert str(layout.without(axis)) == expected  # type: ignore[arg-type]


@settings(max_examples=100, deadline=None)
@given(layouts())
def test_without_any_axis_is_legal(layout: Layout) -> None:
    for axis in ("dp", "tp", "pp", "cp", "ep"):
        assert layout.without(axis).degree(axis) == 1  # type: ignore[arg-type]


def test_layout_inside_other_values_is_its_text() -> None:
    class Config(Value):
        layout: Layout = Layout()

    config = Config.read({"layout": "tp2 dp2"}, where="config")
    assert config.layout == Layout(dp=2, tp=2)
    assert config.model_dump_json() == '{"layout":"dp2 tp2"}'
    assert Config.model_validate_json(config.model_dump_json()) == config
    assert TypeAdapter(Layout).validate_python({"tp": 2}) == Layout(tp=2)
    with pytest.raises(LayoutError, match="unknown layout token"):
        Config.read({"layout": "tq2x"}, where="config")


REFUSED_TEXT = {
    "": "empty layout; one device is 'dp1'",
    "ddp4": r"unknown layout token 'ddp4' \(did you mean 'dp4'\?\)",
    "dp-1": r"unknown layout token 'dp-1' \(did you mean 'dp1'\?\)",
    "no-sp": r"unknown layout token 'no-sp' \(did you mean 'nosp'\?\)",
    "\N{ARABIC-INDIC DIGIT TWO}": "unknown layout token .*known: dp, tp, pp",
    "dp": "layout token 'dp' needs a number, such as dp2",
    "dp2 dp4": "dp is given twice: 'dp2' and 'dp4'",
    "tp2 nosp nosp": "nosp is given twice",
    "dp0": "dp must be at least 1, got 0; nearest: dp=1",
    "dp1234567890": "10 digits; at most 9",
    "dp999999999": "needs 999999999 ranks; at most 16777216",
    "dp4x": "cannot read 'x'; write dp4",
    "dp2tp2": "tokens are separated by spaces; write 'dp2 tp2'",
    "dp2,tp2": "write 'dp2 tp2'",
    "dp2xtp2xpp2": "write 'dp2 tp2 pp2'",
    "dp2, tp2": "write 'dp2'",
    "dp2pp2:gpipe@flops": "write 'dp2 pp2:gpipe@flops'",
    "cp2:ringetp2ep2nosp": "write 'cp2:ring etp2 ep2 nosp'",
    "zero1/x": r"cannot read '/x'; write zeroK/G \(nearest: zero1\)",
    "zero4": "zero takes 0, 1, 2 or 3, got 4; nearest: 3",
    "dp8 zero0/4": "zero0 shards nothing.*nearest: zero1/4",
    "dp8 cp2 zero3/6": "groups of 6 do not divide dp8 x cp2 = 16 data ranks; nearest group: 4 or 8",
    "dp8 zero3/0": "groups of 0 do not divide dp8 x cp1 = 8 data ranks; nearest group: 1",
    "pp4:1f1": r"unknown schedule '1f1' \(did you mean '1f1b'\?\)",
    "pp4x": "write ppN:schedule",
    "pp4:1f1b*1": r"chunks are a number of at least 2, got '1'; nearest: \*2",
    "pp4:1f1b*x": "chunks are a number of at least 2, got 'x'",
    "pp4:zbv*2": r"zbv implies 2 chunks; leave out \*2",
    "pp4:gpipe*2": r"gpipe takes no chunks, got \*2; nearest: pp4:gpipe or pp4:1f1b\*2",
    "pp4:zbh1*3": "zbh1 takes no chunks",
    "pp1:gpipe": "needs pp of at least 2, got 'pp1:gpipe'; nearest: pp2",
    "pp1@9": "needs pp of at least 2, got 'pp1@9'",
    "pp2@flop": r"unknown placement 'flop' \(did you mean 'flops'\?\)",
    "pp2@9+": "unknown placement '9[+]'; write @even",
    "pp2@9+11+10": r"placement @9\+11\+10 lists 3 stages, but pp2 x 1 chunks = 2; nearest: 2 numbers",
    "pp2:zbv@9+11": "lists 2 stages, but pp2 x 2 chunks = 4",
    "pp2@9+0": "a stage needs at least 1 decoder layer, got 0",
    "cp4:rign": r"unknown cp method 'rign' \(did you mean 'ring'\?\)",
    "cp1:gather": "cp method gather needs cp of at least 2, got cp1",
    "cp8:ring2xulysses2": "ring2xulysses2 = 4, but cp8; nearest: cp8:ring2xulysses4",
    "cp6:ring4xulysses2": "ring4xulysses2 = 8, but cp6; nearest: cp6:ring3xulysses2",
    "cp2:ring0xulysses2": "cp_ring must be at least 1, got 0",
    "dp2 tp2 ep3": "ep3 x etp1 = 3 does not divide the dp2 x cp1 x tp2 = 4 .*nearest ep: 2 or 4",
    "dp2 ep8": "ep8 x etp1 = 8 does not divide the dp2 x cp1 x tp1 = 2 .*nearest ep: 2; .*: for ep8 take dp8",
    "ep2": "nearest ep: 1; ep adds no ranks: for ep2 take dp2",
    "dp3 tp2 ep4 etp2": "nearest ep: 3; ep adds no ranks: for ep4 etp2 take dp12",
    "dp4 etp3": "nearest etp: 2 or 4",
    "dp4 tp4 ep4 nosp": "experts with etp1 and tp4 need sequence parallelism.*leave out nosp, or use etp4",
    "dp4 tp4 etp2 nosp": "experts with etp2 and tp4 need sequence parallelism",
    "order=tp-dp": "order needs tp, cp, dp and pp once each; default: order=tp-cp-dp-pp",
    "order=tp-tp-dp-pp": "order needs tp, cp, dp and pp once each",
    "tp2 " * 3000: "at most 10000 are read",
}


@pytest.mark.parametrize("text", REFUSED_TEXT, ids=lambda text: text[:20] or "empty")
def test_refused_text(text: str) -> None:
    with pytest.raises(LayoutError, match=REFUSED_TEXT[text]) as caught:
        Layout.parse(text)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"dp": "x"}, "dp: expected a whole number"),
        ({"chunk": 2}, r"unknown key 'chunk' \(did you mean 'chunks'\?\)"),
        ({"tp": -2}, "tp must be at least 1, got -2"),
        ({"pp": 2, "schedule": "zb"}, "schedule: expected 'gpipe'"),
        ({"pp": 2, "schedule": "zbv", "chunks": 3}, "zbv always has 2 chunks, got 3; write pp2:zbv"),
        ({"chunks": 2}, "needs pp of at least 2"),
        ({"cp": 4, "cp_ring": 2}, "cp4:ring leaves no choice of cp_ring=2 and cp_ulysses=1"),
        ({"cp": 4, "cp_method": "ring_ulysses"}, "ring1xulysses1 = 1, but cp4"),
        ({"zero": -1}, "zero takes 0, 1, 2 or 3, got -1; nearest: 0"),
        ({"order": ("tp", "cp", "dp")}, "order needs tp, cp, dp and pp once each, got 'tp-cp-dp'"),
    ],
)
def test_refused_fields(fields: dict[str, object], message: str) -> None:
    with pytest.raises(LayoutError, match=message) as caught:
        Layout(**fields)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


def test_refused_questions() -> None:
    layout = Layout.parse("dp2 pp2")
    with pytest.raises(LayoutError, match=r"rank 4 is not in 0\.\.3"):
        layout.coordinate(4)
    with pytest.raises(LayoutError, match=r"rank -1 is not in 0\.\.3"):
        layout.group_of("dp", -1)
    with pytest.raises(LayoutError, match=r"dp coordinate 2 is not in 0\.\.1"):
        layout.rank(dp=2)
    with pytest.raises(LayoutError, match=r"virtual stage 2 is not in 0\.\.1"):
        layout.owner_of(2)
    with pytest.raises(LayoutError, match=r"pp coordinate 2 is not in 0\.\.1"):
        layout.virtual_stages_of(2)
    with pytest.raises(LayoutError, match=r"unknown axis 'ddp' \(did you mean 'dp'\?\)"):
        layout.groups("ddp")  # type: ignore[arg-type]

"""Lowering, and the text form of action lists: what is read, what is refused and where."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fivefold.core.layout import Layout
from fivefold.errors import ConfigError
from fivefold.strategies.pipeline import actions as module
from fivefold.strategies.pipeline.actions import (
    Action,
    edge_rounds,
    format_actions,
    lower,
    microbatches_of,
    parse_actions,
    read_actions,
)
from fivefold.strategies.pipeline.check import check_actions


def names(actions: list[Action]) -> str:
    return " ".join(str(action) for action in actions)


def test_chunks_on_one_rank_exchange_nothing() -> None:
    """A pipeline folded in two: chunks 1 and 2 are neighbours on rank 1."""
    lists = parse_actions("0F0, 3F0, 3I0, 0I0, 0W0, 3W0 \n 1F0, 2F0, 2B0, 1B0")
    outer, inner = lower(lists, {0: 0, 1: 1, 2: 1, 3: 0}.__getitem__, 4)
    assert names(inner) == (
        "RECV_F(1,0) F(1,0) RECV_B(2,0) F(2,0) SEND_F(2,0) B(2,0) REDUCE_GRAD(2) B(1,0) SEND_B(1,0) REDUCE_GRAD(1)"
    )
    assert names(outer) == (
        "RECV_F(3,0) F(0,0) SEND_F(0,0) F(3,0) RECV_B(0,0) I(3,0) SEND_B(3,0) I(0,0) W(0,0) REDUCE_GRAD(0) "
        "W(3,0) REDUCE_GRAD(3)"
    )


def test_a_message_that_is_used_late_is_received_in_the_order_of_the_sends() -> None:
    """Rank 0 sends 0, 1, 2; rank 1 reads 2, 0, 1, and sends its gradients in another order than rank 0 reads them."""
    lists = parse_actions("0F0, 0F1, 0F2, 0B0, 0B1, 0B2\n1F2, 1F0, 1F1, 1B1, 1B2, 1B0")
    cut = Layout.parse("pp2:custom")
    first, second = lowered = lower(lists, cut.owner_of, 2)
    assert names([a for a in second if a.kind in ("F", "RECV_F")]) == (
        "RECV_F(1,0) RECV_F(1,1) RECV_F(1,2) F(1,2) F(1,0) F(1,1)"
    )
    assert names([a for a in first if a.kind in ("B", "RECV_B")]) == (
        "RECV_B(0,1) RECV_B(0,2) RECV_B(0,0) B(0,0) B(0,1) B(0,2)"
    )
    check_actions(lowered, cut, 3)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_any_order_of_microbatches_has_matching_ends(data: st.DataObject) -> None:
    """Every rank takes the microbatches as it likes, all forwards first: legal, whatever the orders are."""
    p, m = data.draw(st.integers(2, 4)), data.draw(st.integers(1, 5))
    cut = Layout.parse(f"pp{p}:custom")
    lists = []
    for chunk in range(p):
        forward, backward = (data.draw(st.permutations(range(m))) for _ in "FB")
        lists.append([*(Action("F", chunk, j) for j in forward), *(Action("B", chunk, j) for j in backward)])
    lowered = lower(lists, cut.owner_of, p)
    check_actions(lowered, cut, m)
    for r in range(p - 1):
        for way, source, target in (("F", r, r + 1), ("B", r + 1, r)):
            sent = [a.microbatch for a in lowered[source] if a.kind == f"SEND_{way}"]
            assert sent == [a.microbatch for a in lowered[target] if a.kind == f"RECV_{way}"]


@pytest.mark.parametrize(
    "text", ["pp2", "pp5", "pp2:1f1b*3", "pp4:bfs*2", "pp3:zbv", "pp2:dualpipev", "dp2 pp4"]
)
def test_rounds_hold_every_edge_once_and_no_rank_twice(text: str) -> None:
    cut = Layout.parse(text)
    rounds = edge_rounds(cut)
    edges = [tuple(edge) for turn in rounds for edge in turn]
    apart = [s for s in range(cut.stages - 1) if cut.owner_of(s) != cut.owner_of(s + 1)]
    assert sorted(edges) == sorted([("F", s, s + 1) for s in apart] + [("B", s + 1, s) for s in apart])
    for turn in rounds:
        ends = [cut.owner_of(end) for edge in turn for end in edge[1:]]
        assert len(ends) == len(set(ends))


def test_text_goes_both_ways() -> None:
    text = "# two ranks\n0F0, 0F1,,0I0 , 0W0,0B1  # and a remark\n\n1F0,1B0, ,1F1,1B1\n"
    lists = parse_actions(text)
    assert lists[0][2] == Action("I", 0, 0)
    assert format_actions(lists) == ("0F0, 0F1, 0I0, 0W0, 0B1", "1F0, 1B0, 1F1, 1B1")
    assert parse_actions("\n".join(format_actions(lists))) == lists


def test_what_torch_writes_is_read(tmp_path: Path) -> None:
    """A CSV of its computations, with empty cells for idle turns."""
    import csv

    from torch.distributed.pipelining.schedules import _Action, _ComputationType

    rows = [
        [_Action(0, _ComputationType.FORWARD, 0), None, _Action(0, _ComputationType.FULL_BACKWARD, 0)],
        [None, _Action(1, _ComputationType.FORWARD, 0), _Action(1, _ComputationType.BACKWARD_INPUT, 0),
         _Action(1, _ComputationType.BACKWARD_WEIGHT, 0)],
    ]  # fmt: skip
    path = tmp_path / "actions.csv"
    with path.open("w", newline="") as file:
        csv.writer(file).writerows(rows)
    assert read_actions(path) == ("0F0, 0B0", "1F0, 1I0, 1W0")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0, 0F1\n1F0, 1X0", "line 2, column 6: expected chunk, one of F B I W, and microbatch, .* got '1X0'"),
        ("# x\n\n0F0,0SEND_F0", "line 3, column 5: .* got '0SEND_F0'"),
        ("0F", "line 1, column 1: .* got '0F'"),
        ("0F0 0B0", "line 1, column 1: .* got '0F0 0B0'"),
        ("0F-1", "got '0F-1'"),
        ("0F1234567", "got '0F1234567'"),
        ("٣F0", "line 1, column 1"),
        ("(0F0;1B0)OVERLAP_F_B", "got '\\(0F0;1B0\\)OVERLAP_F_B'"),
        ("", "no actions; write a line for each pipeline rank"),
        ("# nothing\n\n", "no actions"),
        (" , ,\n,", "no actions"),
    ],
)  # fmt: skip
def test_faults_of_the_text_name_their_place(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        parse_actions(text)
    assert len(str(caught.value).splitlines()) == 1


def test_faults_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"cannot read actions .*absent: No such file"):
        read_actions(tmp_path / "absent")
    path = tmp_path / "actions"
    path.write_bytes(b"\xff\xfe0F0")
    with pytest.raises(ConfigError, match="not UTF-8 text"):
        read_actions(path)
    path.write_text("0F0, 0G0")
    with pytest.raises(ConfigError, match=r"actions .*actions, line 1, column 6: expected chunk"):
        read_actions(path)
    monkeypatch.setattr(module, "FILE_LIMIT_BYTES", 8)
    path.write_text("0F0, 0B0 ")
    with pytest.raises(ConfigError, match="has 9 B; at most 8 B are read"):
        read_actions(path)


def test_more_microbatches_than_a_step_has() -> None:
    assert microbatches_of(["0F9999", "1F2"]) == 10_000
    with pytest.raises(ConfigError, match="the actions have a microbatch 999999; at most 10000"):
        microbatches_of(["0F999999"])

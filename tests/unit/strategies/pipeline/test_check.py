"""Lists that are no training step, each refused with the action and rank at fault."""

from __future__ import annotations

import random

import pytest

from fivefold.core.layout import Layout
from fivefold.errors import LayoutError
from fivefold.strategies.pipeline.actions import Action, lower, parse_actions
from fivefold.strategies.pipeline.check import check_actions, deadlock
from fivefold.strategies.pipeline.schedules import computations

GOOD = "0F0, 0F1, 0B0, 0B1\n1F0, 1I0, 1F1, 1W0, 1B1"


def check(text: str, layout: str = "pp2:custom", microbatches: int = 2) -> None:
    check_actions(parse_actions(text), Layout.parse(layout), microbatches)


def test_a_training_step_passes() -> None:
    check(GOOD)
    check("0F0, 2F0, 2B0, 0B0\n1F0, 3F0, 3B0, 1B0", "pp2:custom*2", 1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0, 0B0", "the actions have 1 pipeline ranks, pp2:custom has 2; write one line for each rank"),
        (GOOD + "\n2F0, 2B0", "the actions have 3 pipeline ranks, pp2:custom has 2"),
        ("0F0, 2F0\n1F0, 3F0", r"the actions have 4 chunks, pp2:custom has 2; nearest: pp2:custom\*2"),
        ("0F0, 2F0\n1F0", "the actions have 3 chunks, pp2:custom has 2; each of the 2 ranks needs as many"),
        ("1F0, 1B0\n0F0, 0B0", "rank 0: 1F0 is of a chunk that rank 1 of pp2:custom holds; rank 0 holds chunk 0"),
        (GOOD.replace("0F1", "0F2"), "rank 0: 0F2 is of microbatch 2, but there are 2, 0 to 1"),
        (GOOD.replace("0F1", "0F0"), "rank 0: 0F0 stands twice"),
        (GOOD.replace("1F1, ", ""), "rank 1: 1B1 comes before 1F1, which it needs"),
        ("0B0, 0F0, 0F1, 0B1\n1F0, 1B0, 1F1, 1B1", "rank 0: 0B0 comes before 0F0, which it needs"),
        (GOOD.replace("1I0, 1F1, 1W0", "1W0, 1F1, 1I0"), "rank 1: 1W0 comes before 1I0, which it needs"),
        (GOOD.replace("0B0, ", ""), r"rank 0: 0B0 \(or 0I0, 0W0\) is missing; every forward needs its backward"),
        (GOOD.replace("0F1, 0B0, 0B1", "0B0"), "rank 0: 0F1 is missing; every chunk runs every microbatch"),
        (GOOD.replace("1W0, ", ""), "rank 1: 1W0 is missing"),
        (GOOD + ", 1W1", "rank 1: 1B1 and 1W1: a backward is one B, or one I and one W"),
        (GOOD + ", 1I1", "rank 1: 1B1 and 1I1: a backward is one B"),
        (GOOD + ", 1B0", "rank 1: 1I0 and 1B0: a backward is one B"),
    ],
)  # fmt: skip
def test_incomplete_or_out_of_order(text: str, message: str) -> None:
    with pytest.raises(LayoutError, match=message) as caught:
        check(text)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("text", "layout", "message"),
    [
        (
            "0F0, 0B0, 0F1, 0B1\n1F1, 1F0, 1B0, 1B1",
            "pp2:custom",
            "the actions of pp2:custom deadlock: rank 0 waits at 0B0 for 1B0 of rank 1, rank 1 waits at 1F1 for 0F1 of "
            "rank 0",
        ),
        (
            "2F0, 0F0, 2B0, 0B0\n1F0, 3F0, 3B0, 1B0",
            "pp2:custom*2",
            "deadlock: rank 0 waits at 2F0 for 1F0 of rank 1, rank 1 waits at 1F0 for 0F0 of rank 0",
        ),
        (
            "0F0, 0F1, 0B0, 0B1\n1F0, 1B0, 1F1, 1B1\n2F1, 2B1, 2F0, 2B0",
            "pp3:custom",
            "deadlock: rank 1 waits at 1B0 for 2B0 of rank 2, rank 2 waits at 2F1 for 1F1 of rank 1",
        ),
    ],
)
def test_a_deadlock_names_its_cycle(text: str, layout: str, message: str) -> None:
    with pytest.raises(LayoutError, match=message.replace("*", r"\*")) as caught:
        check(text, layout, 1 if "*" in layout else 2)
    assert len(str(caught.value).splitlines()) == 1


def test_a_rank_can_wait_for_itself() -> None:
    """Neighbouring chunks on one rank, as V schedules have them, in the wrong order."""
    lists = parse_actions("0F0, 3F0, 3B0, 0B0\n2F0, 1F0, 2B0, 1B0")
    assert deadlock(lists, 4) == "rank 1 waits at 2F0 for 1F0 of its own list, further on"


def runs_to_the_end(lists: list[list[Action]], stages: int) -> bool:
    """Whether all of it can be run, by brute force: any rank whose next action has what it reads, moves."""
    left, done = [list(actions) for actions in lists], set()
    moved = True
    while moved:
        moved = False
        for actions in left:
            if not actions:
                continue
            kind, chunk, j = actions[0]
            backward = {("B", chunk + 1, j), ("I", chunk + 1, j)}
            if kind == "F":
                there = chunk == 0 or ("F", chunk - 1, j) in done
            else:
                there = kind == "W" or chunk == stages - 1 or bool(backward & done)
            if there:
                done.add(tuple(actions.pop(0)))
                moved = True
    return not any(left)


def in_order(actions: list[Action]) -> bool:
    """Whether F, then B or I, then W of every chunk and microbatch stand in this order."""
    turns: dict[tuple[int, int], list[int]] = {}
    for kind, chunk, j in actions:
        turns.setdefault((chunk, j), []).append("FBIW".index(kind))
    return all(turn == sorted(turn) for turn in turns.values())


def test_deadlocks_are_found_and_nothing_else() -> None:
    """Random exchanges in good lists, each judged against brute force."""
    rng = random.Random(0)
    verdicts = []
    for _ in range(400):
        cut = Layout.parse(
            f"pp{rng.randint(2, 4)}:{rng.choice(['1f1b', '1f1b*2', 'zbh1', 'zbv', 'dualpipev'])}"
        )
        m = rng.randint(2, 6)
        lists = computations(cut, m)
        for _ in range(rng.randint(1, 30)):
            rank = rng.randrange(cut.pp)
            changed = list(lists[rank])
            a, b = rng.sample(range(len(changed)), 2)
            changed[a], changed[b] = changed[b], changed[a]
            lists[rank] = changed if in_order(changed) else lists[rank]
        verdicts.append(runs_to_the_end(lists, cut.stages))
        if verdicts[-1]:
            check_actions(lists, cut, m)
            check_actions(lower(lists, cut.owner_of, cut.stages), cut, m)
        else:
            with pytest.raises(LayoutError, match="deadlock: rank"):
                check_actions(lists, cut, m)
    assert 50 < sum(verdicts) < 350


def test_messages_are_judged_as_well() -> None:
    cut = Layout.parse("pp2:custom")
    good = lower(parse_actions(GOOD), cut.owner_of, 2)
    check_actions(good, cut, 2)
    receive, send = Action("RECV_F", 1, 0), Action("SEND_F", 0, 1)

    def without(rank: int, action: Action, at: int | None = None) -> list[list[Action]]:
        lists = [list(actions) for actions in good]
        lists[rank].remove(action)
        if at is not None:
            lists[rank].insert(at, action)
        return lists

    for lists, message in (
        (without(1, receive), r"rank 1: F\(1,0\) reads a message before it is received"),
        (without(1, receive, len(good[1]) - 1), r"rank 1: F\(1,0\) reads a message before it is received"),
        (
            without(1, Action("RECV_F", 1, 1), 0),
            r"from chunk 0 to 1: sent are microbatches \[0, 1\], received \[1, 0\]",
        ),
        (without(0, send), r"rank 0: SEND_F\(0,1\) is missing"),
        (without(0, send, 0), r"rank 0: SEND_F\(0,1\) sends what was not made yet, or twice"),
    ):
        with pytest.raises(LayoutError, match=message):
            check_actions(lists, cut, 2)

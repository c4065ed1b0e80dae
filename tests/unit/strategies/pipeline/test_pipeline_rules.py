"""Which schedules are admitted, and a custom one with the actions that come with it."""

from __future__ import annotations

import pytest

from fivefold.core.layout import Layout
from fivefold.errors import ConfigError, LayoutError
from fivefold.strategies.pipeline import rules
from fivefold.strategies.pipeline.actions import format_actions
from fivefold.strategies.pipeline.schedules import computations


@pytest.mark.parametrize(
    "text",
    ["dp1", "pp3", "pp3:gpipe", "pp3:1f1b*2", "pp3:bfs", "pp3:bfs*2", "pp3:zbh1", "pp3:zbv", "pp3:dualpipev"],
)
def test_named_schedules_take_any_microbatches_and_no_actions(text: str) -> None:
    for m in (1, 2, 5, 12):
        rules.check_schedule(Layout.parse(text), m, None)
    with pytest.raises(LayoutError, match=r"actions are given, but .*; write pp\d:custom, or leave them out"):
        rules.check_schedule(Layout.parse(text), 2, ("0F0, 0B0",))


def test_a_custom_schedule_needs_its_actions_and_fits_them() -> None:
    lines = format_actions(computations(Layout.parse("pp3:1f1b*2"), 4))
    rules.check_schedule(Layout.parse("pp3:custom*2"), 4, lines)
    for layout, m, actions, error, message in (
        (
            "pp3:custom*2",
            4,
            None,
            LayoutError,
            r"pp3:custom\*2 needs its actions, a file with a line for each of 3",
        ),
        (
            "pp3:custom",
            4,
            lines,
            LayoutError,
            r"the actions have 6 chunks, pp3:custom has 3; nearest: pp3:custom\*2",
        ),
        ("pp2:custom*3", 4, lines, LayoutError, "have 3 pipeline ranks"),
        ("pp3:custom*2", 3, lines, LayoutError, "0F3 is of microbatch 3, but there are 3"),
        ("pp3:custom*2", 5, lines, LayoutError, "0F4 is missing"),
        ("pp3:custom*2", 4, (*lines[:2], "2F0, x"), ConfigError, "line 3, column 6"),
    ):
        with pytest.raises(error, match=message) as caught:
            rules.check_schedule(Layout.parse(layout), m, actions)
        assert len(str(caught.value).splitlines()) == 1

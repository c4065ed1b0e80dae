"""What `fivefold explain` prints: sentences and tables of one explanation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fivefold.cli.tables import make_console, make_table, say, span, table_of_layouts
from fivefold.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from rich.console import Console

BAR = 40
"""Characters of the longest bar."""
MOST_ALIKE = 8
"""Layouts of those that cannot be told apart that are listed; --json and --html have all."""


def show(facts: dict[str, Any]) -> None:
    """Print all of it."""
    console = make_console()
    plan = facts["plan"]
    say(
        console,
        f"{facts['model']} as {plan['layout']} on {facts['cluster']}: micro-batch {plan['micro_batch']}, global batch "
        f"{facts['global_batch']} x {facts['seq_len']} tokens, recompute {plan['recompute']}",
    )
    reasoned(console, facts)
    _waterfall(console, facts)
    _memory(console, plan)
    say(console, f"between memory, computation and communication: {facts['triangle']['text']}")
    _axes(console, facts["axes"])
    _steps(console, facts["counterfactuals"])
    _others(console, facts)
    for line in (*plan["reasons"], *facts["assumed"]):
        say(console, line)


def reasoned(console: Console, facts: dict[str, Any]) -> None:
    """The numbered steps, and what binds."""
    for number, step in enumerate(facts["reasoning"], 1):
        say(console, f"{number}. {step['step']}: {step['text']}")
    say(console, f"binding: {facts['binding']['text']}")


def _waterfall(console: Console, facts: dict[str, Any]) -> None:
    plan, rows = facts["plan"], [row for row in facts["waterfall"] if row["seconds"]]
    table = make_table("step time", "", "share", "")
    longest = plan["step_time_s"]
    for row in rows:
        begin = round(row["from_s"] / longest * BAR)
        width = max(1, round((row["from_s"] + row["seconds"]) / longest * BAR) - begin)
        table.add_row(
            row["term"], format_seconds(row["seconds"]), f"{row['share']:.1%}", " " * begin + "#" * width
        )
    low, high = format_seconds(plan["step_time_p10_s"]), format_seconds(plan["step_time_p90_s"])
    table.add_row("step", format_seconds(longest), "", f"{low} to {high} (10 to 90 %)")
    console.print(table)


def _memory(console: Console, plan: dict[str, Any]) -> None:
    table = make_table(f"memory of rank {plan['peak_rank']}", "", "share", "")
    total = plan["peak_memory_bytes"]
    for term, n in plan["memory"].items():
        if n:
            width = round(n / plan["capacity_bytes"] * BAR)
            table.add_row(term, format_bytes(n), f"{n / plan['capacity_bytes']:.1%}", "#" * width)
    table.add_row("in all", format_bytes(total), f"{total / plan['capacity_bytes']:.1%}", "of the device")
    console.print(table)


def _axes(console: Console, rows: list[dict[str, Any]]) -> None:
    table = make_table("axis", "cuts", "sent a step", "exposed", "memory saved", "at most")
    for row in rows:
        saved = "never legal" if row["saved_bytes"] is None else format_bytes(row["saved_bytes"])
        table.add_row(
            f"{row['axis']}{row['degree']}", row["cuts"], format_bytes(row["sent_bytes"]),
            format_seconds(row["exposed_s"]), saved, row["limit"],
        )  # fmt: skip
    console.print(table)


def _steps(console: Console, rows: list[dict[str, Any]]) -> None:
    say(console, "one step away:")
    for row in sorted(rows, key=lambda row: float(row["step_time_ratio"])):
        say(console, f"  {row['text']}")


def _others(console: Console, facts: dict[str, Any]) -> None:
    best, plan = facts["best"], facts["plan"]
    if best and best["layout"] != plan["layout"]:
        gain = 1 - best["step_time_ratio"]
        say(
            console,
            f"best found: {best['layout']}, micro-batch {best['micro_batch']}, recompute {best['recompute']}: "
            f"{abs(gain):.1%} {'faster' if gain >= 0 else 'slower'}",
        )
    say(console, f"not to be told apart: {facts['alike_text']}")
    if facts["alike"]:
        cells = [
            [
                one["layout"], str(one["micro_batch"]), one["recompute"], format_seconds(one["step_time_s"]),
                span(one["step_time_p10_s"], one["step_time_p90_s"]), f"{one['step_time_ratio'] - 1:+.1%}",
            ]
            for one in facts["alike"][:MOST_ALIKE]
        ]  # fmt: skip
        names = ["layout", "micro-\nbatch", "recompute", "step", "10-90 %", "by"]
        console.print(table_of_layouts(console, names, cells))
        rest = len(facts["alike"]) - MOST_ALIKE
        if rest > 0:
            say(console, f"and {rest} more")
    runs = facts["runs"]
    say(console, f"to settle it: {runs['text']}")
    for number, run in enumerate(runs["runs"], 1):
        say(
            console,
            f"  {number}. {run['layout']}, micro-batch {run['micro_batch']}, recompute {run['recompute']}",
        )

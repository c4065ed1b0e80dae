"""The table of docs/verification.md, from the exhibits. `python -m tests.museum.table` writes it into the page."""

from __future__ import annotations

from pathlib import Path

from .exhibit import Fault
from .faults import FAULTS, ROOMS, of_room

PAGE = Path(__file__).parents[2] / "docs" / "verification.md"
BEGIN, END = "<!-- museum: begin -->\n", "<!-- museum: end -->\n"


def missed_by_the_loss() -> list[Fault]:
    return [fault for fault in FAULTS if not fault.loss_sees]


def table() -> str:
    """Markdown: a table for each room, then how many a loss-only check misses."""
    parts = []
    for title, room in ROOMS.items():
        parts += [
            f"**{title}**",
            "",
            "| fault | seen in | planted at, and at | the cause says | loss |",
            "|---|---|---|---|---|",
        ]
        parts += [_row(fault) for fault in of_room(room)] + [""]
    missed = missed_by_the_loss()
    parts.append(
        f"{len(FAULTS)} faults; the first loss does not show {len(missed)} of them ({sum(f.late for f in missed)} of "
        "these act from the second step on)."
    )
    return "\n".join(parts) + "\n"


def _row(fault: Fault) -> str:
    words = "; ".join(fault.words)
    seen = fault.seen_in or "-"
    where = (
        f"`{fault.layout}`, `{fault.elsewhere}`"
        + (" with documents" if fault.documents else "")
        + (" with a loss scale" if fault.overflow else "")
        + (f" with recompute={fault.recompute}" if fault.recompute != "none" else "")
        + (" with experts.rebalance_every=1" if fault.rebalance else "")
    )
    loss = "shows it" if fault.loss_sees else "misses it"
    return f"| {fault.name}: {fault.story} | {seen} | {where} | {words} | {loss} |"


def page() -> tuple[str, str]:
    """The page as it is, and as it should be."""
    text = PAGE.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    return text, f"{before}{BEGIN}\n{table()}\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(page()[1], encoding="utf-8")

"""The lab's figure of experts: how even their load is, and what travels to them."""

from __future__ import annotations

from fivefold.report.drawing import INK, PALETTE, Legend
from fivefold.report.lab_report import LabResult
from fivefold.report.rows import byte_unit, finite, label_rows, mean, note, rows, scale
from fivefold.units import format_bytes


def experts(result: LabResult) -> str:
    """Load of the busiest rank and expert over the mean, and what dispatch sends; empty without experts."""
    layouts = [one for one in result.layouts if one.expert_imbalance is not None]
    if not layouts:
        return ""
    unit, name = byte_unit([max(one.dispatch_bytes, default=0) for one in layouts])
    with rows("experts", "Load of experts and bytes of dispatch", layouts, extra_in=0.55) as drawing:
        (left, right), legend = drawing.figure.subplots(1, 2, sharey=True), Legend()
        label_rows(left, layouts, [one.expert_imbalance for one in layouts])
        label_rows(right, layouts, [one.expert_imbalance for one in layouts], named=False)
        for y, layout in enumerate(layouts):
            ranks, expert = finite(layout.rank_imbalance), finite(layout.expert_imbalance)
            if ranks is not None:
                bar = left.barh(y, ranks, 0.62, color=PALETTE["ep"][0])
                drawing.tip(bar, f"{layout.layout}: busiest rank {ranks:.2f} times the mean")
                legend.setdefault("busiest rank", bar)
                note(left, ranks, y, f"{ranks:.2f}")
            if expert is not None:
                (dot,) = left.plot(expert, y, "o", ms=5, color=INK)
                drawing.tip(dot, f"{layout.layout}: busiest expert {expert:.2f} times the mean")
                legend.setdefault("busiest expert", dot)
            sent = mean(layout.dispatch_bytes)
            if sent is not None:
                most = max(layout.dispatch_bytes)
                bar = right.barh(y, sent / unit, 0.62, color=PALETTE["ep"][0])
                drawing.tip(bar, f"{layout.layout}: {format_bytes(sent)} a step, mean of ranks")
                (tick,) = right.plot([most / unit] * 2, [y - 0.36, y + 0.36], color=INK, lw=2)
                legend.setdefault("rank that sends most", tick)
                note(right, most / unit, y, format_bytes(most))
            else:
                note(right, 0, y, "none")
        scale(left, [v for one in layouts for v in (one.rank_imbalance, one.expert_imbalance)], "max / mean")
        left.set_title("Imbalance")
        sizes = [size / unit for one in layouts for size in one.dispatch_bytes]
        scale(right, sizes, f"{name} per step and rank", room=1.35)
        right.set_title("Dispatch and combine")
        drawing.figure.legend(
            list(legend.values()), list(legend), loc="outside upper left", ncols=len(legend)
        )
        return drawing.svg()

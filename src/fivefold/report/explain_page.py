"""An explanation as one HTML page that opens offline: no script, nothing to fetch. Drawn from its facts alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fivefold.core.regular_file import write_whole
from fivefold.errors import RecordError
from fivefold.report.page import fill
from fivefold.units import format_bytes, format_count, format_seconds


def render(facts: dict[str, Any]) -> str:
    """The whole page as text. `facts`: what `fivefold explain --json` prints."""
    from fivefold.report.explain_plots import draw_all

    steps = sorted(facts["counterfactuals"], key=lambda row: float(row["step_time_ratio"]))
    return fill("explain.html", draw_all(facts), **{**facts, "counterfactuals": steps}, facts=_head(facts))


def _head(facts: dict[str, Any]) -> dict[str, str]:
    plan = facts["plan"]
    low, high = format_seconds(plan["step_time_p10_s"]), format_seconds(plan["step_time_p90_s"])
    used, capacity = format_bytes(plan["peak_memory_bytes"]), format_bytes(plan["capacity_bytes"])
    return {
        "cluster": facts["cluster"],
        "step": f"{facts['global_batch']} × {facts['seq_len']} tokens",
        "micro-batch, recompute": f"{plan['micro_batch']}, {plan['recompute']}",
        "step time": f"{format_seconds(plan['step_time_s'])} ({low} to {high})",
        "tokens/s of a device": format_count(plan["tokens_per_s_per_gpu"]),
        "MFU": f"{100 * plan['mfu']:.1f} %" if plan["mfu"] else "–",
        "peak memory": f"{used} of {capacity}",
    }


def write_page(facts: dict[str, Any], path: Path) -> None:
    """Write the page, whole or not at all. Raises: RecordError where the disk refuses."""
    text = render(facts)
    try:
        write_whole({path: text})
    except OSError as error:
        raise RecordError(f"cannot write the page {path}: {error.strerror or error}") from None

"""Progress on standard error: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

from fivefold.cli.process import tell
from fivefold.units import format_bytes, format_count

if TYPE_CHECKING:
    from rich.progress import Progress as Bar
    from rich.progress import TaskID

    from fivefold.core.plan import Plan
    from fivefold.runtime.launch import Rank
    from fivefold.train.trainer import StepMetrics

ROOM = 135
"""Columns that a bar and all numbers take, without the title; a narrower terminal gets neither bar nor FLOP/s."""
EXPERTS_ROOM = 32
"""Those of a model with experts, beside them."""
PLAIN_EVERY_S = 5.0
"""Seconds between two lines where there is no terminal."""


class TrainProgress:
    """Shows loss, throughput, FLOP/s, memory, the share of communication and how unevenly experts are chosen."""

    def __init__(self) -> None:
        self.bar: Bar | None = None
        self.task: TaskID | None = None
        self.said = 0.0
        self.steps = 0
        self.measured = ""
        self.roomy = True

    def start(self, plan: Plan, first: int, steps: int, rank: Rank) -> None:
        self.steps = steps
        title = f"{plan.model.name} {plan.layout}"
        if not sys.stderr.isatty():
            ranks = f"{rank.world_size} rank" + "s" * (rank.world_size > 1)
            since = f", from step {first}" if first else ""
            tell(f"training {title}: {steps} steps on {ranks}{since}")
            return
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        console = Console(stderr=True)
        room = ROOM + EXPERTS_ROOM * any(block.mlp.kind == "moe" for block in plan.model.blocks)
        self.roomy = console.width >= room + len(title)
        if not self.roomy:
            console.print(title, markup=False, highlight=False)
        columns = (
            *((TextColumn(title, markup=False), BarColumn()) if self.roomy else ()),
            MofNCompleteColumn(),
            TextColumn("{task.fields[line]}"),
            TimeRemainingColumn(),
        )
        self.bar = Progress(*columns, console=console)
        self.bar.start()
        self.task = self.bar.add_task("", total=steps, completed=first, line="")

    def update(self, metrics: StepMetrics, memory_bytes: int | None) -> None:
        memory = "-" if memory_bytes is None else format_bytes(memory_bytes)
        if metrics.validation_loss is not None:
            self.measured = f" (validation {metrics.validation_loss:.4f})"
        flops = f"{format_count(metrics.flops_per_s)}FLOP/s  " if self.roomy else ""
        line = (
            f"loss {metrics.loss:.4f}{self.measured}  {format_count(metrics.tokens_per_s)} tok/s  "
            f"{flops}{memory}  comm {metrics.comm_frac:.0%}{_of_experts(metrics)}"
        )
        if self.bar is not None and self.task is not None:
            self.bar.update(self.task, completed=metrics.step, line=line)
        elif time.monotonic() - self.said > PLAIN_EVERY_S or metrics.step in (1, self.steps):
            self.said = time.monotonic()
            tell(f"step {metrics.step}/{self.steps}  {line}")

    def warn(self, line: str) -> None:
        """Say something above the bar; the run goes on."""
        if self.bar is not None:
            self.bar.console.print(f"warning: {line}", markup=False, highlight=False)
        else:
            tell(f"warning: {line}")

    def stop(self) -> None:
        if self.bar is not None:
            self.bar.stop()

    def leave(self) -> None:
        """In the process that started the ranks: rank 0 may have been ended while its bar hid the cursor."""
        if sys.stderr.isatty():
            from rich.console import Console

            Console(stderr=True).show_cursor(True)


def _of_experts(metrics: StepMetrics) -> str:
    """The busiest expert over the mean, and what was dropped; nothing for a model without experts."""
    experts = metrics.experts
    if experts is None:
        return ""
    dropped = f"  dropped {experts.dropped_frac:.1%}" if experts.dropped_choices else ""
    return f"  imbalance {experts.expert_imbalance:.2f}{dropped}"

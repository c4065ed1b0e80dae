"""`fivefold verify --matrix`: the walk, its progress and its table."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from fivefold.errors import ConfigError

if TYPE_CHECKING:
    from fivefold.core.layout import Layout
    from fivefold.core.model_spec import ModelSpec
    from fivefold.strategies.legal import Case
    from fivefold.verify.verify import Verdict

UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}


def seconds_of(budget: str | None) -> float:
    """`90s`, `10m`, `2h` -> seconds; None -> no limit. Raises: ConfigError."""
    if budget is None:
        return float("inf")
    found = re.fullmatch(r"(\d{1,9}(?:\.\d{1,3})?)([smh])", budget.strip())
    if found is None:
        raise ConfigError(f"a budget is a number and s, m or h, such as 10m; got {budget[:40]!r}")
    return float(found[1]) * UNITS[found[2]]


def run_matrix(
    spec: ModelSpec,
    max_ranks: int,
    *,
    dtype: Literal["float64", "float32"],
    steps: int,
    seed: int,
    device: str,
    budget: str | None,
    results: Path | None,
    as_json: bool,
) -> int:
    """Judge the layouts one after another. Exit code 0 if every one that was judged passed."""
    from fivefold.cli.output import print_json
    from fivefold.verify.matrix import chosen_cases, skipped_shapes, walk

    limit_s = seconds_of(budget)
    cases = chosen_cases(spec, max_ranks)
    skipped = skipped_shapes(spec, max_ranks)
    verdicts: list[Verdict] = []
    steps_of = walk(
        spec,
        cases,
        dtype=dtype,
        steps=steps,
        seed=seed,
        device=device,
        budget_s=limit_s,
        results=results,
    )
    try:
        with _progress(len(cases)) as bar:
            for verdict in steps_of:
                verdicts.append(verdict)
                bar(verdict)
    except KeyboardInterrupt:
        if results is not None:
            kept = f"{len(verdicts)} of {len(cases)} are judged"
            click.echo(f"{kept} and kept in {results}; the same command goes on", err=True)
        raise
    passed = bool(verdicts) and all(verdict.passed for verdict in verdicts)
    judged = {verdict.case for verdict in verdicts}
    left = [case for case in cases if case not in judged]
    if as_json:
        print_json(
            {
                "passed": passed,
                "complete": not left,
                "max_rel_err": max((verdict.max_rel_err for verdict in verdicts), default=0.0),
                "layouts": [verdict.model_dump(mode="json") for verdict in verdicts],
                "skipped": [{"layout": str(layout), "rule": rule} for layout, rule in skipped],
                "left": [str(case) for case in left],
            }
        )
    else:
        _print(spec.name, verdicts, skipped, left, results)
    return 0 if passed else 1


class _progress:
    """A bar on a terminal, a line a layout elsewhere; both on standard error."""

    def __init__(self, total: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self.plain = not sys.stderr.isatty()
        self.total, self.done = total, 0
        self.bar = Progress(
            TextColumn("verifying"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[line]}"),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            disable=self.plain,
        )
        self.task = self.bar.add_task("", total=total, line="")

    def __enter__(self) -> _progress:
        self.bar.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self.bar.stop()

    def __call__(self, verdict: Verdict) -> None:
        self.done += 1
        outcome = f"{verdict.max_rel_err:.1e}" if verdict.passed else "FAILED"
        line = f"{verdict.case}  {outcome}"
        self.bar.update(self.task, completed=self.done, line=line)
        if self.plain:
            click.echo(f"{self.done}/{self.total}  {line}", err=True)


def _print(
    model: str,
    verdicts: list[Verdict],
    skipped: list[tuple[Layout, str]],
    left: list[Case],
    results: Path | None,
) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{model} against one device", title_justify="left")
    for name in ("layout", "worst error", "communication", ""):
        table.add_column(name, justify="right" if name == "worst error" else "left")
    for verdict in verdicts:
        events = "as predicted" if verdict.events_match else "[red]differs[/red]"
        outcome = "[green]ok[/green]" if verdict.passed else "[red]failed[/red]"
        table.add_row(str(verdict.case), f"{verdict.max_rel_err:.1e}", events, outcome)
    console = Console(file=sys.stdout)
    console.print(table)
    failed = [verdict for verdict in verdicts if not verdict.passed]
    for verdict in failed:
        console.print(f"{verdict.case}: {verdict.cause}", markup=False, highlight=False, soft_wrap=True)
    worst = max((verdict.max_rel_err for verdict in verdicts), default=0.0)
    passed = len(verdicts) - len(failed)
    console.print(
        f"{passed} of {len(verdicts)} are the same model, worst error {worst:.1e}"
        if verdicts
        else "no layout was judged"
    )
    if skipped:
        shapes = "1 shape is" if len(skipped) == 1 else f"{len(skipped)} shapes are"
        text = f"{shapes} not legal; the first: {skipped[0][0]}: {skipped[0][1]}"
        console.print(text, markup=False, highlight=False, soft_wrap=True)
    if left:
        more = "the same command goes on" if results else "give --results FILE to be able to go on"
        console.print(f"the budget is spent: {len(left)} layouts are left; {more}", soft_wrap=True)

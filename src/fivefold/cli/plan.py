"""`fivefold plan`: the best layouts of a model on a cluster."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fivefold.cli import asked

if TYPE_CHECKING:
    from fivefold.plan.lattice import Fixed
    from fivefold.plan.question import Question
    from fivefold.plan.search import Answer, Found

USUAL_TOKENS = 4_194_304
"""Tokens of a step unless told otherwise: four million, or a sequence for every fourth device if that is more."""


@click.command()
@click.option("--fix", "text", default="", help="Parts of the layout that are given: 'tp8 zero1', 'pp4:zbv'.")
@click.option("--micro-batch", type=click.IntRange(1, 10**6), help="Fix the sequences at a time.")
@click.option("--recompute", help="Fix what is computed again: none, full, attention, mlp, moe, joined by +.")
@click.option(
    "--objective", type=click.Choice(["time", "cost", "devices", "sequence", "micro-batch"]), default="time",
    show_default=True,
    help="Shortest step, least device time per token, fewest devices, longest sequence, largest micro-batch.",
)  # fmt: skip
@click.option("--top", type=click.IntRange(1, 256), default=10, show_default=True, help="Plans to show.")
@click.option(
    "--calibration", type=click.Path(path_type=Path), help="A file that `fivefold calibrate` wrote."
)
@asked.options
def command(
    text: str,
    micro_batch: int | None,
    recompute: str | None,
    objective: Any,
    top: int,
    calibration: Path | None,
    as_json: bool,
    **options: Any,
) -> int:
    """Search all layouts of a model on a cluster: what fits, and what is fastest.

    Where nothing fits, says by how much and the nearest things that do (exit code 2).

    \b
      fivefold plan --model llama-3.1-70b --cluster "64 H100"
      fivefold plan --model deepseek-v3 --cluster "16384 H100" --fix tp8
    """
    import time

    from fivefold.cli.output import print_json
    from fivefold.errors import LayoutError
    from fivefold.plan.objectives import questions
    from fivefold.plan.refusal import refusal

    start = time.perf_counter()
    options["global_batch"] = options["global_batch"] or 1
    question = asked.question(**options)
    question = _usual_batch(question) if options["global_batch"] == 1 else question
    fixed = _fixed(text, micro_batch, recompute)
    tried = [
        (one, _search(one, given, top, calibration)) for one, given in questions(question, fixed, objective)
    ]
    kept = min(tried, key=lambda pair: _device_seconds_per_token(*pair))
    asked_of, answer = kept
    facts = _facts(asked_of, answer, elapsed_s=time.perf_counter() - start)
    facts["reasons"] = asked.said(options["cluster"])
    if not answer.found:
        why, nearest = refusal(asked_of, fixed, answer)
        if not as_json:
            raise LayoutError(why)
        print_json({**facts, "refusal": why, "nearest": nearest})
        return 2
    if as_json:
        print_json(facts)
    else:
        _print(facts)
    return 0


def _usual_batch(question: Question) -> Question:
    from dataclasses import replace

    batch = max(1, USUAL_TOKENS // question.seq_len, question.devices // 4)
    return replace(question, global_batch=batch)


def _fixed(text: str, micro_batch: int | None, recompute: str | None) -> Fixed:
    from fivefold.core.layout import Layout
    from fivefold.core.layout_text import read_layout
    from fivefold.errors import LayoutError
    from fivefold.estimate.recompute import Recompute
    from fivefold.plan.lattice import Fixed

    fields = read_layout(text) if text.split() else {}
    for name in ("order", "placement", "zero_group"):
        if name in fields:
            raise LayoutError(f"--fix {text!r}: {name.replace('_', ' ')} is not searched; leave it out")
    if fields.get("schedule") in ("gpipe", "bfs", "custom"):
        raise LayoutError(
            f"--fix {text!r}: {fields['schedule']} is not searched; 1f1b, zbh1, zbv and dualpipev are"
        )
    of_pipeline: dict[str, Any] = {name: fields[name] for name in ("schedule", "chunks") if name in fields}
    Layout(**of_pipeline, pp=2)
    again = Recompute.parse(recompute) if recompute is not None else None
    return Fixed(layout=fields, micro_batch=micro_batch, recompute=again)


def _search(question: Question, fixed: Fixed, top: int, calibration: Path | None) -> Answer:
    from fivefold.plan.clock import Clock, loaded
    from fivefold.plan.search import search

    return search(question, Clock(question, loaded(calibration)), fixed, top=top)


def _device_seconds_per_token(question: Question, answer: Answer) -> float:
    if not answer.found:
        return float("inf")
    return answer.found[0].step_s * question.devices / (question.global_batch * question.seq_len)


def _facts(question: Question, answer: Answer, *, elapsed_s: float) -> dict[str, Any]:
    return {
        "model": question.spec.name,
        "cluster": str(question.cluster),
        "seq_len": question.seq_len,
        "global_batch": question.global_batch,
        "plans": [_plan(question, one) for one in answer.found],
        "legal": answer.legal,
        "evaluated": answer.evaluated,
        "fitting": answer.fitting,
        "elapsed_s": elapsed_s,
    }


def _plan(question: Question, found: Found) -> dict[str, Any]:
    from fivefold.plan.result import layout_facts, memory_facts, memory_reasons, speed_facts, state_reason
    from fivefold.units import MEGA

    choice = found.choice
    facts = {
        **layout_facts(choice.layout, choice.micro_batch, choice.recompute),
        **speed_facts(question, found.step_s, found.low_s, found.high_s, found.terms),
        **memory_facts(question, found.memory),
    }
    price = question.node.price_per_hour
    if price is not None:
        tokens_per_hour = facts["tokens_per_s_per_gpu"] * 3600
        facts["price_per_million_tokens"] = price / tokens_per_hour * MEGA
    facts["reasons"] = [
        *memory_reasons(question, found.memory),
        state_reason(question, choice.layout, found.memory),
    ]
    return facts


def _print(facts: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    from fivefold.units import format_count, format_seconds

    console = Console()
    console.print(
        f"{facts['model']} on {facts['cluster']}: global batch {facts['global_batch']} x {facts['seq_len']} tokens; "
        "tokens/s and memory of a device, mb: micro-batch",
        markup=False, highlight=False, soft_wrap=True,
    )  # fmt: skip
    table = Table()
    for name in ("layout", "mb", "recompute", "step", "10-90 %", "tokens/s", "MFU", "memory"):
        table.add_column(name, overflow="fold", no_wrap=name == "layout")
    for one in facts["plans"]:
        table.add_row(
            one["layout"], str(one["micro_batch"]), one["recompute"], format_seconds(one["step_time_s"]),
            f"{format_seconds(one['step_time_p10_s'])} .. {format_seconds(one['step_time_p90_s'])}",
            format_count(one["tokens_per_s_per_gpu"]).strip(), f"{one['mfu']:.0%}" if one["mfu"] else "-",
            f"{one['peak_memory_bytes'] / one['capacity_bytes']:.0%}",
        )  # fmt: skip
    console.print(table)
    best = facts["plans"][0]
    shares = {
        term: s / best["step_time_s"] for term, s in best["time"].items() if s > 0.001 * best["step_time_s"]
    }
    told = ", ".join(
        f"{term} {share:.1%}" for term, share in sorted(shares.items(), key=lambda pair: -pair[1])
    )
    for line in (f"time of the first: {told}", *best["reasons"], *facts["reasons"]):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    console.print(
        f"{facts['fitting']:,} of {facts['legal']:,} legal points fit; {facts['evaluated']:,} looked at in "
        f"{format_seconds(facts['elapsed_s'])}",
        highlight=False, soft_wrap=True,
    )  # fmt: skip

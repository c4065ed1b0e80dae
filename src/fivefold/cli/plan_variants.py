"""`fivefold plan --vary`: the best plan of every variant of a model."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fivefold.plan.calibration import Calibration
    from fivefold.plan.lattice import Fixed
    from fivefold.plan.objectives import Objective
    from fivefold.plan.question import Question
    from fivefold.plan.vary import Variant


def sweep(
    question: Question, fixed: Fixed, texts: tuple[str, ...], objective: Objective, known: Calibration | None,
    as_json: bool,
) -> int:  # fmt: skip
    """Plan every variant. Exit code 2 where none has a plan. Raises: ConfigError for a field that cannot vary."""
    from fivefold.cli.output import print_json
    from fivefold.plan.vary import read, variants

    start = time.perf_counter()
    rows = [_row(question, fixed, one, objective, known) for one in variants(question.spec, read(texts))]
    facts = {
        "model": question.spec.name,
        "cluster": str(question.cluster),
        "seq_len": question.seq_len,
        "global_batch": question.global_batch,
        "variants": rows,
        "elapsed_s": time.perf_counter() - start,
    }
    if as_json:
        print_json(facts)
    else:
        _print(facts)
    return 0 if any(row["plan"] for row in rows) else 2


def _row(
    question: Question, fixed: Fixed, variant: Variant, objective: Objective, known: Calibration | None
) -> dict[str, Any]:
    """The best plan of one variant, or why it has none."""
    from dataclasses import replace

    from fivefold.cli import searched
    from fivefold.core.model_counts import parameter_counts
    from fivefold.errors import LayoutError
    from fivefold.plan.refusal import why_nothing
    from fivefold.plan.result import plan_facts

    row: dict[str, Any] = {
        "variant": variant.text,
        "vary": variant.values,
        "plan": None,
        "refusal": variant.refusal,
    }
    if variant.spec is None:
        return row
    counts = parameter_counts(variant.spec)
    row |= {
        "total_parameters": counts["total_parameters"],
        "active_parameters": counts["active_parameters"],
    }
    try:
        clock, answer = searched.best(replace(question, spec=variant.spec), fixed, objective, known, top=1)
    except LayoutError as error:
        return row | {"refusal": str(error)}
    if not answer.found:
        return row | {"refusal": why_nothing(clock.question, fixed, answer)}
    asked = {"cluster": str(clock.question.cluster), "seq_len": clock.question.seq_len}
    return row | asked | {"plan": plan_facts(clock.question, answer.found[0])}


def _print(facts: dict[str, Any]) -> None:
    from fivefold.cli.tables import make_console, say, table_of_layouts
    from fivefold.units import format_count, format_seconds

    console = make_console()
    say(
        console,
        f"{facts['model']} on {facts['cluster']}: global batch {facts['global_batch']} x {facts['seq_len']} tokens; "
        "tokens/s and memory of a device, mb: micro-batch",
    )
    names = [
        "variant",
        "params",
        "active",
        "best layout",
        "mb",
        "recompute",
        "step",
        "tokens/s",
        "MFU",
        "memory",
    ]
    cells = []
    for row in facts["variants"]:
        plan = row["plan"]
        if plan:
            cells.append([
                row["variant"], format_count(row["total_parameters"]), format_count(row["active_parameters"]),
                plan["layout"], str(plan["micro_batch"]), plan["recompute"], format_seconds(plan["step_time_s"]),
                format_count(plan["tokens_per_s_per_gpu"]), f"{plan['mfu']:.0%}" if plan["mfu"] else "-",
                f"{plan['peak_memory_bytes'] / plan['capacity_bytes']:.0%}",
            ])  # fmt: skip
    if cells:
        spare = ("tokens/s", "MFU", "recompute")
        console.print(table_of_layouts(console, names, cells, layout="best layout", spare=spare))
    for row in facts["variants"]:
        if not row["plan"]:
            say(console, f"{row['variant']}: {row['refusal']}")
    say(console, f"{len(facts['variants'])} variants in {format_seconds(facts['elapsed_s'])}")

"""Verify the whole grid: TP 1/2/4 x PP 1/2 x DP 1/2/4, both schedules, in float64 and float32, several models.

    python benchmarks/verify_matrix.py [--models tiny-uneven,tiny-llama] [--max-ranks 32] [--out results/FILE.json]

Prints the largest error of every quantity for each model and dtype, and the layouts that fail. Exit code 1 if any does.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from fivefold.catalog.models import resolve
from fivefold.core.layout import Layout
from fivefold.records.machine import machine_facts, versions
from fivefold.verify.verify import Reference, Verdict
from fivefold.verify.workload import common_plans

MODELS = "tiny-uneven,tiny-llama,tiny-mistral,tiny-qwen2,tiny-qwen3"


def grid(max_ranks: int) -> list[Layout]:
    """18 shapes; those with a pipeline under each schedule: 27 layouts."""
    found = [
        Layout(tp=tp, pp=pp, dp=dp, schedule=schedule)
        for tp in (1, 2, 4)
        for pp in (1, 2)
        for dp in (1, 2, 4)
        for schedule in (("1f1b", "gpipe") if pp > 1 else ("1f1b",))
    ]
    return sorted((cut for cut in found if cut.world_size <= max_ranks), key=lambda cut: cut.world_size)


def verify_all(names: list[str], max_ranks: int) -> list[Verdict]:
    verdicts = []
    cases = [(n, d, cut) for n in names for d in ("float64", "float32") for cut in grid(max_ranks)]
    references: dict[tuple[str, str, int], Reference] = {}
    for name, dtype, layout in track(cases, "verifying", console=Console(stderr=True)):
        plan, reference_plan = common_plans(resolve(name), layout, Layout(), dtype)  # type: ignore[arg-type]
        key = (name, dtype, reference_plan.workload.global_batch)
        if key not in references or references[key].plan != reference_plan:
            references[key] = Reference(reference_plan, seed=0, device="cpu")
        verdicts.append(references[key].judge(plan))
    return verdicts


def table(verdicts: list[Verdict]) -> Table:
    quantities = list(verdicts[0].quantities)
    shown = Table(
        "model", "dtype", "layouts", "passed", "as predicted", *quantities, title="largest relative error"
    )
    for name, dtype in dict.fromkeys((v.model, v.dtype) for v in verdicts):
        group = [v for v in verdicts if (v.model, v.dtype) == (name, dtype)]
        worst = [f"{max(v.quantities[q] for v in group):.1e}" for q in quantities]
        counts = [len(group), sum(v.passed for v in group), sum(v.events_match for v in group)]
        shown.add_row(name, dtype, *map(str, counts), *worst)
    return shown


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", default=MODELS)
    parser.add_argument("--max-ranks", type=int, default=32)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    started = time.perf_counter()
    verdicts = verify_all(arguments.models.split(","), arguments.max_ranks)
    Console(width=200).print(table(verdicts))
    for verdict in verdicts:
        if not verdict.passed:
            print(f"{verdict.model} {verdict.dtype} {verdict.layout}: {verdict.cause}")
    if arguments.out:
        facts = machine_facts()
        result: dict[str, Any] = {
            "date": datetime.now(UTC).strftime("%Y-%m-%d"),
            "machine": {key: facts[key] for key in ("cpu", "cores", "memory_bytes")},
            "versions": versions(),
            "seconds": round(time.perf_counter() - started),
            "verdicts": [v.model_dump(mode="json", exclude_defaults=True) for v in verdicts],
        }
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0 if all(verdict.passed for verdict in verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())

"""Verify all strategies together, each layout against one device.

Every power-of-two shape up to 8 ranks and some of 3, 5, 6 and 7, with options pairwise, and every cut of the experts;
then layouts of 16 ranks that cut along every axis (dp2 tp2 pp2 cp2) with every ZeRO stage, schedule, cp method, ep and
etp. Each recomputes in backward in some form; routers have losses, selection biases and, every second time, a capacity.

    python benchmarks/verify_walk.py [--models tiny-llama,tiny-uneven] [--dtype float64] [--folder FOLDER] [--out FILE]
    python benchmarks/verify_walk.py --models tiny-moe,tiny-qwen-moe,tiny-mla-moe --large 38

Verdicts are kept in FOLDER as they come, so that the same command goes on where it was stopped, and a walk over one
case in so many (`--every 3`) can be made whole later. Prints the largest error of each part, of what is judged
(AdamW's weights are not in float32); exit code 1 if a layout fails.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from datetime import UTC, datetime
from itertools import cycle
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from fivefold.catalog.models import preset
from fivefold.core.layout import Layout
from fivefold.core.model_spec import ModelSpec
from fivefold.records.machine import machine_facts, versions
from fivefold.strategies.legal import Case, covering, legal_layouts, recompute_options, with_recompute
from fivefold.verify.matrix import walk
from fivefold.verify.verify import Verdict
from fivefold.verify.workload import common_plans

SAMPLED = 4
"""Of the layouts of 3, 5, 6 and 7 ranks that cover pairs of options, one in so many is taken."""


def candidates(spec: ModelSpec, ranks: int) -> list[Layout]:
    return list(legal_layouts(spec, ranks, lambda layout: common_plans(spec, layout, Layout(), "float64")[0]))


def small(spec: ModelSpec) -> list[Case]:
    """Up to 8 ranks; of those of powers of two, such that every form of recompute meets every option."""
    powers = covering([layout for ranks in (2, 4, 8) for layout in candidates(spec, ranks)])
    others = covering([layout for ranks in (3, 5, 6, 7) for layout in candidates(spec, ranks)])
    return with_recompute(powers, recompute_options(spec)) + in_turn(spec, others[::SAMPLED])


def in_turn(spec: ModelSpec, layouts: list[Layout]) -> list[Case]:
    """Each layout with the next form of recompute."""
    return [Case(layout, option) for layout, option in zip(layouts, cycle(recompute_options(spec)))]


def large(spec: ModelSpec, least: int) -> list[Case]:
    """16 ranks, two along each axis: a pairwise cover, and others evenly spread over the legal ones up to `least`."""
    legal = [one for one in candidates(spec, 16) if (one.dp, one.tp, one.pp, one.cp) == (2, 2, 2, 2)]
    chosen = covering(legal)
    rest = [layout for layout in legal if layout not in set(chosen)]
    wanted = max(0, min(least - len(chosen), len(rest)))
    return in_turn(spec, chosen + [rest[i * len(rest) // wanted] for i in range(wanted)])


def summary(verdicts: list[Verdict]) -> dict[str, Any]:
    return {
        "cases": len(verdicts),
        "passed": sum(verdict.passed for verdict in verdicts),
        "events_as_predicted": sum(verdict.events_match for verdict in verdicts),
        "largest_judged": max(v.max_rel_err for v in verdicts),
        "worst": {q: max(v.quantities[q] for v in verdicts) for q in verdicts[0].quantities},
        "failed": {str(v.case): v.cause for v in verdicts if not v.passed},
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", default="tiny-llama,tiny-uneven")
    parser.add_argument("--dtype", default="float64", choices=["float64", "float32"])
    parser.add_argument("--folder", type=Path, default=Path(".fivefold/walk"))
    parser.add_argument("--large", type=int, default=100, help="at least so many layouts of 16 ranks a model")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="one case in N of each part")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    started, found = time.time(), {}
    for name in options.models.split(","):
        spec = preset(name)
        for size, whole in (("up to 8 ranks", small(spec)), ("16 ranks", large(spec, options.large))):
            cases = whole[:: options.every]
            results = options.folder / f"{name}-{options.dtype}.jsonl"
            verdicts = walk(spec, cases, dtype=options.dtype, device="cpu", results=results)
            console = Console(stderr=True)
            found[f"{name}, {size}"] = summary(
                list(track(verdicts, f"{name}, {size}", total=len(cases), console=console))
            )
    table = Table("model", "cases", "passed", "as predicted", "largest error")
    for name, one in found.items():
        counts = [one["cases"], one["passed"], one["events_as_predicted"]]
        table.add_row(name, *map(str, counts), f"{one['largest_judged']:.1e}")
    Console().print(table)
    if options.out:
        facts = machine_facts()
        head = {
            "date": datetime.now(UTC).date().isoformat(),
            "machine": {key: facts[key] for key in ("cpu", "cores", "memory_bytes")},
            "versions": versions(),
            "dtype": options.dtype,
            "every": options.every,
        }
        text = json.dumps({**head, "seconds": time.time() - started, "walks": found}, indent=1)
        options.out.write_text(text + "\n")
    return 0 if all(one["passed"] == one["cases"] for one in found.values()) else 1


if __name__ == "__main__":
    sys.exit(main())

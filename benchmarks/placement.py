"""How unequal the stages of a pipeline are when layers are dealt evenly, and when FLOPs are balanced.

    .venv/bin/python benchmarks/placement.py [--model llama-3.1-70b] [--seq-len 8192] [--json]

Prints max / mean of the stages' training FLOPs: in a full pipeline the slowest stage sets the pace of all, so a step
takes that much longer than with equal stages. Needs no torch and no device. Exit code 1 if balancing is ever worse.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from fivefold.catalog.models import resolve
from fivefold.strategies.pipeline.placement import balanced_counts, even_counts, flops


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="llama-3.1-70b")
    parser.add_argument("--seq-len", type=int, default=8192)
    parser.add_argument("--stages", type=int, nargs="+", default=[4, 8, 16])
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    spec = resolve(args.model)
    costs = flops(spec, args.seq_len)
    rows = []
    for stages in args.stages:
        row: dict[str, Any] = {"stages": stages}
        for name, counts in (
            ("even", even_counts(spec.layers, stages)),
            ("flops", balanced_counts(costs, stages)),
        ):
            times = costs.of_stages(counts)
            row[name] = {"layers": counts, "max_over_mean": max(times) / (sum(times) / stages)}
        rows.append(row)
    if args.json:
        print(json.dumps({"model": spec.name, "seq_len": args.seq_len, "rows": rows}))
    else:
        print(f"{spec.name}, {args.seq_len} tokens: max / mean of the stages' training FLOPs")
        for row in rows:
            for name in ("even", "flops"):
                layers = "+".join(map(str, row[name]["layers"]))
                print(f"pp{row['stages']:<3}@{name:<6}{row[name]['max_over_mean']:.3f}  {layers}")
    worse = [
        row for row in rows if row["flops"]["max_over_mean"] > row["even"]["max_over_mean"] * (1 + 1e-12)
    ]
    return 1 if worse else 0


if __name__ == "__main__":
    sys.exit(main())

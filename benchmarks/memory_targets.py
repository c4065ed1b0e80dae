"""Error of the memory estimate on a runs table, by source: `python benchmarks/memory_targets.py RUNS.jsonl [--rows]`.

Only rows with a measured peak and a trust of A or B (all of a source that has none) count. A golden row that does not
say its attention backend is taken with the one of the two that fits it better: those tests force one or the other.
Labels: rows that say whether they ran out of memory, against the device's memory with the estimate's band. A row that
ran out of memory and yet lists its peak is left out: what it lists is not what it would have needed.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

from fivefold.catalog.clusters import resolve
from fivefold.errors import ClusterError
from fivefold.estimate.memory import USABLE, estimate
from fivefold.plan.memory_rows import job_of_row, predicted_gib
from fivefold.units import GIB


def errors(rows: list[dict[str, Any]]) -> tuple[dict[str, list[tuple[float, dict[str, Any]]]], list[str]]:
    found: dict[str, list[tuple[float, dict[str, Any]]]] = defaultdict(list)
    skipped = []
    for row in rows:
        if not row.get("peak_mem_gib") or row.get("oom"):
            continue
        options = [row]
        if "golden" in row["source"] and not row.get("attention_backend"):
            options = [{**row, "attention_backend": name} for name in ("flash", "unfused")]
        predicted = [predicted_gib(option) for option in options]
        if isinstance(predicted[0], str):
            skipped.append(f"{row['source']}: {row.get('model_name')}: {predicted[0]}")
            continue
        shares = [float(p) / row["peak_mem_gib"] - 1 for p in predicted]
        kind = f" {row['model_type']}" if "golden" in row["source"] else ""
        tier = row.get("tier_mem") or "-"
        found[f"{row['source']}{kind} ({tier})"].append((min(shares, key=abs), row))
    return found, skipped


def labels(rows: list[dict[str, Any]]) -> tuple[int, list[str]]:
    checked, wrong = 0, []
    for row in rows:
        job = job_of_row(row) if row.get("oom") is not None else ""
        if isinstance(job, str) or (row["oom"] and row.get("peak_mem_gib")):
            continue
        try:
            capacity = resolve(f"8 {row['gpu']}").nodes[0].memory_bytes or 0
        except ClusterError:
            continue
        memory = estimate(job)
        verdict = memory.fits(capacity * USABLE)
        checked += 1
        if verdict == ("yes" if row["oom"] else "no"):
            wrong.append(
                f"{row['source']}: {job.layout}: says {verdict}, {memory.peak.total() / GIB:.1f} GiB"
            )
    return checked, wrong


def main() -> None:
    rows = [json.loads(line) for line in Path(sys.argv[1]).read_text().splitlines() if line.strip()]
    found, skipped = errors(rows)
    for source, listed in sorted(found.items()):
        shares = [error for error, _ in listed]
        mean = sum(map(abs, shares)) / len(shares)
        print(f"{source:60s} {len(shares):4d} rows  {mean:6.2%}  bias {sum(shares) / len(shares):+.2%}")
        for error, row in listed if "--rows" in sys.argv else ():
            print(f"    {error:+7.1%}  {row['peak_mem_gib']:7.2f} GiB  {row.get('source_locator')}")
    checked, wrong = labels(rows)
    print(f"labels: {checked} checked, {len(wrong)} wrong", *wrong, sep="\n    ")
    print(f"skipped: {len(skipped)}", *skipped, sep="\n    ")


if __name__ == "__main__":
    main()

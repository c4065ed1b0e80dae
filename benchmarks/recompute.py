"""What each form of recompute saves and costs on one rank: bytes that layers keep, counted and predicted; CPU time.

    python benchmarks/recompute.py --pairs 20 [--model small-llama] [--seq-len 512] [--micro-batch 2] [--dtype float32]

The engines of all forms train the same model from the same weights on the same batches, one step each in turn, in one
process on one thread: other work on the machine falls on all alike. Losses must be equal bit for bit, and bytes equal
to the byte, or the exit code is 1. Bytes are those by which live memory grows from layer to layer in a forward.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from datetime import date
from itertools import pairwise
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import torch
from rich.console import Console
from rich.table import Table

from fivefold.catalog.models import resolve
from fivefold.core.cluster import Cluster
from fivefold.core.execution import Execution
from fivefold.core.layout import Layout
from fivefold.core.plan import Plan
from fivefold.core.workload import Workload
from fivefold.data.batches import SyntheticDataset
from fivefold.engine.engine import Engine
from fivefold.engine.feed import feed
from fivefold.estimate.recompute import Recompute, layer_kept
from fivefold.estimate.saved import Share, own_kernels
from fivefold.records.machine import machine_facts, versions
from fivefold.runtime.device import Device
from fivefold.runtime.memory import LiveBytes
from fivefold.runtime.mesh import Mesh
from fivefold.strategies.legal import recompute_options
from fivefold.units import format_bytes

MICROBATCHES, WARM_UP, LR = 2, 2, 1e-4


def plan_of(options: argparse.Namespace, recompute: str) -> Plan:
    return Plan(
        model=resolve(options.model),
        cluster=Cluster.parse("cpu"),
        workload=Workload(seq_len=options.seq_len, global_batch=options.micro_batch * MICROBATCHES),
        layout=Layout(),
        execution=Execution(micro_batch=options.micro_batch, dtype=options.dtype, recompute=recompute),
    )


class Contestant:
    """One form of recompute with an engine of its own."""

    def __init__(self, options: argparse.Namespace, recompute: str) -> None:
        self.plan = plan_of(options, recompute)
        self.mesh = Mesh(self.plan.layout, 0, Device(torch.device("cpu")))
        self.engine = Engine(self.plan, self.mesh, seed=0)
        self.data = SyntheticDataset(self.plan.model.vocab, options.seq_len, 0)
        self.seconds: list[float] = []
        self.losses: list[float] = []

    def step(self, number: int) -> None:
        load = feed(self.data, self.plan, self.mesh, number)
        started = time.process_time()
        self.losses.append(self.engine.step(load, LR).loss)
        self.seconds.append(time.process_time() - started)

    def counted(self) -> tuple[list[int], int]:
        """Bytes that each layer but the last keeps for a microbatch; the most that live in a step beside the state."""
        begun: list[int] = []
        state = self.engine.tensors()
        with LiveBytes(state) as memory:
            at_rest = memory.live_bytes
            hooks = [
                layer.register_forward_pre_hook(lambda *_: begun.append(memory.live_bytes))
                for layer in self.engine.chunks[0].get_submodule("layers").children()
            ]
            self.engine.step(feed(self.data, self.plan, self.mesh, 0), 0.0)
        for hook in hooks:
            hook.remove()
        first = begun[: len(begun) // MICROBATCHES]
        return [after - before for before, after in pairwise(first)], memory.peak_bytes - at_rest

    def predicted(self) -> list[int]:
        spec, execution, seq_len = self.plan.model, self.plan.execution, self.plan.workload.seq_len
        tokens, again = execution.micro_batch * seq_len, Recompute.parse(execution.recompute)
        share = Share(tokens=tokens, mine=tokens, seq_len=seq_len, tp=1, etp=1, imbalance=1.0)
        kernels = own_kernels(execution.dtype)
        return [
            int(
                layer_kept(
                    block, spec.hidden, share, kernels, again.words if again.takes(i) else ("none",)
                ).kept
            )
            for i, block in enumerate(spec.blocks[:-1])
        ]


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    forms = recompute_options(resolve(options.model))
    contestants = {form: Contestant(options, form) for form in forms}
    rows = []
    for form, one in contestants.items():
        counted, peak = one.counted()
        rows.append(
            {
                "recompute": form,
                "kept_bytes": sum(counted),
                "predicted_bytes": sum(one.predicted()),
                "peak_beside_state_bytes": peak,
                "layer_by_layer": counted == one.predicted(),
            }
        )
    for number in range(options.pairs + WARM_UP):
        for one in contestants.values():
            one.step(number)
    base = contestants["none"]
    for row, one in zip(rows, contestants.values()):
        ours, plain = one.seconds[WARM_UP:], base.seconds[WARM_UP:]
        row["cpu_s_per_step"] = sum(ours) / len(ours)
        row["time_ratio"] = sum(ours) / sum(plain)
        row["same_losses"] = one.losses == base.losses
    return rows


def table(rows: list[dict[str, Any]]) -> Table:
    shown = Table("recompute", "kept", "predicted", "of none", "peak beside state", "time, of none", "")
    for row in rows:
        exact = row["layer_by_layer"] and row["same_losses"]
        shown.add_row(
            row["recompute"],
            format_bytes(row["kept_bytes"]),
            format_bytes(row["predicted_bytes"]),
            f"{row['kept_bytes'] / rows[0]['kept_bytes']:.3f}",
            format_bytes(row["peak_beside_state_bytes"]),
            f"{row['time_ratio']:.3f}",
            "equal" if exact else "differs",
        )
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="small-llama", help="a preset or a config.json")
    parser.add_argument("--seq-len", type=int, default=512)
    parser.add_argument("--micro-batch", type=int, default=2)
    parser.add_argument("--dtype", default="float32", choices=["float32", "float64", "bfloat16"])
    parser.add_argument("--pairs", type=int, default=20, help="steps of each form, in turn")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument("--save", type=Path, metavar="DIR", help="also write DIR/recompute-DATE.json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = measure(options)
    passed = all(row["layer_by_layer"] and row["same_losses"] for row in rows)
    asked = {name: getattr(options, name) for name in ("model", "seq_len", "micro_batch", "dtype", "pairs")}
    facts = {key: machine_facts()[key] for key in ("cpu", "cores")}
    result = {
        "date": date.today().isoformat(),
        "machine": facts,
        "versions": versions(),
        **asked,
        "rows": rows,
    }
    result["passed"] = passed
    if options.json:
        print(json.dumps(result))
    else:
        Console().print(table(rows))
    if options.save:
        path = options.save / f"recompute-{result['date']}.json"
        path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    sys.exit(0 if passed else 1)


if __name__ == "__main__":
    main()

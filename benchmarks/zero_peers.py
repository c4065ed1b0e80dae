"""CPU-seconds per token of our ZeRO-3 on two ranks, against torch's FSDP2 alone.

    python benchmarks/zero_peers.py --pairs 60

As in single_rank.py: both train the same decoder from the same weights on the same data, strictly in turn, one step
each, in the same two processes of one thread; both are made anew for each round of pairs, and must agree on every
loss. Seconds are those of both processes, the threads that communicate included.

zero3         parameters gathered for each forward and each backward, gradients reduced after each microbatch;
              against `fully_shard` of each layer and the whole, `reshard_after_forward=True`
zero3 step    gathered once a step, gradients reduced once; against `reshard_after_forward=False`, which keeps layers
              from forward to backward, with `set_requires_gradient_sync` in the last microbatch only

FSDP2 gets what a careful user would write: fused AdamW, clipping, sums rather than means (gloo has no average), one
sum of the valid tokens a step.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import time
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from fivefold.core.layout import Layout
from fivefold.engine.engine import Engine
from fivefold.nn.decoder import Decoder
from fivefold.records.machine import machine_facts, versions
from fivefold.runtime.launch import Rank, run_ranks
from fivefold.runtime.mesh import Mesh
from fivefold.strategies.pipeline.apply import Microbatch
from single_rank import (
    CASES,
    LOSS_TOLERANCE,
    LR,
    WARM_UP,
    Batches,
    Case,
    Step,
    initial_weights,
    plan_of,
    ratio_with_bound,
)

RANKS, ROUNDS = 2, 6
TARGET = 1.03


def ours(case: Case, batches: Batches, rank: Rank, *, once: bool) -> Step:
    """Our trainer under zero3. Its weights depend on the seed alone."""
    plan = plan_of(case)
    workload = plan.workload.replace(global_batch=plan.workload.global_batch * RANKS)
    execution = plan.execution.replace(zero3_gather="step" if once else "microbatch")
    plan = plan.replace(layout=Layout.parse(f"dp{RANKS} zero3"), workload=workload, execution=execution)
    engine = Engine(plan, Mesh(plan.layout, rank.rank, rank.device), seed=0)
    positions = torch.arange(case.seq_len)[None]
    mask = batches.labels != -100

    def step(i: int) -> float:
        def load(j: int) -> Microbatch:
            return Microbatch(batches.tokens[i, j], batches.labels[i, j], mask[i, j], positions)

        return engine.step(load, LR).loss

    return step


def fsdp2(case: Case, batches: Batches, rank: Rank, *, once: bool) -> Step:
    """`fully_shard` on each layer and the whole decoder, in the loop that its users write."""
    optimizer = plan_of(case).execution.optimizer
    assert optimizer.clip_norm is not None
    model = Decoder(plan_of(case).model)
    model.load_state_dict(initial_weights(case))
    mesh = init_device_mesh("cpu", (RANKS,))
    for part in (*model.layers.values(), model):
        fully_shard(part, mesh=mesh, reshard_after_forward=not once)
        assert isinstance(part, FSDPModule)
        part.set_force_sum_reduction_for_comms(True)
        part.set_gradient_divide_factor(1.0)
    parameters = list(model.parameters())
    adamw = torch.optim.AdamW(
        [
            {"params": [p for p in parameters if p.ndim > 1], "weight_decay": optimizer.weight_decay},
            {"params": [p for p in parameters if p.ndim == 1], "weight_decay": 0.0},
        ],
        lr=LR, betas=optimizer.betas, eps=optimizer.eps, fused=True,
    )  # fmt: skip
    positions = torch.arange(case.seq_len)[None]
    mask = batches.labels != -100
    clip_norm = optimizer.clip_norm

    def step(i: int) -> float:
        valid = mask[i].sum()
        dist.all_reduce(valid)
        total: Tensor = torch.zeros(())
        for j, (tokens_BS, labels_BS) in enumerate(zip(batches.tokens[i], batches.labels[i])):
            if once:
                model.set_requires_gradient_sync(j == len(batches.tokens[i]) - 1)  # type: ignore[operator]
            loss = model.loss(model(tokens_BS, positions), labels_BS, mask[i, j]) / valid
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(parameters, clip_norm)
        adamw.step()
        adamw.zero_grad(set_to_none=True)
        dist.all_reduce(total)
        return float(total)

    return step


def measure_round(
    rank: Rank, case: Case, once: bool, number: int, pairs: int
) -> tuple[list[float], list[float]]:
    """CPU-seconds of this rank for `pairs` steps of ours and of FSDP2 in turn, both made anew."""
    batches = Batches.make(case, pairs + WARM_UP, seed=RANKS * number + rank.rank)
    makers = [ours, fsdp2]
    first = number % 2  # who is made first
    made = {i: makers[i](case, batches, rank, once=once) for i in (first, 1 - first)}
    seconds: tuple[list[float], list[float]] = ([], [])
    gc.collect()
    gc.freeze()
    for step in range(pairs + WARM_UP):
        losses = []
        for i in (0, 1):
            started = time.process_time()
            losses.append(made[i](step))
            seconds[i].append(time.process_time() - started)
        if abs(losses[0] - losses[1]) > LOSS_TOLERANCE:
            raise AssertionError(
                f"hidden {case.hidden}, step {step}: our loss is {losses[0]}, FSDP2's {losses[1]}"
            )
    return seconds[0][WARM_UP:], seconds[1][WARM_UP:]


def compare(case: Case, pairs: int, *, once: bool) -> dict[str, Any]:
    """One row of the result."""
    rounds = []
    for number in range(ROUNDS):
        found = run_ranks(measure_round, case, once, number, -(-pairs // ROUNDS), ranks=RANKS, device="cpu")
        rounds.append(np.array(found).sum(0))
    mine, other = np.array(rounds).transpose(1, 0, 2)
    ratio, bound = ratio_with_bound(mine, other)
    tokens = case.tokens * RANKS
    return {
        "hidden": case.hidden,
        "gather": "step" if once else "microbatch",
        "ratio": round(ratio, 4),
        "upper_bound": round(bound, 4),
        "target": TARGET,
        "passed": bound <= TARGET,
        "pairs": mine.size,
        "cpu_us_per_token": round(1e6 * float(mine.mean()) / tokens, 2),
        "other_cpu_us_per_token": round(1e6 * float(other.mean()) / tokens, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--pairs", type=int, default=60, help="pairs of steps for each comparison")
    parser.add_argument("--hidden", type=int, action="append", help="only this size (may be repeated)")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument("--save", type=Path, metavar="DIR", help="also write DIR/zero_peers-DATE.json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    cases = [case for case in CASES if not options.hidden or case.hidden in options.hidden]
    rows = []
    for case in cases:
        for once in (False, True):
            rows.append(compare(case, options.pairs, once=once))
            print(
                "hidden {hidden:4d}  gather per {gather:10s}  {ratio:.3f}, upper bound {upper_bound:.3f} (target "
                "{target:.2f})  {cpu_us_per_token:.1f} and {other_cpu_us_per_token:.1f} us/token".format(
                    **rows[-1]
                ),
                file=sys.stderr,
            )
    result = {
        "date": date.today().isoformat(),
        "machine": {key: machine_facts()[key] for key in ("cpu", "cores")},
        "versions": versions(),
        "cases": [asdict(case) for case in cases],
        "rows": rows,
        "passed": all(row["passed"] for row in rows),
    }
    if options.json:
        print(json.dumps(result))
    if options.save:
        path = options.save / f"zero_peers-{result['date']}.json"
        path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    sys.exit(0 if result["passed"] else 1)


if __name__ == "__main__":
    main()

"""CPU-seconds per token of our strategies on two ranks, each against the library that people use for it.

    python benchmarks/peers.py --pairs 60 --save benchmarks/results

As in single_rank.py: both train the same model from the same weights on the same data, strictly in turn, one step
each, in the same two processes of one thread, over one gloo group; both are made anew for each round of pairs, and
must agree on every loss, or nothing is reported. Seconds are those of both processes, threads that communicate
included. Where an opponent takes a model as it finds it (FSDP2, DeepSpeed), both train our decoder, so that only the
machinery differs; `transformers` brings its own.

ours               opponent
zero3              FSDP2: `fully_shard` of each layer and the whole, `reshard_after_forward=True`
zero3 step         FSDP2: `reshard_after_forward=False`, `set_requires_gradient_sync` in the last microbatch only
zero1, 2, 3        DeepSpeed ZeRO-1, 2, 3; the third also with all parameters cut (`peers_deepspeed.py`)
pp2                DeepSpeed `PipelineModule`, 1F1B
cp2:ulysses        DeepSpeed `DistributedAttention`
dp2 ep2            DeepSpeed `MoE`, two of eight experts for each token, none dropped
tp2, tp2 nosp      transformers, `tp_plan="auto"`

Every opponent gets what a careful user would write: fused AdamW, clipping, sums rather than means (gloo has no
average), one sum of the valid tokens a step. What had to be added beyond that:

transformers       `clip_grad_norm_` does not take tensors and DTensors together: their norms are taken apart and joined
DeepSpeed          see `peers_deepspeed.py`
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import date
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fivefold.core.layout import Layout
from fivefold.core.plan import Plan
from fivefold.engine.engine import Engine
from fivefold.errors import RankFailure
from fivefold.records.machine import machine_facts, versions
from fivefold.runtime.launch import Rank, run_ranks
from fivefold.runtime.mesh import Mesh
from fivefold.strategies.context.order import local_spans
from fivefold.strategies.pipeline.apply import Microbatch
from peers_libraries import fsdp2, save_for_transformers, transformers_tp
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
NEVER_CLIPS = 1e3
"""DeepSpeed clips by the mean of the ranks' norms, each of its own experts: so both compute norms, which do not act."""
LARGE = Case(1024, 2, 16, 4, 2816, 1, 128, 0.0, 0.0)


@dataclass(frozen=True)
class Job:
    """What both contestants of a round are given on one rank."""

    case: Case
    plan: Plan
    rank: Rank
    batches: Batches
    """This rank's: its own sequences (dp), its own tokens of them (cp), or those of all ranks."""
    positions: Tensor
    """[1, S/cp]"""
    folder: Path
    """Holds the initial weights as a checkpoint of transformers, where the opponent reads one."""

    @property
    def weights(self) -> dict[str, Tensor]:
        return initial_weights(self.case)

    def adamw(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        """torch's fused AdamW with our settings; norms have no weight decay."""
        optimizer = self.plan.execution.optimizer
        return torch.optim.AdamW(
            [
                {"params": [p for p in parameters if p.ndim > 1], "weight_decay": optimizer.weight_decay},
                {"params": [p for p in parameters if p.ndim == 1], "weight_decay": 0.0},
            ],
            lr=LR, betas=optimizer.betas, eps=optimizer.eps, fused=True,
        )  # fmt: skip

    @property
    def clip_norm(self) -> float:
        clip_norm = self.plan.execution.optimizer.clip_norm
        assert clip_norm is not None
        return clip_norm


Maker = Callable[[Job], Step]


def ours(job: Job) -> Step:
    """Our trainer under the layout of the contest. Its weights depend on the seed alone."""
    engine = Engine(job.plan, Mesh(job.plan.layout, job.rank.rank, job.rank.device), seed=0)
    batches, mask = job.batches, job.batches.labels != -100

    def step(i: int) -> float:
        def load(j: int) -> Microbatch:
            return Microbatch(batches.tokens[i, j], batches.labels[i, j], mask[i, j], job.positions)

        return engine.step(load, LR).loss

    return step


def deepspeed(job: Job, *, maker: str, **options: Any) -> Step:
    import peers_deepspeed

    return getattr(peers_deepspeed, maker)(job, **options)  # type: ignore[no-any-return]


@dataclass(frozen=True, kw_only=True)
class Contest:
    """One of our layouts against one opponent. `targets`: hidden size -> bound on the ratio, None: told only."""

    layout: str
    against: str
    make: Maker
    package: str
    targets: Mapping[int, float | None]
    execution: Mapping[str, Any] = field(default_factory=dict)
    experts: int = 0
    clip_norm: float = 1.0

    @property
    def name(self) -> str:
        return " ".join([self.layout, *map(str, self.execution.values())])


def contests() -> list[Contest]:
    fsdp = [
        Contest(
            layout="dp2 zero3", against=f"FSDP2, gathered per {gather}", package="torch",
            make=partial(fsdp2, once=gather == "step"), targets=dict.fromkeys((64, 256), 1.03),
            execution={"zero3_gather": gather},
        )
        for gather in ("microbatch", "step")
    ]  # fmt: skip
    rows: list[tuple[str, str, dict[str, Any]]] = [
        ("dp2 zero1", "ZeRO-1", {"maker": "zero", "stage": 1}),
        ("dp2 zero2", "ZeRO-2", {"maker": "zero", "stage": 2}),
        ("dp2 zero3", "ZeRO-3", {"maker": "zero", "stage": 3}),
        ("dp2 zero3", "ZeRO-3, all cut", {"maker": "zero", "stage": 3, "all_cut": True}),
        ("pp2", "PP2", {"maker": "pipeline"}),
        ("cp2:ulysses", "Ulysses 2", {"maker": "ulysses"}),
    ]
    speed = [
        Contest(
            layout=layout, against=f"DeepSpeed {name}", package="deepspeed", make=partial(deepspeed, **options),
            targets=dict.fromkeys((64, 256), 1.0),
        )
        for layout, name, options in rows
    ]  # fmt: skip
    experts = Contest(
        layout="dp2 ep2", against="DeepSpeed MoE EP2", package="deepspeed", make=partial(deepspeed, maker="experts"),
        targets=dict.fromkeys((64, 256), 1.0), experts=8, clip_norm=NEVER_CLIPS,
    )  # fmt: skip
    tensor = [
        Contest(
            layout=layout, against="transformers TP2", package="transformers", make=transformers_tp,
            targets=targets,
        )
        for layout, targets in (
            ("tp2 nosp", {64: 1 / 2.0, 256: 1 / 1.5, 1024: 1 / 1.1}),
            # transformers has no sequence parallelism: ours saves memory there for more messages.
            ("tp2", dict.fromkeys((64, 256, 1024))),
        )
    ]  # fmt: skip
    return [*fsdp, *speed, experts, *tensor]


def plan_for(contest: Contest, case: Case) -> Plan:
    plan, layout = plan_of(case), Layout.parse(contest.layout)
    workload = plan.workload.replace(global_batch=plan.workload.global_batch * layout.dp)
    optimizer = plan.execution.optimizer.replace(clip_norm=contest.clip_norm)
    execution = plan.execution.replace(optimizer=optimizer, **contest.execution)
    return plan.replace(layout=layout, workload=workload, execution=execution)


def measure_round(
    rank: Rank, contest: Contest, case: Case, number: int, pairs: int, folder: Path
) -> list[list[tuple[float, float]]]:
    """(CPU-seconds of this rank, seconds) for `pairs` steps of ours and of the opponent in turn, both made anew."""
    # What a launcher would have set, and both DeepSpeed and transformers read.
    os.environ.update(RANK=str(rank.rank), LOCAL_RANK=str(rank.rank), WORLD_SIZE=str(RANKS))
    plan = plan_for(contest, case)
    layout = plan.layout
    coordinate = layout.coordinate(rank.rank)
    batches = Batches.make(case, pairs + WARM_UP, seed=layout.dp * number + coordinate["dp"])
    here = torch.cat(
        [torch.arange(s.start, s.stop) for s in local_spans(case.seq_len, layout, coordinate["cp"])]
    )
    if layout.cp > 1:
        batches = Batches(batches.tokens[..., here].contiguous(), batches.labels[..., here].contiguous())
    job = Job(case, plan, rank, batches, here[None], folder)
    makers = [ours, contest.make]
    first = number % 2  # who is made first
    with contextlib.redirect_stdout(sys.stderr):
        made = {i: makers[i](job) for i in (first, 1 - first)}
        seconds: list[list[tuple[float, float]]] = [[], []]
        gc.collect()
        gc.freeze()
        for step in range(pairs + WARM_UP):
            losses = []
            for i in (0, 1):
                dist.barrier()  # neither pays for ranks that the other left at different moments
                started, wall = time.process_time(), time.perf_counter()
                losses.append(made[i](step))
                seconds[i].append((time.process_time() - started, time.perf_counter() - wall))
            if not abs(losses[0] - losses[1]) <= LOSS_TOLERANCE:
                raise AssertionError(
                    f"hidden {case.hidden}, step {step}: our loss is {losses[0]}, that of {contest.against} {losses[1]}"
                )
    return [of_one[WARM_UP:] for of_one in seconds]


def compare(contest: Contest, case: Case, pairs: int) -> dict[str, Any]:
    """One row of the result; of a peer that does not run, or disagrees, what it says."""
    row: dict[str, Any] = {"ours": contest.name, "against": contest.against, "hidden": case.hidden}
    folder = save_for_transformers(case).name if contest.make is transformers_tp else os.devnull
    rounds = []
    try:
        for number in range(ROUNDS):
            found = run_ranks(
                measure_round, contest, case, number, -(-pairs // ROUNDS), Path(folder), ranks=RANKS, device="cpu"
            )  # fmt: skip
            rounds.append(np.array(found))
    except RankFailure as failure:
        return row | {"error": str(failure), "passed": False}
    measured = np.array(rounds)  # [round, rank, who, pair, (CPU, wall)]
    mine, other = measured[..., 0].sum(1).transpose(1, 0, 2)
    ratio, bound = ratio_with_bound(mine, other)
    wall, wall_bound = ratio_with_bound(*measured[..., 1].max(1).transpose(1, 0, 2))
    layout = Layout.parse(contest.layout)
    tokens = case.tokens * layout.dp
    target = contest.targets[case.hidden]
    return row | {
        "ratio": round(ratio, 4),
        "upper_bound": round(bound, 4),
        "target": target and round(target, 4),
        "passed": target is None or bound <= target,
        "tokens_per_s_over_theirs": round(1 / wall, 4),
        "tokens_per_s_lower_bound": round(1 / wall_bound, 4),
        "pairs": mine.size,
        "cpu_us_per_token": round(1e6 * float(mine.mean()) / tokens, 2),
        "other_cpu_us_per_token": round(1e6 * float(other.mean()) / tokens, 2),
    }


def told(row: dict[str, Any]) -> str:
    start = f"{row['ours']:22s} against {row['against']:28s} hidden {row['hidden']:4d}  "
    if "error" in row:
        return f"{start}{row['error']}"
    measured: str = (
        "{ratio:.3f}, upper bound {upper_bound:.3f} (target {target})  {cpu_us_per_token:.1f} and "
        "{other_cpu_us_per_token:.1f} us/token; tokens/s x {tokens_per_s_over_theirs:.2f}".format(**row)
    )
    return start + measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=60, help="pairs of steps for each comparison")
    parser.add_argument("--hidden", type=int, action="append", help="only this size (may be repeated)")
    parser.add_argument("--only", metavar="TEXT", default="", help="only contests with TEXT in their line")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument("--save", type=Path, metavar="DIR", help="also write DIR/peers-DATE.json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    chosen = [c for c in contests() if options.only in f"{c.name} {c.against}"]
    packages = {c.package for c in chosen}
    missing = {name for name in packages if importlib.util.find_spec(name) is None}
    if "deepspeed" in packages - missing:
        import peers_deepspeed  # noqa: F401 - once, before ranks are forked
    rows = []
    for contest in chosen:
        for case in (*CASES, LARGE):
            case = replace(case, experts=contest.experts)
            if case.hidden not in contest.targets or case.hidden not in (options.hidden or contest.targets):
                continue
            if contest.package in missing:
                row = {
                    "ours": contest.name,
                    "against": contest.against,
                    "hidden": case.hidden,
                    "passed": False,
                }
                row |= {"error": f"{contest.package} is not installed"}
            else:
                row = compare(contest, case, options.pairs)
            rows.append(row)
            print(told(row), file=sys.stderr)
    used = {row["hidden"] for row in rows}
    result = {
        "date": date.today().isoformat(),
        "machine": {key: machine_facts()[key] for key in ("cpu", "cores")},
        "versions": versions()
        | {name: metadata.version(name) for name in sorted(packages - missing - {"torch"})},
        "ranks": RANKS,
        "loss_tolerance": LOSS_TOLERANCE,
        "cases": [
            {key: value for key, value in asdict(case).items() if not key.startswith("target")}
            for case in (*CASES, LARGE)
            if case.hidden in used
        ],
        "rows": rows,
        "passed": all(row["passed"] for row in rows),
    }
    if options.json:
        print(json.dumps(result))
    if options.save:
        path = options.save / f"peers-{result['date']}.json"
        path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    sys.exit(0 if result["passed"] else 1)


if __name__ == "__main__":
    main()

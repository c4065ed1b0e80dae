"""How much slower a training step is while a checkpoint is written behind it.

    python benchmarks/save_overlap.py [--mb 500] [--rounds 5] [--folder FOLDER] [--bound 1.2]

One rank on one thread, float32 and AdamW. Quiet steps and steps that run wholly within a save take turns; reported are
the ratio of their medians, the time that `save` itself holds up the loop (the copy), and how long the writing takes.
On a machine that others use as well, threads wait for a core, the more the more threads there are: the time that the
training thread waited for one (Linux counts it) is left out of a second ratio, which is the one that is judged.
Exit code 1 if it is above the bound.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import torch

from fivefold.core.cluster import Cluster
from fivefold.core.execution import Execution
from fivefold.core.layout import Layout
from fivefold.core.model_spec import AttentionSpec, BlockSpec, MLPSpec, ModelSpec
from fivefold.core.plan import Plan
from fivefold.core.workload import Workload
from fivefold.data.batches import SyntheticDataset
from fivefold.runtime.device import Device
from fivefold.runtime.launch import Rank
from fivefold.train.saver import Saver
from fivefold.train.sections import CheckpointConfig
from fivefold.train.trainer import Trainer

HIDDEN, FFN, VOCAB, SEQ_LEN, BATCH = 512, 1536, 512, 32, 2
LAYER_BYTES = 12 * (4 * HIDDEN**2 + 3 * HIDDEN * FFN + 2 * HIDDEN)
"""Weights and two moments in float32."""
QUIET_STEPS = 8


@dataclass
class Times:
    """Seconds; of a step as (wall, wall less waiting for a core)."""

    quiet: list[tuple[float, float]]
    writing: list[tuple[float, float]]
    held_up: list[float]
    written: list[float]

    def median(self, kind: str, number: int) -> float:
        steps: list[tuple[float, float]] = getattr(self, kind)
        return median(step[number] for step in steps)

    def ratio(self, number: int) -> float:
        return self.median("writing", number) / self.median("quiet", number)


def waited_for_a_core() -> float:
    """Seconds that this thread was ready and did not run, so far; 0 where the system does not say."""
    try:
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    except OSError:
        return 0.0


def trainer(megabytes: float) -> Trainer:
    attention = AttentionSpec(heads=8, kv_heads=8, head_dim=HIDDEN // 8)
    block = BlockSpec(attention=attention, mlp=MLPSpec(ffn=FFN))
    layers = max(1, round(megabytes * 1e6 / LAYER_BYTES))
    spec = ModelSpec(name="overlap", hidden=HIDDEN, vocab=VOCAB, blocks=(block,) * layers)
    plan = Plan(
        model=spec,
        cluster=Cluster.parse("cpu"),
        workload=Workload(seq_len=SEQ_LEN, global_batch=BATCH),
        layout=Layout(),
        execution=Execution(micro_batch=BATCH),
    )
    rank = Rank(0, 1, Device(torch.device("cpu")))
    return Trainer(plan, rank, SyntheticDataset(VOCAB, SEQ_LEN, seed=0), steps=10**6, seed=0)


def measure(megabytes: float, rounds: int, folder: Path) -> tuple[Times, int]:
    """The times, and the bytes of one checkpoint."""
    job = trainer(megabytes)
    rank = Rank(0, 1, Device(torch.device("cpu")))
    saver = Saver(CheckpointConfig(folder=str(folder), keep=1), job, rank, data="", warn=sys.exit)
    times, step = Times([], [], [], []), 0

    def one() -> tuple[float, float]:
        nonlocal step
        began, waited = time.perf_counter(), waited_for_a_core()
        job.step(step)
        step += 1
        seconds = time.perf_counter() - began
        return seconds, seconds - (waited_for_a_core() - waited)

    for _ in range(4):
        one()
    for _ in range(rounds):
        times.quiet += [one() for _ in range(QUIET_STEPS)]
        began = time.perf_counter()
        saver.save(step)
        times.held_up.append(time.perf_counter() - began)
        thread = saver.thread
        assert thread is not None
        while thread.is_alive():
            taken = one()
            if thread.is_alive():
                times.writing.append(taken)
        times.written.append(time.perf_counter() - began)
        saver.wait()
    (newest,) = folder.glob("step-*")
    return times, sum(path.stat().st_size for path in newest.iterdir())


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mb", type=float, default=500)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="where to save; default: the folder for temporary files")
    parser.add_argument("--bound", type=float, default=1.2)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="fivefold-save-", dir=arguments.folder) as name:
        times, size = measure(arguments.mb, arguments.rounds, Path(name))
    print(f"checkpoint                {size / 1e6:8.0f} MB, {len(times.held_up)} times")
    for number, what in enumerate(("wall time", "less waiting for a core")):
        quiet, writing = (times.median(kind, number) * 1e3 for kind in ("quiet", "writing"))
        print(
            f"{what}: quiet step {quiet:.0f} ms, step while it is written {writing:.0f} ms, ratio {writing / quiet:.3f}"
        )
    print(f"steps                     {len(times.quiet)} quiet, {len(times.writing)} while it is written")
    print(f"copy, which the step waits for {median(times.held_up) * 1e3:8.0f} ms")
    print(f"until it is on the disk        {median(times.written) * 1e3:8.0f} ms")
    print(f"load of the machine            {os.getloadavg()[0]:8.1f} on {os.cpu_count()} cores")
    if arguments.out:
        ratios = {"ratio_wall": times.ratio(0), "ratio": times.ratio(1), "bytes": size}
        arguments.out.write_text(json.dumps({**ratios, **asdict(times)}) + "\n")
    return 0 if times.ratio(1) <= arguments.bound else 1


if __name__ == "__main__":
    sys.exit(main())

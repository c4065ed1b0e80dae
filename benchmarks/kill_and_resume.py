"""Kill a random rank with `kill -9` at a random moment, again and again: does every run end in the same weights?

    python benchmarks/kill_and_resume.py [--faults 50] [--during-saves 12] [--layout 'dp2 tp2'] [--seed 0] [--out FILE]

Each fault is a run of its own under `fivefold train --restarts 1`, on 4 ranks. One kind of fault strikes at a moment
drawn uniformly from the length of a run without faults; the other waits for a random save to be under way. The files of
the last step must be those of the run without faults, bit for bit. Exit code 1 if one run does not end, or ends in
other weights.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
import torch

from fivefold.cli.main import run as run_command
from fivefold.compat import warm_up_imports
from fivefold.train.checkpoint import Manifest, checkpoints

MODEL = {
    "model_type": "llama", "hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 384, "vocab_size": 259, "max_position_embeddings": 256,
}  # fmt: skip
LONGEST_S = 120.0


@dataclass(frozen=True)
class Fault:
    """What was done to one run, and how it ended."""

    kind: str
    """`moment` or `save`."""
    at_s: float
    """After the start of the run."""
    during_save: bool
    """A save was under way just before and just after the kill."""
    steps_saved: int
    """Newest checkpoint when the rank was killed."""
    restarted: bool
    ended: bool
    same: bool
    """The last checkpoint is that of the run without faults, bit for bit."""


class Runs:
    """Starts runs in `folder`, each a forked process with the imports done."""

    def __init__(self, folder: Path, layout: str, steps: int) -> None:
        self.folder, self.layout, self.steps = folder, layout, steps
        (folder / "config.json").write_text(json.dumps(MODEL))

    def start(self, saves: Path) -> int:
        arguments = [
            "train", f"model={self.folder / 'config.json'}", f"layout={self.layout}", f"steps={self.steps}",
            "seq_len=64", "global_batch=8", "data_limit_mib=0.5", "log.records=null", f"checkpoint.folder={saves}",
            "checkpoint.every=1", "--restarts", "1", "--device", "cpu",
        ]  # fmt: skip
        pid = os.fork()
        if pid == 0:
            code = 70
            try:
                log = os.open(f"{saves}.log", os.O_WRONLY | os.O_CREAT, 0o600)
                os.dup2(log, 1)
                os.dup2(log, 2)
                sys.stdout, sys.stderr = (os.fdopen(n, "w", buffering=1) for n in (1, 2))
                code = run_command(arguments)
                sys.stdout.flush()
            finally:
                os._exit(code)
        return pid

    def wait(self, pid: int) -> bool:
        """Whether it ends well in time."""
        deadline = time.monotonic() + LONGEST_S
        while (pair := os.waitpid(pid, os.WNOHANG)) == (0, 0):
            if time.monotonic() > deadline:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                return False
            time.sleep(0.02)
        return os.waitstatus_to_exitcode(pair[1]) == 0

    def final(self, saves: Path) -> dict[str, str] | None:
        last = saves / f"step-{self.steps:08d}"
        return {n: e.sha256 for n, e in Manifest.load(last).files.items()} if last.exists() else None


def under_way(saves: Path) -> int:
    """The step that is being saved; 0 if none is."""
    return max((int(path.name[5:13]) for path in saves.glob("*.partial")), default=0)


def strike(
    runs: Runs, kind: str, name: str, length_s: float, expected: object, chance: random.Random
) -> Fault | None:
    """One run with one fault; None where the run had ended before the fault."""
    saves = runs.folder / name
    started, pid = time.monotonic(), runs.start(saves)
    moment, target = chance.uniform(0, length_s), chance.randrange(1, runs.steps)
    while True:
        now = time.monotonic() - started
        if (now >= moment) if kind == "moment" else (under_way(saves) >= target):
            ranks = psutil.Process(pid).children()
            if ranks or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                break
        if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            ranks = []
            break
        time.sleep(0.0003 if kind == "save" else 0.001)
    if not ranks:
        runs.wait(pid)
        return None
    before = under_way(saves)
    os.kill(chance.choice(ranks).pid, signal.SIGKILL)
    during_save = before > 0 and under_way(saves) == before
    saved = max((step for step, _ in checkpoints(saves)), default=0)
    ended = runs.wait(pid)
    restarted = "starting again from" in Path(f"{saves}.log").read_text()
    same = ended and runs.final(saves) == expected
    return Fault(kind, round(now, 3), during_save, saved, restarted, ended, same)


def table(faults: list[Fault]) -> str:
    counts = Counter({"faults": len(faults)})
    for fault in faults:
        counts["during a save"] += fault.during_save
        counts["started again"] += fault.restarted
        counts["ended"] += fault.ended
        counts["same weights, bit for bit"] += fault.same
        counts["before the first save"] += fault.steps_saved == 0
    return "\n".join(f"{name:28}{count:4}" for name, count in counts.items())


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--faults", type=int, default=50)
    parser.add_argument("--during-saves", type=int, default=12)
    parser.add_argument("--layout", default="dp2 tp2")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warm_up_imports()
    chance = random.Random(arguments.seed)
    faults: list[Fault] = []
    with tempfile.TemporaryDirectory(prefix="fivefold-kill-") as name:
        runs = Runs(Path(name), arguments.layout, arguments.steps)
        began = time.monotonic()
        if not runs.wait(runs.start(runs.folder / "whole")):
            print((runs.folder / "whole.log").read_text())
            return 1
        length_s, expected = time.monotonic() - began, runs.final(runs.folder / "whole")
        kinds = ["save"] * arguments.during_saves + ["moment"] * (arguments.faults - arguments.during_saves)
        attempts = 0
        while len(faults) < len(kinds):
            attempts += 1
            fault = strike(runs, kinds[len(faults)], f"run{attempts}", length_s, expected, chance)
            if fault is not None:
                faults.append(fault)
                print(fault, file=sys.stderr)
                if not fault.same:
                    print(Path(runs.folder / f"run{attempts}.log").read_text(), file=sys.stderr)
    print(table(faults))
    if arguments.out:
        arguments.out.write_text(json.dumps([asdict(fault) for fault in faults], indent=1) + "\n")
    return 0 if all(fault.same for fault in faults) else 1


if __name__ == "__main__":
    sys.exit(main())

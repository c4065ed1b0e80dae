"""`fivefold train` that is killed, refused, or short of disk: nothing that was saved is lost."""

from __future__ import annotations

import os
import random
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from safetensors.torch import load_file

from fivefold.train.checkpoint import Manifest, checkpoints

from .command_line import CommandLine, Started

SAVING = ("checkpoint.folder=saves", "checkpoint.every=1", "log.records=null")
STEPS = 12


def final(folder: Path) -> dict[str, str]:
    """Checksums of the last step's files: equal weights and moments, bit for bit."""
    return {name: entry.sha256 for name, entry in Manifest.load(folder / f"step-{STEPS:08d}").files.items()}


def kill_one(pid: int, chance: random.Random) -> bool:
    """`kill -9` one rank; False where none is left."""
    ranks = psutil.Process(pid).children()
    if ranks:
        os.kill(chance.choice(ranks).pid, signal.SIGKILL)
    return bool(ranks)


def wait_for(folder: Path, pattern: str, *, above: int = 0, timeout_s: float = 60.0) -> None:
    """Until a folder of that form is there, of a step above this."""
    deadline = time.monotonic() + timeout_s
    while not any(int(path.name[5:13]) > above for path in folder.glob(pattern)):
        assert time.monotonic() < deadline, list(folder.iterdir())
        time.sleep(0.0005)


@pytest.fixture
def expected(fivefold: CommandLine) -> dict[str, str]:
    """The end of a run without faults."""
    ended = fivefold(
        "train", "train.yaml", "layout=dp2 tp2", f"steps={STEPS}", *SAVING,
        "checkpoint.folder=whole", "log.metrics=whole.jsonl",
    )  # fmt: skip
    assert ended.code == 0, ended.err
    return final(fivefold.folder / "whole")


def test_killed_ranks(fivefold: CommandLine, expected: dict[str, str]) -> None:
    """At random moments and in the middle of a save, four times in one run: the same weights in the end."""
    chance, saves = random.Random(0), fivefold.folder / "saves"
    run = fivefold.start(
        "train", "train.yaml", "layout=dp2 tp2", f"steps={STEPS}", *SAVING, "--restarts", "4"
    )
    kills = 0
    for above, pattern in ((0, "*.partial"), (2, "step-????????"), (4, "*.partial"), (6, "step-????????")):
        wait_for(saves, pattern, above=above)
        time.sleep(chance.random() * 0.02 if pattern != "*.partial" else 0.0)
        kills += kill_one(run.pid, chance)
    ended = run.ended()
    assert ended.code == 0, ended.err
    assert kills >= 3
    assert 1 <= ended.err.count("killed by SIGKILL (out of memory?); starting again from") <= kills
    assert final(saves) == expected
    assert not list(saves.glob("*.partial"))
    assert len(checkpoints(saves)) == 2
    lines = fivefold.metrics()
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1)), (
        "each step once, whatever was taken again"
    )


def test_killed_more_often_than_allowed(fivefold: CommandLine) -> None:
    run = fivefold.start("train", "train.yaml", "layout=dp2", "steps=500", *SAVING, "--restarts", "0")
    wait_for(fivefold.folder / "saves", "step-????????")
    kill_one(run.pid, random.Random(1))
    ended = run.ended()
    assert ended.code == 1
    assert "killed by SIGKILL" in ended.err.splitlines()[-1]


def test_resume_from_the_command_line(fivefold: CommandLine, expected: dict[str, str]) -> None:
    """Killed as a whole, then resumed by hand; every refusal is one line."""

    def train(*more: str) -> tuple[str, ...]:
        return ("train", "train.yaml", "layout=dp2 tp2", f"steps={STEPS}", *SAVING, *more)

    saves = fivefold.folder / "saves"
    run: Started = fivefold.start(*train("--resume", "auto"))
    wait_for(saves, "step-????????", above=2)
    os.kill(run.pid, signal.SIGKILL)
    assert run.ended().code == -signal.SIGKILL
    deadline = time.monotonic() + 10
    while run.alive() and time.monotonic() < deadline:
        time.sleep(0.01)

    assert "go on with --resume auto, or save elsewhere" in fivefold(*train()).said()
    assert "seed was 0, is 1 now" in fivefold(*train("--resume", "auto", "seed=1")).said()
    assert (
        "is of another model"
        in fivefold(
            *train("--resume", "auto", "model=" + fivefold.model("wide.json", intermediate_size=64))
        ).said()
    )
    (fivefold.folder / "corpus" / "more.py").write_text("print('more')\n" * 50)
    assert "data fingerprint was" in fivefold(*train("--resume", "auto")).said()
    (fivefold.folder / "corpus" / "more.py").unlink()
    assert final_or_none(saves) is None, "none of these went on"

    ended = fivefold(*train("--resume", "auto"))
    assert ended.code == 0, ended.err
    assert ", from step " in ended.err
    assert final(saves) == expected
    beyond = fivefold(*train("--resume", "auto"))
    assert beyond.code == 2
    assert f"is at step {STEPS} of {STEPS}: nothing is left to do; raise steps" in beyond.said()
    assert "needs checkpoint.folder" in fivefold("train", "train.yaml", "--resume", "auto").said()
    assert "needs checkpoint.folder" in fivefold("train", "train.yaml", "--restarts", "1").said()


def final_or_none(folder: Path) -> dict[str, str] | None:
    return final(folder) if (folder / f"step-{STEPS:08d}").exists() else None


def test_a_disk_that_is_full(fivefold: CommandLine) -> None:
    """The system refuses files above 40 KiB: every save fails, is warned of, and the run ends well."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (40_960, 40_960))

    run = fivefold.start("train", "train.yaml", "layout=tp2", "steps=3", *SAVING, before=limit)
    ended = run.ended()
    assert ended.code == 0, ended.err
    warnings = [line for line in ended.err.splitlines() if line.startswith("warning: ")]
    assert len(warnings) == 3
    for step, line in enumerate(warnings, start=1):
        assert f"checkpoint of step {step} not saved to saves/step-{step:08d}: rank " in line
        assert "File too large" in line
    assert list((fivefold.folder / "saves").iterdir()) == []


def test_nothing_is_saved_over_the_last_good_state(fivefold: CommandLine) -> None:
    """A learning rate that overflows the weights in an update: that state is not saved, the one before is kept."""
    ended = fivefold(
        "train", "train.yaml", *SAVING, "checkpoint.keep=1", "steps=50", "optimizer.lr=1e38",
        "optimizer.clip_norm=null", "optimizer.warmup_steps=0",
    )  # fmt: skip
    assert ended.code == 1
    assert "training diverged" in ended.err
    for _, path in checkpoints(fivefold.folder / "saves"):
        values = load_file(path / "rank-00000.safetensors").values()
        assert all(bool(value.isfinite().all()) for value in values)
    assert "not saved" in ended.err
    assert not list((fivefold.folder / "saves").glob("*.partial"))


@pytest.mark.exhaustive
def test_torchrun_brings_a_killed_rank_back(fivefold: CommandLine) -> None:
    """`--max-restarts`: gloo meets again, the job goes on from the newest save."""
    command = (
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=2",
        "-m", "fivefold", "train", "train.yaml", "layout=dp2", f"steps={STEPS}", *SAVING,
    )  # fmt: skip
    with (fivefold.folder / "log").open("wb") as log:
        launcher = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            wait_for(fivefold.folder / "saves", "step-????????", above=3, timeout_s=120)
            workers = psutil.Process(launcher.pid).children()
            os.kill(workers[-1].pid, signal.SIGKILL)
            assert launcher.wait(timeout=180) == 0, (fivefold.folder / "log").read_text()
        finally:
            launcher.kill()
    assert ", from step " in (fivefold.folder / "log").read_text()
    saves = fivefold.folder / "saves"
    whole = fivefold(
        "train", "train.yaml", "layout=dp2", f"steps={STEPS}", *SAVING, "checkpoint.folder=whole"
    )
    assert whole.code == 0
    assert final(saves) == final(fivefold.folder / "whole")

"""How a command ends from outside: SIGTERM, closed streams, and a launcher that starts and ends its ranks."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from fivefold.cli import process

from .command_line import CommandLine

PROMPT_S = 5.0
LONG = ("train", "train.yaml", "layout=dp2", "steps=100000")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def wait_for(path: Path, text: str, timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while text not in (path.read_text() if path.exists() else ""):
        assert time.monotonic() < deadline, path.read_text() if path.exists() else "nothing was said"
        time.sleep(0.02)


def start(folder: Path, *command: str) -> subprocess.Popen[bytes]:
    """As a batch system starts it: a process of its own, output in files."""
    with (folder / "out").open("wb") as out, (folder / "err").open("wb") as err:
        return subprocess.Popen(command, cwd=folder, stdout=out, stderr=err, start_new_session=True)


def alive(session: int) -> list[int]:
    """Processes of this session that still run."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == session and fields[0] not in "ZX":
            found.append(int(stat.parent.name))
    return found


def told(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("fivefold: ")]


@pytest.mark.parametrize(
    "whole_group", [True, pytest.param(False, marks=pytest.mark.exhaustive)], ids=["group", "parent"]
)
def test_sigterm_ends_all_ranks_and_keeps_the_record(fivefold: CommandLine, whole_group: bool) -> None:
    """As Slurm does before it takes the machine away: to the first process, or to all."""
    started = start(fivefold.folder, sys.executable, "-m", "fivefold", *LONG)
    try:
        wait_for(fivefold.folder / "err", "step 1/")
        began = time.monotonic()
        (os.killpg if whole_group else os.kill)(started.pid, signal.SIGTERM)
        assert started.wait(30) == 143
        assert time.monotonic() - began < PROMPT_S
        assert alive(started.pid) == []
    finally:
        started.kill()
    err = Path("err").read_text()
    assert told(err) == ["fivefold: terminated by SIGTERM; what was saved and recorded before is kept"]
    assert "Traceback" not in err
    run = fivefold.last_run()
    assert (run["status"], run["error"]) == ("interrupted", "Terminated: by SIGTERM")
    assert run["last_step"] >= 1


def test_closed_streams_are_no_fault(fivefold: CommandLine) -> None:
    """Not even of ranks, and nothing that was meant for them lands in another file."""
    command = f"{sys.executable} -m fivefold train train.yaml steps=1 layout=dp2 <&- >&- 2>&-"
    assert subprocess.run(["sh", "-c", command], timeout=60, cwd=fivefold.folder, check=False).returncode == 0
    assert [line["step"] for line in fivefold.metrics()] == [1]
    assert fivefold.last_run()["status"] == "finished"


def close(*numbers: int) -> None:
    """As a shell starts a command with `>&-`; what `main` does then."""
    for number in numbers:
        os.close(number)
        setattr(sys, ("stdin", "stdout", "stderr")[number], None)
    process.open_streams()


def fill(*numbers: int) -> None:
    """As `>/dev/full`: a disk without space."""
    for number in numbers:
        os.dup2(os.open("/dev/full", os.O_WRONLY), number)


LIGHT = ("model list", "model show tiny-llama", "data show nowhere", "runs list", "lab --steps 0", "--help")
WITH_RANKS = (
    "verify -m tiny-llama -l dp2 --steps 1",
    "lab --model config.json --steps 1 --max-ranks 1",
    "train train.yaml steps=1",
)


@pytest.mark.parametrize("command", [*LIGHT, *WITH_RANKS])
def test_no_command_needs_its_streams(fivefold: CommandLine, command: str) -> None:
    changes = [lambda: close(1), lambda: fill(2)]
    if command in LIGHT:
        changes += [lambda: close(2), lambda: fill(1), lambda: fill(1, 2)]
    for change in changes:
        for name in ("out", "err", "metrics.jsonl"):
            Path(name).unlink(missing_ok=True)
        ended = fivefold.start(*command.split(), before=change).ended()
        assert ended.code in (0, 2)
        assert "Traceback" not in ended.err


JOB = """
import os, signal, sys, time
import fivefold.train.run as run
from fivefold.cli.main import main

def planted(rank, *rest):
    if rank.rank == {rank}:
        {fault}
    return train_rank(rank, *rest)

train_rank, run.train_rank = run.train_rank, planted
if __name__ == "__main__":
    main()
"""


def launch(fivefold: CommandLine, *overrides: str, rank: int = 1, fault: str = "pass") -> Any:
    script = fivefold.folder / "job.py"
    script.write_text(JOB.format(rank=rank, fault=fault))
    command = [*TORCHRUN, str(script), "train", "train.yaml", "layout=dp2", *overrides]
    return subprocess.run(command, cwd=fivefold.folder, capture_output=True, text=True, timeout=120)


def test_a_mistake_of_all_ranks_is_told_once(fivefold: CommandLine) -> None:
    """Before the ranks have met: afterwards they agree on who tells it, as they do on a failure."""
    ended = launch(fivefold, "optimizer.lrr=1")
    assert ended.returncode != 0
    assert len(told(ended.stderr)) == 1, ended.stderr
    assert "unknown key 'optimizer.lrr'" in told(ended.stderr)[0]
    assert ended.stdout == ""


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.exhaustive), 1])
def test_the_first_failure_of_a_launched_job_is_told_once(fivefold: CommandLine, rank: int) -> None:
    """Its peer fails too, in a collective that never ends."""
    ended = launch(fivefold, rank=rank, fault="raise ZeroDivisionError('planted')")
    assert ended.returncode != 0
    assert told(ended.stderr) == [f"fivefold: rank {rank} failed first: ZeroDivisionError: planted"]
    run = fivefold.last_run()
    assert run["status"] == "failed"
    assert f"rank {rank} failed first: ZeroDivisionError: planted" in run["error"]


@pytest.mark.exhaustive
def test_a_rank_of_a_launched_job_that_is_killed(fivefold: CommandLine) -> None:
    ended = launch(fivefold, rank=1, fault="os.kill(os.getpid(), signal.SIGKILL)")
    assert ended.returncode != 0
    assert len(told(ended.stderr)) == 1, ended.stderr
    assert "a rank died without a word (killed? out of memory?)" in told(ended.stderr)[0]
    assert "SIGKILL" in ended.stderr  # the launcher's own summary names the rank
    assert fivefold.last_run()["status"] == "failed"


@pytest.mark.exhaustive
def test_a_launched_job_that_is_terminated(fivefold: CommandLine) -> None:
    """The launcher passes SIGTERM on; rank 0 waits for its peer in a collective, and still ends the record."""
    script = fivefold.folder / "job.py"
    script.write_text(
        JOB.format(rank=1, fault="print('asleep', file=sys.stderr, flush=True); time.sleep(600)")
    )
    started = start(fivefold.folder, *TORCHRUN, str(script), *LONG)
    try:
        wait_for(fivefold.folder / "err", "asleep")
        while "running" not in fivefold("runs", "list").out:  # the store may just be made
            time.sleep(0.1)
        began = time.monotonic()
        os.kill(started.pid, signal.SIGTERM)
        assert started.wait(60) != 0
        assert time.monotonic() - began < PROMPT_S
    finally:
        started.kill()
    run = fivefold.last_run()
    assert (run["status"], run["error"]) == ("interrupted", "Terminated: by SIGTERM")
    assert not re.search("failed first", json.dumps(run))

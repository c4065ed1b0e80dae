"""Starting and ending ranks: quickly, in order, the root cause first, and nothing left behind."""

from __future__ import annotations

import faulthandler
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fivefold.core.layout import Layout
from fivefold.errors import LaunchError, RankFailure, WorkloadError
from fivefold.runtime.launch import Rank, run_ranks
from fivefold.runtime.mesh import Mesh

PROMPT_S = 5.0


def run(function: Callable[..., Any], *args: Any, ranks: int, **options: Any) -> list[Any]:
    return run_ranks(function, *args, ranks=ranks, device="cpu", **options)


def meet(rank: Rank) -> None:
    """A collective of all ranks."""
    dist.all_reduce(torch.ones(1))


def test_results_come_in_order_of_rank() -> None:
    def work(rank: Rank, base: int) -> tuple[int, int, int, int]:
        time.sleep(0.02 * (rank.world_size - rank.rank))  # the last is ready first
        return rank.rank, rank.world_size, base + rank.rank, dist.get_rank()

    assert run(work, 10, ranks=4) == [(r, 4, 10 + r, r) for r in range(4)]


def test_large_results_and_tensors_come_back_whole() -> None:
    results = run(lambda rank: torch.full((1_000_000,), float(rank.rank)), ranks=2)
    assert [float(r.sum()) for r in results] == [0.0, 1e6]


def test_a_rank_has_one_thread_and_its_own_process() -> None:
    found = run(lambda rank: (torch.get_num_threads(), os.getpid(), str(rank.device.device)), ranks=3)
    assert {threads for threads, _, _ in found} == {1}
    assert len({pid for _, pid, _ in found} | {os.getpid()}) == 4
    assert {device for _, _, device in found} == {"cpu"}


def test_32_ranks_start_quickly() -> None:
    def work(rank: Rank) -> float:
        total = torch.tensor([float(rank.rank)])
        dist.all_reduce(total)
        return total.item()

    run(work, ranks=1)  # imports are done
    began = time.monotonic()
    assert run(work, ranks=32) == [sum(range(32))] * 32
    assert time.monotonic() - began < PROMPT_S


@pytest.mark.parametrize("culprit", [0, 3])
def test_the_root_cause_comes_first(culprit: int) -> None:
    """The others fail too, since their peer is gone: that is not what is told. Rank 0 holds the meeting point."""

    def work(rank: Rank) -> None:
        meet(rank)
        if rank.rank == culprit:
            raise ValueError("no more data\nsecond line")
        meet(rank)
        meet(rank)

    began = time.monotonic()
    with pytest.raises(RankFailure) as caught:
        run(work, ranks=5)
    assert time.monotonic() - began < PROMPT_S
    assert str(caught.value) == f"rank {culprit} failed first: ValueError: no more data"
    assert caught.value.rank == culprit
    assert "second line" in caught.value.details
    assert 'raise ValueError("no more data' in caught.value.details, "with its traceback"


def test_ranks_that_never_answer_are_ended() -> None:
    def work(rank: Rank) -> None:
        if rank.rank == 1:
            raise RuntimeError
        time.sleep(600)

    began = time.monotonic()
    with pytest.raises(RankFailure, match=r"^rank 1 failed first: RuntimeError$"):
        run(work, ranks=3)
    assert time.monotonic() - began < PROMPT_S


def test_a_rank_that_ignores_being_asked_is_killed() -> None:
    def work(rank: Rank) -> None:
        if rank.rank == 1:
            time.sleep(0.2)
            raise RuntimeError("stop")
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(600)

    began = time.monotonic()
    with pytest.raises(RankFailure, match=r"rank 1 .*stop"):
        run(work, ranks=2)
    assert time.monotonic() - began < PROMPT_S


@pytest.mark.parametrize(
    ("end", "cause"),
    [
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "killed by SIGKILL (out of memory?)"),
        (lambda: os.kill(os.getpid(), signal.SIGSEGV), "killed by SIGSEGV"),
        (lambda: os._exit(7), "exited with code 7 without a word"),
        (lambda: sys.exit("enough"), "SystemExit: enough"),
    ],
)
def test_a_rank_that_dies_is_named(end: Callable[[], None], cause: str) -> None:
    def work(rank: Rank) -> None:
        meet(rank)
        if rank.rank == 2:
            faulthandler.disable()  # no report of a crash that is meant
            end()
        meet(rank)

    began = time.monotonic()
    with pytest.raises(RankFailure) as caught:
        run(work, ranks=4)
    assert time.monotonic() - began < PROMPT_S
    assert str(caught.value) == f"rank 2 failed first: {cause}"


def test_a_users_mistake_arrives_as_itself() -> None:
    def work(rank: Rank) -> None:
        if rank.rank == 1:
            raise WorkloadError("global batch 7 is not a multiple of dp2")
        meet(rank)

    with pytest.raises(WorkloadError, match=r"^global batch 7 is not a multiple of dp2$"):
        run(work, ranks=2)


def test_a_job_inside_a_launched_rank_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(LaunchError, match="this is rank 1 of 4 that a launcher started"):
        run(meet, ranks=2)


def test_a_result_that_cannot_travel_is_told() -> None:
    def work(rank: Rank) -> Any:
        return (lambda: None) if rank.rank == 1 else None

    with pytest.raises(RankFailure, match=r"rank 1 failed first: .*pickle"):
        run(work, ranks=2)


@pytest.mark.parametrize(
    "text", ["", "\n\n", "a\r\nb", "a\x0bb\x0cc", "a\u2028b", "  padded  ", "x" * 10_000]
)
def test_every_failure_is_one_line(text: str) -> None:
    def work(rank: Rank) -> None:
        raise ValueError(text)

    with pytest.raises(RankFailure) as caught:
        run(work, ranks=1)
    assert len(str(caught.value).splitlines()) == 1
    assert str(caught.value).startswith("rank 0 failed first: ValueError")


def test_a_peer_that_never_comes_ends_at_the_timeout() -> None:
    """The timeout of the job holds for the groups of every axis."""

    def work(rank: Rank) -> None:
        mesh = Mesh(Layout.parse("tp2"), rank.rank, rank.device)
        axis = mesh.axis("tp")
        axis.all_reduce(torch.ones(1))
        if rank.rank == 1:
            time.sleep(60)
        axis.all_reduce(torch.ones(1))

    began = time.monotonic()
    with pytest.raises(RankFailure, match=r"^rank 0 failed first: "):
        run(work, ranks=2, timeout=timedelta(seconds=2))
    assert 1.5 < time.monotonic() - began < 2 + PROMPT_S


def test_a_port_can_be_used_again_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    for _ in range(3):
        run(meet, ranks=2, port=port)


# ---------------------------------------------------------------------------------------------------------------------
# Signals to the parent: in a process of its own, forked from this one so that it need not import torch again.


class Parent:
    """A process that starts ranks; its output goes to files in `folder`."""

    def __init__(self, folder: Path, work: Callable[[Rank], Any], ranks: int) -> None:
        self.folder = folder
        self.process = get_context("fork").Process(target=self._main, args=(work, ranks))
        self.process.start()
        assert self.process.pid is not None
        self.pid = self.process.pid

    def _main(self, work: Callable[[Rank], Any], ranks: int) -> None:
        os.setsid()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for name in ("stdout", "stderr"):
            stream = (self.folder / name).open("w", buffering=4096)
            setattr(sys, name, stream)
            os.dup2(stream.fileno(), ("stdout", "stderr").index(name) + 1)

        def on_rank(rank: Rank) -> Any:
            (self.folder / f"rank{rank.rank}").write_text(str(os.getpid()))
            return work(rank)

        try:
            run(on_rank, ranks=ranks)
        except KeyboardInterrupt:
            sys.exit(130)

    def ranks(self, count: int) -> list[int]:
        """The process ids of all ranks, once they are written."""
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and self.process.is_alive():
            texts = [file.read_text() for file in self.folder.glob("rank*")]
            if len(texts) == count and all(texts):
                return [int(text) for text in texts]
            time.sleep(0.02)
        self.process.kill()
        pytest.fail(f"ranks did not start: {self.output('stderr')}")

    def output(self, name: str) -> str:
        return (self.folder / name).read_text()


def busy(rank: Rank) -> None:
    """Rank 0 computes for ever; the others wait for it in a collective."""
    if rank.rank == 0:
        time.sleep(600)
    meet(rank)


def is_alive(pid: int) -> bool:
    """Whether the process runs; one that nobody has buried yet does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state != "Z"


def gone_within(pids: list[int], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while any(is_alive(pid) for pid in pids):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@linux
@pytest.mark.parametrize("whole_group", [False, True])
def test_ctrl_c_ends_all_ranks(tmp_path: Path, whole_group: bool) -> None:
    """A terminal sends SIGINT to the parent and its ranks, a supervisor to the parent alone."""
    parent = Parent(tmp_path, busy, ranks=4)
    pids = parent.ranks(4)
    began = time.monotonic()
    (os.killpg if whole_group else os.kill)(parent.pid, signal.SIGINT)
    parent.process.join(30)
    assert time.monotonic() - began < PROMPT_S
    assert parent.process.exitcode == 130, parent.output("stderr")
    assert gone_within(pids, 1.0)
    assert "Traceback" not in parent.output("stderr")


def test_an_interrupted_rank_goes_on() -> None:
    """The parent decides when ranks end; a signal that reaches a rank alone changes nothing."""

    def work(rank: Rank) -> int:
        if rank.rank == 1:
            os.kill(os.getpid(), signal.SIGINT)
        meet(rank)
        return rank.rank

    assert run(work, ranks=2) == [0, 1]


@linux
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_no_rank_outlives_its_parent(tmp_path: Path, how: signal.Signals) -> None:
    parent = Parent(tmp_path, busy, ranks=4)
    pids = parent.ranks(4)
    os.kill(parent.pid, how)
    parent.process.join(30)
    assert gone_within(pids, PROMPT_S)


def test_what_ranks_print_is_not_lost(tmp_path: Path) -> None:
    """Standard output is a file here, so what is printed waits in a buffer until it is flushed."""
    parent = Parent(tmp_path, lambda rank: print("hello from", rank.rank), ranks=2)
    parent.process.join(60)
    assert parent.process.exitcode == 0
    assert sorted(parent.output("stdout").splitlines()) == ["hello from 0", "hello from 1"]


JOINED = """
import torch, torch.distributed as dist
from fivefold.core.layout import Layout
from fivefold.runtime.launch import joined_rank, under_launcher
from fivefold.runtime.mesh import Mesh
assert under_launcher()
with joined_rank("cpu") as rank:
    axis = Mesh(Layout.parse("dp2"), rank.rank, rank.device).axis("data")
    total = axis.all_reduce(torch.tensor([rank.rank + 1.0]))
    print(f"rank {rank.rank} of {rank.world_size} on {rank.device.device}: {total.item()}\\n", end="", flush=True)
assert not dist.is_initialized()
"""


def test_under_torchrun(tmp_path: Path) -> None:
    script = tmp_path / "job.py"
    script.write_text(JOINED)
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["rank 0 of 2 on cpu: 3.0", "rank 1 of 2 on cpu: 3.0"]


@pytest.mark.exhaustive
def test_a_rank_that_fails_under_torchrun_ends_the_job(tmp_path: Path) -> None:
    """The failing rank does not wait for the others on its way out."""
    script = tmp_path / "job.py"
    script.write_text(
        JOINED.replace("    axis =", "    if rank.rank == 1: raise ValueError('bad row 17')\n    axis =")
    )
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    began = time.monotonic()
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=120)
    assert done.returncode != 0
    assert "bad row 17" in done.stderr
    assert time.monotonic() - began < 60

"""Starting ranks: forked on this machine from a parent that has imported torch, or joined to a `torchrun` job.

    results = run_ranks(function, ranks=8)        # this machine; one result per rank, in order of rank
    with joined_rank() as rank: ...               # under torchrun or Slurm: this process is one rank already

When a rank fails, its error is the first thing said, and the others are ended at once instead of waiting for a peer
that will never answer.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import pickle
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from typing import Any

import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore, rendezvous  # type: ignore[attr-defined]

from fivefold.compat import warm_up_imports
from fivefold.errors import FivefoldError, LaunchError, RankFailure
from fivefold.runtime.device import Device, check_device_count, device_kind, select_device
from fivefold.runtime.mesh import DEFAULT_TIMEOUT

GRACE_S = 0.5
"""After a first failure, how long other ranks may still report theirs before all are ended."""


@dataclass(frozen=True)
class Rank:
    """What a started rank knows of itself before any layout."""

    rank: int
    world_size: int
    device: Device
    store: Store | None = None
    """Of a launched job: what its ranks can write to and read from without a collective."""


def run_ranks(
    function: Callable[..., Any],
    *args: Any,
    ranks: int,
    device: str = "auto",
    port: int | None = None,
    timeout: timedelta = DEFAULT_TIMEOUT,
) -> list[Any]:
    """Run `function(rank, *args)` in `ranks` forked processes and return their results in order of rank.

    Raises: RankFailure with the first cause, or a rank's own FivefoldError (a user's mistake, training that diverged);
            LaunchError if the ranks cannot be started. KeyboardInterrupt (also of a SIGTERM handler) ends all ranks,
            then goes on.
    """
    refuse_launcher()
    kind = device_kind(device)
    check_device_count(kind, ranks)
    listener = _listen(port)
    warm_up_imports()
    context = get_context("fork")
    pipes: list[Connection] = []
    processes = []
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        for rank in range(ranks):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_child,
                args=(theirs, listener, rank, ranks, kind, timeout, function, args),
                daemon=False,
            )
            with _signals_held():
                process.start()
                processes.append(process)
            theirs.close()
            pipes.append(ours)
        listener.close()
        return _collect(pipes, processes)
    finally:
        listener.close()
        _end(processes)


@contextlib.contextmanager
def _signals_held() -> Iterator[None]:
    """Ctrl-C and SIGTERM wait until the block is left: Python drops what is raised inside its hooks around a fork."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _listen(port: int | None) -> socket.socket:
    """A listening socket that rank 0 inherits: the port is ours from here on, so nobody can take it in between."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    # Linux refuses a port on which somebody listens all the same; this only allows one that a past run used.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(("127.0.0.1", port or 0))
        listener.listen(1024)
    except (OSError, OverflowError) as error:
        listener.close()
        reason = error.strerror if isinstance(error, OSError) else "ports are 0 to 65535"
        raise LaunchError(
            f"port {port} cannot be used ({reason}); leave --port out to take a free one"
        ) from None
    return listener


def _child(
    pipe: Connection,
    listener: socket.socket,
    rank: int,
    ranks: int,
    kind: str,
    timeout: timedelta,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when ranks end
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})  # held since before the fork
    _die_with_parent()
    try:
        device = select_device(kind, rank, ranks)
        device.activate()
        os.environ.setdefault("GLOO_SOCKET_IFNAME", _loopback())
        port = listener.getsockname()[1]
        store = TCPStore(
            "127.0.0.1",
            port,
            ranks,
            is_master=rank == 0,
            wait_for_workers=False,
            master_listen_fd=os.dup(listener.fileno()) if rank == 0 else None,
            timeout=timeout,
        )
        listener.close()
        dist.init_process_group(device.backend, store=store, rank=rank, world_size=ranks, timeout=timeout)
        failed, report = (
            False,
            pickle.dumps((time.time(), "result", function(Rank(rank, ranks, device), *args))),
        )
    except BaseException as error:
        reason = error if isinstance(error, FivefoldError) else None
        value = (reason, one_line(error), traceback.format_exc())
        failed, report = True, pickle.dumps((time.time(), "error", value))
    with contextlib.suppress(OSError, EOFError):
        pipe.send_bytes(report)
        if not failed:
            pipe.recv_bytes()  # leave together: rank 0 holds the store that slower ranks still need
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(failed)


def _collect(pipes: list[Connection], processes: list[Any]) -> list[Any]:
    """Results in order of rank; at the first failure, a short grace for other reports, then the root cause."""
    results: dict[int, Any] = {}
    failures: list[tuple[float, int, Any, str, str]] = []
    open_pipes = {pipe: rank for rank, pipe in enumerate(pipes)}
    deadline: float | None = None
    while open_pipes and (deadline is None or time.monotonic() < deadline):
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        for pipe in wait(list(open_pipes), left):
            assert isinstance(pipe, Connection)
            rank = open_pipes.pop(pipe)
            try:
                moment, kind, value = pickle.loads(pipe.recv_bytes())  # noqa: S301 - our own child's bytes
            except (EOFError, ConnectionError):
                moment, kind, value = 0.0, "error", (None, _death(processes[rank]), "")
            if kind == "result":
                results[rank] = value
            else:
                failures.append((moment, rank, *value))
                deadline = deadline or time.monotonic() + GRACE_S
    if failures:
        _, rank, told, line, details = min(failures, key=lambda failure: failure[:2])
        raise told or RankFailure(rank, line, details)
    for pipe in pipes:
        with contextlib.suppress(OSError):
            pipe.send_bytes(b"leave")
    for process in processes:
        process.join(timeout=5)
    return [results[rank] for rank in range(len(pipes))]


def _death(process: Any) -> str:
    process.join(timeout=1)
    code = process.exitcode
    if code is not None and code < 0:
        name = signal.Signals(-code).name
        hint = " (out of memory?)" if name == "SIGKILL" else ""
        return f"killed by {name}{hint}"
    return f"exited with code {code} without a word"


def _end(processes: list[Any]) -> None:
    """End what still runs: politely, then not."""
    running = [process for process in processes if process.is_alive()]
    for process in running:
        process.terminate()
    deadline = time.monotonic() + 1.0
    for process in running:
        process.join(timeout=max(0.0, deadline - time.monotonic()))
        if process.is_alive():
            process.kill()
            process.join()


def one_line(error: BaseException) -> str:
    """The class of an error and the first line of what it says."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__


def _loopback() -> str:
    return next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo")


def _die_with_parent() -> None:
    """On Linux, a rank whose parent is killed does not live on (PR_SET_PDEATHSIG = 1)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)


# ---------------------------------------------------------------------------------------------------------------------


def under_launcher() -> bool:
    """Whether this process was started as one rank of a job (torchrun, or Slurm with the same variables)."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def refuse_launcher() -> None:
    """Raises: LaunchError where this process is one rank of a job already and should start ranks of its own."""
    if under_launcher():
        raise LaunchError(
            f"this is rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']} that a launcher started, but the command "
            f"starts its own ranks on one machine; run it without torchrun (of all commands only train runs under it)"
        )


@contextlib.contextmanager
def joined_rank(device: str = "auto", timeout: timedelta = DEFAULT_TIMEOUT) -> Iterator[Rank]:
    """Join the job that a launcher started, by the variables RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT.

    Raises: LaunchError naming the variable that is missing or wrong, or the port that is in use.
    """
    rank, world_size = _number("RANK"), _number("WORLD_SIZE")
    _number("MASTER_PORT")
    if rank >= world_size:
        raise LaunchError(
            f"RANK={rank} must be below WORLD_SIZE={world_size}; start with torchrun, or set both"
        )
    local_rank = _number("LOCAL_RANK", rank)
    local_ranks = _number("LOCAL_WORLD_SIZE", local_rank + 1)
    chosen = select_device(device_kind(device), local_rank, local_ranks)
    chosen.activate()
    try:
        store, _, _ = next(rendezvous("env://", timeout=timeout))
        # torchrun keeps its store over restarts, with addresses of ranks that are gone: each start has its own names.
        store = PrefixStore(f"start-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
        dist.init_process_group(
            chosen.backend, store=store, rank=rank, world_size=world_size, timeout=timeout
        )
    except (dist.DistError, ValueError) as error:
        address = f"{os.environ.get('MASTER_ADDR', '?')}:{os.environ.get('MASTER_PORT', '?')}"
        in_use = "the port is in use; set MASTER_PORT to a free one"
        reason = in_use if "EADDRINUSE" in str(error) else one_line(error)
        raise LaunchError(f"cannot meet the other ranks at {address}: {reason}") from None
    # A rank that fails leaves as it is: taking the group down in order would wait for the others.
    yield Rank(rank, world_size, chosen, store)
    dist.barrier()
    dist.destroy_process_group()


def _number(name: str, default: int | None = None) -> int:
    text = os.environ.get(name, "" if default is None else str(default))
    if not text.isdecimal():
        raise LaunchError(
            f"{name}={text!r} is not a number; start with torchrun, or use --ranks on one machine"
        )
    return int(text)

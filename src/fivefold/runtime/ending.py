"""How a rank that a launcher started ends: the job's first failure is told once, and SIGTERM leaves a readable record.

    with first_failure(rank):           # an error in here is told by the rank that had it first, and by no other
        with on_sigterm(action):        # `action()` runs as soon as the signal comes
            ...

A launcher ends all ranks with SIGTERM, both when one of them has failed and when the whole job is to end.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist

from fivefold.errors import FivefoldError, RankFailure, UserError
from fivefold.records.store import Run
from fivefold.runtime.launch import Rank, one_line

KEY = "first-failure"
LOST_PEER = re.compile("onnection (closed|reset) by peer|Broken pipe")
"""What gloo says where the process at the other end is gone."""
RANK_0_FIRST_S = 1.0
"""So long the other ranks live on after SIGTERM: rank 0 should get its own before it finds its peers gone."""
ENDED = 128 + signal.SIGTERM


@contextlib.contextmanager
def first_failure(rank: Rank) -> Iterator[None]:
    """Agree on which rank failed first, through the store of the job: no collective, the others may be gone.

    Raises: on the rank that failed first its own error, a FivefoldError as it is and another one as RankFailure, with
            `told` False; on all others what that rank said, with `told` True. KeyboardInterrupt as it is.
    """
    try:
        yield
    except FivefoldError as error:
        if error.told is not None or rank.store is None:
            raise
        first = _claim(rank, str(error), error.exit_code)
        error.told = first["rank"] != rank.rank
        if not error.told:
            raise
        raise _of_another(first) from None
    except Exception as error:
        if rank.store is None:
            raise
        lost = LOST_PEER.search(str(error)) is not None
        line = one_line(error)
        if lost:
            line = f"a rank died without a word (killed? out of memory?), the launcher says which: {line}"
        first = _claim(rank, line, 1)
        if first["rank"] != rank.rank:
            raise _of_another(first) from None
        own = FivefoldError(line) if lost else RankFailure(rank.rank, line, traceback.format_exc())
        own.told = False
        raise own from None


def known_failure(rank: Rank) -> str | None:
    """What the rank that failed first said, if one has."""
    with contextlib.suppress(dist.DistError, RuntimeError):
        if rank.store is not None and rank.store.check([KEY]):
            return str(_of_another(json.loads(rank.store.get(KEY))))
    return None


def _claim(rank: Rank, line: str, code: int) -> dict[str, Any]:
    """The first failure: this one, unless another rank was quicker. Where the store is gone, this one."""
    own = {"rank": rank.rank, "line": line, "code": code}
    assert rank.store is not None
    try:
        first: dict[str, Any] = json.loads(rank.store.compare_set(KEY, "", json.dumps(own)))
    except (dist.DistError, RuntimeError, ValueError):
        return own
    return first


def _of_another(first: dict[str, Any]) -> FivefoldError:
    code = int(first["code"])
    error = (
        UserError(first["line"]) if code == UserError.exit_code else RankFailure(first["rank"], first["line"])
    )
    error.told = True
    return error


@contextlib.contextmanager
def record_ends_on_sigterm(rank: Rank, run: Run | None) -> Iterator[None]:
    """End this process on SIGTERM with exit code 143, and on rank 0 the record of the run with the reason.

    An error that is on its way out of the block is not cut off: it ends the process by itself.
    """
    leaving = threading.Event()

    def end() -> None:
        if leaving.is_set():
            return
        if rank.rank != 0:
            time.sleep(RANK_0_FIRST_S)
        elif run is not None:
            failure = known_failure(rank)
            run.finish("failed" if failure else "interrupted", failure or "Terminated: by SIGTERM")
        os._exit(ENDED)

    with on_sigterm(end):
        try:
            yield
        except BaseException:
            leaving.set()
            raise


@contextlib.contextmanager
def on_sigterm(action: Callable[[], None]) -> Iterator[None]:
    """Call `action` in a thread of its own when SIGTERM comes, at once.

    The main thread may wait for other ranks inside a collective, and Python runs handlers only when it comes back.
    """
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    handler = signal.signal(signal.SIGTERM, lambda number, frame: None)
    wakeup = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)

    def watch() -> None:
        while numbers := reader.recv(64):
            if signal.SIGTERM in numbers:
                action()

    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(wakeup)
        signal.signal(signal.SIGTERM, handler)
        writer.close()

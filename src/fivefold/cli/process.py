"""This process and what surrounds it: standard streams that may be closed, SIGTERM, other ranks of a launched job."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
import time
from types import FrameType
from typing import TextIO

NODE_RANK_0_SPEAKS_S = 10.0
"""A mistake that all ranks of a node make is told by the first of them. So long the others wait to be ended by the
launcher, which ends all when one has failed; whoever is still there then is the only one with that mistake."""


class Terminated(KeyboardInterrupt):
    """SIGTERM, as a batch system sends it before it takes a machine away. Everything ends as it does on Ctrl-C."""


def open_streams() -> None:
    """Lead standard streams that were closed (`>&-`) nowhere.

    Otherwise they are None in Python, and the next file that is opened takes their number: what a library prints would
    then stand in it.
    """
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != number:
                os.dup2(opened, number)
                os.close(opened)
            os.set_inheritable(number, True)
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 - open to the end


def end_on_sigterm() -> None:
    """From now on SIGTERM raises `Terminated` here, once; processes that are forked later die of it as usual."""

    def terminate(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # what is being ended already is not to be disturbed
        raise Terminated("by SIGTERM")

    def as_usual() -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

    signal.signal(signal.SIGTERM, terminate)
    os.register_at_fork(after_in_child=as_usual)


def tell(line: str) -> None:
    """A line on standard error. Where nobody can read it (a closed pipe, a full disk) the work goes on."""
    try:
        print(line, file=sys.stderr, flush=True)
    except OSError:
        abandon(sys.stderr)


def abandon(stream: TextIO) -> None:
    """Lead a stream that cannot be written to nowhere, with what still waits to be written."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


def abandon_broken_streams() -> None:
    """At the end of a command: Python flushes both once more, and would end with an error of its own."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            abandon(stream)


def launched() -> bool:
    """Whether this process is one rank of a job; as `runtime.launch.under_launcher`, which needs torch."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def let_node_rank_0_speak() -> None:
    """Return at once where this rank is the one to tell of a mistake, else when no other seems to have made it."""
    if launched() and "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get("LOCAL_RANK", "0") != "0":
        time.sleep(NODE_RANK_0_SPEAKS_S)


COLLECT_AFTER = 100_000


def collect_rarely() -> None:
    """Look for garbage after so many new objects: a command of half a second leaves none that is worth its time."""
    gc.set_threshold(COLLECT_AFTER)

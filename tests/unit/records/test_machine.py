"""Facts of machine, process and versions, against other sources of the same facts."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from importlib import metadata
from multiprocessing.context import ForkProcess
from typing import Any

import pytest

from fivefold.records.machine import _process_start_from_ps, machine_facts, process_start, versions


def test_facts_of_this_machine() -> None:
    facts = machine_facts()
    assert facts["cpu"]
    assert facts["os"]
    assert 1 <= facts["cores"] <= (os.cpu_count() or 1)
    if sys.platform == "linux":
        with open("/proc/meminfo") as lines:
            total_bytes = int(next(line for line in lines if line.startswith("MemTotal")).split()[1]) * 1024
        assert facts["memory_bytes"] == pytest.approx(total_bytes, rel=0.01)


def test_versions_agree_with_the_installation() -> None:
    found = versions()
    assert found["fivefold"] == metadata.version("fivefold")
    assert found["python"] == sys.version.split()[0]
    assert found["torch"] == metadata.version("torch")


def test_process_start_is_stable_and_differs_between_processes(answer: Callable[..., Any]) -> None:
    ours = process_start(os.getpid())
    assert ours is not None
    assert answer(process_start, os.getpid()) == ours
    time.sleep(0.02)  # two clock ticks of 10 ms
    assert answer(lambda: process_start(os.getpid())) != ours


def test_a_killed_process_is_gone_even_before_it_is_collected(spawn: Callable[..., ForkProcess]) -> None:
    child = spawn(time.sleep, 60)
    assert child.pid is not None
    assert process_start(child.pid) is not None
    os.kill(child.pid, signal.SIGKILL)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # dead, and still a zombie
    assert process_start(child.pid) is None
    child.join()
    assert process_start(child.pid) is None


def test_ps_tells_the_same_where_there_is_no_proc(answer: Callable[..., Any]) -> None:
    try:
        ours = _process_start_from_ps(os.getpid())
    except FileNotFoundError:
        pytest.skip("ps is not installed")
    assert ours is not None
    assert answer(_process_start_from_ps, os.getpid()) == ours
    assert _process_start_from_ps(2**22 + 1) is None  # above the largest process number of Linux

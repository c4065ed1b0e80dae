"""What a record says of the machine, the process and the versions. Nothing here imports torch."""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path
from typing import Any


def machine_facts() -> dict[str, Any]:
    """CPU model, cores that this process may use, memory in bytes and operating system."""
    affinity = getattr(os, "sched_getaffinity", None)  # Linux only
    return {
        "cpu": _cpu_model(),
        "cores": len(affinity(0)) if affinity else os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "os": platform.platform(),
    }


def load_average() -> float | None:
    """Processes that wanted a core in the last minute, mean over it; None where the system does not count them."""
    try:
        return os.getloadavg()[0]
    except OSError:
        return None


def versions() -> dict[str, str | None]:
    """Versions of fivefold, Python and torch (None where torch is not installed)."""
    from importlib import metadata

    from fivefold import __version__

    try:
        torch: str | None = metadata.version("torch")
    except metadata.PackageNotFoundError:
        torch = None
    return {"fivefold": __version__, "python": platform.python_version(), "torch": torch}


def host_name() -> str:
    """The name of this machine."""
    return platform.node()


def process_start(pid: int) -> str | None:
    """When process `pid` of this machine started, as a text that no other process of that number will have.

    Returns: on Linux `boot id:clock ticks since boot`; elsewhere what `ps` says; None if there is no such
             process, or if it is dead and only waits to be collected.
    """
    if not sys.platform.startswith("linux"):
        return _process_start_from_ps(pid)
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None
    # The command in parentheses may hold spaces and parentheses: fields are counted from the last one.
    fields = stat.rpartition(")")[2].split()
    state, ticks = fields[0], fields[19]
    return None if state in "ZX" else f"{boot}:{ticks}"


def _process_start_from_ps(pid: int) -> str | None:
    import subprocess

    command = ["ps", "-o", "stat=,lstart=", "-p", str(pid)]
    answer = subprocess.run(command, capture_output=True, text=True, check=False).stdout.split(maxsplit=1)
    return answer[1].strip() if len(answer) == 2 and not answer[0].startswith("Z") else None


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(models, "") or platform.processor() or platform.machine()

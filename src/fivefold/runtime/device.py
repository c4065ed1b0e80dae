"""The one place that decides on which device and with which backend a rank runs."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

import psutil
import torch
import torch.distributed as dist

from fivefold.errors import LaunchError
from fivefold.units import MIB, format_bytes

# Ask the driver library, not the runtime, how many devices there are: the runtime cannot be used after a fork.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")


@dataclass(frozen=True)
class Device:
    """A rank's device and the communication backend that belongs to it."""

    device: torch.device

    @property
    def kind(self) -> str:
        return self.device.type

    @property
    def backend(self) -> str:
        return dist.get_default_backend_for_device(self.device.type)

    @property
    def is_cpu(self) -> bool:
        return self.device.type == "cpu"

    def activate(self) -> None:
        """Make it the current device of this process; on the CPU, one thread per rank."""
        if self.is_cpu:
            torch.set_num_threads(1)
        else:
            torch.accelerator.set_device_index(self.device.index)

    def synchronize(self) -> None:
        if not self.is_cpu:
            torch.accelerator.synchronize()

    def peak_memory_bytes(self) -> int | None:
        """Peak allocated bytes since the last reset, as the device counts them; None on the CPU."""
        return None if self.is_cpu else int(torch.accelerator.max_memory_allocated())

    def reset_peak_memory(self) -> None:
        if not self.is_cpu:
            torch.accelerator.reset_peak_memory_stats()

    def mark(self) -> Mark:
        """Now: on the host's clock (CPU), or the moment at which the accelerator's current stream gets here."""
        if self.is_cpu:
            return time.perf_counter()
        event = torch.Event(self.device, enable_timing=True)
        event.record()
        return event


Mark = float | torch.Event
"""A moment of a step, see `Device.mark`."""


def elapsed_s(start: Mark, end: Mark) -> float:
    """Seconds between two marks of one device. On an accelerator both must have been reached (`synchronize`)."""
    if isinstance(start, float):
        assert isinstance(end, float)
        return end - start
    assert not isinstance(end, float)
    return float(start.elapsed_time(end)) / 1e3


MOST_CPU_RANKS = 128
"""Ranks that are started on one machine's CPU. Each is connected with every other one, several times: 128 ranks have
about 600 open files each (1024 is a usual limit) and take 10 s to start on two cores, and both grow from there."""

CPU_RANK_BYTES = 32 * MIB
"""A forked rank's own memory, beside the model: 16 MiB measured before the first step, and as much for steps."""


def device_count(kind: str) -> int:
    """How many devices of this kind this machine has; as many CPUs as anyone likes (see `check_device_count`)."""
    return 2**31 if kind == "cpu" else int(torch.get_device_module(kind).device_count())


def device_kind(wanted: str = "auto") -> str:
    """`auto` is the accelerator of this machine if there is one, else the CPU.

    Raises: LaunchError if a kind is asked for that this machine lacks.
    """
    here = torch.accelerator.current_accelerator()
    found = here.type if here is not None and device_count(here.type) > 0 else "cpu"
    if wanted in ("auto", found, "cpu"):
        return found if wanted == "auto" else wanted
    raise LaunchError(
        f"device {wanted!r} is not available here; this machine has: {', '.join(sorted({found, 'cpu'}))}"
    )


def select_device(kind: str, local_rank: int, local_ranks: int) -> Device:
    """The device of one rank. Raises: LaunchError if this machine has fewer devices than ranks."""
    if kind == "cpu":
        return Device(torch.device("cpu"))
    check_device_count(kind, local_ranks)
    return Device(torch.device(kind, local_rank))


def check_device_count(kind: str, local_ranks: int) -> None:
    """Raises: LaunchError if this machine has fewer devices of this kind than ranks, or its CPU cannot hold so many."""
    if kind == "cpu":
        _check_cpu_ranks(local_ranks)
    devices = device_count(kind)
    if devices < local_ranks:
        raise LaunchError(
            f"{local_ranks} ranks need {local_ranks} {kind} devices, this machine has {devices}; "
            f"use a layout of at most {devices} ranks, more nodes, or --device cpu"
        )


def _check_cpu_ranks(ranks: int) -> None:
    free = int(psutil.virtual_memory().available)
    fitting = free // CPU_RANK_BYTES
    if ranks <= min(fitting, MOST_CPU_RANKS):
        return
    why = (
        f"this machine starts at most {MOST_CPU_RANKS} on its CPU"
        if fitting >= MOST_CPU_RANKS
        else f"{fitting} fit: each takes about {format_bytes(CPU_RANK_BYTES)} beside the model, {format_bytes(free)} "
        f"of memory are free"
    )
    raise LaunchError(
        f"the layout has {ranks} ranks, {why}; use a layout of fewer ranks, or more machines under torchrun"
    )


class Stopwatch:
    """Seconds by label, on the host's clock (CPU) or as the accelerator's own stream sees them.

    On an accelerator a pair of events stands around the section on the current stream, so that what is counted is the
    time that the stream could not go on; nothing waits until `seconds` is read.
    """

    def __init__(self, device: Device) -> None:
        self.device = device
        self._host: dict[str, float] = {}
        self._pending: list[tuple[str, Mark, Mark]] = []

    def start(self) -> Mark:
        return self.device.mark()

    def stop(self, label: str, started: Mark) -> None:
        if isinstance(started, float):
            self._host[label] = self._host.get(label, 0.0) + time.perf_counter() - started
            return
        self._pending.append((label, started, self.device.mark()))

    def seconds(self, *, reset: bool = False) -> dict[str, float]:
        """Seconds by label since the last reset."""
        if self._pending:
            self.device.synchronize()
        for label, started, ended in self._pending:
            self._host[label] = self._host.get(label, 0.0) + elapsed_s(started, ended)
        self._pending.clear()
        result = dict(self._host)
        if reset:
            self._host.clear()
        return result

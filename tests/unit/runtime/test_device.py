"""Choice of device, refusals, and the stopwatch on the CPU."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
import torch

from fivefold.errors import LaunchError
from fivefold.runtime import device as module
from fivefold.runtime.device import Device, Stopwatch, check_device_count, device_kind, select_device
from fivefold.runtime.launch import run_ranks
from fivefold.units import MIB

CPU = Device(torch.device("cpu"))


@pytest.fixture
def two_accelerators(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(module, "device_count", lambda kind: 2**31 if kind == "cpu" else 2)


def test_the_cpu_runs_gloo_with_one_thread() -> None:
    assert (CPU.kind, CPU.backend, CPU.is_cpu) == ("cpu", "gloo", True)
    CPU.activate()
    assert torch.get_num_threads() == 1
    assert CPU.peak_memory_bytes() is None
    assert Device(torch.device("cuda", 1)).backend == "nccl"


@pytest.mark.usefixtures("two_accelerators")
def test_auto_takes_the_accelerator_and_the_cpu_can_be_asked_for() -> None:
    assert device_kind() == "cuda"
    assert device_kind("cpu") == "cpu"
    assert select_device("cuda", 1, 2).device == torch.device("cuda", 1)
    assert select_device("cpu", 7, 8).device == torch.device("cpu")


def test_a_machine_without_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: None)
    assert device_kind() == "cpu"
    with pytest.raises(LaunchError, match=r"^device 'cuda' is not available here; this machine has: cpu$"):
        device_kind("cuda")


def test_a_driver_without_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """A build for an accelerator on a machine that has none."""
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(module, "device_count", lambda kind: 0)
    assert device_kind() == "cpu"


@pytest.mark.usefixtures("two_accelerators")
def test_fewer_accelerators_than_ranks() -> None:
    check_device_count("cuda", 2)
    check_device_count("cpu", 16)
    message = "^4 ranks need 4 cuda devices, this machine has 2; use a layout of at most 2 ranks"
    with pytest.raises(LaunchError, match=message):
        run_ranks(lambda rank: None, ranks=4)
    with pytest.raises(LaunchError, match=message):
        select_device("cuda", 0, 4)


def test_stopwatch_sums_by_label_and_forgets_on_reset() -> None:
    clock = Stopwatch(CPU)
    for label, seconds in (("tp", 0.02), ("tp", 0.03), ("pp", 0.01)):
        started = clock.start()
        time.sleep(seconds)
        clock.stop(label, started)
    first = clock.seconds(reset=True)
    assert first.keys() == {"tp", "pp"}
    assert 0.05 <= first["tp"] < 0.5
    assert 0.01 <= first["pp"] < 0.3
    assert clock.seconds() == {}
    assert first["tp"] > 0, "what was read does not change with the clock"


@pytest.mark.parametrize(
    ("ranks", "free_mib", "message"),
    [
        (64, 4096, None),
        (128, 4096, None),
        (129, 10**6, "129 ranks, this machine starts at most 128 on its CPU; use a layout of fewer ranks"),
        (64, 320, "64 ranks, 10 fit: each takes about 32 MiB beside the model, 320 MiB of memory are free"),
    ],
)
def test_ranks_on_the_cpu_share_its_memory(
    monkeypatch: pytest.MonkeyPatch, ranks: int, free_mib: int, message: str | None
) -> None:
    memory = SimpleNamespace(available=free_mib * MIB)
    monkeypatch.setattr(module.psutil, "virtual_memory", lambda: memory)
    if message is None:
        check_device_count("cpu", ranks)
        return
    with pytest.raises(LaunchError, match=message):
        check_device_count("cpu", ranks)

"""How long a plan takes, start of the process included: CPU time of one process, the least of a few tries."""

from __future__ import annotations

import os
import resource
import subprocess
import sys

import pytest

TRIES = 3


def cpu_seconds(*arguments: str) -> float:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    spent = []
    for _ in range(TRIES):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(
            [sys.executable, "-m", "fivefold", *arguments, "--json"],
            check=True,
            capture_output=True,
            env=environment,
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        spent.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return min(spent)


@pytest.mark.exhaustive
def test_all_axes_of_deepseek_v3_on_16384_devices() -> None:
    assert cpu_seconds("plan", "-m", "deepseek-v3", "-c", "16384 H100") < 2


@pytest.mark.exhaustive
def test_a_small_case() -> None:
    assert cpu_seconds("plan", "-m", "llama-3-8b", "-c", "8 H100") < 0.7

"""Which runs of a calibration speak for a question: those of its device family and framework, on its network.

A correction reaches only the cluster that was measured (`residual`), by the words that its runs use. A question names
its framework from a list, a runs table as its author likes; a question that names none is taken to mean what was run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fivefold.estimate.stacks import DEFAULT, of_framework
from fivefold.units import GIGA

if TYPE_CHECKING:
    from fivefold.plan.calibration import Calibration


@dataclass(frozen=True)
class Taught:
    """What the runs call the framework, and its age; how many of them there are."""

    stack: str
    software: str
    release: float
    runs: int
    nic_bytes_per_s: float
    reaches: bool
    """Whether they are on the network of the question, so that their correction holds there."""

    def sentence(self, device: str) -> str:
        runs = f"{self.runs} measured runs of {self.stack or 'a framework without a name'} on {device}"
        if self.reaches:
            return f"times are corrected by {runs}"
        network = f"at {self.nic_bytes_per_s / GIGA:.3g} GB/s between nodes for each device"
        return f"the calibration has {runs}, but {network}: its coefficients hold, its correction does not"


def taught(
    calibration: Calibration, hardware: str, framework: str, nic_bytes_per_s: float | None
) -> Taught | None:
    """None where no run is of that device family and framework (`DEFAULT`: of any).

    `nic_bytes_per_s`: of the question's network; None: it uses none, so any is its own.
    """
    import numpy as np

    from fivefold.plan.residual import network_octaves

    jobs = calibration.jobs
    if jobs is None:
        return None
    wanted = jobs.nic_bytes_per_s if nic_bytes_per_s is None else np.full(len(jobs), nic_bytes_per_s)
    same_network = network_octaves(jobs.nic_bytes_per_s) == network_octaves(wanted)
    usable = jobs.hardware == hardware
    if framework != DEFAULT:
        usable &= np.array([of_framework(text).name == framework for text in jobs.stack.tolist()], dtype=bool)
    if not usable.any():
        return None
    here = usable & same_network if (usable & same_network).any() else usable
    names, counts = np.unique(jobs.stack[here], return_counts=True)
    stack = str(names[counts.argmax()])
    mine = np.flatnonzero(here & (jobs.stack == stack))
    latest = mine[jobs.release[mine].argmax()]
    return Taught(
        stack,
        str(jobs.software[latest]),
        float(jobs.release[latest]),
        len(mine),
        float(jobs.nic_bytes_per_s[latest]),
        bool(same_network[latest]),
    )

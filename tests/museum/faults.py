"""Every exhibit, room by room."""

from __future__ import annotations

from types import ModuleType

from . import (
    context_faults,
    data_faults,
    expert_faults,
    input_faults,
    optimizer_faults,
    pipeline_faults,
    precision_faults,
    recompute_faults,
    replica_faults,
    tensor_faults,
)
from .exhibit import Fault

ROOMS: dict[str, ModuleType] = {
    "Scale and reduction of gradients": data_faults,
    "Norm, clipping, optimizer state": optimizer_faults,
    "Loss scale": precision_faults,
    "Tensor parallelism": tensor_faults,
    "Pipeline parallelism": pipeline_faults,
    "Context parallelism": context_faults,
    "Experts": expert_faults,
    "Experts that move and have copies": replica_faults,
    "Recompute": recompute_faults,
    "Weights and data at the start, counters": input_faults,
}


def of_room(room: ModuleType) -> list[Fault]:
    return [value for value in vars(room).values() if isinstance(value, Fault)]


FAULTS: tuple[Fault, ...] = tuple(fault for room in ROOMS.values() for fault in of_room(room))

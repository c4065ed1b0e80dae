"""Where a NaN or an infinity came from: the rank, and the parameter, output or gradient that had it first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fivefold.engine.engine import Engine
from fivefold.strategies.pipeline.apply import Microbatch

Place = tuple[int, str]
"""Virtual stage, and the name of a parameter or module in it."""


@dataclass
class Findings:
    """What one rank saw, each list in order of time."""

    parameters: list[Place] = field(default_factory=list)
    outputs: list[Place] = field(default_factory=list)
    gradients: list[Place] = field(default_factory=list)


def find_nonfinite(engine: Engine, load: Callable[[int], Microbatch]) -> str:
    """Run the step's forward and backward once more, all ranks together, and look at everything on the way.

    The weights are still those before the step, so the same thing happens again. Gradients are looked at before they
    are summed over ranks, and dropped afterwards.
    Returns: one phrase, the same on every rank: `rank 2: the output of layers.3.mlp.down is the first with ...`.
    """
    found = Findings()
    hooks: list[Any] = []
    found.parameters = [(row.stage, row.name) for row, held in engine.data.weights() if not _finite(held)]
    for chunk, pairs in engine.parameters.items():
        for row, parameter in pairs:
            hooks.append(parameter.register_hook(_look_at_gradient((chunk, row.name), found.gradients)))
    for chunk, module in engine.chunks.items():
        for name, part in module.named_modules():
            if not list(part.children()) and name != "loss":
                hooks.append(part.register_forward_hook(_look_at_output((chunk, name), found.outputs)))
    try:
        batches = [load(j) for j in range(engine.microbatches)]
        engine.pipeline.run(batches, engine.gradient_scale(engine.count_valid(batches)))
        engine.data.wait()
        engine.data.forget_gradients()
    finally:
        for hook in hooks:
            hook.remove()
    first = Findings(found.parameters[:1], found.outputs[:1], found.gradients[:1])
    everyone: list[Any] = [first]
    if engine.mesh.layout.world_size > 1:
        everyone = [None] * engine.mesh.layout.world_size
        dist.all_gather_object(everyone, first)
    return say(everyone)


def say(everyone: Sequence[Findings]) -> str:
    """The cause by the findings of all ranks: a parameter, else the earliest output, else the first gradient."""
    parameters, outputs, gradients = (
        [(stage, rank, name) for rank, found in enumerate(everyone) for stage, name in getattr(found, kind)]
        for kind in ("parameters", "outputs", "gradients")
    )
    if parameters:
        _, rank, name = min(parameters)
        return f"rank {rank}: the parameter {name} itself has a NaN or an infinity"
    if outputs:
        _, rank, name = min(outputs)
        return f"rank {rank}: the output of {name} is the first with a NaN or an infinity"
    if gradients:  # backward begins at the last stage
        _, rank, name = min(gradients, key=lambda found: (-found[0], found[1]))
        return f"rank {rank}: all outputs are finite, the gradient of {name} is the first that is not"
    return "all outputs and gradients of single ranks are finite: their sum overflowed"


def _finite(tensor: Tensor) -> bool:
    return bool(torch.isfinite(tensor).all())


def _look_at_output(place: Place, found: list[Place]) -> Callable[[nn.Module, Any, Any], None]:
    def hook(_module: nn.Module, _inputs: Any, outputs: Any) -> None:
        tensors = outputs if isinstance(outputs, tuple) else (outputs,)
        if not found and any(isinstance(t, Tensor) and not _finite(t) for t in tensors):
            found.append(place)

    return hook


def _look_at_gradient(place: Place, found: list[Place]) -> Callable[[Tensor], None]:
    def hook(gradient: Tensor) -> None:
        if not found and not _finite(gradient):
            found.append(place)

    return hook

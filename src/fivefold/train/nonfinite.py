"""Where a NaN or an infinity came from: the rank and the first module whose output has one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fivefold.engine.engine import Engine
from fivefold.strategies.pipeline.apply import Microbatch


def find_nonfinite(engine: Engine, load: Callable[[int], Microbatch]) -> str:
    """Run the step's forward and backward once more, all ranks together, and look at every module's output.

    The weights are still those before the step, so the same thing happens again. Gradients are dropped afterwards.
    Returns: one phrase, the same on every rank: `rank 2: the output of layers.3.mlp.down is the first with ...`.
    """
    found: list[str] = []
    hooks: list[Any] = []
    for chunk, module in engine.chunks.items():
        for name, part in module.named_modules():
            if not list(part.children()) and name != "loss":
                hooks.append(part.register_forward_hook(_look(f"{name}", chunk, found)))
    try:
        batches = [load(j) for j in range(engine.microbatches)]
        scale = torch.ones(
            (), dtype=torch.promote_types(engine.dtype, torch.float32), device=batches[0].mask_BS.device
        )
        engine.pipeline.run(batches, scale)
        engine.data.wait()
        gradients = [
            row.name for row, g in engine.data.local_gradients() if not bool(torch.isfinite(g).all())
        ]
        engine.data.forget_gradients()
    finally:
        for hook in hooks:
            hook.remove()
    local = (engine.mesh.coordinate["pp"], found[:1], gradients[-1:])
    everyone: list[Any] = [local]
    if engine.mesh.layout.world_size > 1:
        everyone = [None] * engine.mesh.layout.world_size
        dist.all_gather_object(everyone, local)
    return _say(everyone)


def _look(name: str, chunk: int, found: list[str]) -> Callable[[nn.Module, Any, Any], None]:
    def hook(_module: nn.Module, _inputs: Any, outputs: Any) -> None:
        tensors = outputs if isinstance(outputs, tuple) else (outputs,)
        if not found and any(isinstance(t, Tensor) and not bool(torch.isfinite(t).all()) for t in tensors):
            found.append(name)

    return hook


def _say(everyone: list[tuple[int, list[str], list[str]]]) -> str:
    """The earliest stage with a bad output; else the last parameter in forward order with a bad gradient."""
    outputs = [(stage, rank, names[0]) for rank, (stage, names, _) in enumerate(everyone) if names]
    if outputs:
        _, rank, name = min(outputs, key=lambda item: item[:2])
        return f"rank {rank}: the output of {name} is the first with a NaN or an infinity"
    gradients = [(-stage, rank, names[0]) for rank, (stage, _, names) in enumerate(everyone) if names]
    if gradients:
        _, rank, name = min(gradients, key=lambda item: item[:2])
        return f"rank {rank}: all outputs are finite, the gradient of {name} is the first that is not"
    return "all outputs and gradients of single ranks are finite: their sum overflowed"

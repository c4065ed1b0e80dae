"""The precision report of a run: overflows and the loss scale over time, and now and then a look at every layer.

A look takes one step with hooks: the 2-norm of each layer's gradient (unscaled, before clipping) and the largest
absolute output of its modules. Each rank looks at what it holds; the ranks' findings travel with the log's numbers, so
that no step communicates more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fivefold.core.execution import LARGEST_NUMBER
from fivefold.core.sharding import ParameterRow
from fivefold.engine.engine import Engine, StepResult
from fivefold.nn.roles import role_of

PRECISION = "precision"
"""Result of a run that has the report."""

MOST_LOOKS = 256
"""Looks that a record keeps; beyond, the closest ones are thinned out, so that they still cover the whole run."""


@dataclass
class Look:
    """What one rank, or in a record all ranks, found in one step, by block: decoder layer, embedding, norm + head."""

    step: int
    """From 1."""
    squared_norm: dict[str, float] = field(default_factory=dict)
    """Of the gradients, each element counted on one rank."""
    largest: dict[str, tuple[float, str]] = field(default_factory=dict)
    """Largest absolute output, and the module that gave it."""


class Watch:
    """Looks at one step of one rank through hooks, which are gone after it."""

    def __init__(self, engine: Engine, step: int) -> None:
        self.engine, self.look = engine, Look(step)
        self._outputs: dict[str, Tensor] = {}
        self._norms: dict[str, Tensor] = {}
        self._hooks: list[Any] = []

    def __enter__(self) -> Watch:
        self.engine.after_backward = self._gradients
        for chunk in self.engine.chunks.values():
            for name, module in chunk.named_modules():
                if block_of(name) is not None and (role_of(name) == "layer" or not list(module.children())):
                    self._hooks.append(module.register_forward_hook(self._output(name)))
        return self

    def __exit__(self, *_: Any) -> None:
        self.engine.after_backward = None
        for hook in self._hooks:
            hook.remove()
        for block, norm in self._norms.items():
            self.look.squared_norm[block] = float(norm) ** 2
        for name, value in self._outputs.items():
            merge_largest(self.look.largest, str(block_of(name)), (float(value), name))

    def _gradients(self, gradients: list[tuple[ParameterRow, Tensor]]) -> None:
        layout, at = self.engine.plan.layout, self.engine.mesh.coordinate
        blocks: dict[str, list[Tensor]] = {}
        for row, gradient in gradients:
            if row.written_here(layout, at):
                blocks.setdefault(row.block, []).append(gradient)
        self._norms = {block: torch.nn.utils.get_total_norm(held).double() for block, held in blocks.items()}

    def _output(self, name: str) -> Callable[[nn.Module, Any, Any], None]:
        @torch.no_grad()
        def hook(_module: nn.Module, _inputs: Any, outputs: Any) -> None:
            for out in outputs if isinstance(outputs, tuple) else (outputs,):
                if isinstance(out, Tensor) and out.is_floating_point() and out.numel():
                    largest = torch.linalg.vector_norm(out.detach(), math.inf)
                    before = self._outputs.get(name)
                    self._outputs[name] = largest if before is None else torch.maximum(before, largest)

        return hook


class Precision:
    """The report as it grows on one rank. `every`: steps between two looks; None: overflows and scale only."""

    def __init__(self, engine: Engine, every: int | None) -> None:
        self.engine, self.every = engine, every
        self.scales: list[tuple[int, int]] = []
        """(first step with it, loss scale), one entry for each change."""
        self.overflow_steps: list[int] = []
        self.looks: list[Look] = []
        """Of this rank, not collected yet."""

    @property
    def told(self) -> bool:
        """Whether there is anything to report in this run."""
        return self.every is not None or self.engine.scaler is not None

    def watching(self, step: int) -> AbstractContextManager[Any]:
        """Around step `step` (from 1)."""
        if self.every is None or step % self.every:
            return nullcontext()
        watch = Watch(self.engine, step)
        self.looks.append(watch.look)
        return watch

    def after(self, step: int, result: StepResult) -> None:
        """Take down what step `step` did."""
        if result.loss_scale is not None and (not self.scales or self.scales[-1][1] != result.loss_scale):
            self.scales.append((step, result.loss_scale))
        if result.overflow:
            self.overflow_steps.append(step)

    def take(self) -> list[Look]:
        """The looks of this rank since the last call."""
        looks, self.looks = self.looks, []
        return looks


def joined(everyone: Iterable[Sequence[Look]]) -> list[Look]:
    """The looks of all ranks as those of the job, in order of steps."""
    found: dict[int, Look] = {}
    for look in (look for looks in everyone for look in looks):
        whole = found.setdefault(look.step, Look(look.step))
        for block, squared in look.squared_norm.items():
            whole.squared_norm[block] = whole.squared_norm.get(block, 0.0) + squared
        for block, largest in look.largest.items():
            merge_largest(whole.largest, block, largest)
    return [found[step] for step in sorted(found)]


def thinned(looks: Sequence[Look]) -> list[Look]:
    """At most `MOST_LOOKS` of them, the first and the last among them, the others about evenly over the steps."""
    looks = list(looks)
    while len(looks) > MOST_LOOKS:
        inner = range(1, len(looks) - 1)
        del looks[min(inner, key=lambda i: looks[i + 1].step - looks[i - 1].step)]
    return looks


def as_result(precision: Precision, looks: Sequence[Look]) -> dict[str, Any]:
    """What a record holds, in JSON types. Blocks are in the order of the model."""
    dtype = precision.engine.plan.execution.dtype
    return {
        "dtype": dtype,
        "largest_number": LARGEST_NUMBER[dtype],
        "scales": [list(pair) for pair in precision.scales],
        "overflow_steps": precision.overflow_steps,
        "layers": [
            {
                "step": look.step,
                "grad_norm": {
                    b: math.sqrt(look.squared_norm[b]) for b in sorted(look.squared_norm, key=_place)
                },
                "largest": {b: list(look.largest[b]) for b in sorted(look.largest, key=_place)},
            }
            for look in looks
        ],
    }


def merge_largest(largest: dict[str, tuple[float, str]], block: str, found: tuple[float, str]) -> None:
    """Keep the larger; what is not a number is larger than any."""
    before = largest.get(block)
    if before is None or math.isnan(found[0]) or found[0] > before[0]:
        largest[block] = found


def block_of(name: str) -> str | None:
    """The block of a module, as rows of the parameter table name it; None for one that computes no hidden states."""
    first, *rest = name.split(".")
    if first == "layers" and rest:
        return f"layers.{rest[0]}"
    return {"embedding": "embedding", "norm": "head", "head": "head"}.get(first)


def _place(block: str) -> tuple[int, int]:
    """In the order of the model."""
    number = block.removeprefix("layers.")
    return (1, int(number)) if number.isdigit() else ({"embedding": 0}.get(block, 2), 0)

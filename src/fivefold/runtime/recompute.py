"""Activations that are computed again in backward (Chen et al. 2016, arXiv:1604.06174, section 4).

Of a recomputed function only its inputs are kept. When backward first reads something that the function would have
kept, the function runs once more, up to the last tensor that backward needs and no further: a map at its end is not
computed again, nor is a sum over ranks repeated. What the second run keeps lives until backward has read it, or, where
weight gradients are deferred (`deferred.py`), until their closure has run. Its collectives are of the phase backward.

What a function of autograd needs in backward it must hand to `save_for_backward`: an attribute of its context would be
that of the first run, and would keep it alive.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


def recomputed(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, which keeps nothing but its inputs for backward.

    It must do the same each time it is called, and backward must go through it once. Inputs that need a gradient are
    arguments themselves, not parts of one.
    """

    def run(*inputs: Any, **named: Any) -> Any:
        if not torch.is_grad_enabled():
            return function(*inputs, **named)
        first = _Run(function, inputs, named)
        with saved_tensors_hooks(first.pack, first.unpack):
            return function(*inputs, **named)

    return run


def remaining() -> int | None:
    """In a second run: how many more tensors backward needs of it. None outside."""
    return None if _second is None else _second.count - _second.packed


class _Run:
    """One call of a recomputed function: it numbers what autograd would keep, and makes it when backward asks."""

    def __init__(self, function: Callable[..., Any], inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        self.call: Callable[[], Any] | None = partial(
            function,
            *[_detached(value) for value in inputs],
            **{name: _detached(value) for name, value in named.items()},
        )
        self.count = 0
        self.kept: dict[int, Tensor] | None = None

    def pack(self, _: Tensor) -> int:
        self.count += 1
        return self.count - 1

    def unpack(self, number: int) -> Tensor:
        if self.kept is None:
            self.kept = self._run_again()
        assert number in self.kept, "backward went twice through what is recomputed"
        return self.kept.pop(number)

    def _run_again(self) -> dict[int, Tensor]:
        global _second
        assert self.call is not None
        before, _second = _second, _Second(self.count)
        try:
            with saved_tensors_hooks(_second.pack, lambda tensor: tensor), torch.enable_grad():
                self.call()
        except _Enough:
            pass
        else:
            raise AssertionError(f"the second run kept {_second.packed} tensors, the first one {self.count}")
        finally:
            kept, _second = _second.kept, before
        self.call = None
        return kept


class _Second:
    """The second run of a function: it keeps the first `count` tensors, and ends with the last of them."""

    def __init__(self, count: int) -> None:
        self.count, self.packed = count, 0
        self.kept: dict[int, Tensor] = {}

    def pack(self, tensor: Tensor) -> Tensor:
        detached = (
            tensor.detach()
        )  # the graph of this run is not kept: a tensor that knows it would keep it alive
        self.kept[self.packed] = detached
        self.packed += 1
        if self.packed == self.count:
            raise _Enough
        return detached


class _Enough(Exception):
    """All that backward needs is there."""


_second: _Second | None = None
"""The second run that is under way."""


def _detached(value: Any) -> Any:
    return value.detach().requires_grad_(value.requires_grad) if isinstance(value, Tensor) else value

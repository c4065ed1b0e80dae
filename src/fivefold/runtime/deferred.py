"""Weight gradients that a schedule runs later than the input gradients: what zero bubble is made of.

A linear map hands the computation of its weight gradients over as a closure. Outside `collect` it runs at once and
autograd gets the result. Inside, it is kept under a key and autograd gets nothing, until `run(key)` computes the
gradients and adds them to the parameters (Qi et al. 2023, arXiv:2401.10241, section 2: B is split in B and W).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

WeightGradients = Callable[[], Sequence[Tensor | None]]
Accumulate = Callable[[nn.Parameter, Tensor], None]


def add_to_grad(parameter: nn.Parameter, gradient: Tensor) -> None:
    """What autograd does with a leaf's gradient."""
    if parameter.grad is None:
        parameter.grad = gradient
    else:
        parameter.grad += gradient


class DeferredGradients:
    """The closures of one rank that have not run yet, by key (chunk, microbatch)."""

    def __init__(self, accumulate: Accumulate = add_to_grad) -> None:
        """`accumulate(parameter, gradient)`: how a gradient that did not come through autograd is added."""
        self.accumulate = accumulate
        self._kept: dict[Hashable, list[tuple[Sequence[nn.Parameter | None], WeightGradients]]] = {}
        self._key: Hashable | None = None

    @contextmanager
    def collect(self, key: Hashable) -> Iterator[None]:
        """Keep what is handed over inside, under `key`."""
        self._key = key
        self._kept[key] = []
        try:
            yield
        finally:
            self._key = None

    @property
    def collecting(self) -> bool:
        return self._key is not None

    def keep(self, parameters: Sequence[nn.Parameter | None], gradients: WeightGradients) -> None:
        """Run `gradients` later: one for each of `parameters`, None where there is none."""
        assert self._key is not None, "nothing is being collected"
        self._kept[self._key].append((parameters, gradients))

    @torch.no_grad()
    def run(self, key: Hashable) -> None:
        """Compute and add the gradients kept under `key`, in the order of backward; then forget them."""
        kept = self._kept.pop(key)
        kept.reverse()
        while kept:  # each closure's memory is free as soon as it has run
            parameters, gradients = kept.pop()
            for parameter, gradient in zip(parameters, gradients(), strict=True):
                if parameter is not None and gradient is not None:
                    self.accumulate(parameter, gradient)

    @property
    def pending(self) -> int:
        """Keys whose gradients have not been computed."""
        return len(self._kept)

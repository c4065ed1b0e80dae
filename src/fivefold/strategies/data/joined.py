"""Dense parameters and experts behind one face: each kind has data ranks of its own, and a form of its own.

ZeRO shards experts over the edp ranks inside a sharding group; where there is one, they are kept whole as under zero0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from torch import Tensor, nn

from fivefold.core.sharding import ParameterRow
from fivefold.strategies.data.masters import Moved

if TYPE_CHECKING:
    from fivefold.strategies.data.apply import DataParallel

Pairs = list[tuple[ParameterRow, nn.Parameter]]


class Joined:
    """`DataParallel` made of several parts; lists come in the order of the model."""

    def __init__(self, parts: Sequence[DataParallel], pairs: Sequence[Pairs], order: Sequence[str]) -> None:
        """`pairs`: the parameters of each part; `order`: the names of all in the order of the model."""
        self.parts = parts
        self._part_of = {id(p): part for part, own in zip(parts, pairs) for _, p in own}
        self._place = {name: i for i, name in enumerate(order)}

    def watch(self, chunk: int) -> None:
        for part in self.parts:
            part.watch(chunk)

    def accumulate(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        self._part_of[id(parameter)].accumulate(parameter, gradient)

    def reduce(self, chunk: int) -> None:
        for part in self.parts:
            part.reduce(chunk)

    def wait(self) -> None:
        for part in self.parts:
            part.wait()

    def local_gradients(self) -> list[tuple[ParameterRow, Tensor]]:
        found = [pair for part in self.parts for pair in part.local_gradients()]
        return sorted(found, key=lambda pair: self._place[pair[0].name])

    def reorder(self, orders: Mapping[str, tuple[int, ...]], moved: Moved) -> None:
        for part in self.parts:
            part.reorder(orders, moved)

    def step(self, lr: float) -> None:
        for part in self.parts:
            part.step(lr)

    def forget_gradients(self) -> None:
        for part in self.parts:
            part.forget_gradients()

    def reshard(self) -> None:
        for part in self.parts:
            part.reshard()

    def weights(self) -> list[tuple[ParameterRow, Tensor]]:
        found = [pair for part in self.parts for pair in part.weights()]
        return sorted(found, key=lambda pair: self._place[pair[0].name])

    def state(self) -> dict[str, dict[str, Tensor]]:
        return {name: state for part in self.parts for name, state in part.state().items()}

    def tensors(self) -> list[Tensor]:
        return [tensor for part in self.parts for tensor in part.tensors()]

    def persistent(self) -> list[tuple[str, ParameterRow, Tensor]]:
        found = [entry for part in self.parts for entry in part.persistent()]
        return sorted(found, key=lambda entry: (entry[0] != "weights", self._place[entry[1].name]))

    @property
    def updates(self) -> int:
        return self.parts[0].updates

    def loaded(self, updates: int) -> None:
        for part in self.parts:
            part.loaded(updates)

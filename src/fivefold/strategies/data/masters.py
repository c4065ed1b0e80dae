"""What every form of data parallelism has in common: an optimizer that updates masters, and their state by name.

A master is what the optimizer updates in at least float32 (Micikevicius et al. 2018, section 3.1): the parameter itself
where it is wide enough and whole, a float32 copy of it, or, under ZeRO, this rank's shard.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from fivefold.core.sharding import ParameterRow
from fivefold.errors import ModelError

Moved = Callable[[ParameterRow, Tensor], tuple[Tensor, Tensor]]
"""(new row, what a rank holds) -> (the whole local tensor in the new order, what this rank holds of it)."""

MakeOptimizer = Callable[[list[tuple[ParameterRow, nn.Parameter]]], torch.optim.Optimizer]


def no_gradient(row: ParameterRow, when: str = "") -> ModelError:
    """What is told of a parameter that no backward of a step came to, as one that the forward of a module ignores."""
    if when:
        return ModelError(
            f"{row.name} has no gradient {when}, of which zero2 and zero3 reduce those of every one; let the loss "
            f"depend on it always, or use zero1"
        )
    return ModelError(
        f"{row.name} has no gradient: nothing that the loss depends on reads it; leave it out of the module, or use it"
    )


class Masters:
    """The optimizer of one rank. A subclass says how masters get their gradients, and parameters their values."""

    def __init__(
        self, triples: list[tuple[ParameterRow, nn.Parameter, nn.Parameter]], make_optimizer: MakeOptimizer
    ) -> None:
        """`triples`: (row of the master, parameter, master), in the order of the model."""
        self.triples = triples
        self.optimizer = make_optimizer([(row, master) for row, _, master in triples])
        self._rows = {row.name: row for row, _, _ in triples}
        self._updates = 0

    def spread(self) -> None:
        """Give the parameters the values of the masters."""
        raise NotImplementedError

    def forget_gradients(self) -> None:
        """Drop the gradients of a step."""
        raise NotImplementedError

    def local_gradients(self) -> list[tuple[ParameterRow, Tensor]]:
        gradients = []
        for row, _, master in self.triples:
            if master.grad is None:
                if not row.may_be_skipped:
                    raise no_gradient(row)
                master.grad = torch.zeros_like(master)
            gradients.append((row, master.grad))
        return gradients

    def step(self, lr: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self._updates += 1
        self.forget_gradients()
        self.spread()

    @torch.no_grad()
    def reorder(self, orders: Mapping[str, tuple[int, ...]], moved: Moved) -> None:
        """Dim 0 of some parameters gets another order, in masters, moments and parameters. Comm: that of `moved`."""
        for i, (row, parameter, master) in enumerate(self.triples):
            if row.name not in orders:
                continue
            row = replace(row, order=orders[row.name])
            moments = [value for value in self.state()[row.name].values() if value.shape == master.shape]
            for held in (master, *moments):
                whole, mine = moved(row, held.detach())
                held.copy_(mine)
                if held is master is not parameter and parameter.untyped_storage().nbytes():
                    parameter.copy_(whole)
            self.triples[i] = row, parameter, master
            self._rows[row.name] = row

    def weights(self) -> list[tuple[ParameterRow, Tensor]]:
        return [(row.whole, parameter.detach()) for row, parameter, _ in self.triples]

    def state(self) -> dict[str, dict[str, Tensor]]:
        return {
            row.name: {
                key: value for key, value in self.optimizer.state[p].items() if isinstance(value, Tensor)
            }
            for row, _, p in self.triples
        }

    def tensors(self) -> list[Tensor]:
        """Masters, their gradients and the optimizer's state, as far as they exist now."""
        masters = [master for _, _, master in self.triples]
        states = [tensor for state in self.state().values() for tensor in state.values()]
        return [*masters, *(p.grad for p in masters if p.grad is not None), *states]

    def persistent(self) -> list[tuple[str, ParameterRow, Tensor]]:
        found = [("weights", row, master.detach()) for row, _, master in self.triples]
        for name, state in self.state().items():
            row = self._rows[name]
            found += [(kind, row, value) for kind, value in state.items() if kind != "step"]
        return found

    @property
    def updates(self) -> int:
        return self._updates

    def loaded(self, updates: int) -> None:
        self._updates = updates
        for state in self.state().values():
            if "step" in state:
                state["step"].fill_(updates)
        self.spread()

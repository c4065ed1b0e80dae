"""Degree 1 is free: no group, no operator, no copy, the same object."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.compat import TorchDispatchMode
from fivefold.core.layout import Layout
from fivefold.runtime.collectives import all_gather, all_reduce, broadcast_input, reduce_scatter
from fivefold.runtime.device import Device
from fivefold.runtime.mesh import Axis, Mesh


class CountOperators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.operators: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operators.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    return Mesh(Layout.parse("dp1"), 0, Device(torch.device("cpu")))


COLLECTIVES: list[Callable[[Tensor, Axis], Tensor]] = [
    lambda x, axis: all_gather(x, axis, 0),
    lambda x, axis: reduce_scatter(x, axis, 1),
    all_reduce,
    broadcast_input,
    lambda x, axis: axis.all_reduce(x),
    lambda x, axis: axis.all_gather(x, 1),
    lambda x, axis: axis.reduce_scatter(x, 0),
]


@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize("name", ["dp", "tp", "pp", "cp", "data", "world"])
def test_the_input_is_the_output(mesh: Mesh, name: str, collective: Callable[[Tensor, Axis], Tensor]) -> None:
    x = torch.ones(3, 3).t().requires_grad_()
    with CountOperators() as counter:
        assert collective(x, mesh.axis(name)) is x
    assert counter.operators == []


def test_no_process_group_is_made(mesh: Mesh) -> None:
    assert not dist.is_initialized()
    assert mesh.axis("tp").group is None
    assert mesh.axis("tp").degree == 1


def test_an_asynchronous_collective_with_nobody_is_our_own_bug(mesh: Mesh) -> None:
    with pytest.raises(AssertionError, match="axis tp has degree 1"):
        mesh.axis("tp").all_reduce_start(torch.ones(1))

"""The ledger sees what is dispatched, whoever issues it: axis, phase, operation, dtype and bytes. So does the clock."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from fivefold.core.events import Event
from fivefold.runtime.collectives import all_gather, reduce_scatter
from fivefold.runtime.ledger import Ledger
from fivefold.runtime.mesh import Mesh

pytestmark = pytest.mark.filterwarnings("ignore")  # torch warns of collectives that it renamed


def event(phase: str, axis: str, op: str, n_bytes: int, dtype: str = "float32") -> Event:
    return Event(phase, axis, op, dtype, n_bytes)  # type: ignore[arg-type]


def our_own(mesh: Mesh) -> list[str]:
    tp, data = mesh.axis("tp"), mesh.axis("data")
    x = torch.ones(2, 4, requires_grad=True)
    with Ledger(mesh) as ledger:
        mesh.phase = "forward"
        y = all_gather(x, tp, 1)  # [2, 8]: the result is the larger buffer
        z = reduce_scatter(y, tp, 1)  # [2, 8]: the input is
        mesh.phase = "backward"
        z.sum().backward()
        mesh.phase = "reduce"
        data.all_reduce_start(torch.ones(5, dtype=torch.float64)).wait()
        mesh.phase = "norm"
        tp.all_reduce(torch.ones((), dtype=torch.float64))
        data.all_reduce(torch.ones((), dtype=torch.int64))
    expected = Counter(
        {
            event("forward", "tp", "all_gather", 64): 1,
            event("forward", "tp", "reduce_scatter", 64): 1,
            event("backward", "tp", "all_gather", 64): 1,
            event("backward", "tp", "reduce_scatter", 64): 1,
            event("reduce", "data", "all_reduce", 40, "float64"): 1,
            event("norm", "tp", "all_reduce", 8, "float64"): 1,
            event("norm", "data", "all_reduce", 8, "int64"): 1,
        }
    )
    assert ledger.events == expected
    assert [e.op for e in ledger.order] == [
        "all_gather", "reduce_scatter", "all_gather", "reduce_scatter", "all_reduce", "all_reduce", "all_reduce",
    ]  # fmt: skip
    return [str(e) for e in ledger.order]


def torch_distributed(mesh: Mesh) -> None:
    """torch's own calls on our groups; a list of tensors is one buffer in parts."""
    axis = mesh.axis("tp")
    group, first, x, n = axis.group, axis.ranks[0], torch.ones(3), axis.degree
    parts = [torch.empty(3) for _ in range(n)]
    mine = parts if axis.index == 0 else None
    mesh.phase = "metrics"
    calls: list[tuple[str, int, Callable[[], Any]]] = [
        ("all_reduce", 12, lambda: dist.all_reduce(x, group=group)),
        ("all_gather", 24, lambda: dist.all_gather(parts, x, group=group)),
        ("all_gather", 24, lambda: dist.all_gather_into_tensor(torch.empty(6), x, group=group)),
        ("reduce_scatter", 24, lambda: dist.reduce_scatter(torch.empty(3), parts, group=group)),
        (
            "reduce_scatter",
            24,
            lambda: dist.reduce_scatter_tensor(torch.empty(3), torch.ones(6), group=group),
        ),
        ("broadcast", 12, lambda: dist.broadcast(x, first, group=group)),
        ("reduce", 12, lambda: dist.reduce(x, first, group=group)),
        ("gather", 24 if mine else 12, lambda: dist.gather(x, mine, first, group=group)),
        ("scatter", 24 if mine else 12, lambda: dist.scatter(x, mine, first, group=group)),
        ("all_to_all", 24, lambda: dist.all_to_all_single(torch.empty(6), torch.ones(6), group=group)),
        ("all_reduce", 24, lambda: dist.all_reduce_coalesced([x, x], group=group)),
    ]
    for op, n_bytes, call in calls:
        with Ledger(mesh) as ledger:
            call()
        assert ledger.events == Counter({event("metrics", "tp", op, n_bytes): 1}), op
    with Ledger(mesh) as ledger:
        if axis.index == 0:
            dist.send(x, axis.ranks[1], group=group)
        else:
            dist.recv(torch.empty(3), first, group=group)
    assert ledger.events == Counter({event("metrics", "tp", "send" if axis.index == 0 else "recv", 12): 1})
    with Ledger(mesh) as ledger:
        dist.barrier(group=group)
    assert [(e.axis, e.op) for e in ledger.order] == [("tp", "barrier")]


def functional_collectives(mesh: Mesh) -> None:
    """What DTensor and compiled code issue: the group is a name, and the larger buffer may be the result."""
    axis = mesh.axis("tp")
    group, x = axis.group, torch.ones(4)
    assert group is not None
    mesh.phase = "optimizer"
    calls: list[tuple[str, int, Callable[[], Any]]] = [
        ("all_reduce", 16, lambda: functional.all_reduce(x, "sum", group)),
        ("all_gather", 32, lambda: functional.all_gather_tensor(x, 0, group)),
        ("reduce_scatter", 16, lambda: functional.reduce_scatter_tensor(x, "sum", 0, group)),
        ("broadcast", 16, lambda: functional.broadcast(x, 0, group)),
        ("all_to_all", 16, lambda: functional.all_to_all_single(x, [2, 2], [2, 2], group)),
    ]
    for op, n_bytes, call in calls:
        with Ledger(mesh) as ledger:
            functional.wait_tensor(call())
        assert ledger.events == Counter({event("optimizer", "tp", op, n_bytes): 1}), op
    parameter = torch.ones(4, requires_grad=True)
    with Ledger(mesh) as ledger:
        y = functional.all_to_all_single_autograd(parameter, [2, 2], [2, 2], group)
        (y + 0).sum().backward()
    assert ledger.events == Counter({event("optimizer", "tp", "all_to_all", 16): 2}), "forward and backward"


def the_world(mesh: Mesh) -> None:
    """A group that is no axis of the mesh is filed under the world."""
    mesh.phase = "setup"
    with Ledger(mesh) as ledger:
        dist.all_reduce(torch.ones(2))
    assert ledger.events == Counter({event("setup", "world", "all_reduce", 8): 1})


def nothing_when_off(mesh: Mesh) -> None:
    with Ledger(mesh) as ledger:
        pass
    mesh.axis("tp").all_reduce(torch.ones(2))
    assert not ledger.events


def test_ledger(on_mesh: Callable[..., Any]) -> None:
    def everything(mesh: Mesh) -> list[str]:
        for check in (torch_distributed, functional_collectives, the_world, nothing_when_off):
            check(mesh)
        return our_own(mesh)

    seen = on_mesh(everything, "dp2 tp2")
    assert all(lines == seen[0] for lines in seen), "ranks that do the same see the same"


def test_the_clock_counts_waiting_only(on_mesh: Callable[..., Any]) -> None:
    late_s = 0.4

    def wait_for_the_late_one(mesh: Mesh) -> tuple[dict[str, float], dict[str, float]]:
        axis = mesh.axis("tp")
        axis.all_reduce(torch.ones(1))  # meet
        mesh.clock.seconds(reset=True)
        if axis.index == 1:
            time.sleep(late_s)
        axis.all_reduce(torch.ones(1))
        waiting = mesh.clock.seconds(reset=True)
        handle = axis.all_gather_start(torch.ones(1), 0)
        time.sleep(late_s)  # both compute while it travels
        handle.wait()
        return waiting, mesh.clock.seconds()

    (early, early_hidden), (late, late_hidden) = on_mesh(wait_for_the_late_one, "tp2")
    assert early.keys() == late.keys() == {"tp"}
    assert 0.75 * late_s < early["tp"] < late_s + 0.5
    assert late["tp"] < 0.5 * late_s
    assert max(early_hidden["tp"], late_hidden["tp"]) < 0.5 * late_s

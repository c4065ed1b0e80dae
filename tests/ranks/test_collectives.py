"""Every differentiable collective against the single-process formula, forward and backward.

Rank r holds x_r and weighs its output with w_r; the loss of all is the sum over ranks of <output_r, w_r>. One process
that holds every x_r computes the same loss with plain autograd.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fivefold.runtime.collectives import all_gather, all_reduce, broadcast_input, reduce_scatter
from fivefold.runtime.mesh import Mesh

SHAPE = (2, 12, 12)  # B = 2; 12 divides by 2, 3 and 4
DIMS = [0, 1, 2, -1]


def tensor(seed: str, shape: tuple[int, ...]) -> Tensor:
    """The same values on every rank for one seed; not contiguous: its last two dims are swapped in memory."""
    generator = torch.Generator().manual_seed(sum(seed.encode()) * 7919)
    swapped = (*shape[:-2], shape[-1], shape[-2])
    return torch.randn(swapped, generator=generator, dtype=torch.float64).transpose(-1, -2)


def shape_for(dim: int, n: int) -> tuple[int, ...]:
    """Dim 0 grows to n * B, so that it can be scattered."""
    return (SHAPE[0] * n, *SHAPE[1:]) if dim == 0 else SHAPE


def outputs_on_one_process(op: str, xs: list[Tensor], dim: int) -> list[Tensor]:
    """What each rank gets, by the definition of the collective."""
    n = len(xs)
    if op == "all_gather":
        return [torch.cat(xs, dim)] * n
    total = torch.stack(xs).sum(0)
    return list(total.chunk(n, dim)) if op == "reduce_scatter" else [total] * n


CALLS: dict[str, Callable[[Tensor, Any, int], Tensor]] = {
    "all_gather": all_gather,
    "reduce_scatter": reduce_scatter,
}


def run_gather_and_scatter(mesh: Mesh) -> None:
    axis = mesh.axis("tp")
    n, r = axis.degree, axis.index
    for op, call in CALLS.items():
        for dim in DIMS:
            xs = [tensor(f"{op}{dim}x{i}", shape_for(dim, n)).requires_grad_() for i in range(n)]
            expected = outputs_on_one_process(op, xs, dim)
            ws = [tensor(f"{op}{dim}w{i}", tuple(expected[i].shape)) for i in range(n)]
            torch.stack([(y * w).sum() for y, w in zip(expected, ws, strict=True)]).sum().backward()
            mine = xs[r].detach().clone(memory_format=torch.preserve_format).requires_grad_()
            assert not mine.is_contiguous()
            out = call(mine, axis, dim)
            torch.testing.assert_close(out, expected[r].detach(), rtol=0, atol=1e-12)
            (out * ws[r]).sum().backward()
            torch.testing.assert_close(mine.grad, xs[r].grad, rtol=0, atol=1e-12)
            assert torch.equal(mine.detach(), xs[r].detach()), "the input is not touched"
            # a gradient with stride 0, as a sum makes it
            (again,) = torch.autograd.grad(call(mine, axis, dim).sum(), mine)
            torch.testing.assert_close(again, torch.full_like(again, n if op == "all_gather" else 1.0))


def run_all_reduce(mesh: Mesh) -> None:
    """The output is the same on all ranks and feeds one computation, so its gradient is one and is passed on."""
    axis = mesh.axis("tp")
    n, r = axis.degree, axis.index
    xs = [tensor(f"ax{i}", SHAPE).requires_grad_() for i in range(n)]
    w = tensor("aw", SHAPE)
    total = torch.stack(xs).sum(0)
    (total * w).sum().backward()
    mine = xs[r].detach().clone(memory_format=torch.preserve_format).requires_grad_()
    out = all_reduce(mine, axis)
    torch.testing.assert_close(out, total.detach(), rtol=0, atol=1e-12)
    (out * w).sum().backward()
    torch.testing.assert_close(mine.grad, xs[r].grad, rtol=0, atol=1e-12)
    assert torch.equal(mine.detach(), xs[r].detach()), "not in place"
    dense = torch.ones(2, 3)
    all_reduce(dense, axis)
    assert torch.equal(dense, torch.ones(2, 3)), "nor where no copy is needed to make it contiguous"


def run_broadcast_input(mesh: Mesh) -> None:
    """The input is the same on all ranks; each uses it for its own part, and the gradients add up."""
    axis = mesh.axis("tp")
    n, r = axis.degree, axis.index
    x = tensor("bx", SHAPE).requires_grad_()
    ws = [tensor(f"bw{i}", SHAPE) for i in range(n)]
    torch.stack([(x * w).sum() for w in ws]).sum().backward()
    mine = x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
    out = broadcast_input(mine, axis)
    assert torch.equal(out, x.detach())
    (out * ws[r]).sum().backward()
    torch.testing.assert_close(mine.grad, x.grad, rtol=0, atol=1e-12)
    (again,) = torch.autograd.grad(broadcast_input(mine, axis).sum(), mine)
    torch.testing.assert_close(again, torch.full_like(again, n))


def run_plain(mesh: Mesh) -> None:
    """The plain methods of an axis; a sum is in place, and a handle gives its result as often as it is asked."""
    axis = mesh.axis("tp")
    n, r = axis.degree, axis.index
    x = torch.full((2, 3), float(r + 1))
    assert axis.all_reduce(x) is x
    assert torch.equal(x, torch.full((2, 3), n * (n + 1) / 2))
    handle = axis.all_gather_start(torch.full((2, 3, 1), float(r)), -1)
    assert torch.equal(handle.wait(), torch.arange(n).float().expand(2, 3, n))
    assert handle.wait() is handle.wait()
    for k in range(n):  # around the ring, two ranks at a time
        source, target = axis.ranks[k], axis.ranks[(k + 1) % n]
        if mesh.rank == source:
            axis.send_start(torch.tensor([float(k)]), target).wait()
        if mesh.rank == target:
            assert axis.receive_start(torch.empty(1), source).wait().item() == k


@pytest.mark.parametrize("degree", [2, 3, 4])
def test_collectives(on_mesh: Callable[..., Any], degree: int) -> None:
    def all_of_them(mesh: Mesh) -> None:
        run_gather_and_scatter(mesh)
        run_all_reduce(mesh)
        run_broadcast_input(mesh)
        run_plain(mesh)

    on_mesh(all_of_them, f"tp{degree}")


def test_each_axis_reaches_its_own_ranks(on_mesh: Callable[..., Any]) -> None:
    """Sum of the global ranks along each axis of dp2 tp2 pp2, against the members that the layout lists."""

    def sums(mesh: Mesh) -> dict[str, tuple[float, list[int], int]]:
        found = {}
        for name, size in (
            ("tp", None),
            ("dp", None),
            ("pp", None),
            ("data", None),
            ("tie", None),
            ("tp", 1),
        ):
            axis = mesh.axis(name, size)
            total = axis.all_reduce(torch.tensor([float(mesh.rank)])).item()
            found[f"{name}{size or ''}"] = (total, list(axis.ranks), axis.index)
        return found

    from fivefold.core.layout import Layout

    layout = Layout.parse("dp2 tp2 pp2")
    for rank, found in enumerate(on_mesh(sums, "dp2 tp2 pp2")):
        for name, (total, members, index) in found.items():
            size = 1 if name == "tp1" else None
            assert members == list(layout.group_of(name.rstrip("1"), rank, size))  # type: ignore[arg-type]
            assert total == sum(members)
            assert members[index] == rank

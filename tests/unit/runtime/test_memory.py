"""Live bytes: a sequence of allocations whose peak is known to the byte."""

from __future__ import annotations

import torch
from torch import nn

from fivefold.runtime.memory import LiveBytes

KB = 1000


def floats(n_bytes: int) -> torch.Tensor:
    return torch.empty(n_bytes // 4)


def test_peak_of_a_known_sequence() -> None:
    with LiveBytes() as memory:
        a = floats(4 * KB)
        b = floats(8 * KB)
        assert memory.live_bytes == 12 * KB
        del a
        c = floats(2 * KB)
        assert (memory.live_bytes, memory.peak_bytes) == (10 * KB, 12 * KB)
        d = floats(4 * KB)
        assert (memory.live_bytes, memory.peak_bytes) == (14 * KB, 14 * KB)
        del b, c, d
    assert (memory.live_bytes, memory.peak_bytes) == (0, 14 * KB)


def test_what_lives_already_counts_and_can_be_freed() -> None:
    a = floats(4 * KB)
    memory = LiveBytes([a, a.view(2, -1)])
    assert memory.live_bytes == memory.peak_bytes == 4 * KB
    with memory:
        del a
        floats(KB)
    assert (memory.live_bytes, memory.peak_bytes) == (0, 4 * KB)


def test_views_and_in_place_operations_add_nothing() -> None:
    a = floats(4 * KB)
    with LiveBytes([a]) as memory:
        b = a.view(10, -1)[3:].t()
        a.add_(1).mul_(b.reshape(-1)[0])
        del a
        assert memory.live_bytes == 4 * KB, "the view holds the whole storage"
        del b
        assert memory.live_bytes == 0


def test_what_autograd_keeps_lives_until_backward() -> None:
    weight = floats(4 * KB).requires_grad_()
    with LiveBytes([weight]) as memory:
        loss = weight.exp().sum()  # exp keeps its result
        assert memory.live_bytes == 4 * KB + 4 * KB + 4
        loss.backward()
        del loss
        assert memory.live_bytes == 4 * KB + 4 * KB, "the weight and its gradient"
        weight.grad = None
        assert memory.live_bytes == 4 * KB


def test_many_short_lives_do_not_add_up() -> None:
    """Storages are made at the same addresses again and again."""
    with LiveBytes() as memory:
        for _ in range(100):
            floats(KB)
    assert (memory.live_bytes, memory.peak_bytes) == (0, KB)


def test_a_linear_layer() -> None:
    B, D, F = 8, 16, 32
    layer, x = nn.Linear(D, F), torch.ones(B, D)
    held = 4 * (D * F + F + B * D)
    with LiveBytes([*layer.parameters(), x]) as memory:
        y = layer(x)
        assert memory.live_bytes == memory.peak_bytes == held + 4 * B * F
        y.sum().backward()
        del y
        assert memory.live_bytes == held + 4 * (D * F + F)

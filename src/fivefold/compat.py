"""Every private torch API that Fivefold uses, in one place; `tests/unit/test_compat.py` pins each one.

A new torch version that moves one of these breaks this file and its test, and nothing else.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import ProcessGroup
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = [
    "COLLECTIVE_NAMESPACES",
    "TorchDispatchMode",
    "default_timeout",
    "flash_attention",
    "flash_attention_backward",
    "group_name_of",
    "grouped_mm",
    "has_flash",
    "has_grouped_mm",
    "scale_in_place",
    "storage_key",
    "tree_leaves",
    "unscale_in_place",
    "warm_up_imports",
]

COLLECTIVE_NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")
"""Operator namespaces through which every collective of torch is dispatched."""


def group_name_of(argument: Any) -> str | None:
    """The process group's name if this operator argument is a (boxed) process group, else None."""
    if isinstance(argument, ProcessGroup):
        return argument.group_name
    if isinstance(argument, torch.ScriptObject):
        try:
            return ProcessGroup.unbox(argument).group_name
        except (RuntimeError, TypeError):
            return None
    return None


def default_timeout(device: torch.device) -> timedelta:
    """The timeout that the job was started with. A new group does not inherit it: it takes the backend's own."""
    assert dist.group.WORLD is not None
    timeout: timedelta = dist.group.WORLD._get_backend(device).options._timeout
    return timeout


def scale_in_place(tensors: list[Tensor], factor: Tensor) -> None:
    """Multiply every tensor by a scalar tensor on the same device: one kernel, nothing waits."""
    torch._foreach_mul_(tensors, factor)


def unscale_in_place(tensors: list[Tensor], found: Tensor, inverse: Tensor) -> None:
    """Multiply every tensor by `inverse` and set `found` to 1 if one had a NaN or an infinity: one pass over each.

    Shapes: found and inverse [1], float32, on the tensors' device.
    """
    if tensors:
        torch._amp_foreach_non_finite_check_and_unscale_(tensors, found, inverse)


def flash_attention(q_BNSH: Tensor, k_BKSH: Tensor, v_BKSH: Tensor, *, causal: bool) -> tuple[Tensor, Tensor]:
    """Attention and its log-sum-exp, which the public function does not return. For tensors that `has_flash` accepts.

    Shapes: q [B, N, Sq, H], k and v [B, K, Sk, H], N a multiple of K -> [B, N, Sq, H], and [B, N, Sq] in at least
            float32. `causal` takes Sq = Sk.
    """
    if q_BNSH.is_cpu:
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q_BNSH, k_BKSH, v_BKSH, 0.0, causal
        )
        return out, lse
    out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(q_BNSH, k_BKSH, v_BKSH, 0.0, causal)
    return out, lse


def flash_attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v: of a whole attention, or of one block of keys where `out` and `lse` are of all keys."""
    if q.is_cpu:
        dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, lse, 0.0, causal
        )
        return dq, dk, dv
    no_dropout = torch.empty(2, dtype=torch.uint64, device=q.device)
    dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_backward(
        grad, q, k, v, out, lse, None, None, q.shape[2], k.shape[2], 0.0, causal, no_dropout, no_dropout
    )
    return dq, dk, dv


def has_flash(q: Tensor) -> bool:
    """Whether flash attention takes such tensors: everything on the CPU; on CUDA 16 bits and whole vectors of 8."""
    if q.is_cpu:
        return q.dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16)
    return (
        q.is_cuda
        and q.dtype in (torch.bfloat16, torch.float16)
        and q.shape[-1] % 8 == 0
        and q.shape[-1] <= 256
    )


def grouped_mm(a: Tensor, b: Tensor, counts_E: Tensor) -> Tensor:
    """A matrix product per group. For tensors that `has_grouped_mm` accepts; `counts_E` [E] (int64): sizes of groups.

    Shapes: a [R, D], b [E, D, O] -> [R, O], rows in groups; or a [O, R], b [R, D] -> [E, O, D], sums over each group.
    """
    return torch._grouped_mm(a, b, offs=counts_E.cumsum(0).to(torch.int32))


def has_grouped_mm(a: Tensor, b: Tensor) -> bool:
    """Whether the grouped kernel takes such tensors: no float64, and rows of whole 16 bytes."""
    dtypes = (torch.float32, torch.bfloat16) if a.is_cpu else (torch.bfloat16,)
    return a.dtype in dtypes and all(size * x.itemsize % 16 == 0 for x in (a, b) for size in x.shape[-1:])


def storage_key(storage: torch.UntypedStorage) -> int:
    """What identifies a storage while it lives."""
    return int(storage._cdata)


def warm_up_imports() -> None:
    """Import what torch imports lazily, so that ranks forked afterwards share it."""
    import torch._dynamo
    import torch.distributed  # noqa: F401

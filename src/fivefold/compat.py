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
    "group_name_of",
    "scale_in_place",
    "storage_key",
    "tree_leaves",
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


def storage_key(storage: torch.UntypedStorage) -> int:
    """What identifies a storage while it lives."""
    return int(storage._cdata)


def warm_up_imports() -> None:
    """Import what torch imports lazily, so that ranks forked afterwards share it."""
    import torch._dynamo
    import torch.distributed  # noqa: F401

"""Live tensor bytes of one rank on the CPU, where no allocator counts them.

A dispatch mode sees every storage when an operator returns it and counts it until Python and autograd let go of it.
Like the ledger it costs time, and is used for one profiled step.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from fivefold.compat import TorchDispatchMode, storage_key, tree_leaves


class LiveBytes(TorchDispatchMode):
    """Counts live storage bytes; `peak_bytes` is the most at one time since it was entered.

    `existing`: tensors that live already (parameters, gradients, optimizer state).
    Not seen: scratch memory inside one operator.
    """

    def __init__(self, existing: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.live_bytes = 0
        self.peak_bytes = 0
        self._seen: dict[int, int] = {}
        for tensor in existing:
            self._add(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._add(leaf)
        return result

    def _add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage_key(storage)
        if key in self._seen:
            return
        self._seen[key] = storage.nbytes()
        self.live_bytes += storage.nbytes()
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        weakref.finalize(storage, self._remove, key)

    def _remove(self, key: int) -> None:
        self.live_bytes -= self._seen.pop(key, 0)

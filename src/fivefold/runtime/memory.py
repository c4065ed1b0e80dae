"""Live tensor bytes of one rank on the CPU, where no allocator counts them.

A dispatch mode sees every storage when an operator returns it and counts it until Python and autograd let go of it.
Like the ledger it costs time, and is used for one profiled step.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any, Self

import torch
from torch import Tensor

from fivefold.compat import TorchDispatchMode, storage_key, tree_leaves

_counting: list[LiveBytes] = []
"""Counts that are under way: a storage that changes its size tells them, as no operator does."""


def resize_storage(tensor: Tensor, elements: int) -> None:
    """Give the memory under a tensor back (0 elements), or get it anew, without values. Views of it stay views."""
    storage = tensor.untyped_storage()
    storage.resize_(elements * tensor.itemsize)
    for count in _counting:
        count.resized(storage)


def unfilled(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of this shape without memory: what is to be gathered later."""
    tensor = torch.empty(shape, dtype=dtype, device=device)
    resize_storage(tensor, 0)
    return tensor


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

    def __enter__(self) -> Self:
        _counting.append(self)
        return super().__enter__()  # type: ignore[no-any-return]

    def __exit__(self, *error: Any) -> None:
        _counting.remove(self)
        super().__exit__(*error)

    def resized(self, storage: torch.UntypedStorage) -> None:
        """A storage has another size now."""
        key = storage_key(storage)
        if key in self._seen:
            self.live_bytes += storage.nbytes() - self._seen[key]
            self._seen[key] = storage.nbytes()
            self.peak_bytes = max(self.peak_bytes, self.live_bytes)

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

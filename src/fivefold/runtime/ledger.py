"""The ledger writes down every collective that is really dispatched, also those that torch issues itself.

It sits in torch's dispatcher, so it sees what is done and not what was meant. It costs time on every operator and is
therefore off unless asked for: `with Ledger(mesh) as ledger: ...; ledger.events`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor

from fivefold.compat import COLLECTIVE_NAMESPACES, TorchDispatchMode, group_name_of
from fivefold.core.events import Event, Op
from fivefold.runtime.mesh import Mesh

OPERATIONS: dict[str, Op] = {
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce",
    "all_reduce": "all_reduce",
    "all_reduce_": "all_reduce",
    "all_reduce_coalesced": "all_reduce",
    "all_reduce_coalesced_": "all_reduce",
    "allgather_": "all_gather",
    "_allgather_base_": "all_gather",
    "allgather_coalesced_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "all_gather_into_tensor_out": "all_gather",
    "all_gather_into_tensor_coalesced": "all_gather",
    "reduce_scatter_": "reduce_scatter",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_tensor_out": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "alltoall_": "all_to_all",
    "alltoall_base_": "all_to_all",
    "all_to_all_single": "all_to_all",
    "broadcast_": "broadcast",
    "broadcast": "broadcast",
    "reduce_": "reduce",
    "scatter_": "scatter",
    "gather_": "gather",
    "send": "send",
    "isend": "send",
    "recv_": "recv",
    "recv_any_source_": "recv",
    "irecv": "recv",
    "barrier": "barrier",
    "monitored_barrier_": "barrier",
}
"""Operator of torch -> the name it has in an event. An operator that is not listed is written under its own name."""

NOT_COMMUNICATION = {"wait_tensor", "_wrap_tensor_autograd", "check_for_nan"}
"""Operators of the same namespaces that send nothing."""


class Ledger(TorchDispatchMode):
    """Collects the events of one rank, each filed under the mesh's current phase."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        self.mesh = mesh
        self.events: Counter[Event] = Counter()
        self.order: list[Event] = []
        """The same events in the order of their dispatch."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.namespace in COLLECTIVE_NAMESPACES:
            name = func.overloadpacket.__name__
            if name not in NOT_COMMUNICATION:
                self._write(name, [*args, *(kwargs or {}).values()], result)
        return result

    def _write(self, name: str, arguments: list[Any], result: Any) -> None:
        groups = [a if isinstance(a, str) else group_name_of(a) for a in arguments]
        known = [self.mesh.axis_name_of(g) for g in groups if g]
        # A list of tensors is one buffer in parts. Functional collectives return theirs, the others fill an argument.
        buffers = [tensors for value in (*arguments, result) if (tensors := list(_tensors(value)))]
        largest = max(buffers, key=_bytes, default=[])
        event = Event(
            phase=self.mesh.phase,
            axis=next((axis for axis in known if axis != "world"), "world"),
            op=OPERATIONS.get(name, cast(Op, name)),
            dtype=str(largest[0].dtype).removeprefix("torch.") if largest else "none",
            bytes=_bytes(largest),
        )
        self.events[event] += 1
        self.order.append(event)


def _bytes(buffer: list[Tensor]) -> int:
    return sum(tensor.numel() * tensor.itemsize for tensor in buffer)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)

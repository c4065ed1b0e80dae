"""Pipeline parallelism acts on a finished model by keeping one stage of it, and runs the action list of its rank.

Communication (axis pp), per microbatch and pair of neighbouring stages: hidden states forward, their gradient
backward. Each directed edge and kind has a two-rank group of its own, so no send waits behind a receive and no order
of posting can deadlock, on any backend. Receives are posted one computation ahead.

At pp = 1 the same loop runs the F and B of every microbatch in turn, with no communication.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from fivefold.runtime.mesh import Axis, Handle, Mesh
from fivefold.strategies.pipeline.schedules import Action, Edge, edge_rounds


@dataclass(frozen=True)
class Microbatch:
    """One microbatch on the device: tokens, labels, mask [B, S], positions [B or 1, S], valid [B, S] or None."""

    tokens_BS: Tensor
    labels_BS: Tensor
    mask_BS: Tensor
    positions: Tensor
    valid_BS: Tensor | None = None


@dataclass
class Trace:
    """What one run of the action list took, on the host's clock."""

    total_s: float = 0.0
    busy_s: float = 0.0
    """Time inside F and B actions, less their waiting for a message; the rest of the total is idle."""
    actions: list[tuple[Action, float, float]] = field(default_factory=list)
    """(action, start, end) relative to the start of the run; an F or B starts when its message is there."""


def keep_stage(model: nn.Module, layers: range, *, first: bool, last: bool) -> None:
    """Drop what other stages hold. Layers keep their global names."""
    kept = {str(layer) for layer in layers}
    modules = model.get_submodule("layers")
    assert isinstance(modules, nn.ModuleDict)
    for name in [name for name in modules if name not in kept]:
        del modules[name]
    dropped = [] if first else ["embedding"]
    dropped += [] if last else ["norm", "head"]
    for name in dropped:
        setattr(model, name, None)


class Pipeline:
    """Runs the action list of one rank over its chunks.

    `chunks`: virtual stage -> its part of the model. `boundary`: shape of one message, and its dtype.
    `before_last_backward(chunk)` and `on_reduce(chunk)` let data parallelism act at the right moments.
    """

    def __init__(
        self,
        chunks: dict[int, nn.Module],
        actions: Sequence[Action],
        mesh: Mesh,
        *,
        boundary: tuple[tuple[int, ...], torch.dtype],
        before_last_backward: Callable[[int], None],
        on_reduce: Callable[[int], None],
    ) -> None:
        self.chunks, self.actions, self.mesh = chunks, list(actions), mesh
        self.shape, self.dtype = boundary
        self.before_last_backward, self.on_reduce = before_last_backward, on_reduce
        self.last_stage = mesh.layout.stages - 1
        self.last_microbatch = max(action.microbatch for action in self.actions)
        self.edges = self._make_edges()

    def run(self, microbatches: Sequence[Microbatch], gradient_scale: Tensor) -> tuple[Tensor, Trace]:
        """Forward and backward of all microbatches. Returns this rank's sum of token losses and the times.

        `gradient_scale` (1 / global valid tokens) multiplies the loss in backward only, once.
        """
        self.microbatches, self.scale = microbatches, gradient_scale
        self.loss = torch.zeros((), dtype=gradient_scale.dtype, device=gradient_scale.device)
        self.inputs: dict[tuple[int, int], Tensor] = {}
        self.outputs: dict[tuple[int, int], Tensor] = {}
        self.received: dict[tuple[str, int, int], Handle | Tensor] = {}
        self.sends: dict[tuple[str, int, int], Handle] = {}
        trace, started = Trace(), time.perf_counter()
        for action in self.actions:
            begin, self.waited_s = time.perf_counter(), 0.0
            getattr(self, f"_{action.kind.lower()}")(action.chunk, action.microbatch)
            end = time.perf_counter()
            trace.actions.append((action, begin - started + self.waited_s, end - started))
        for send in self.sends.values():
            send.wait()
        trace.total_s = time.perf_counter() - started
        trace.busy_s = sum(e - b for action, b, e in trace.actions if action.kind in ("F", "B"))
        return self.loss, trace

    def _f(self, chunk: int, j: int) -> None:
        self.mesh.phase = "forward"
        module, batch = self.chunks[chunk], self.microbatches[j]
        x = batch.tokens_BS if chunk == 0 else self._take("F", chunk, j)
        out = module(x, batch.positions, batch.valid_BS)
        if chunk == self.last_stage:
            out = module.loss(out, batch.labels_BS, batch.mask_BS)  # type: ignore[operator]
            self.loss += out.detach()
        if chunk > 0:
            self.inputs[chunk, j] = x
        self.outputs[chunk, j] = out
        self._hand_over("F", chunk, chunk + 1, j, out)

    def _b(self, chunk: int, j: int) -> None:
        self.mesh.phase = "backward"
        if j == self.last_microbatch:
            self.before_last_backward(chunk)
        out = self.outputs.pop((chunk, j))
        grad = self.scale if chunk == self.last_stage else self._take("B", chunk, j)
        self._let_go("F", chunk, j)  # its gradient is here, so it has arrived
        torch.autograd.backward(out, grad)
        if chunk > 0:
            input_grad = self.inputs.pop((chunk, j)).grad
            assert input_grad is not None
            self._hand_over("B", chunk, chunk - 1, j, input_grad)

    def _reduce_grad(self, chunk: int, _: int) -> None:
        self.mesh.phase = "reduce"
        self.on_reduce(chunk)

    def _recv_f(self, chunk: int, j: int) -> None:
        self._receive("F", chunk - 1, chunk, j)

    def _recv_b(self, chunk: int, j: int) -> None:
        self._receive("B", chunk + 1, chunk, j)

    def _send_f(self, chunk: int, j: int) -> None:
        self._send("F", chunk, chunk + 1, j, self.outputs[chunk, j].detach())

    def _send_b(self, chunk: int, j: int) -> None:
        grad = self.received.pop(("B", chunk - 1, j))
        assert isinstance(grad, Tensor)
        self._let_go("B", chunk, j - 1)
        self._send("B", chunk, chunk - 1, j, grad)

    def _send(self, way: str, source: int, target: int, j: int, message: Tensor) -> None:
        self.mesh.phase = "forward" if way == "F" else "backward"
        axis, to = self.edges[Edge(way, source, target)]
        self.sends[way, source, j] = axis.send_start(message.contiguous(), to)

    def _let_go(self, way: str, source: int, j: int) -> None:
        """Forget a message that was sent, so that messages in flight stay as few as the schedule promises."""
        send = self.sends.pop((way, source, j), None)
        if send is not None:
            send.wait()

    def _receive(self, way: str, source: int, target: int, j: int) -> None:
        self.mesh.phase = "forward" if way == "F" else "backward"
        axis, peer = self.edges[Edge(way, source, target)]
        buffer = torch.empty(self.shape, dtype=self.dtype, device=self.mesh.device.device)
        self.received[way, target, j] = axis.receive_start(buffer, peer)

    def _hand_over(self, way: str, chunk: int, target: int, j: int, message: Tensor) -> None:
        """Keep what a SEND will take, or what a neighbouring chunk on this rank reads directly."""
        if 0 <= target <= self.last_stage and (way == "B" or target in self.chunks):
            self.received[way, target, j] = message.detach()

    def _take(self, way: str, chunk: int, j: int) -> Tensor:
        """What the neighbour sent for (chunk, microbatch); waits for it."""
        message = self.received.pop((way, chunk, j))
        if isinstance(message, Handle):
            began = time.perf_counter()
            message = message.wait()
            self.waited_s = time.perf_counter() - began
        return message.requires_grad_() if way == "F" else message

    def _make_edges(self) -> dict[Edge, tuple[Axis, int]]:
        """Every edge of this rank -> (its two-rank group, the other rank). All ranks go through the same rounds."""
        edges = {}
        for number, turn in enumerate(edge_rounds(self.mesh.layout)):
            ends = {edge: (self._owner(edge.source), self._owner(edge.target)) for edge in turn}
            mine = next((edge for edge in turn if self.mesh.rank in ends[edge]), None)
            axis = self.mesh.edge(number, ends[mine] if mine else None)
            if mine:
                edges[mine] = (axis, sum(ends[mine]) - self.mesh.rank)
        return edges

    def _owner(self, chunk: int) -> int:
        """The global rank that holds a chunk, at this rank's other coordinates."""
        return self.mesh.layout.rank(**{**self.mesh.coordinate, "pp": self.mesh.layout.owner_of(chunk)})

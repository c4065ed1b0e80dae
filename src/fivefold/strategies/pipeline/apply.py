"""Pipeline parallelism acts on a finished model by keeping one stage of it, and runs the action list of its rank.

Communication (axis pp), per microbatch and pair of neighbouring stages: hidden states forward, their gradient
backward. Each directed edge and kind has a two-rank group of its own, so no send waits behind a receive and no order
of posting can deadlock, on any backend. Receives are posted one computation ahead.

At pp = 1 the same loop runs the F and B of every microbatch in turn, with no communication.
Zero bubble: I is a backward whose weight gradients are kept as closures, which W runs (`runtime/deferred.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from fivefold.nn.attention import Mask
from fivefold.runtime.deferred import DeferredGradients
from fivefold.runtime.device import Device, Mark, elapsed_s
from fivefold.runtime.mesh import Axis, Handle, Mesh
from fivefold.strategies.pipeline.actions import Action, Edge, arrivals, edge_rounds


@dataclass(frozen=True)
class Microbatch:
    """One microbatch on the device: this rank's tokens, labels, mask [B, S/cp] and positions [B or 1, S/cp]."""

    tokens_BS: Tensor
    labels_BS: Tensor
    mask_BS: Tensor
    positions: Tensor
    attention: Mask | None = None
    """What attention hides beside what comes after a token; of the whole sequence."""
    valid_BS: Tensor | None = None
    """Which tokens are no padding; only those whose hidden states this rank holds. None: all."""
    padding: int = 0
    """How many of `tokens_BS` are padding, for the routers of a mixture of experts."""


COMPUTE = ("F", "B", "I", "W")


@dataclass
class Trace:
    """When one rank ran its action list: on the host's clock (CPU), or as the accelerator's stream got to it.

    On an accelerator nothing may be read before the device has been synchronised.
    """

    device: Device
    started: Mark
    ended: Mark
    marks: list[tuple[Action, Mark, Mark, Mark]] = field(default_factory=list)
    """(action, begun, its message was there, done)."""

    @property
    def total_s(self) -> float:
        """From the first action to the last, sends included."""
        return elapsed_s(self.started, self.ended)

    @property
    def busy_s(self) -> float:
        """Inside computations, less their waiting for a message; the rest of the total is idle."""
        return sum(elapsed_s(ready, end) for action, _, ready, end in self.marks if action.kind in COMPUTE)

    @property
    def chunk_s(self) -> dict[int, float]:
        """Chunk -> seconds in its computations."""
        seconds: dict[int, float] = {}
        for action, _, ready, end in self.marks:
            if action.kind in COMPUTE:
                seconds[action.chunk] = seconds.get(action.chunk, 0.0) + elapsed_s(ready, end)
        return seconds

    @property
    def actions(self) -> list[tuple[Action, float, float]]:
        """(action, start, end) relative to the start of the run; a computation starts when its message is there."""
        return [
            (action, elapsed_s(self.started, ready), elapsed_s(self.started, end))
            for action, _, ready, end in self.marks
        ]


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

    `lists`: the actions of every pipeline rank; this one runs its own, and knows from the others' what has arrived.
    `chunks`: virtual stage -> its part of the model. `boundary`: shape of one message, and its dtype.
    `before_last_backward(chunk)` and `on_reduce(chunk)` let data parallelism act at the right moments.
    `deferred`: where the weight gradients between an I and its W are kept.
    """

    def __init__(
        self,
        chunks: dict[int, nn.Module],
        lists: Sequence[Sequence[Action]],
        mesh: Mesh,
        *,
        boundary: tuple[tuple[int, ...], torch.dtype],
        before_last_backward: Callable[[int], None],
        on_reduce: Callable[[int], None],
        deferred: DeferredGradients | None = None,
    ) -> None:
        self.chunks, self.actions, self.mesh = chunks, list(lists[mesh.coordinate["pp"]]), mesh
        self.shape, self.dtype = boundary
        self.before_last_backward, self.on_reduce = before_last_backward, on_reduce
        self.last_stage = mesh.layout.stages - 1
        self.last_microbatch = max(action.microbatch for action in self.actions)
        self.deferred = deferred or DeferredGradients()
        self.now = self.actions[0]
        """The action under way."""
        self.edges = self._make_edges()
        owner_of = mesh.layout.owner_of
        self._arrivals = {chunk: arrivals(lists[owner_of(chunk - 1)], chunk) for chunk in chunks if chunk > 0}

    def run(self, microbatches: Sequence[Microbatch], gradient_scale: Tensor) -> tuple[Tensor, Trace]:
        """Forward and backward of all microbatches. Returns this rank's sum of token losses and the times.

        `gradient_scale` (1 / global valid tokens) multiplies the loss in backward only, once.
        """
        loss, trace = self._run(self.actions, microbatches, gradient_scale)
        assert self.deferred.pending == 0, "a W is missing"
        return loss, trace

    @torch.no_grad()
    def evaluate(self, microbatches: Sequence[Microbatch], dtype: torch.dtype) -> Tensor:
        """Forward of all microbatches, in the order of the schedule. Returns this rank's sum of token losses."""
        forward = [action for action in self.actions if action.kind in ("F", "SEND_F", "RECV_F")]
        scale = torch.ones((), dtype=dtype, device=self.mesh.device.device)
        loss, _ = self._run(forward, microbatches, scale)
        self.outputs.clear()
        self.inputs.clear()
        return loss

    def _run(
        self, actions: Sequence[Action], microbatches: Sequence[Microbatch], gradient_scale: Tensor
    ) -> tuple[Tensor, Trace]:
        self.microbatches, self.scale = microbatches, gradient_scale
        self.loss = torch.zeros((), dtype=gradient_scale.dtype, device=gradient_scale.device)
        self.inputs: dict[tuple[int, int], Tensor] = {}
        self.outputs: dict[tuple[int, int], Tensor] = {}
        self.received: dict[tuple[str, int, int], Handle | Tensor] = {}
        self.sends: dict[tuple[str, int, int], Handle] = {}
        device = self.mesh.device
        started = device.mark()
        trace = Trace(device, started, started)
        for action in actions:
            self.now = action
            begun = self.ready = device.mark()
            getattr(self, f"_{action.kind.lower()}")(action.chunk, action.microbatch)
            trace.marks.append((action, begun, self.ready, device.mark()))
        for send in self.sends.values():
            send.wait()
        trace.ended = device.mark()
        return self.loss, trace

    def _f(self, chunk: int, j: int) -> None:
        self.mesh.phase = "forward"
        module, batch = self.chunks[chunk], self.microbatches[j]
        x = batch.tokens_BS if chunk == 0 else self._take("F", chunk, j)
        out = module(x, batch.positions, batch.attention, batch.valid_BS)
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

    def _i(self, chunk: int, j: int) -> None:
        with self.deferred.collect((chunk, j)):
            self._b(chunk, j)

    def _w(self, chunk: int, j: int) -> None:
        self.mesh.phase = "backward"
        self.deferred.run((chunk, j))

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
        self._send("B", chunk, chunk - 1, j, grad)

    def _send(self, way: str, source: int, target: int, j: int, message: Tensor) -> None:
        self.mesh.phase = "forward" if way == "F" else "backward"
        axis, to = self.edges[Edge(way, source, target)]
        self.sends[way, source, j] = axis.send_start(message.contiguous(), to)

    def _let_go(self, way: str, source: int, j: int) -> None:
        """Forget a message of which the other rank has asked for: no list can make this wait for long.

        Hidden states have arrived when their gradient is here; for gradients, see `arrivals`.
        """
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
            message = message.wait()
            self.ready = self.mesh.device.mark()
            for arrived in self._arrivals[chunk].get(j, ()) if way == "F" else ():
                self._let_go("B", chunk, arrived)
        return message.requires_grad_() if way == "F" else message

    def _make_edges(self) -> dict[Edge, tuple[Axis, int]]:
        """Every edge of this rank -> (its two-rank group, the other rank). All ranks go through the same rounds."""
        self.mesh.phase = "setup"
        edges = {}
        for number, turn in enumerate(edge_rounds(self.mesh.layout)):
            ends = {edge: (self._owner(edge.source), self._owner(edge.target)) for edge in turn}
            mine = next((edge for edge in turn if self.mesh.rank in ends[edge]), None)
            axis = self.mesh.edge(number, ends[mine] if mine else None)
            if mine:
                peer = sum(ends[mine]) - self.mesh.rank
                edges[mine] = (axis, peer)
                self._greet(axis, peer, first=ends[mine][0] == self.mesh.rank)
        return edges

    def _greet(self, axis: Axis, peer: int, *, first: bool) -> None:
        """One number over a new edge: backends that connect two ranks at their first message do it now."""
        number = torch.zeros(1, device=self.mesh.device.device)
        (axis.send_start(number, peer) if first else axis.receive_start(number, peer)).wait()

    def _owner(self, chunk: int) -> int:
        """The global rank that holds a chunk, at this rank's other coordinates."""
        return self.mesh.layout.rank(**{**self.mesh.coordinate, "pp": self.mesh.layout.owner_of(chunk)})

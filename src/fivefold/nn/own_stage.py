"""One pipeline stage of a module that is not ours. Its own forward runs, over its own objects.

What other stages hold is replaced by stand-ins, which have no parameters: a layer, the last norm and the head by one
that returns its input; the embedding by one that returns the hidden states that have arrived. So a forward that goes
through all layers in turn goes through those of this stage, and layers keep their place in the module's list.
Learned positions are replaced by 0.

Shape letters: B batch, S sequence, D hidden, V vocabulary.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from fivefold.errors import ModelError
from fivefold.nn.attention import Mask
from fivefold.nn.layers import TokenLoss
from fivefold.nn.own import Parts
from fivefold.nn.roles import replace_module


class PassOn(nn.Module):
    """Stands where another stage has a layer, the norm or the head: returns what it is given."""

    def forward(self, x: Tensor, *_: Any, **__: Any) -> Tensor:
        return x


class Arrival(nn.Module):
    """Stands where another stage has the embedding: returns the hidden states that came from the stage before."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden: Tensor | None = None

    def forward(self, *_: Any, **__: Any) -> Tensor:
        assert self.hidden is not None, "nothing has arrived"
        return self.hidden


class Nothing(nn.Module):
    """Stands where another stage has learned positions: adds nothing to what has arrived."""

    def forward(self, *_: Any, **__: Any) -> float:
        return 0.0


class NoTokens(Tensor):
    """Stands for the tokens on a stage that does not have them: has their shape, and nothing else may be asked."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in ("__get__", "size", "dim", "numel", "stride"):
            return super().__torch_function__(func, types, args, kwargs or {})
        raise ModelError(
            f"the forward uses its tokens beside the embedding ({getattr(func, '__name__', func)}), which the later "
            f"stages of a pipeline do not have; use pp1"
        )


class OwnRoot:
    """The module itself, of which one stage at a time is in place."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self.arrival = Arrival()
        self.positions_name = parts.positions_name
        self.tokens_name, self.more = _arguments(parts.root)
        self._modules = {name: parts.module(name) for name in parts.names}
        self._shown: OwnStage | None = None

    def take(self, name: str) -> nn.Module:
        """A part, which from here on only its stage keeps."""
        return self._modules[name]

    def let_go(self) -> None:
        """Forget the parts that no stage here has taken."""
        self._modules.clear()

    def show(self, stage: OwnStage) -> None:
        """Put the parts of a stage where they belong, and stand-ins where it has none."""
        if self._shown is stage:
            return
        held = stage.parts()
        for name, own in self.parts.names.items():
            stand_in = {"embedding": self.arrival, "positions": Nothing()}.get(name) or PassOn()
            replace_module(self.parts.root, own, held.get(name, stand_in))
        self._shown = stage

    def __call__(self, tokens_BS: Tensor, positions: Tensor) -> Tensor:
        """Run the module's forward. Shapes: -> [B, S, V], or [B, S, D] where the head is a stand-in."""
        arguments = {self.tokens_name: tokens_BS, **self.more}
        if self.positions_name is not None:
            arguments[self.positions_name] = positions
        out = self.parts.root(**arguments)
        out = getattr(out, "logits", out)
        out = out[0] if isinstance(out, tuple) else out
        if not isinstance(out, Tensor):
            raise ModelError(
                f"{self.parts.kind} returns a {type(out).__name__}; it must return logits, or something with .logits"
            )
        return out


def _arguments(root: nn.Module) -> tuple[str, dict[str, Any]]:
    """(name of the tokens, arguments beside tokens and positions) of a module's forward."""
    names = list(inspect.signature(root.forward).parameters)
    if not names:
        raise ModelError(f"the forward of {type(root).__name__} takes no tokens")
    return names[0], {"use_cache": False} if "use_cache" in names else {}


class OwnStage(nn.Module):
    """The parts of one virtual stage, by our names; called as our decoder is.

    Shapes: tokens_BS (int64) if it holds the embedding, else hidden_BSD; positions [B or 1, S]
            -> logits_BSV if it holds the head, else hidden_BSD.
    """

    def __init__(self, root: OwnRoot, layers: range, *, first: bool, last: bool) -> None:
        super().__init__()
        self._root = root
        # Its routers are of its own making: nothing may take them for ours.
        self.roles = {name: role for name, role in root.parts.roles.items() if role != "router"}
        self.embedding = root.take("embedding") if first else None
        self.positions = root.take("positions") if first and "positions" in root.parts.names else None
        self.layers = nn.ModuleDict({str(i): root.take(f"layers.{i}") for i in layers})
        self.norm = root.take("norm") if last and "norm" in root.parts.names else None
        self.head = root.take("head") if last else None
        self.loss = TokenLoss()

    def parts(self) -> dict[str, nn.Module]:
        found = {f"layers.{name}": layer for name, layer in self.layers.items()}
        ends = {
            "embedding": self.embedding,
            "positions": self.positions,
            "norm": self.norm,
            "head": self.head,
        }
        return found | {name: module for name, module in ends.items() if module is not None}

    def forward(
        self, x: Tensor, positions: Tensor, mask: Mask | None = None, valid_BS: Tensor | None = None
    ) -> Tensor:
        assert mask is None, "masks of documents are refused before"
        root = self._root
        root.show(self)
        if self.embedding is not None:
            return root(x, positions)
        root.arrival.hidden = x
        tokens = x.new_zeros(x.shape[0], positions.shape[-1], dtype=torch.int64).as_subclass(NoTokens)
        try:
            return root(tokens, positions)
        finally:
            root.arrival.hidden = None

"""The feed-forward block, gated (Shazeer 2020, SwiGLU) or plain."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

from fivefold.core.model_spec import MLPSpec
from fivefold.errors import ModelError, nearest
from fivefold.nn.layers import Projections

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
}


def activation_of(name: str) -> Callable[[Tensor], Tensor]:
    """Raises: ModelError naming the nearest one that is known."""
    if name not in ACTIVATIONS:
        raise ModelError(
            f"activation {name!r} is not supported{nearest(name, ACTIVATIONS)}; known: {', '.join(ACTIVATIONS)}"
        )
    return ACTIVATIONS[name]


class MLP(nn.Module):
    """down(activation(gate(x)) * up(x)), or down(activation(up(x))) when not gated.

    Shapes: x_BSD -> [B, S, D], through [B, S, F].
    """

    def __init__(self, hidden: int, spec: MLPSpec) -> None:
        super().__init__()
        self.activation = activation_of(spec.activation)
        outputs = {"gate": spec.ffn, "up": spec.ffn} if spec.gated else {"up": spec.ffn}
        self.inputs = Projections(hidden, outputs, bias=spec.bias)
        self.down = nn.Linear(spec.ffn, hidden, bias=spec.bias)

    def forward(self, x_BSD: Tensor) -> Tensor:
        first, *rest = self.inputs(x_BSD)
        hidden_BSF = self.activation(first)
        return self.down(hidden_BSF * rest[0] if rest else hidden_BSF)  # type: ignore[no-any-return]

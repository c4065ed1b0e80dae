"""Tensor parallelism acts on a module that is not ours: its objects stay, what they compute with and at is changed.

    attention, mlp          their input is gathered over the sequence (SP), or its gradient summed
    q, k, v, gate, up       their weights are cut, and that is all
    attention_output, down  a row: partial sums are reduce-scattered (SP) or all-reduced
    embedding, head, loss   by vocabulary, as for our decoder
    positions               whole; with SP the output is cut to this rank's tokens

                  forward                                  backward
    SP            2 all-gathers, 2 reduce-scatters         2 all-gathers, 2 reduce-scatters     a layer, b*S*D*x bytes
    nosp          2 all-reduces                            2 all-reduces

The gathered input of a block is what its linears keep for backward: with SP, that is b*S*D elements where our own
column map keeps b*S/tp*D and gathers again.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn

from fivefold.errors import ModelError
from fivefold.nn.own_roles import BLOCK_ROLES
from fivefold.runtime.collectives import all_gather, broadcast_input
from fivefold.runtime.deferred import DeferredGradients
from fivefold.runtime.mesh import Mesh
from fivefold.strategies.tensor.linear import SEQUENCE_DIM, Cut, column_linear, row_linear
from fivefold.strategies.tensor.rules import COLUMN, ROW
from fivefold.strategies.tensor.vocabulary import VocabularyLoss, look_up

SHAPE_FAULT = re.compile(r"shape '\[.*\]' is invalid for input of size")
"""What view and reshape say."""


def apply(
    stage: nn.Module,
    roles: Mapping[str, str],
    mesh: Mesh,
    vocab: int,
    *,
    own_name: Callable[[str], str] = str,
    deferred: DeferredGradients | None = None,
) -> None:
    """Change what the modules of a stage do. At tp = 1 nothing is touched, unless weight gradients are `deferred`.

    `roles`: name in the stage -> role. `own_name`: name in the stage -> what the module's author calls it.
    """
    axis = mesh.axis("tp")
    if axis.degree == 1 and deferred is None:
        return
    cut = Cut(axis, mesh.layout.sequence_parallel, deferred)
    local = Cut(mesh.axis("tp", 1), False, deferred)
    for name, module in list(stage.named_modules()):
        role = roles.get(name)
        if role in COLUMN and deferred is not None:
            run(module, partial(_linear, module, local))
        elif role in ROW:
            run(module, partial(_row, module, cut))
        elif role == "head":
            run(module, partial(_linear, module, cut))
        elif role == "embedding" and axis.degree > 1:
            run(module, partial(_embedding, module, cut))
        elif role == "positions" and cut.sequence_parallel:
            module.register_forward_hook(partial(_own_places, cut))
        elif role in BLOCK_ROLES and axis.degree > 1:
            module.register_forward_pre_hook(partial(_enter, cut, own_name(name)), with_kwargs=True)
            run(module, partial(_with_fewer_features, module.forward, own_name(name), axis.degree))
    if axis.degree > 1:
        stage.loss = VocabularyLoss(axis, vocab)


def run(module: nn.Module, forward: Callable[..., Any]) -> None:
    """Let the module run `forward` in place of its own; its hooks stay."""
    module.forward = forward


def _linear(module: Any, cut: Cut, x_BSD: Tensor) -> Tensor:
    return column_linear(x_BSD, [module.weight], [module.bias], cut)[0]


def _row(module: Any, cut: Cut, x_BSD: Tensor) -> Tensor:
    return row_linear(x_BSD, module.weight, module.bias, cut)


def _embedding(module: Any, cut: Cut, tokens_BS: Tensor) -> Tensor:
    return look_up(tokens_BS, module.weight, cut, module.padding_idx)


def _own_places(cut: Cut, _module: nn.Module, _args: Any, out: Tensor) -> Tensor:
    """Shapes: [B or 1, S, D] or [S, D] -> S/tp for S, as the embedding's output."""
    return out.chunk(cut.axis.degree, -2)[cut.axis.index]


def _with_fewer_features(
    forward: Callable[..., Any], name: str, degree: int, *args: Any, **kwargs: Any
) -> Any:
    """Run the forward of a block, and say what is wrong if it gives its heads a shape that only all of them have."""
    try:
        return forward(*args, **kwargs)
    except RuntimeError as error:
        if not SHAPE_FAULT.match(str(error)):
            raise
        raise ModelError(
            f"{name}: {error}: under tp{degree} a rank has a part of its heads or features; let the shapes count them "
            f"(-1), not a number kept from the start"
        ) from None


def _enter(
    cut: Cut, name: str, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Hand a block the hidden states of all tokens, of which each rank then computes a part with.

    They are the first floating-point tensor among its arguments.
    """

    def entered(x: Tensor) -> Tensor:
        if cut.sequence_parallel:
            return all_gather(x, cut.axis, SEQUENCE_DIM)
        return broadcast_input(x, cut.axis)

    for i, value in enumerate(args):
        if isinstance(value, Tensor) and value.is_floating_point():
            return (*args[:i], entered(value), *args[i + 1 :]), kwargs
    for name, value in kwargs.items():
        if isinstance(value, Tensor) and value.is_floating_point():
            return args, {**kwargs, name: entered(value)}
    raise ModelError(
        f"{name} was called without hidden states: no floating-point tensor is among its arguments"
    )

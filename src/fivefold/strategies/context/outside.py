"""Context parallelism acts on a module that is not ours: its attention modules stay, what they attend with is replaced.

A model of transformers attends with our cores under tensor parallelism as well: its masks are made for as many tokens
as the embedding returns, which are 1/tp of all with sequence parallelism, and for KV heads that no rank repeats.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import nn

from fivefold.nn.own_attention import Replaced, is_transformers, replace_called, replace_registered
from fivefold.runtime.mesh import Mesh
from fivefold.strategies.context.apply import core


def apply(
    stage: nn.Module,
    root: nn.Module,
    attentions: Mapping[str, int],
    mesh: Mesh,
    own_name: Callable[[str], str] = str,
) -> None:
    """Replace the attention cores of a stage of `root`. Where neither cp nor tp needs it, nothing is touched.

    `attentions`: name of each attention module in the stage -> the KV heads that a rank has of it.
    `own_name`: name in the stage -> what the module's author calls it.
    """
    registry = is_transformers(root)
    if mesh.layout.cp == 1 and not (registry and mesh.layout.tp > 1):
        return
    replaced = {
        stage.get_submodule(name): Replaced(own_name(name), lambda window: core(window, mesh), heads)
        for name, heads in attentions.items()
    }
    if registry:
        replace_registered(root, replaced)
        return
    for module, one in replaced.items():
        replace_called(module, one)

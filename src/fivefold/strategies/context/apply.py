"""Context parallelism acts on a finished model: attention cores are found by role and replaced, all else stays."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from fivefold.nn.attention import AttentionCore
from fivefold.nn.roles import DECODER_ROLES, modules_with_role, replace_module
from fivefold.runtime.mesh import Axis, Mesh
from fivefold.strategies.context.gather import GatherCore
from fivefold.strategies.context.ring import RingCore
from fivefold.strategies.context.ulysses import UlyssesCore


def axes(mesh: Mesh) -> tuple[Axis, Axis]:
    """(ring positions, ulysses ranks) of the cp axis: U consecutive cp ranks share one ring position."""
    size = mesh.layout.cp_ulysses
    return mesh.axis("cp", size, across=True), mesh.axis("cp", size)


def apply(model: nn.Module, mesh: Mesh, roles: Mapping[str, str] = DECODER_ROLES) -> None:
    """Replace the attention cores. At cp = 1 nothing is touched."""
    if mesh.layout.cp == 1:
        return
    for name, module in modules_with_role(model, "attention_core", roles):
        assert isinstance(module, AttentionCore)
        replace_module(model, name, core(module.window, mesh))


def core(window: int | None, mesh: Mesh) -> nn.Module:
    """The attention core of this layout; at cp = 1 the plain one."""
    ring, ulysses = axes(mesh)
    inside: nn.Module = AttentionCore(window)
    if ring.degree > 1:
        kind = GatherCore if mesh.layout.cp_method == "gather" else RingCore
        inside = kind(window, ring)
    return UlyssesCore(inside, ulysses) if ulysses.degree > 1 else inside

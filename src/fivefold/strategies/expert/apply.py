"""Expert parallelism acts on a finished model: routed experts are found by role and replaced, all else stays."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from fivefold.nn.roles import DECODER_ROLES, modules_with_role, replace_module
from fivefold.runtime.deferred import DeferredGradients
from fivefold.runtime.mesh import Mesh
from fivefold.strategies.expert.dispatch import Cut, DispatchedExperts
from fivefold.strategies.expert.rules import same_tokens


def apply(
    model: nn.Module,
    mesh: Mesh,
    roles: Mapping[str, str] = DECODER_ROLES,
    *,
    deferred: DeferredGradients | None = None,
) -> None:
    """Replace the experts of every routed layer. At ep = etp = 1 nothing is touched.

    `deferred`: where a zero-bubble schedule collects weight gradients; experts are replaced even at degree 1 then.
    """
    layout = mesh.layout
    if layout.ep * layout.etp == 1 and deferred is None:
        return
    cut = Cut(mesh.axis("ep"), mesh.axis("etp"), same_tokens(layout), deferred)
    for name, module in modules_with_role(model, "experts", roles):
        replace_module(model, name, DispatchedExperts(module, cut))

"""Expert parallelism acts on a finished model: experts and routers are found by role, experts replaced if need be."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from torch import nn

from fivefold.core.router import RouterConfig
from fivefold.nn.moe import MoE, Router
from fivefold.nn.roles import DECODER_ROLES, modules_with_role, replace_module
from fivefold.runtime.deferred import DeferredGradients
from fivefold.runtime.mesh import Mesh
from fivefold.strategies.expert.capacity import Limit, Pieces, Spans
from fivefold.strategies.expert.dispatch import Cut, DispatchedExperts, Padding, overlap
from fivefold.strategies.expert.rules import same_tokens, tokens_here


def apply(
    model: nn.Module,
    mesh: Mesh,
    roles: Mapping[str, str] = DECODER_ROLES,
    *,
    router: RouterConfig,
    seq_len: int,
    shared_tokens: Sequence[Spans],
    deferred: DeferredGradients | None = None,
    recomputed: Callable[[int], bool] = lambda layer: False,
) -> None:
    """Replace the experts of every routed layer, and limit their capacity. At ep = etp = 1 nothing is replaced.

    `shared_tokens`: the places of the tokens of all ranks that hold the same sequences: tp under sequence parallelism,
    then cp, the first fastest. `deferred`: where a zero-bubble schedule collects weight gradients; experts are replaced
    even at degree 1 then. `recomputed`: whether backward computes the experts of a layer again; elsewhere, shared
    experts compute while tokens travel. (A second run ends at the last tensor that backward needs, and would repeat the
    last sum of shared experts that come first.)
    """
    layout = mesh.layout
    axes = [mesh.axis("tp")] if layout.sequence_parallel else []
    shared = [axis for axis in (*axes, mesh.axis("cp")) if axis.degree > 1]
    pieces = Pieces(shared_tokens, shared, mesh.device.device)
    padded: dict[str, Padding] = {}
    for name, module in modules_with_role(model, "router", roles):
        assert isinstance(module, Router)
        capacity = router.capacity_of(module.spec, seq_len)
        if capacity is not None:
            here = tokens_here(layout, seq_len)
            if router.capacity == "pad":
                padded[_block_of(name)] = Padding(min(capacity, here), here)
            module.register_forward_hook(Limit(module.spec.experts, capacity, pieces))
    if layout.ep * layout.etp == 1 and deferred is None:
        return
    cut = Cut(mesh.axis("ep"), mesh.axis("etp"), same_tokens(layout), deferred)
    for name, module in modules_with_role(model, "experts", roles):
        replace_module(
            model, name, DispatchedExperts(module, replace(cut, padded=padded.get(_block_of(name))))
        )
    for name, module in model.named_modules():
        shares = isinstance(module, MoE) and module.shared is not None and layout.ep > 1
        if shares and not recomputed(int(name.split(".")[1])):
            overlap(module)


def _block_of(name: str) -> str:
    """What router and experts are parts of."""
    return name.rpartition(".")[0]

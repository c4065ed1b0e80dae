"""A module that is not ours as the engine takes a model: cut from outside, its own objects and forward kept.

    pipeline   parts of other stages become stand-ins            nn/own_stage.py
    tensor     weights are cut, linears sum, blocks gather       strategies/tensor/outside.py
    context    attention functions are replaced                  strategies/context/outside.py
    expert     experts modules dispatch                          strategies/expert/outside.py
    data       as for every model: hooks on parts and parameters

Its own weights are the initial ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import nn

from fivefold.core.plan import Plan
from fivefold.engine import recompute
from fivefold.engine.own_check import check_dtype, check_recompute, check_structure
from fivefold.errors import ModelError
from fivefold.nn.own import find_parts, measure, own_rows
from fivefold.nn.own_roles import roles_for
from fivefold.nn.own_stage import OwnRoot, OwnStage
from fivefold.nn.own_values import OwnValues
from fivefold.runtime.deferred import DeferredGradients
from fivefold.runtime.mesh import Mesh
from fivefold.strategies import compose
from fivefold.strategies.context import outside as context
from fivefold.strategies.context.rules import local_heads
from fivefold.strategies.expert import outside as expert
from fivefold.strategies.tensor import outside as tensor


class OwnModel:
    """A module with its table of roles. Building an engine with it changes the module: one engine for each.

    Raises: ModelError naming the role or module that does not fit.
    """

    def __init__(
        self, module: nn.Module, roles: Mapping[str, str] | None = None, weights: Path | None = None
    ) -> None:
        """`weights`: a folder of safetensors files with its values; None: those that it has."""
        self.module = module
        self.parts = find_parts(module, roles_for(module) if roles is None else roles)
        self.spec = measure(self.parts)
        self.rows = own_rows(self.parts)
        self._root = OwnRoot(self.parts)
        self.values = OwnValues(self.parts, weights)

    def check(self, plan: Plan) -> None:
        """Raises: LayoutError or WorkloadError as for every model; ModelError naming the module that forbids it."""
        check_structure(self.parts, plan.layout)
        check_dtype(self.parts, plan.execution.dtype)
        check_recompute(self.parts, plan.execution.recomputed)
        if plan.execution.experts.rebalance_every is not None:
            raise ModelError(
                f"experts.rebalance_every places experts of our own models only, not those of "
                f"{type(self.module).__name__}; leave it out"
            )
        compose.check_cut(plan)

    def chunk(
        self,
        plan: Plan,
        layers: range,
        *,
        first: bool,
        last: bool,
        mesh: Mesh,
        deferred: DeferredGradients | None,
    ) -> OwnStage:
        stage = OwnStage(self._root, layers, first=first, last=last)
        self._root.show(stage)
        own_name = self.parts.own_name
        tensor.apply(stage, self.parts.roles, mesh, self.spec.vocab, own_name=own_name, deferred=deferred)
        heads = local_heads(self.spec.blocks[layers.start : layers.stop], mesh.layout)
        attentions = {
            name: kv_heads
            for layer, (_, kv_heads) in zip(layers, heads)
            for name in self.parts.inside(layer, "attention")
        }
        context.apply(stage, self.module, attentions, mesh, own_name)
        expert.apply(stage, mesh)
        recompute.apply(stage, self.spec, plan.execution.recomputed)
        for where, module in self.module.named_modules():
            for name, buffer in module.named_buffers(recurse=False):
                values = self.values.buffer(f"{where}.{name}" if where else name, buffer)
                setattr(module, name, values.to(mesh.device.device))
        return stage

    def let_go(self) -> None:
        """Forget the module's whole parameters, and the parts that other ranks hold. After the engine was built."""
        self.values.let_go()
        self._root.let_go()

"""What the engine asks of a model, whoever wrote it. `Native` answers for our decoder, `own.py` for a user's module."""

from __future__ import annotations

import copy
from typing import Protocol

import torch
from torch import nn

from fivefold.core.model_spec import ModelSpec
from fivefold.core.plan import Plan
from fivefold.core.sharding import ParameterRow
from fivefold.engine import recompute
from fivefold.nn.decoder import Decoder
from fivefold.runtime.deferred import DeferredGradients
from fivefold.runtime.mesh import Mesh
from fivefold.strategies import compose
from fivefold.strategies.context import apply as context
from fivefold.strategies.expert import apply as expert
from fivefold.strategies.pipeline.apply import keep_stage
from fivefold.strategies.tensor import apply as tensor


class Model(Protocol):
    """A model that can be cut. The names of its parts are those of our decoder, whatever it calls them itself.

    A chunk has `embedding`, `layers` (a ModuleDict by global index), `norm`, `head`, each None where another stage
    holds it, and `loss`. It is called as our decoder is, and its parameters' names are those of the rows.
    """

    @property
    def rows(self) -> tuple[ParameterRow, ...] | None:
        """Its parameters on one device; None: those of our decoder."""

    def check(self, plan: Plan) -> None:
        """Whether the plan can be run. Raises: UserError."""

    def chunk(
        self,
        plan: Plan,
        layers: range,
        *,
        first: bool,
        last: bool,
        mesh: Mesh,
        deferred: DeferredGradients | None,
    ) -> nn.Module:
        """One virtual stage with the strategies applied; its parameters still have their global shapes."""


EXPERTS = frozenset({"layer", "moe"})
"""Regions with experts in them."""


class Native:
    """Our decoder, on the meta device until its parts are made."""

    rows = None

    def __init__(self, spec: ModelSpec) -> None:
        self.spec = spec
        self._whole: Decoder | None = None

    def check(self, plan: Plan) -> None:
        compose.check(plan)

    def chunk(
        self,
        plan: Plan,
        layers: range,
        *,
        first: bool,
        last: bool,
        mesh: Mesh,
        deferred: DeferredGradients | None,
    ) -> nn.Module:
        if self._whole is None:
            with torch.device("meta"):
                self._whole = Decoder(self.spec)
        module = copy.deepcopy(self._whole)
        keep_stage(module, layers, first=first, last=last)
        tensor.apply(module, mesh, self.spec.vocab, deferred=deferred)
        context.apply(module, mesh)
        seq_len = plan.workload.seq_len
        expert.apply(
            module, mesh, router=plan.execution.router, seq_len=seq_len,
            shared_tokens=compose.shared_tokens(mesh.layout, seq_len), deferred=deferred,
            recomputed=lambda i: not EXPERTS.isdisjoint(plan.execution.recomputed.of(i, self.spec.blocks[i])),
        )  # fmt: skip
        recompute.apply(module, self.spec, plan.execution.recomputed)
        return module

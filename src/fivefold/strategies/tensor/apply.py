"""Tensor parallelism acts on a finished model: modules are found by role and replaced; then gradients are completed."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from fivefold.core.sharding import ParameterRow
from fivefold.nn.roles import DECODER_ROLES, modules_with_role, replace_module
from fivefold.runtime.deferred import DeferredGradients
from fivefold.runtime.mesh import Mesh
from fivefold.strategies.tensor import rules
from fivefold.strategies.tensor.latent import LatentColumn
from fivefold.strategies.tensor.linear import ColumnParallel, Cut, RowParallel
from fivefold.strategies.tensor.vocabulary import VocabularyEmbedding, VocabularyHead, VocabularyLoss

LINEARS = {
    "column": ColumnParallel,
    "row": RowParallel,
    "head": VocabularyHead,
    "latent_column": LatentColumn,
}


def apply(
    model: nn.Module,
    mesh: Mesh,
    vocab: int,
    roles: Mapping[str, str] = DECODER_ROLES,
    *,
    deferred: DeferredGradients | None = None,
) -> None:
    """Replace the modules that tensor parallelism changes. At tp = 1 nothing is touched.

    The parameters keep their names; their local shapes are those of the parameter table.
    `deferred`: where a zero-bubble schedule collects weight gradients; linear maps are replaced even at tp = 1 then.
    """
    axis = mesh.axis("tp")
    if axis.degree == 1 and deferred is None:
        return
    cut = Cut(axis, mesh.layout.sequence_parallel, deferred)
    replacements = LINEARS if axis.degree == 1 else {**LINEARS, "embedding": VocabularyEmbedding}
    for role, replacement in replacements.items():
        for name, module in modules_with_role(model, role, roles):
            replace_module(model, name, replacement(module, cut))
    if deferred is not None:  # latents are not cut, but their weight gradients can wait as well
        alone = Cut(mesh.axis("tp", 1), False, deferred)
        for name, module in modules_with_role(model, "latent", roles):
            replace_module(model, name, ColumnParallel(module, alone))
    if axis.degree > 1:
        for name, _ in modules_with_role(model, "loss", roles):
            replace_module(model, name, VocabularyLoss(axis, vocab))


def sum_gradients(gradients: list[tuple[ParameterRow, Tensor]], mesh: Mesh) -> None:
    """Complete, in place, the gradients of which each tp rank holds a part: one all-reduce for each group of ranks."""
    by_name = {row.name: gradient for row, gradient in gradients}
    for size, rows in rules.gradient_sums([row for row, _ in gradients]).items():
        parts = [by_name[row.name] for row in rows]
        flat = mesh.axis("tp", size).all_reduce(torch.cat([part.flatten() for part in parts]))
        for part, total in zip(parts, flat.split([part.numel() for part in parts])):
            part.copy_(total.view_as(part))

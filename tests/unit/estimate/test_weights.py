"""Parameters in closed form against the counts of the model and against the table of parameters."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from fivefold.catalog import models
from fivefold.core.layout import Layout
from fivefold.core.model_counts import block_parameters, parameter_counts
from fivefold.core.model_spec import ModelSpec
from fivefold.errors import UserError
from fivefold.estimate.memory import Cut, kinds_of, stage_of
from fivefold.estimate.recompute import Recompute
from fivefold.estimate.weights import (
    embedding_matrices,
    head_matrices,
    local_elements,
    matrices_of,
)
from fivefold.strategies import compose
from fivefold.strategies.pipeline.placement import stage_layers

RUNNABLE = ["tiny-llama", "tiny-qwen2", "tiny-qwen3", "tiny-uneven"]


@pytest.mark.parametrize("name", models.names())
def test_every_parameter_is_counted_once(name: str) -> None:
    spec = models.preset(name)
    for block in dict.fromkeys(spec.blocks):
        counted = sum(matrix.elements for matrix in matrices_of(spec, block))
        assert counted == sum(block_parameters(spec, block).values())
    total = sum(matrix.elements for block in spec.blocks for matrix in matrices_of(spec, block))
    total += sum(m.elements for m in embedding_matrices(spec))
    total += sum(m.elements for m in head_matrices(spec, tied_here=spec.tied_embeddings))
    assert total == parameter_counts(spec)["total_parameters"]


def small_layouts() -> list[Layout]:
    found = []
    for dp, tp, pp, zero, schedule in product((1, 2, 3), (1, 2, 4), (1, 2, 3), (0, 1, 3), ("1f1b", "zbv")):
        options = {"schedule": schedule} if pp > 1 else {}
        if pp > 1 or schedule == "1f1b":
            found.append(Layout(dp=dp, tp=tp, pp=pp, zero=zero, **options))  # type: ignore[arg-type]
    return found


@pytest.mark.parametrize("name", RUNNABLE)
def test_equal_to_the_table_of_parameters(name: str) -> None:
    """On every rank of small layouts, also what ZeRO leaves of each parameter, padding included."""
    spec = models.preset(name)
    checked = 0
    for layout in small_layouts():
        try:
            table = compose.parameter_table(spec, layout, 16)
            layers = stage_layers(spec, layout, 16)
        except UserError:
            continue
        if any(block.attention.heads % layout.tp or block.mlp.ffn % layout.tp for block in spec.blocks):
            continue
        for rank in range(layout.pp):
            rows = [row for chunk in compose.rows_of(table, layout, rank).values() for row in chunk]
            whole = sum(row.local_elements(layout) for row in rows)
            shard = sum(row.held.local_elements(layout) for row in rows)
            counted = _elements(spec, layout, rank, layers)
            assert counted == (whole, shard), (layout, rank)
            checked += 1
    assert checked > 50


def _elements(spec: ModelSpec, layout: Layout, rank: int, layers: tuple[range, ...]) -> tuple[int, int]:
    stage = stage_of(kinds_of(spec), layout.virtual_stages_of(rank), layers, Recompute())
    matrices = [m for block, _, n in stage.layers for m in matrices_of(spec, block) * n]
    matrices += embedding_matrices(spec) if stage.first else ()
    matrices += head_matrices(spec, tied_here=spec.tied_embeddings and stage.first) if stage.last else ()
    cut = Cut.of(layout)
    found = local_elements(
        tuple(matrices), tp=cut.tp, ep=cut.ep, etp=cut.etp, shards=cut.shards, expert_shards=cut.expert_shards
    )
    return found.dense + found.expert, found.shard_dense + found.shard_expert


def test_experts_are_cut_by_ep_and_etp() -> None:
    spec = models.preset("mixtral-8x7b")
    matrices = matrices_of(spec, spec.blocks[0])
    experts = 8 * 3 * 4096 * 14336
    one = local_elements(matrices, tp=1, ep=1, etp=1, shards=1, expert_shards=1)
    cut = local_elements(matrices, tp=4, ep=4, etp=2, shards=8, expert_shards=2)
    assert one.expert == experts
    assert (cut.expert, cut.shard_expert) == (experts // 8, experts // 16)
    assert cut.dense < one.dense


def test_arrays_of_degrees_give_what_numbers_give() -> None:
    spec = models.preset("deepseek-v3")
    tp, ep, shards = np.array([1, 2, 8]), np.array([1, 8, 64]), np.array([1, 4, 16])
    matrices = matrices_of(spec, spec.blocks[-1])
    many = local_elements(matrices, tp=tp, ep=ep, etp=1, shards=shards, expert_shards=shards)
    for i in range(3):
        one = local_elements(
            matrices, tp=int(tp[i]), ep=int(ep[i]), etp=1, shards=int(shards[i]), expert_shards=int(shards[i])
        )
        assert [many.dense[i], many.expert[i], many.shard_dense[i], many.shard_expert[i]] == [
            one.dense, one.expert, one.shard_dense, one.shard_expert,
        ]  # fmt: skip

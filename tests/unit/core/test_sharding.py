"""The parameter table: it lists the model's parameters, and its regions tile each of them."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch

from fivefold.core.layout import Layout
from fivefold.core.model_counts import parameter_counts
from fivefold.core.model_spec import AttentionSpec, BlockSpec, MLPSpec, ModelSpec
from fivefold.core.sharding import ParameterRow, Shard, parameters
from fivefold.nn.decoder import Decoder
from fivefold.strategies.compose import parameter_table, rows_of


def model(
    *, kv: int = 2, vocab: int = 53, layers: int = 5, tied: bool = False, full: bool = True
) -> ModelSpec:
    """head_dim is not hidden/heads, the vocabulary is odd, layers do not divide."""
    attention = AttentionSpec(heads=8, kv_heads=kv, head_dim=6, qkv_bias=full, output_bias=full, qk_norm=full)
    block = BlockSpec(attention=attention, mlp=MLPSpec(ffn=24, bias=full, gated=full))
    return ModelSpec(name="t", hidden=20, vocab=vocab, blocks=(block,) * layers, tied_embeddings=tied)


MODELS = [model(), model(tied=True), model(kv=1), model(kv=8, full=False), model(vocab=5, tied=True)]
LAYOUTS = [
    "dp1",
    "tp2",
    "tp4",
    "tp8",
    "pp2",
    "pp3:gpipe",
    "tp4 pp2",
    "tp4 pp5 nosp",
    "dp2 tp2 pp2",
    "tp2 pp2 order=pp-tp-cp-dp",
]
CASES = [(m, text) for m in MODELS for text in LAYOUTS]


@pytest.mark.parametrize("spec", MODELS)
def test_the_table_lists_the_parameters_of_the_model(spec: ModelSpec) -> None:
    with torch.device("meta"):
        module = Decoder(spec)
    rows = parameters(spec)
    assert [(row.name, row.shape) for row in rows] == [
        (n, tuple(p.shape)) for n, p in module.named_parameters()
    ]
    assert sum(np.prod(row.shape) for row in rows) == parameter_counts(spec)["total_parameters"]
    assert [row.is_bias for row in rows] == [row.name.endswith(".bias") for row in rows]
    assert all(row.init_name == row.name for row in rows)


def ranks_of(row: ParameterRow, layout: Layout) -> list[dict[str, int]]:
    """The (tp, pp) coordinates that own a row, one data rank only."""
    pp = layout.owner_of(row.stage)
    return [{"tp": tp, "pp": pp, "dp": 0, "cp": 0} for tp in range(layout.tp)]


@pytest.mark.parametrize(("spec", "text"), CASES)
def test_regions_tile_every_parameter(spec: ModelSpec, text: str) -> None:
    """Every element on as many ranks as there are replicas, whole blocks but for the padded end."""
    layout = Layout.parse(text)
    for row in parameter_table(spec, layout, 16):
        held = np.zeros(row.shape, dtype=int)
        for coordinate in ranks_of(row, layout):
            region = row.region(layout, coordinate)
            held[region] += 1
            shape, local = held[region].shape, row.local_shape(layout)
            assert all(part <= whole for part, whole in zip(shape, local, strict=True))
            short = [d for d, (part, whole) in enumerate(zip(shape, local)) if part < whole]
            assert all(region[d].stop == row.shape[d] for d in short), "only the end of a dim is padded"
        shard = row.placement.get("tp")
        replicas = layout.tp if shard is None else shard.replicas
        assert (held == replicas).all(), row


@pytest.mark.parametrize(("spec", "text"), CASES)
def test_each_element_of_the_model_counts_once(spec: ModelSpec, text: str) -> None:
    """Over all tp and pp ranks: replicas, replicated KV heads and the second tied copy count nothing."""
    layout = Layout.parse(text)
    table = parameter_table(spec, layout, 16)
    held = {row.name: np.zeros(row.shape, dtype=int) for row in parameters(spec)}
    for tp, pp in product(range(layout.tp), range(layout.pp)):
        for rows in rows_of(table, layout, pp).values():
            for row in rows:
                coordinate = {"tp": tp, "pp": pp, "dp": 0, "cp": 0}
                if row.counts_once_here(coordinate):
                    held[row.name][row.region(layout, coordinate)] += 1
    for name, count in held.items():
        assert (count == 1).all(), name


@pytest.mark.parametrize(("kv", "tp"), [(1, 4), (2, 4), (2, 8), (4, 4), (8, 4), (8, 2)])
def test_a_rank_holds_the_kv_heads_of_its_query_heads(kv: int, tp: int) -> None:
    spec, layout = model(kv=kv), Layout.parse(f"tp{tp}")
    rows = {
        row.name.rsplit(".", 2)[1]: row
        for row in parameter_table(spec, layout, 16)
        if row.name.startswith("layers.0.attention.qkv") and not row.is_bias
    }
    for coordinate in ranks_of(rows["q"], layout):
        heads = {name: _heads(row.region(layout, coordinate)[0], 6) for name, row in rows.items()}
        needed = sorted({q // (8 // kv) for q in heads["q"]})
        assert heads["k"] == heads["v"] == needed


def _heads(region: slice, head_dim: int) -> list[int]:
    assert region.start % head_dim == region.stop % head_dim == 0, "heads are never cut"
    return list(range(region.start // head_dim, region.stop // head_dim))


def test_a_vocabulary_that_does_not_divide_is_padded_at_the_end() -> None:
    layout = Layout.parse("tp4")
    row = parameter_table(model(vocab=5), layout, 16)[0]
    regions = [row.region(layout, {"tp": tp, "pp": 0})[0] for tp in range(4)]
    assert [(r.start, r.stop) for r in regions] == [(0, 2), (2, 4), (4, 5), (5, 5)]
    assert row.local_shape(layout) == (2, 20)
    assert row.local_elements(layout) == 40


def test_replicas_are_neighbours() -> None:
    row = ParameterRow("k", "k", (12, 20), placement={"tp": Shard(0, replicas=2)})
    layout = Layout.parse("tp4")
    regions = [row.region(layout, {"tp": tp})[0] for tp in range(4)]
    assert [(r.start, r.stop) for r in regions] == [(0, 6), (0, 6), (6, 12), (6, 12)]
    assert [row.counts_once_here({"tp": tp}) for tp in range(4)] == [True, False, True, False]


def test_blocks() -> None:
    blocks = {row.name: row.block for row in parameters(model(layers=2))}
    assert blocks["embedding.weight"] == "embedding"
    assert blocks["layers.1.mlp.down.bias"] == "layers.1"
    assert blocks["norm.weight"] == blocks["head.weight"] == "head"

"""Saved tensors against closed forms from papers. This project's own: `tests/ranks/test_saved_activations.py`."""

from __future__ import annotations

import numpy as np
import pytest

from fivefold.catalog import models
from fivefold.core.model_spec import AttentionSpec, BlockSpec, MLPSpec, MoESpec
from fivefold.estimate import saved
from fivefold.estimate.recompute import Recompute, layer_kept
from fivefold.estimate.saved import Kernels, Share

GPT = BlockSpec(
    attention=AttentionSpec(heads=96, kv_heads=96, head_dim=128), mlp=MLPSpec(ffn=4 * 12288, gated=False)
)


def share(tokens: int, *, tp: int = 1, sp: bool = False, seq_len: int = 2048) -> Share:
    return Share(
        tokens=tokens, mine=tokens / tp if sp else tokens, seq_len=seq_len, tp=tp, etp=1, imbalance=1.0
    )


@pytest.mark.parametrize(
    ("tp", "sp", "divided"), [(1, False, 34.0), (8, False, 10 + 24 / 8), (8, True, 34 / 8)]
)
def test_korthikanti_table_2(tp: int, sp: bool, divided: float) -> None:
    """sbh (10 + 24/t), with sequence parallelism sbh 34/t; unfused attention adds 5 a s / h / t.

    Source: Korthikanti et al. 2022, arXiv:2205.05198, table 2. Row statistics, which the paper leaves out, are small.
    """
    s, b, h, a = 2048, 1, 12288, 96
    for attention, scores in (("flash", 0.0), ("unfused", 5 * a * s / h / tp)):
        kernels = Kernels(dropout=True, attention=attention)  # type: ignore[arg-type]
        kept = saved.layer(GPT, h, share(s * b, tp=tp, sp=sp), kernels)
        assert kept.attention + kept.mlp == pytest.approx(s * b * h * (divided + scores), rel=2e-3)


def test_kv_heads_are_not_cut_below_one() -> None:
    block = BlockSpec(attention=AttentionSpec(heads=8, kv_heads=2, head_dim=4), mlp=MLPSpec(ffn=8))
    keys = [
        saved.queries_keys_values(share(1, tp=tp), block.attention, Kernels())  # type: ignore[arg-type]
        for tp in (1, 2, 4, 8)
    ]
    assert keys == [2 * 4 * (8 + 4), 2 * 4 * (4 + 2), 2 * 4 * (2 + 2), 2 * 4 * (1 + 2)]


def test_experts_keep_what_is_dispatched_to_them() -> None:
    moe = MoESpec(experts=8, top_k=2, ffn=16)
    one = saved.routed(share(100), moe, 32, Kernels())
    assert one == 100 * 8 * 4 + 200 * (32 + 3 * 16) * 2
    skewed = Share(tokens=100, mine=100, seq_len=1, tp=1, etp=1, imbalance=1.5)
    assert saved.routed(skewed, moe, 32, Kernels()) == 100 * 8 * 4 + 300 * (32 + 3 * 16) * 2


def test_recompute_keeps_inputs_in_place_of_regions() -> None:
    spec = models.preset("llama-3-8b")
    block, D, s = spec.blocks[0], spec.hidden, share(8192)
    whole = saved.layer(block, D, s, Kernels())

    def kept(text: str) -> float:
        return float(layer_kept(block, D, s, Kernels(), Recompute.parse(text).words).kept)

    assert kept("none") == whole.attention + whole.mlp
    assert kept("full") == 8192 * D * 2
    assert kept("mlp") == whole.attention + 8192 * D * 2
    assert kept("attention+mlp") == 2 * 8192 * D * 2
    assert kept("moe") == kept("none")
    assert kept("full") < kept("ops") < kept("none")
    unfused = Kernels(attention="unfused")
    assert layer_kept(block, D, s, unfused, ("core",)).kept == kept("none")


def test_every_kind_of_layer_takes_arrays() -> None:
    many = Share(
        tokens=np.array([64.0, 128.0]), mine=np.array([64.0, 16.0]), seq_len=64, tp=np.array([1, 8]),
        etp=np.array([1, 1]), imbalance=1.0,
    )  # fmt: skip
    for name in ("llama-3-8b", "deepseek-v3", "qwen3-next-80b-a3b", "gpt-oss-20b", "mixtral-8x7b"):
        spec = models.preset(name)
        for block in dict.fromkeys(spec.blocks):
            both = layer_kept(block, spec.hidden, many, Kernels(), ("none",))
            one = Share(tokens=128.0, mine=16.0, seq_len=64, tp=8, etp=1, imbalance=1.0)
            single = layer_kept(block, spec.hidden, one, Kernels(), ("none",))
            assert both.kept[1] == single.kept
            assert both.moment[1] == single.moment

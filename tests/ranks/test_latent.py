"""Latent attention over ranks: every quantity as on one device, and the communication that was predicted."""

from __future__ import annotations

from functools import cache

import pytest

from fivefold.core.layout import Layout
from fivefold.core.model_spec import BlockSpec, MLASpec, MLPSpec, ModelSpec, YarnScaling
from fivefold.verify.verify import Reference
from fivefold.verify.workload import common_plans


def block(q_rank: int | None, *, bias: bool) -> BlockSpec:
    attention = MLASpec(heads=4, q_rank=q_rank, kv_rank=10, nope_dim=6, rope_dim=4, value_dim=6, bias=bias)
    return BlockSpec(attention=attention, mlp=MLPSpec(ffn=24))


LATENT = ModelSpec(
    name="latent",
    hidden=24,
    vocab=53,
    blocks=(block(14, bias=True), block(None, bias=False), block(14, bias=False), block(None, bias=True)),
    rope_scaling=YarnScaling(factor=4.0, original_max_positions=64, mscale=0.7, mscale_all_dim=1.0),
)
"""With and without compressed queries, with and without biases; values narrower than keys, and a scaled softmax."""


@cache
def reference(documents: bool, dp: int, seq_len: int) -> Reference:
    one = Layout()
    _, plan = common_plans(LATENT, one.replace(dp=dp), one, "float64", documents=documents)
    return Reference(plan.replace(workload=plan.workload.replace(seq_len=seq_len)), seed=0, device="cpu")


SLOW = pytest.mark.exhaustive
CASES = [
    ("tp2 pp2:zbh1", {}),
    ("cp4:ring2xulysses2", {"recompute": "attention"}),
    pytest.param("tp2", {}, marks=SLOW),
    pytest.param("tp2 nosp", {"recompute": "full"}, marks=SLOW),
    pytest.param("tp2", {"recompute": "full"}, marks=SLOW),
    pytest.param("tp4 pp2:zbv", {}, marks=SLOW),
    pytest.param("pp2:zbh1 nosp tp2", {}, marks=SLOW),
    pytest.param("cp2:gather", {"documents": True}, marks=SLOW),
    pytest.param("cp2:ring", {"documents": True}, marks=SLOW),
    pytest.param("cp2:ulysses tp2", {"documents": True}, marks=SLOW),
    pytest.param("cp2:ring tp2", {}, marks=SLOW),
    pytest.param("dp2 zero3", {"recompute": "attention"}, marks=SLOW),
]


@pytest.mark.parametrize(("text", "options"), CASES)
def test_float64(text: str, options: dict[str, object]) -> None:
    layout = Layout.parse(text)
    plan, alone = common_plans(LATENT, layout, Layout(), "float64", **options)  # type: ignore[arg-type]
    judged = reference(bool(options.get("documents")), layout.dp, alone.workload.seq_len)
    verdict = judged.judge(plan, find_axis=False)
    assert verdict.passed, f"{verdict.cause}; {verdict.quantities}"
    assert verdict.events_match

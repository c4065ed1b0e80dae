"""Faults of other systems that are a layout which should have been refused, or one that was refused and is legal.

`fivefold layouts --why` says the rule; here the function behind it. Memory is a matter of counts.
"""

from __future__ import annotations

import pytest

from fivefold.core.cluster import Cluster
from fivefold.core.execution import Execution
from fivefold.core.layout import Layout
from fivefold.core.model_spec import AttentionSpec, BlockSpec, MLPSpec, ModelSpec
from fivefold.core.plan import Plan
from fivefold.core.workload import Workload
from fivefold.strategies.legal import why_not
from fivefold.strategies.pipeline.placement import stage_layers
from fivefold.strategies.pipeline.schedules import Action, computations, in_flight, in_flight_bound


def model(heads: int = 8, kv_heads: int = 4, layers: int = 4) -> ModelSpec:
    attention = AttentionSpec(heads=heads, kv_heads=kv_heads, head_dim=8)
    return ModelSpec(
        name="m",
        hidden=64,
        vocab=100,
        blocks=(BlockSpec(attention=attention, mlp=MLPSpec(ffn=240)),) * layers,
    )


def rule(text: str, spec: ModelSpec | None = None, *, seq_len: int = 480) -> str | None:
    layout = Layout.parse(text)
    plan = Plan(
        model=spec or model(),
        cluster=Cluster.parse("cpu"),
        workload=Workload(seq_len=seq_len, global_batch=24 * layout.dp),
        layout=layout,
        execution=Execution(micro_batch=2),
    )
    return why_not(layout, lambda _: plan)


REFUSED = [
    # seen in, layout, model, sequence length, what the rule says
    ("EasyContext #47", "cp2", model(), 18, ["18", "multiple of 4", "16 or 20"]),
    ("NeMo-RL #3563", "tp4 cp2", model(), 12, ["12", "multiple of 8", "8 or 16", "cp*tp = 8"]),
    ("verl #1226", "cp5:ulysses", model(40, 8), 480, ["ulysses degree 5", "40 heads", "8 KV heads", "4"]),
    (
        "torchtitan #2574",
        "tp3",
        model(24, 8),
        480,
        ["kv_heads", "= 8 is not divisible by 3", "nearest legal tp: 2 or 4"],
    ),
    ("Megatron #1304", "pp5", model(layers=4), 480, ["5 pipeline stages", "4 layers", "at most 4"]),
    ("DeepSpeed #823", "dp2 pp2:zbh1 zero2", model(), 480, ["zero2", "zbh1", "nearest: zero1"]),
    ("DeepSpeed #823", "dp2 pp2:zbv zero3", model(), 480, ["zero3", "zbv", "nearest: zero1"]),
]


@pytest.mark.parametrize(("seen_in", "text", "spec", "seq_len", "words"), REFUSED, ids=lambda v: str(v)[:20])
def test_refused_with_the_numbers(
    seen_in: str, text: str, spec: ModelSpec, seq_len: int, words: list[str]
) -> None:
    said = rule(text, spec, seq_len=seq_len)
    assert said is not None, seen_in
    for word in words:
        assert word in said


def test_ulysses_degrees_of_40_heads_and_8_kv_heads() -> None:
    """verl #1226: KV heads that are fewer than ranks are repeated; what does not divide is refused."""
    legal = [u for u in range(2, 41) if rule(f"cp{u}:ulysses", model(40, 8), seq_len=40 * u) is None]
    assert legal == [2, 4, 8, 40]


def test_fewer_kv_heads_than_tp_are_legal() -> None:
    """torchtitan #2574, transformers #48307: a crash in a reshape."""
    assert rule("tp8", model(8, 2)) is None


@pytest.mark.parametrize(("layers", "text"), [(30, "pp4"), (80, "pp7:1f1b*2"), (70, "pp12")])
def test_layers_that_do_not_divide_are_all_placed(layers: int, text: str) -> None:
    """Megatron #1304 (30/4 -> 28), #468 (80 -> 64); 70 layers on 12 stages are BLOOM's, which `layers % pp` refused."""
    spec, layout = model(layers=layers), Layout.parse(text)
    assert rule(text, spec) is None
    assert [i for stage in stage_layers(spec, layout, 480) for i in stage] == list(range(layers))


def test_experts_add_no_ranks() -> None:
    """A guide of Megatron counts tp * pp * cp * ep * dp devices."""
    assert Layout.parse("dp8 tp2 ep8").world_size == 16


def test_weight_gradients_that_are_put_off_to_the_end_exceed_the_bound() -> None:
    """marin #6532, torchtitan #773: a stash for every microbatch. What is held is counted from the list."""
    layout, m = Layout.parse("pp4:zbh1"), 12
    for rank, actions in enumerate(computations(layout, m)):
        bound = in_flight_bound(layout, rank, m)
        assert in_flight(actions) == bound
        late: list[Action] = sorted(actions, key=lambda action: action.kind == "W")
        assert in_flight(late).stashed == m > bound.stashed

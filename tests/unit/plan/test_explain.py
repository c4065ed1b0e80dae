"""Explanations: sums, steps of one axis that are what `estimate` says, and what binds."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fivefold.catalog import models
from fivefold.catalog.clusters import resolve
from fivefold.core.layout import Layout
from fivefold.estimate.recompute import Recompute
from fivefold.estimate.volumes import sent_bytes
from fivefold.plan import fit
from fivefold.plan.clock import Choice, Clock
from fivefold.plan.explain.alike import alike, settling_runs, spread
from fivefold.plan.explain.binding import resources
from fivefold.plan.explain.explanation import explain, waterfall
from fivefold.plan.explain.moves import moves
from fivefold.plan.explain.steps import counterfactuals
from fivefold.plan.explain.why import fast_domain, least_cp, one_device, spans
from fivefold.plan.legality import why_not
from fivefold.plan.question import Question
from fivefold.plan.ranking import REPEAT
from fivefold.plan.search import Answer, evaluate, search

CASES = [
    ("llama-2-70b", "32xA100-80GB", 4096, 128, "tp8 pp4", 1, "none"),
    ("llama-2-70b", "32xA100-80GB", 4096, 128, "dp2 tp4 pp4:1f1b*2 zero1", 2, "full"),
    ("deepseek-v3", "2048 H800", 4096, 2048, "dp64 pp16:dualpipev cp2:ring ep64 zero1", 1, "moe+mlp"),
    ("mixtral-8x7b", "64 H100", 32768, 64, "dp2 tp4 cp8:ulysses ep4 etp2 zero3", 1, "attention"),
    ("gpt2", "2x4 H100", 1024, 64, "dp8 zero2", 4, "none"),
]


def asked(model: str, devices: str, seq_len: int, batch: int) -> Question:
    return Question(spec=models.preset(model), cluster=resolve(devices), seq_len=seq_len, global_batch=batch)


def case(one: tuple[Any, ...]) -> tuple[Question, Choice]:
    model, devices, seq_len, batch, layout, size, again = one
    return asked(model, devices, seq_len, batch), Choice(Layout.parse(layout), size, Recompute.parse(again))


@pytest.mark.parametrize("one", CASES, ids=lambda one: one[4])
def test_the_waterfall_adds_up_to_the_step(one: tuple[Any, ...]) -> None:
    question, choice = case(one)
    clock = Clock(question)
    (found,) = evaluate(question, clock, [choice])
    rows = waterfall(question, clock, found)
    assert sum(row["seconds"] for row in rows) == pytest.approx(found.step_s, rel=1e-12)
    assert all(row["seconds"] >= 0 for row in rows)
    assert [row["from_s"] for row in rows[1:]] == pytest.approx(
        [row["from_s"] + row["seconds"] for row in rows[:-1]]
    )
    again = next(row["seconds"] for row in rows if row["term"] == "computed again")
    assert (again > 0) == (choice.recompute != Recompute())


@pytest.mark.parametrize("one", CASES, ids=lambda one: one[4])
def test_a_step_changes_one_axis_and_what_has_to_take_up_its_devices(one: tuple[Any, ...]) -> None:
    question, choice = case(one)
    found = moves(question, choice)
    assert {"tp", "pp", "cp", "micro-batch", "recompute"} <= {move.axis for move in found}
    for move in found:
        if move.choice is None:
            assert move.rule
            continue
        other, layout = move.choice.layout, choice.layout
        assert other.world_size == question.devices
        allowed = {
            "tp": {"tp"}, "pp": {"pp", "schedule", "chunks", "placement"},
            "cp": {"cp", "cp_method", "cp_ring", "cp_ulysses"},
            "schedule": {"schedule", "chunks", "placement"}, "micro-batch": set(), "recompute": set(),
        }.get(move.axis, {move.axis})  # fmt: skip
        if move.other:
            allowed = allowed | {move.other[0]}
            if "pp" in allowed:
                allowed |= {"schedule", "chunks", "placement"}
            if "cp" in allowed:
                allowed |= {"cp_method", "cp_ring", "cp_ulysses"}
        changed = {
            name for name in type(layout).model_fields if getattr(layout, name) != getattr(other, name)
        }
        assert changed <= allowed, move.text
        assert (move.choice.micro_batch != choice.micro_batch) == (move.axis == "micro-batch")
        assert (move.choice.recompute != choice.recompute) == (move.axis == "recompute")
        assert move.choice != choice
        assert not why_not(
            question.spec, other, seq_len=question.seq_len, global_batch=question.global_batch,
            micro_batch=move.choice.micro_batch,
        )  # fmt: skip


def test_a_step_is_what_estimate_says_of_that_layout() -> None:
    question, choice = case(CASES[0])
    clock = Clock(question)
    (found,) = evaluate(question, clock, [choice])
    rows = [row for row in counterfactuals(question, clock, found) if row["legal"]]
    assert len(rows) > 8
    for row in rows:
        there = Choice(Layout.parse(row["layout"]), row["micro_batch"], Recompute.parse(row["recompute"]))
        (alone,) = evaluate(question, clock, [there])
        assert row["step_time_s"] == pytest.approx(alone.step_s)
        assert row["peak_memory_bytes"] == alone.memory.peak.total()
        assert row["memory_change_bytes"] == alone.memory.peak.total() - found.memory.peak.total()
        assert row["fits"] == alone.memory.fits(question.capacity_bytes)
        changes = {term: alone.terms[term] - found.terms[term] for term in found.terms}
        slower = alone.step_s > found.step_s
        assert row["time_change"]["seconds"] == pytest.approx(
            max(changes.values()) if slower else min(changes.values())
        )


def test_the_worked_step_of_tp() -> None:
    question, choice = case(CASES[0])
    clock = Clock(question)
    (found,) = evaluate(question, clock, [choice])
    (row,) = [row for row in counterfactuals(question, clock, found) if row["change"].startswith("tp 8 -> 4")]
    assert row["layout"] == "dp2 tp4 pp4"
    assert row["fits"] == "no"
    assert "on pipeline rank 0 (optimizer +24.3 GiB), does not fit (89.7 GiB of 79.2 GiB)" in row["text"]


def test_an_illegal_step_is_told_with_its_rule() -> None:
    question = asked("llama-3-8b", "8 H100", 4096, 8)
    clock = Clock(question)
    (found,) = evaluate(question, clock, [Choice(Layout.parse("dp8 zero1"), 1, Recompute())])
    texts = [row["text"] for row in counterfactuals(question, clock, found) if not row["legal"]]
    assert any(text.startswith("micro-batch 1 -> 2: not legal: global batch 8") for text in texts)


def test_one_device() -> None:
    facts = one_device(asked("llama-2-70b", "32xA100-80GB", 4096, 128))
    assert facts["state_bytes"] == pytest.approx(69e9 * 16, rel=0.01)
    assert facts["over_bytes"] == facts["needed_bytes"] - facts["capacity_bytes"]
    assert facts["least_parts"] == 14
    small = one_device(asked("gpt2", "8 H100", 1024, 8))
    assert small["over_bytes"] == 0
    assert "cutting serves speed only" in small["text"]


@pytest.mark.parametrize(
    "layout", ["dp4 tp2 pp2", "dp2 tp4 cp2:ring ep2", "dp2 tp2 pp2 cp2:ring order=dp-tp-cp-pp", "dp16 ep8"]
)
@pytest.mark.parametrize("per_node", [1, 2, 4, 8])
def test_axes_are_inside_the_fast_domain_where_no_group_crosses_nodes(layout: str, per_node: int) -> None:
    made = Layout.parse(layout)
    for axis, (degree, span) in spans(made).items():
        assert degree == made.degree(axis)  # type: ignore[arg-type]
        crossing = made.crossing(axis, per_node)  # type: ignore[arg-type]
        assert (span > per_node) == bool(crossing), axis


def test_fast_domain_in_words() -> None:
    question = asked("llama-2-70b", "32xA100-80GB", 4096, 128)
    text = fast_domain(question, Layout.parse("tp8 pp4"))["text"]
    assert text == "8 A100-80GB at 300 GB/s, 25 GB/s beyond (12 times less); inside: tp8; across: pp4"


def test_a_long_sequence_forces_cp() -> None:
    question = asked("llama-3-8b", "64 H100", 1_048_576, 8)
    least = least_cp(question, Layout.parse("dp8 tp8 zero1"))
    assert least is not None
    assert least > 1
    assert least_cp(asked("llama-3-8b", "64 H100", 8192, 64), Layout.parse("dp8 tp8 zero1")) == 1


def test_what_binds_is_what_is_scarce() -> None:
    """Expert dispatch over a slow network; a small model whose host cannot launch fast enough; a large dense one."""
    for model, devices, batch, layout, scarce in (
        ("mixtral-8x7b", "8x8 H100, 20 Gb/s", 64, "dp64 ep8 zero1", "network"),
        ("llama-2-70b", "32xA100-80GB", 512, "tp8 pp4", "computation"),
        ("gpt2", "1 H100", 64, "dp1", "host"),
    ):
        question = asked(model, devices, 1024 if model == "gpt2" else 4096, batch)
        found = resources(Clock(question), Choice(Layout.parse(layout), 1, Recompute()))
        assert found[0]["resource"] == scarce, model
        assert all(-0.6 < one["gain"] < 0.6 for one in found)


def test_doubled_peak_is_the_step_on_such_devices() -> None:
    question, choice = case(CASES[0])
    node = question.node
    peaks = {name: 2 * peak for name, peak in (node.peak_flops_per_s or {}).items()}
    fast = Question(
        spec=question.spec, seq_len=question.seq_len, global_batch=question.global_batch,
        cluster=question.cluster.replace(nodes=(node.replace(peak_flops_per_s=peaks),)),
    )  # fmt: skip
    before, after = (float(Clock(one).times([choice]).total[0]) for one in (question, fast))
    gain = {one["resource"]: one["gain"] for one in resources(Clock(question), choice)}
    assert gain["computation"] == pytest.approx(1 - after / before)


def test_alike_by_the_rule_of_ranking_and_runs_that_settle_it() -> None:
    question = asked("llama-3-8b", "16 H100", 4096, 64)
    clock = Clock(question)
    answer = search(question, clock, top=24)
    best = answer.found[0]
    others = alike(best, answer.found)
    assert len(others) == sum(one.step_s / best.step_s <= 1 + REPEAT for one in answer.found) - 1
    runs = settling_runs(clock, answer.found)
    assert 3 <= len(runs["runs"]) <= 5
    assert runs["spread_after"] < runs["spread_before"]
    K, noise = fit.belief(clock.jobs([one.choice for one in answer.found]), clock.coefficients)
    after = [spread(K - np.outer(K[:, i], K[i]) / (K[i, i] + noise**2)) for i in range(len(K))]
    first = answer.found[int(np.argmin(after))].choice
    assert (runs["runs"][0]["layout"], runs["runs"][0]["micro_batch"]) == (
        str(first.layout),
        first.micro_batch,
    )
    assert settling_runs(clock, answer.found[:1])["runs"] == []


def test_volumes_in_closed_form() -> None:
    """Two pipeline ranks of 16 layers, tp 2, dp 4, zero1, 4 microbatches: counted by hand."""
    question = asked("llama-3-8b", "16 H100", 4096, 16)
    choice = Choice(Layout.parse("dp4 tp2 pp2 zero1"), 1, Recompute())
    sent = {axis: float(n[0]) for axis, n in sent_bytes(Clock(question).jobs([choice])).items()}
    hidden = 4096 * 4096 * 2
    assert (
        sent["tp"] == 4 * 16 * 4 * 2 * hidden / 2
    )  # forward and backward: 2 collectives for each of 2 parts
    assert sent["pp"] == 4 * 2 * hidden / 2
    assert (sent["cp"], sent["ep"]) == (0, 0)
    layer = 4096 * (4096 + 2 * 1024 + 4096 + 3 * 14336)
    assert sent["dp"] == 3 / 4 * (16 * layer + 128256 * 4096) / 2 * (2 + 2)


def test_an_explanation_has_all_parts() -> None:
    question, choice = case(CASES[1])
    clock = Clock(question)
    (found,) = evaluate(question, clock, [choice])
    facts = explain(question, clock, found, Answer((found,), 1, 1, 1, 0.0, None))
    assert [step["step"] for step in facts["reasoning"]] == [
        "one device",
        "fast domain",
        "sequence",
        "throughput",
    ]
    assert sum(facts["triangle"]["at"].values()) == pytest.approx(1)
    rows = {row["axis"]: row for row in facts["axes"]}
    assert (
        rows["tp"]["cuts"] == "heads 64 -> 16, KV heads 8 -> 2, MLP 28672 -> 7168, vocabulary 32000 -> 8000"
    )
    assert (rows["tp"]["most"], rows["pp"]["most"], rows["dp"]["most"]) == (64, 80, 128)
    assert rows["pp"]["saved_bytes"] > 0
    assert rows["ep"]["cuts"] == "no experts"

"""The search against brute force over every layout that can be formed, also those that the lattice leaves out."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from fivefold.catalog import models
from fivefold.catalog.clusters import resolve
from fivefold.core.cluster import Cluster
from fivefold.core.layout import Layout
from fivefold.core.layout_checks import divisors
from fivefold.errors import ConfigError, UserError
from fivefold.estimate.memory import BAND, USABLE, estimate
from fivefold.plan.clock import Choice, Clock
from fivefold.plan.lattice import Fixed, Lattice, schedules
from fivefold.plan.legality import why_not
from fivefold.plan.objectives import largest_micro_batch, longest_sequence
from fivefold.plan.question import Question
from fivefold.plan.refusal import fewest_devices, fits, refusal
from fivefold.plan.search import search
from fivefold.strategies.legal import context_options, pipeline_options, shapes


def question(model: str, devices: str, seq_len: int, batch: int, **more: object) -> Question:
    return Question(
        spec=models.preset(model),
        cluster=resolve(devices),
        seq_len=seq_len,
        global_batch=batch,
        **more,  # type: ignore[arg-type]
    )


def with_memory(asked: Question, memory_bytes: int) -> Question:
    return replace(asked, cluster=Cluster(nodes=(asked.node.replace(memory_bytes=memory_bytes),)))


def random_question(draw: random.Random) -> Question:
    """A small lattice whose memory lets only a part of its points fit."""
    model = draw.choice(["tiny-llama", "tiny-moe", "tiny-mla-moe", "gpt2", "qwen3-0.6b"])
    devices = draw.choice([1, 2, 3, 4, 6])
    short = model.startswith("tiny")
    asked = question(
        model, f"{draw.choice([f'1x{devices}', f'{devices}x1'])} H100", draw.choice([8, 12, 24]) * (1 if short else 32),
        draw.choice([2, 3, 4, 6]), grad_dtype=draw.choice(["bfloat16", "float32"]),
    )  # fmt: skip
    lattice = Lattice(asked)
    peaks = [
        float(lattice.peak_bytes(bytes_))
        for group in lattice.groups()
        for needed in lattice.needed(group)
        for bytes_ in needed[lattice.legal(group)].ravel()
    ]
    bound = float(np.quantile(peaks, draw.random())) if peaks else asked.capacity_bytes
    return with_memory(asked, int(bound * (1 + BAND) / USABLE * 1.0000001) + 1)


def pipelines(asked: Question, pp: int) -> list[dict[str, object]]:
    """Schedules, also those that the lattice leaves out; of interleaved ones the numbers of chunks that it has."""
    if pp == 1:
        return [{}]
    named = [{"schedule": name, "chunks": chunks} for name, chunks in schedules(pp, asked.spec.layers)]
    others = [one for one in pipeline_options(asked.spec, pp) if one["schedule"] in ("gpipe", "bfs")]
    return [*named, *(one for one in others if one["placement"] == "even")]


def every_layout(asked: Question) -> list[Layout]:
    """Where there is nothing to share, ZeRO is a name for the same layout: it is left out there."""
    found = []
    routed = any(block.mlp.kind == "moe" for block in asked.spec.blocks)
    for (dp, tp, pp, cp), zero, ep, etp, sp in product(
        shapes(asked.devices), range(4), divisors(asked.devices), divisors(asked.devices), (True, False)
    ):
        for pipeline, context in product(pipelines(asked, pp), context_options(cp)):
            if not sp and tp == 1:
                continue
            try:
                found.append(
                    Layout(
                        dp=dp, tp=tp, pp=pp, cp=cp, zero=zero, ep=ep, etp=etp, sp=sp, **pipeline, **context
                    )  # type: ignore[arg-type]
                )
            except UserError:
                continue
    shared = [one for one in found if one.zero == 0 or one.data > 1 or (routed and one.edp > 1)]
    return list(dict.fromkeys(shared))


def brute_force(asked: Question) -> tuple[float, int]:
    """Seconds of the fastest choice that fits, and how many fit."""
    lattice, clock = Lattice(asked), Clock(asked)
    fitting = []
    for layout in every_layout(asked):
        for size in lattice.micro_batch:
            rule = why_not(
                asked.spec, layout, seq_len=asked.seq_len, global_batch=asked.global_batch, micro_batch=size
            )
            if rule is not None:
                continue
            for option in lattice.recompute:
                if estimate(asked.memory_job(layout, size, option)).fits(asked.capacity_bytes) == "yes":
                    fitting.append(Choice(layout, size, option))
    return (float(clock.times(fitting).total.min()) if fitting else float("inf")), len(fitting)


def compare(number: int, seed: int) -> None:
    draw = random.Random(seed)
    found = 0
    for _ in range(number):
        asked = random_question(draw)
        best, fitting = brute_force(asked)
        answer = search(asked, Clock(asked), Fixed(layout={"placement": "even"}))
        mine = answer.found[0].step_s if answer.found else float("inf")
        assert mine == pytest.approx(best, rel=1e-9), (
            asked.spec.name,
            str(asked.cluster),
            asked.seq_len,
            fitting,
        )
        assert answer.fitting <= fitting
        found += bool(answer.found)
    assert found > number / 3


def test_equal_to_brute_force() -> None:
    compare(5, seed=3)


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
def test_equal_to_brute_force_on_200_lattices() -> None:
    compare(200, seed=4)


def test_plans_are_in_order_and_fit_and_are_the_same_again() -> None:
    asked = question("llama-3-8b", "16 H100", 4096, 64)
    first, second = (search(asked, Clock(asked), top=20) for _ in range(2))
    assert [one.choice for one in first.found] == [one.choice for one in second.found]
    seconds = [one.step_s for one in first.found]
    assert seconds == sorted(seconds)
    for one in first.found:
        assert one.memory.fits(asked.capacity_bytes) == "yes"
        assert sum(one.terms.values()) == pytest.approx(one.step_s)
        assert one.low_s < one.step_s < one.high_s
        assert one.choice.layout.world_size == 16


def test_fixed_parts_are_kept() -> None:
    asked = question("mixtral-8x7b", "32 H100", 4096, 128)
    answer = search(asked, Clock(asked), Fixed(layout={"tp": 4, "zero": 1}, micro_batch=1))
    assert answer.found
    assert all((one.choice.layout.tp, one.choice.micro_batch) == (4, 1) for one in answer.found)
    free = search(asked, Clock(asked))
    assert free.found[0].step_s <= answer.found[0].step_s


def test_layers_are_placed_by_flops_where_that_is_faster() -> None:
    """A head of 128,256 rows is as much work as two layers of the 8B model."""
    asked = question("llama-3-8b", "32 A100-40GB", 4096, 64)
    even = search(asked, Clock(asked), Fixed(layout={"pp": 4, "tp": 2, "placement": "even"}))
    free = search(asked, Clock(asked), Fixed(layout={"pp": 4, "tp": 2}))
    best = free.found[0]
    assert best.choice.layout.placement == "flops"
    assert best.step_s < even.found[0].step_s
    assert best.memory.fits(asked.capacity_bytes) == "yes"
    clock = Clock(asked)
    for one in even.found:
        other = replace(one.choice, layout=one.choice.layout.replace(placement="flops"))
        assert best.step_s <= float(clock.times([other]).total[0]) * (1 + 1e-9)


def test_70b_in_full_adam_on_8_devices_is_refused_with_what_would_fit() -> None:
    asked = question("llama-3.1-70b", "8 A100-80GB", 4096, 64)
    answer = search(asked, Clock(asked))
    assert not answer.found
    why, nearest = refusal(asked, Fixed(), answer)
    assert "16 bytes x 70.6 G parameters = 1,129 GB" in why
    assert "the devices have 640 GiB in all" in why
    assert nearest[0] == "16 A100-80GB (2x8 A100-80GB, 200 Gb/s)"
    assert any("--offload" in one for one in nearest)
    assert fits(replace(asked, offload=True), Fixed())


def test_fewest_devices_are_the_fewest() -> None:
    asked = question("llama-2-70b", "128 A100-40GB", 2048, 128)
    fewest = fewest_devices(asked, Fixed())
    assert fewest is not None
    assert fits(replace(asked, cluster=fewest), Fixed())
    assert fewest.devices < 128
    half = Cluster(nodes=(asked.node.replace(count=fewest.nodes[0].count // 2),))
    assert not fits(replace(asked, cluster=half), Fixed())


def test_longest_sequence_and_largest_micro_batch_are_at_the_limit() -> None:
    asked = question("llama-3-8b", "8 H100", 2048, 64)
    length = longest_sequence(asked, Fixed())
    assert fits(replace(asked, seq_len=length), Fixed())
    assert length > 8192
    assert not fits(replace(asked, seq_len=length * 2), Fixed())
    size = largest_micro_batch(asked, Fixed(recompute=Lattice(asked).recompute[0]))
    assert size >= 1


def test_a_model_that_would_take_minutes_is_refused() -> None:
    spec = models.preset("tiny-llama")
    many = spec.replace(blocks=spec.blocks[:1] * 513)
    with pytest.raises(ConfigError, match="513 layers; models of at most 512 are planned for"):
        Question(spec=many, cluster=resolve("8 H100"), seq_len=512, global_batch=8)

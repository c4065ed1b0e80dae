"""Copies of experts: against every placement of small cases, and against the load that no sharing can undercut."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from fivefold.cli.main import run
from fivefold.errors import DataError, LayoutError
from fivefold.records.store import Store
from fivefold.strategies.expert.counts_file import read_counts
from fivefold.strategies.expert.placement import contiguous, place_experts


def smallest_maximum(counts: Sequence[float], slots: Sequence[Sequence[int]]) -> float:
    """The least possible load of the most loaded rank, by the theorem of Hall: of any experts, their tokens must go
    to the ranks that hold one of them."""
    worst = 0.0
    for size in range(1, len(counts) + 1):
        for some in itertools.combinations(range(len(counts)), size):
            homes = sum(any(expert in held for expert in some) for held in slots)
            worst = max(worst, sum(counts[expert] for expert in some) / homes)
    return worst


def every_placement(experts: int, ranks: int, each: int) -> list[tuple[tuple[int, ...], ...]]:
    holdings = list(itertools.combinations(range(experts), each))
    return [
        slots
        for slots in itertools.combinations_with_replacement(holdings, ranks)
        if len(set(itertools.chain(*slots))) == experts
    ]


@pytest.mark.parametrize("seed", range(4))
def test_sharing_is_the_best_there_is_and_places_are_close_to_it(seed: int) -> None:
    draw = random.Random(seed)
    counts = [draw.paretovariate(1.0) for _ in range(6)]
    found = place_experts(counts, 3, 1)
    assert max(found.loads) == pytest.approx(smallest_maximum(counts, found.slots), rel=1e-6)
    best = min(smallest_maximum(counts, slots) for slots in every_placement(6, 3, 3))
    assert max(found.loads) <= 1.05 * best


@pytest.mark.parametrize("seed", range(3))
def test_twice_the_mean_becomes_a_tenth_more_at_most(seed: int) -> None:
    draw = random.Random(seed)
    counts = [draw.paretovariate(1.2) for _ in range(64)]
    mean, excess = sum(counts) / 64, contiguous(counts, 8).imbalance - 1
    counts = [
        mean + (count - mean) / excess for count in counts
    ]  # the most loaded rank has 2.0 times the mean
    assert contiguous(counts, 8).imbalance == pytest.approx(2.0)
    found = place_experts(counts, 8, 1)
    assert found.imbalance <= 1.1
    assert all(len(set(held)) == len(held) == 9 for held in found.slots)
    assert sum(found.loads) == pytest.approx(sum(counts))
    parts = [0.0] * 64
    for held, shares in zip(found.slots, found.shares, strict=True):
        for expert, share in zip(held, shares, strict=True):
            parts[expert] += share
    assert parts == pytest.approx([1.0] * 64)


@pytest.mark.parametrize("counts", [[0.0] * 8, [1.0] * 8, [100.0, *[0.0] * 7]])
@pytest.mark.parametrize("spare", [0, 1, 6])
def test_extremes(counts: list[float], spare: int) -> None:
    found = place_experts(counts, 4, spare)
    assert all(len(set(held)) == 2 + spare for held in found.slots)
    assert found.imbalance <= contiguous(counts, 4).imbalance


def test_what_cannot_be() -> None:
    with pytest.raises(LayoutError, match=r"8 experts are not divisible by 3 ranks; nearest legal ranks: 2"):
        place_experts([1.0] * 8, 3)
    with pytest.raises(LayoutError, match=r"make 9 slots, more than the 8 experts; at most 6 spare"):
        place_experts([1.0] * 8, 4, 7)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "[",
        "[]",
        "[1]",
        "[1, -1]",
        "[1, NaN]",
        "[1, true]",
        "[[1, 2], 3]",
        "[1, 1e400]",
        "[" * 99999,
    ],
)
def test_a_bad_file_is_one_line(tmp_path: Path, text: str) -> None:
    file = tmp_path / "counts.json"
    file.write_text(text)
    with pytest.raises(DataError) as error:
        read_counts(file)
    assert "\n" not in str(error.value)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "counts.json"
    file.write_text(json.dumps([[8, 1, 1, 1, 1, 1, 1, 1], [1] * 8]))
    assert run(["experts", "plan", str(file), "-n", "4", "--json"]) == 0
    first, second = json.loads(capsys.readouterr().out)["layers"]
    assert first["imbalance_before"] == pytest.approx(9 * 4 / 15)
    assert first["imbalance_after"] == pytest.approx(1.0)
    assert max(first["copies"]) > 1
    assert second["imbalance_after"] == pytest.approx(1.0)
    assert run(["experts", "plan", str(file), "-n", "4"]) == 0
    assert "2.400" in capsys.readouterr().out
    assert run(["experts", "plan", str(file), "-n", "3"]) == 2


def test_a_plan_from_the_record_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(tmp_path / "records.sqlite")
    with Store.open(path) as store:
        for layout, chosen in (("ep2", [30, 10, 5, 5]), ("dp1", [1, 2, 3, 4])):
            with store.start(kind="train", layout=layout, model="tiny", plan={}) as made:
                ep = 2 if layout == "ep2" else 1
                made.result("experts", {"ep": ep, "steps": 3, "layers": [{"layer": 5, "chosen": chosen}]})
        alone, shared = store.runs()
        dense = store.start(kind="train", layout="dp1", model="tiny", plan={})
        damaged = store.start(kind="train", layout="dp1", model="tiny", plan={})
        damaged.result("experts", {"ep": 2, "layers": [{"layer": 5}]})

    def plan(*arguments: str) -> tuple[int, str, str]:
        code = run(["experts", "plan", *arguments, "--records", path, "--json"])
        return (code, *capsys.readouterr())

    code, out, _ = plan(shared.id)
    assert code == 0
    found = json.loads(out)
    assert (found["ranks"], [layer["layer"] for layer in found["layers"]]) == (2, [5])
    assert found["layers"][0]["imbalance_before"] == 40 / 25
    assert plan(alone.id, "-n", "4")[0] == 0
    for arguments, words in (
        ([alone.id], "does not say how many ranks share the experts: add --ranks N"),
        ([dense.id], f"run {dense.id} has no counts of experts"),
        ([damaged.id], f"run {damaged.id}: its counts of experts are damaged"),
        (["nothing"], "'nothing' is no file, and no run 'nothing' in"),
    ):
        code, out, error = plan(*arguments)
        assert (code, out) == (2, "")
        assert words in error
        assert error.count("\n") == 1

"""The walk over the legal layouts: resumed from a file that was cut short, within a budget, past ranks that break."""

from __future__ import annotations

import json
import os
from itertools import product
from pathlib import Path

import pytest

from fivefold.core.layout import Layout
from fivefold.engine.engine import Engine
from fivefold.errors import ConfigError
from fivefold.strategies.legal import Case
from fivefold.verify import matrix
from fivefold.verify.matrix import chosen_cases, skipped_shapes, walk
from fivefold.verify.verify import Verdict

from .command_line import CommandLine
from .models import PLAIN

SPEC = PLAIN.replace(name="matrix", hidden=16, blocks=PLAIN.blocks[:1])
"""One layer: no pipeline is legal."""
DP2, TP2 = Case(Layout.parse("dp2")), Case(Layout.parse("tp2"), "full")


def walked(cases: list[Case], results: Path | None = None, **options) -> list[Verdict]:
    return list(walk(SPEC, cases, steps=1, device="cpu", results=results, **options))


def lines_of(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines()


def broken_beyond_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    count = Engine.count_valid

    def faulty(self, batches):
        if self.plan.layout.world_size > 1:
            raise ArithmeticError("rank is ill")
        return count(self, batches)

    monkeypatch.setattr(Engine, "count_valid", faulty)


def test_every_shape_is_chosen_or_skipped_with_its_rule() -> None:
    chosen, skipped = chosen_cases(SPEC, 2), skipped_shapes(SPEC, 2)
    cuts = [case.layout for case in chosen]
    assert {(one.dp, one.tp, one.pp, one.cp) for one in cuts} == {(2, 1, 1, 1), (1, 2, 1, 1), (1, 1, 1, 2)}
    assert {one.zero for one in cuts if one.dp == 2} == {0, 1, 2, 3}
    modes = {"none", "attention", "mlp", "attention+mlp", "full"}  # one layer: no full/2
    assert {(c.recompute, c.layout.sp) for c in chosen if c.layout.tp == 2} == set(
        product(modes, (True, False))
    )
    ((layout, rule),) = skipped
    assert str(layout) == "pp2"
    assert "2 pipeline stages" in rule


def test_a_walk_goes_on_where_it_was_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the middle of a line: that layout is judged again, what is whole is not."""
    file = tmp_path / "deep" / "results.jsonl"
    (first,) = walked([DP2], file)
    assert first.passed
    whole = lines_of(file)
    assert len(whole) == 2
    file.write_text("\n".join([*whole, whole[1][: len(whole[1]) // 2]]), encoding="utf-8")
    judged: list[str] = []
    judge = matrix._judge

    def counted(plans, *arguments):
        judged.append(str(Case(plans[0].layout, plans[0].execution.recompute)))
        return judge(plans, *arguments)

    monkeypatch.setattr(matrix, "_judge", counted)
    verdicts = walked([DP2, TP2], file)
    assert judged == ["tp2 recompute=full"]
    assert verdicts[0] == first
    assert [str(v.case) for v in verdicts] == ["dp2", "tp2 recompute=full"]
    assert all(v.passed for v in verdicts)
    assert [json.loads(line).get("layout") for line in lines_of(file)] == [None, "dp2", "tp2"]
    assert walked([DP2, TP2], file) == verdicts
    assert judged == ["tp2 recompute=full"]


def test_a_file_of_another_walk_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "results.jsonl"
    walked([], file)
    before = file.read_bytes()
    with pytest.raises(ConfigError, match="another walk"):
        walked([], file, seed=1)
    with pytest.raises(ConfigError, match="another walk"):
        list(walk(SPEC.replace(vocab=51), [], steps=1, device="cpu", results=file))
    assert file.read_bytes() == before
    for text in ("no results\n", '{"model": 1}\n', "[1]\n"):
        file.write_text(text)
        with pytest.raises(ConfigError, match=r"another walk|no file of results"):
            walked([], file)
    damaged = before + b'{"layout": "dp2 nonsense"}\n', before + b"[" * 100_000 + b"\n", b"notes, one line"
    for content in damaged:
        file.write_bytes(content)
        with pytest.raises(ConfigError, match="no file of results of this command"):
            walked([], file)
        assert file.read_bytes() == content
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(ConfigError, match="not a regular file"):
            walked([], path)
    file.write_bytes(before[:20])  # killed in its first line
    walked([], file)
    assert file.read_bytes() == before


def test_a_file_that_another_walk_writes_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "results.jsonl"
    walked([DP2], file)
    under_way = walk(SPEC, [DP2], steps=1, device="cpu", results=file)
    next(under_way)
    with pytest.raises(ConfigError, match="another walk is writing"):
        walked([], file)
    under_way.close()
    walked([], file)


def test_a_spent_budget_begins_nothing() -> None:
    assert walked([DP2, TP2], budget_s=-1.0) == []


def test_a_rank_that_breaks_fails_its_layout_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken_beyond_one_rank(monkeypatch)
    file = tmp_path / "r.jsonl"
    first, second = walked([DP2, TP2], file)
    for verdict in (first, second):
        assert not verdict.passed
        assert verdict.max_rel_err == float("inf")
        assert verdict.cause is not None
        assert "ArithmeticError: rank is ill" in verdict.cause
    assert len(lines_of(file)) == 1, "it is not kept: the same walk tries it again"
    monkeypatch.undo()
    assert all(verdict.passed for verdict in walked([DP2, TP2], file))


def test_an_infinite_error_is_kept(tmp_path: Path) -> None:
    (good,) = walked([DP2])
    bad = good.replace(passed=False, max_rel_err=float("inf"), cause="it is not there")
    file = tmp_path / "r.jsonl"
    header = {"model": 1}
    matrix._Results(file, header).add(bad)
    assert matrix._Results(file, header).verdicts == {str(bad.case): bad}


MATRIX = ["verify", "--model", "config.json", "--matrix", "--max-ranks", "2", "--steps", "1"]


def test_command_json(fivefold: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrix, "recompute_options", lambda _: ["full"])
    fivefold.model(num_hidden_layers=1, vocab_size=30, hidden_size=16, intermediate_size=12)
    ended = fivefold(*MATRIX, "--results", "r.jsonl", "--json")
    assert ended.code == 0, ended.err
    found = ended.json()
    assert (found["passed"], found["complete"], found["left"]) == (True, True, [])
    assert 0.0 < found["max_rel_err"] <= 1e-10
    assert found["max_rel_err"] == max(verdict["max_rel_err"] for verdict in found["layouts"])
    assert {"dp2", "tp2", "cp2:ring"} <= {verdict["layout"] for verdict in found["layouts"]}
    assert [(one["layout"], "2 pipeline stages" in one["rule"]) for one in found["skipped"]] == [
        ("pp2", True)
    ]
    assert {verdict["recompute"] for verdict in found["layouts"]} == {"full"}
    again = fivefold(*MATRIX, "--results", "r.jsonl")
    assert again.code == 0
    assert "tp2 recompute=full" in again.out
    count = len(found["layouts"])
    assert f"{count} of {count} are the same model" in again.out
    assert "1 shape is not legal; the first: pp2" in again.out


def test_command_with_no_time_and_with_ranks_that_break(
    fivefold: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    fivefold.model(num_hidden_layers=1, vocab_size=30, hidden_size=16, intermediate_size=12)
    nothing = fivefold(*MATRIX, "--budget", "0s", "--json")
    assert (nothing.code, nothing.json()["passed"], nothing.json()["complete"]) == (1, False, False)
    assert "dp2" in nothing.json()["left"]
    broken_beyond_one_rank(monkeypatch)
    monkeypatch.setattr(matrix, "chosen_cases", lambda *_: [DP2])
    failed = fivefold(*MATRIX, "--json")
    assert failed.code == 1
    assert "rank is ill" in failed.json()["layouts"][0]["cause"]
    refused = fivefold(*MATRIX, "--budget", "ten minutes")
    assert (refused.code, refused.out) == (2, "")
    assert "such as 10m" in refused.said()


def test_an_interrupt_says_where_it_goes_on(fivefold: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    fivefold.model(num_hidden_layers=1, vocab_size=30, hidden_size=16, intermediate_size=12)

    def interrupted(*_: object) -> Verdict:
        raise KeyboardInterrupt

    monkeypatch.setattr(matrix, "_judge", interrupted)
    monkeypatch.setattr(matrix, "chosen_cases", lambda *_: [DP2, TP2])
    ended = fivefold(*MATRIX, "--results", "r.jsonl")
    assert (ended.code, ended.out) == (130, "")
    assert "0 of 2 are judged and kept in r.jsonl; the same command goes on" in ended.err

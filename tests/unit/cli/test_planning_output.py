"""What the planning commands print: in any width, what was assumed, names of software, refusals of what was fixed."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from fivefold.cli.main import run
from fivefold.cli.tables import say, span, table_of_layouts

NAMES = ["layout", "mb", "recompute", "step", "10-90 %", "tokens/s", "MFU", "memory"]
LONG = "dp128 tp8 pp16:dualpipev@flops cp16:ring4xulysses4 ep64 etp2 zero1"
ROW = ["1", "attention+mlp", "47.9 s", "40.5..56.6 s", "1.37 k", "60%", "92%"]


def console(width: int) -> tuple[Console, io.StringIO]:
    file = io.StringIO()
    return Console(file=file, width=width, force_terminal=True, color_system=None), file


@pytest.mark.parametrize("width", [80, 100, 120, 200])
@pytest.mark.parametrize("layout", ["dp1", "dp4 tp2 pp4:1f1b*8@flops cp2:ring zero1", LONG])
def test_numbers_are_whole_in_every_terminal(width: int, layout: str) -> None:
    made, file = console(width)
    made.print(table_of_layouts(made, NAMES, [[layout, *ROW]], spare=("tokens/s",)))
    text = file.getvalue()
    assert all(len(line) <= width for line in text.splitlines())
    for cell in ROW:
        assert cell in text or (cell == "1.37 k" and width < 120)
    assert all(token in text for token in layout.split())


def test_a_sentence_is_broken_between_words_in_a_terminal_only() -> None:
    line = "  fits: " + "pipeline-rank 0.5 " * 20
    made, file = console(60)
    say(made, line)
    rows = file.getvalue().splitlines()
    assert all(len(row) <= 60 for row in rows)
    assert all(row.startswith("     ") for row in rows[1:])
    assert " ".join(file.getvalue().split()) == " ".join(line.split())
    piped = io.StringIO()
    say(Console(file=piped, width=60), line)
    assert piped.getvalue().count("\n") == 1


def test_a_span_has_one_unit_where_it_is_the_same() -> None:
    assert span(40.5, 56.6) == "40.5..56.6 s"
    assert span(0.9, 1.1) == "900 ms..1.1 s"


def asked(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    run([*arguments, "--json"])
    answer: dict[str, Any] = json.loads(capsys.readouterr().out)
    return answer


JOB = ("-m", "llama-3-8b", "-c", "8 H100")


def test_estimate_and_explain_take_the_same_step(capsys: pytest.CaptureFixture[str]) -> None:
    layout, small = ("-l", "dp2 zero1"), ("-m", "tiny-llama", "-c", "2 H100")
    one, other = (asked(capsys, name, *small, *layout) for name in ("estimate", "explain"))
    assert one["global_batch"] == other["global_batch"]
    assert one["step_time_s"] == pytest.approx(other["plan"]["step_time_s"])
    assert any("--global-batch is not given" in line for line in one["reasons"])
    assert any("--global-batch is not given" in line for line in other["assumed"])
    layout = ("-l", "dp2 tp4 zero1")
    given = asked(capsys, "estimate", *JOB, *layout, "--global-batch", "64")
    assert not any("--global-batch" in line for line in given["reasons"])
    long = asked(capsys, "estimate", *JOB, *layout, "--seq-len", "65536")
    assert "65536 tokens are more than the model's 8192 positions" in long["reasons"]


def test_any_number_of_data_ranks_has_a_usual_batch(capsys: pytest.CaptureFixture[str]) -> None:
    facts = asked(
        capsys, "estimate", "-m", "llama-3-8b", "-c", "3x4 H100", "-l", "dp3 pp4", "--micro-batch", "5"
    )
    assert facts["global_batch"] % 15 == 0
    assert facts["global_batch"] >= 15 * 16


def test_software_is_known_by_the_names_of_runs_tables(capsys: pytest.CaptureFixture[str]) -> None:
    layout = ("-l", "dp8 zero3")
    plain = asked(capsys, "estimate", *JOB, *layout, "--framework", "fsdp")
    named = asked(capsys, "estimate", *JOB, *layout, "--framework", "TorchTitan")
    assert named["memory"] == plain["memory"]
    assert "TorchTitan is planned for as fsdp" in named["reasons"]
    assert run(["estimate", *JOB, *layout, "--framework", "standrad"]) == 2


@pytest.mark.parametrize(
    ("fix", "said"),
    [
        ("tp3", "heads = 32 is not divisible by 3; nearest legal tp: 2 or 4"),
        ("dp7", "global batch 1024 is not a multiple of dp7"),
        ("tp4 pp4", "tp4 pp4 takes 16 devices, and 8 are no multiple of them"),
    ],
)
def test_what_was_fixed_is_refused_by_its_rule(
    capsys: pytest.CaptureFixture[str], fix: str, said: str
) -> None:
    assert run(["plan", *JOB, "--fix", fix]) == 2
    assert said in capsys.readouterr().err


def test_a_file_of_nodes_without_their_size_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "ours.yaml"
    path.write_text("nodes: [{count: 8, device: H100}]")
    facts = asked(capsys, "estimate", "-m", "llama-3-8b", "-c", str(path), "-l", "dp8 zero3")
    assert "devices_per_node is not given: nodes of one H100; usual are 8" in facts["reasons"]


def test_calibrate_says_why_rows_are_skipped_and_what_is_not_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:  # fmt: skip
    path = tmp_path / "runs.csv"
    head = "model_name,seq_len,global_batch,gpu,num_gpus,layout,iter_time_s,batch\n"
    rows = [f"llama-3.1-8b,4096,256,H100,16,dp{16 // n} tp{n} zero1,{8 + n / 10},3" for n in (1, 2, 4)]
    path.write_text(head + "\n".join([*rows, "unheard-of,4096,256,H100,16,dp16,8,3"]) + "\n")
    assert run(["calibrate", str(path), "-o", str(tmp_path / "mine.json")]) == 0
    out = capsys.readouterr().out
    assert "skipped line 5 (unheard-of): does not say layers, hidden, heads" in out
    assert "columns that are not read: batch" in out
    path.write_text(head + "unheard-of,4096,256,H100,16,dp16,8,3\n")
    assert run(["calibrate", str(path), "-o", str(tmp_path / "mine.json")]) == 2
    assert "line 2 (unheard-of): does not say layers" in capsys.readouterr().err


def test_experts_that_do_not_divide_are_refused_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "-m", "mixtral-8x7b", "-c", "8 H100", "--fix", "ep3"]) == 2
    assert "8 experts are not divisible by 3; nearest legal ep: 2 or 4\n" in capsys.readouterr().err

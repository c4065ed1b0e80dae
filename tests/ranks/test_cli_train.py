"""`fivefold train` as a user types it: the same numbers under every layout, one clear line for whatever goes wrong."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import resource
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from .command_line import CommandLine

LAYOUTS = ("dp1", "dp2", "tp2", "pp2")
PROMPT_S = 5.0
HIDE_CURSOR, SHOW_CURSOR = b"\x1b[?25l", b"\x1b[?25h"


@pytest.mark.parametrize(("dtype", "bound"), [("float32", 1e-6), ("float64", 1e-12)])
def test_losses_do_not_depend_on_the_layout(fivefold: CommandLine, dtype: str, bound: float) -> None:
    """Nor do the gradient norm, the learning rate and the number of valid tokens."""
    curves = {}
    for layout in LAYOUTS:
        ended = fivefold("train", "train.yaml", f"layout={layout}", f"dtype={dtype}", f"log.metrics={layout}")
        assert ended.code == 0, ended.err
        curves[layout] = fivefold.metrics(layout)
    one = curves["dp1"]
    assert [line["step"] for line in one] == [1, 2, 3, 4, 5]
    assert one[4]["loss"] < one[0]["loss"]
    for layout, lines in curves.items():
        for line, reference in zip(lines, one, strict=True):
            for key in ("step", "lr", "valid_tokens"):
                assert line[key] == reference[key]
            for key in ("loss", "grad_norm"):
                assert line[key] == pytest.approx(reference[key], rel=bound), (layout, line["step"], key)


def test_json_metrics_and_record_agree(fivefold: CommandLine) -> None:
    ended = fivefold("train", "train.yaml", "layout=dp2", "optimizer.lr=2e-3", "log.every=2", "--json")
    assert ended.code == 0
    outcome = ended.json()
    assert "training llama dp2: 5 steps on 2 ranks" in ended.err
    assert "step 1/5" in ended.err

    lines = fivefold.metrics()
    assert [line["step"] for line in lines] == [2, 4, 5]  # every second, and the last
    assert lines[0]["lr"] == 2e-3 * 2 / 3  # the override, at step 2 of a warm-up of 2
    assert (outcome["layout"], outcome["steps"], outcome["last_loss"]) == ("dp2", 5, lines[-1]["loss"])

    run = fivefold.last_run()
    assert (run["id"], run["status"], run["kind"]) == (outcome["run_id"], "finished", "train")
    assert run["plan"]["execution"]["optimizer"]["lr"] == 2e-3
    assert [(row["step"], row["rank"]) for row in run["metrics"]] == [
        (s, r) for s in (2, 4, 5) for r in (0, 1)
    ]
    recorded = [{"step": row["step"], **row["values"]} for row in run["metrics"] if row["rank"] == 0]
    assert recorded == lines

    parameters = fivefold("model", "show", "config.json", "--json").json()["total_parameters"]
    assert outcome["comm_bytes"] == 4 * parameters + 2 * 8  # gradients; valid tokens and loss, 8 bytes each
    peaks = [row["peak_memory_bytes"] for row in run["results"]["profiled_step"]]
    assert outcome["peak_memory_bytes"] == max(peaks) >= 16 * parameters

    listed = fivefold("runs", "list", "--json").json()
    assert [r["id"] for r in listed["runs"]] == [run["id"]]


def test_what_a_person_reads(fivefold: CommandLine) -> None:
    ended = fivefold("train", "model=config.json", "data=corpus", "seq_len=16", "global_batch=2", "steps=2")
    assert ended.code == 0
    first, second = [line for line in ended.err.splitlines() if line.startswith("step ")]
    assert "FLOP/s  -  comm 0%" in first  # no memory is known before the profiled step
    assert "KiB  comm 0%" in second
    assert "on 1 rank\n" in ended.err
    assert ended.out.startswith("2 steps: loss ")
    shown = fivefold("runs", "show", "last")
    assert shown.code == 0
    assert "finished" in shown.out
    assert not Path("metrics.jsonl").exists()


def test_nothing_is_recorded_if_so_asked(fivefold: CommandLine) -> None:
    outcome = fivefold("train", "train.yaml", "steps=1", "log.records=null", "--json").json()
    assert outcome["run_id"] is None
    assert fivefold("runs", "list", "--json").json()["runs"] == []


MISTAKES: list[tuple[list[str], list[str]]] = [
    (["optimizer.lrr=1"], ["unknown key 'optimizer.lrr'", "did you mean 'optimizer.lr'?"]),
    (["layout=tp3"], ["tp3", "heads = 4", "nearest legal tp: 2 or 4"]),
    (["layout=pp3"], ["pp3 has 3 pipeline stages", "2 layers"]),
    (["layout=dp3"], ["global batch 8", "dp3 x micro-batch 2 = 6", "6 or 12"]),
    (["layout=tp2", "seq_len=31"], ["sequence length 31", "tp = 2", "30 or 32"]),
    (["seq_len=1024"], ["sequence length 1024", "256 positions"]),
    (["layout=dp2 ep2"], ["llama has no experts, which ep2 etp1 would cut"]),
    (["layout=dp2 zero1", "zero3_gather=step"], ["zero3_gather=step does nothing with zero1"]),
    (["layout=dq2"], ["dq2"]),
    (["data=empty"], ["corpus empty holds no text"]),
    (["data=nowhere"], ["nowhere"]),
    (["layout=dp2", "--ranks", "3"], ["--ranks 3", "the 2 ranks of layout dp2"]),
    (["model=none"], ["no preset 'none'"]),
    (["model=gpt2"], ["gpt2 cannot be run yet", "learned positions"]),
    (["--device", "tpu"], ["device 'tpu' is not available here"]),
    (["log.metrics=/proc/no/file"], ["cannot write metrics to /proc/no/file"]),
    (["log.records=/proc/no/file"], ["/proc/no/file"]),
]


@pytest.mark.parametrize(("arguments", "words"), MISTAKES, ids=lambda value: value[0] if value else None)
def test_a_mistake_is_one_line(fivefold: CommandLine, arguments: list[str], words: list[str]) -> None:
    Path("empty").mkdir()
    ended = fivefold("train", "train.yaml", *arguments, "--json")
    assert (ended.code, ended.out) == (2, "")
    for word in words:
        assert word in ended.said()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"vocab_size": 100}, ["has 100", "at least 259"]),
        ({"hidden_size": None}, ["field 'hidden_size' is missing"]),
        ({"num_experts": 8}, ["field 'num_experts'"]),
        ({"num_key_value_heads": 3}, ["4 attention heads cannot share 3 key/value heads", "2 or 4"]),
        ({"hidden_act": "mish"}, ["activation 'mish' is not supported"]),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}, ["rope scaling 'dynamic'"]),
        ({"model_type": "mamba"}, ["mamba"]),
    ],
)
def test_a_model_that_is_not_supported(
    fivefold: CommandLine, changes: dict[str, Any], words: list[str]
) -> None:
    ended = fivefold("train", "train.yaml", "model=" + fivefold.model("odd.json", **changes))
    assert (ended.code, ended.out) == (2, "")
    for word in words:
        assert word in ended.said()


def test_config_file_that_is_not_there(fivefold: CommandLine) -> None:
    assert (
        fivefold("train", "missing.yaml")
        .said()
        .startswith("cannot read training config missing.yaml: No such file")
    )
    assert fivefold("train", "steps=1").said().startswith("command line: missing key 'model': name a config")
    assert "no option --layout; a setting is written layout=VALUE" in fivefold("train", "--layout", "tp2").err


def test_port_in_use(fivefold: CommandLine) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        ended = fivefold("train", "train.yaml", "layout=dp2", "--port", str(port))
    assert (ended.code, ended.out) == (2, "")
    assert f"port {port} cannot be used" in ended.said()
    assert fivefold("train", "train.yaml", "layout=dp2", "--port", str(port), "steps=1").code == 0


def test_training_that_diverges(fivefold: CommandLine) -> None:
    ended = fivefold(
        "train", "train.yaml", "layout=dp2", "optimizer.lr=1e6", "optimizer.clip_norm=null", "steps=50"
    )
    assert (ended.code, ended.out) == (1, "")
    assert "try a smaller optimizer.lr than 1e+06" in ended.said()
    run = fivefold.last_run()
    assert run["status"] == "failed"
    assert "training diverged" in run["error"]
    assert run["last_step"] == len(fivefold.metrics()) >= 1


def test_disk_full_while_writing_metrics(fivefold: CommandLine) -> None:
    ended = fivefold("train", "train.yaml", "log.metrics=/dev/full")
    assert (ended.code, ended.out) == (2, "")
    assert "cannot write metrics to /dev/full: No space left on device" in ended.said()
    assert fivefold.last_run()["status"] == "failed"


def limit_files(limit_bytes: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, limit_bytes))


def test_disk_full_in_the_middle_of_a_line(fivefold: CommandLine) -> None:
    """The line that does not fit is taken back; the lines before it stay, and the record has the same steps."""
    command = fivefold.start(
        "train", "train.yaml", "layout=dp2", "log.records=null", "steps=60", before=lambda: limit_files(9000)
    )
    ended = command.ended()
    assert (ended.code, ended.out) == (2, "")
    assert "cannot write metrics to metrics.jsonl: File too large; the steps before are kept" in ended.said()
    lines = fivefold.metrics()
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    assert 8000 < Path("metrics.jsonl").stat().st_size <= 9000


def test_disk_full_while_writing_the_record(fivefold: CommandLine) -> None:
    command = fivefold.start(
        "train", "train.yaml", "layout=dp2", "steps=200", before=lambda: limit_files(100_000)
    )
    ended = command.ended()
    assert (ended.code, ended.out) == (2, "")
    assert "cannot write records in" in ended.said()
    assert "disk" in ended.said()
    run = fivefold.last_run()
    assert run["last_step"] >= 1
    losses = {row["step"]: row["values"]["loss"] for row in run["metrics"] if row["rank"] == 0}
    kept = {line["step"]: line["loss"] for line in fivefold.metrics()}
    assert losses.items() <= kept.items()  # the metrics file was still written


@pytest.mark.parametrize("whole_group", [True, False], ids=["group", "parent"])
def test_ctrl_c(fivefold: CommandLine, whole_group: bool) -> None:
    command = fivefold.start("train", "train.yaml", "layout=dp2", "steps=100000", "--json")
    command.wait_for("step 1/")
    assert len(command.ranks) == 2
    began = time.monotonic()
    command.interrupt(whole_group=whole_group)
    ended = command.ended()
    assert time.monotonic() - began < PROMPT_S
    assert command.alive() == []
    assert (ended.code, ended.out) == (130, "")
    assert ended.said() == "interrupted"
    run = fivefold.last_run()
    assert run["status"] == "interrupted"
    steps = [row["step"] for row in run["metrics"] if row["rank"] == 0]
    assert steps == list(range(1, len(steps) + 1))
    assert abs(len(steps) - len(fivefold.metrics())) <= 1  # it may end between the two


def test_ctrl_c_gives_the_cursor_back(fivefold: CommandLine) -> None:
    """On a terminal rank 0 draws a bar, which hides the cursor; it is ended before it can show it again."""
    master, slave = pty.openpty()
    command = fivefold.start(
        "train",
        "train.yaml",
        "layout=dp2",
        "steps=100000",
        before=lambda: os.dup2(slave, sys.stderr.fileno()),
    )
    os.close(slave)
    shown = b""
    while b"1/100000" not in shown and b"loss" not in shown:
        shown += os.read(master, 4096)
    assert HIDE_CURSOR in shown
    command.interrupt(whole_group=True)
    with contextlib.suppress(OSError):  # Linux says EIO where the other end is closed
        while chunk := os.read(master, 4096):
            shown += chunk
    os.close(master)
    assert command.ended().code == 130
    assert shown.rindex(SHOW_CURSOR) > shown.rindex(HIDE_CURSOR)
    assert b"fivefold: interrupted" in shown


def test_a_rank_that_is_killed(fivefold: CommandLine) -> None:
    command = fivefold.start("train", "train.yaml", "layout=tp2", "steps=100000")
    command.wait_for("step 1/")
    command.ranks[1].kill()
    began = time.monotonic()
    ended = command.ended()
    assert time.monotonic() - began < PROMPT_S
    assert command.alive() == []
    assert (ended.code, ended.out) == (1, "")
    assert ended.said() == "rank 1 failed first: killed by SIGKILL (out of memory?)"
    run = fivefold.last_run()
    assert run["status"] == "failed"
    assert "rank 1 failed first" in run["error"]
    assert run["last_step"] >= 1


def torchrun(folder: Path, ranks: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    launcher = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(ranks),
        "-m",
        "fivefold",
    ]
    return subprocess.run(
        [sys.executable, *launcher, *arguments], cwd=folder, capture_output=True, text=True, timeout=120
    )


def test_under_torchrun(fivefold: CommandLine) -> None:
    """One process per rank, started by torchrun: the same losses, told and recorded once."""
    ended = torchrun(fivefold.folder, 2, "train", "train.yaml", "layout=dp2", "dtype=float64", "--json")
    assert ended.returncode == 0, ended.stderr
    outcome = json.loads(ended.stdout)
    launched = fivefold.metrics()
    assert outcome["last_loss"] == launched[-1]["loss"]
    assert [run["id"] for run in fivefold("runs", "list", "--json").json()["runs"]] == [outcome["run_id"]]
    assert {row["rank"] for row in fivefold.last_run()["metrics"]} == {0, 1}
    here = ("layout=dp2", "dtype=float64", "log.metrics=here.jsonl")
    assert fivefold("train", "train.yaml", *here).code == 0
    for one, other in zip(launched, fivefold.metrics("here.jsonl"), strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-12)


def test_wrong_number_of_processes_under_torchrun(fivefold: CommandLine) -> None:
    """All ranks find it out; one tells it."""
    ended = torchrun(fivefold.folder, 2, "train", "train.yaml", "layout=dp4", "micro_batch=1")
    assert ended.returncode != 0
    said = [line for line in ended.stderr.splitlines() if line.startswith("fivefold: ")]
    assert said == ["fivefold: layout dp4 has 4 ranks, the launcher started 2; start 4, or change the layout"]
    assert ended.stdout == ""

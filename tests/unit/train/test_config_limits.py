"""Whatever a key of the config is set to, the answer is one line: no traceback, no hanging, no file overwritten.

The keys come from the config itself, so that a new one is tried without being listed here.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fivefold.cli.main import run
from fivefold.train import run as training
from fivefold.train.config import valid_keys

ENDLESS = ("1000000000000", "1" + "0" * 30, "9" * 5000, "0x" + "f" * 5000)
NUMBERS = ("-1", ".inf", "-.inf", ".nan", "1.0e+300", "-1.0e+300", *ENDLESS)
PLACES = (
    '"a\\0b"', '"\\0"', "x" * 300, "x/" * 5000, "/proc/none/x", "/dev/null/x", "~nobody-here/x", '"a\\nb\\0"',
)  # fmt: skip
SHAPES = ("[]", "[[]]", "[{}]", "{a: 1}", "2001-01-01", "2001-99-99", "!!binary x", "*x", "{")

LEGAL = {
    "seed": {"1000000000000"},
    "optimizer.lr": {"1000000000000", "1" + "0" * 30},
    "export": {"2001-99-99", "*x", "{", "!!binary x"},
    "checkpoint.folder": {"2001-99-99", "*x", "{", "!!binary x"},
    "log.metrics": {"2001-99-99", "*x", "{", "!!binary x"},
    "log.records": {"2001-99-99", "*x", "{", "!!binary x"},
    "log.tensorboard": {"2001-99-99", "*x", "{", "!!binary x"},
    "log.wandb": {*PLACES, *SHAPES},
    "log.mlflow": {*PLACES, *SHAPES},
}
"""What a run may begin with all the same: odd names of files that can be made, and names of others' projects."""

NEEDED = {
    "actions": ["layout=pp2:custom"],
    "measured": ["layout=pp2@measured"],
    "validation.data": ["validation.every=1"],
    "loss_scale.initial": ["dtype=float16"],
    "loss_scale.grow_every": ["dtype=float16"],
    "router.balance": ["model=tiny-moe", "router.balance_coefficient=0.01"],
    "router.balance_coefficient": ["model=tiny-moe"],
    "router.z_coefficient": ["model=tiny-moe"],
    "router.bias_speed": ["model=tiny-mla-moe"],
    "router.capacity_factor": ["model=tiny-moe"],
    "experts.rebalance_every": ["model=tiny-moe", "layout=dp2 ep2"],
    "experts.spare_slots": ["model=tiny-moe", "layout=dp2 ep2", "experts.rebalance_every=1"],
    "log.experts": ["model=tiny-moe", "log.metrics=metrics.jsonl"],
    "router.capacity": ["model=tiny-moe", "router.capacity_factor=1.25"],
}
"""What makes a key count."""


class Reached(Exception):
    """The ranks would start now."""


@pytest.fixture
def refusals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., str | None]:
    """`refusals("steps=-1")`: what is said; None where training would begin."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FIVEFOLD_RECORDS", str(tmp_path / "records.sqlite"))
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "corpus.txt").write_text("some text to train on " * 200)

    def reached(*args: Any, **options: Any) -> None:
        raise Reached

    monkeypatch.setattr(training, "run_ranks", reached)

    def said(*overrides: str) -> str | None:
        capsys.readouterr()
        base = ["model=tiny-llama", "data=corpus.txt", "seq_len=16", "global_batch=2"]
        try:
            code = run(["train", *base, *overrides])
        except Reached:
            return None
        printed = capsys.readouterr()
        lines = printed.err.splitlines()
        assert (code, printed.out, len(lines)) == (2, "", 1), printed.err
        assert lines[0].startswith("fivefold: ")
        assert "Input should" not in lines[0], "pydantic's own words"
        assert len(lines[0]) < 6000
        return lines[0]

    return said


@pytest.mark.parametrize("key", valid_keys())
def test_no_value_is_more_than_one_line(refusals: Callable[..., str | None], key: str) -> None:
    values = [*NUMBERS, *PLACES, *SHAPES, *(f"[{value}, {value}]" for value in (*NUMBERS, *PLACES))]
    began = [
        value for value in values
        if refusals(*NEEDED.get(key, []), f"{key}={value}") is None and value not in LEGAL.get(key, ())
    ]  # fmt: skip
    assert not began, f"training begins with {key} = {began}"


@pytest.mark.parametrize("key", valid_keys())
def test_a_folder_that_is_there_is_no_file(refusals: Callable[..., str | None], key: str) -> None:
    """Nor is a file a folder. What a run may use, it may; nothing of it is lost."""
    Path("folder").mkdir()
    Path("folder/kept").write_text("kept")
    Path("file").write_text("not of a run")
    for value in ("folder", "file", "file/x"):
        refusals(*NEEDED.get(key, []), f"{key}={value}")
    assert Path("folder/kept").read_text() == "kept"
    assert Path("file").read_text() == "not of a run"


@pytest.mark.parametrize("field", ["path", "weight"])
def test_sources_of_a_mixture(refusals: Callable[..., str | None], field: str) -> None:
    other = "weight: 1" if field == "path" else "path: corpus.txt"
    for value in (*NUMBERS, *PLACES):
        assert refusals(f"data=[{{{field}: {value}, {other}}}, {{path: corpus.txt}}]") is not None, value


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["global_batch=1000000000000"], ["global_batch", "at most 1000000"]),
        (["global_batch=100000"], ["100000 microbatches in a step", "at most 10000", "micro-batch: 10"]),
        (["layout=dp1000", "global_batch=1000"], ["1000 ranks", "at most 128", "fewer ranks", "torchrun"]),
        (
            ["global_batch=1000000", "micro_batch=1000000"],
            ["takes at least", "one microbatch", "make it smaller"],
        ),
        (
            ["optimizer.lr=1.0e+38", "optimizer.weight_decay=1000"],
            ["lr 1e+38 x weight_decay 1000", "float32"],
        ),
        (["layout=dp2tp2"], ["'dp2tp2'", "write 'dp2 tp2'"]),
        (['log.metrics="a\\0b"'], ["log.metrics", "without zero bytes"]),
        (["data_limit_mib=1.0e+300"], ["data_limit_mib", "at most"]),
        (["model=gpt2"], ["layer norm", "Models that run", "RMS norms", "tiny-llama"]),
    ],
)
def test_what_is_said(refusals: Callable[..., str | None], overrides: list[str], words: list[str]) -> None:
    said = refusals(*overrides)
    assert said is not None
    for word in words:
        assert word in said


def test_64_ranks_are_not_too_many(refusals: Callable[..., str | None]) -> None:
    assert refusals("layout=dp64", "global_batch=64") is None


def test_the_metrics_of_another_run_are_not_overwritten(refusals: Callable[..., str | None]) -> None:
    Path("m.jsonl").write_text('{"step": 1, "loss": 5.5}\n')
    said = refusals("log.metrics=m.jsonl")
    assert said is not None
    assert "m.jsonl holds the metrics of an earlier run" in said
    assert "--resume" in said
    assert Path("m.jsonl").read_text() == '{"step": 1, "loss": 5.5}\n'
    Path("empty.jsonl").touch()
    assert refusals("log.metrics=empty.jsonl") is None
    assert refusals("log.metrics=/dev/null") is None
    assert refusals("log.metrics=new/m.jsonl") is None
    assert not Path("new/m.jsonl").exists(), "trying a place leaves nothing in it"

"""`fivefold model convert`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file

from fivefold.cli.main import run as fivefold
from fivefold.cli.model import command
from fivefold.core.model_spec import AttentionSpec, BlockSpec, MLPSpec, ModelSpec
from fivefold.core.sharding import parameters
from fivefold.nn.hub_write import write_hf

SPEC = ModelSpec(
    name="own",
    hidden=256,
    vocab=1500,
    blocks=(BlockSpec(attention=AttentionSpec(heads=4, kv_heads=2, head_dim=8), mlp=MLPSpec(ffn=24)),),
)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    values = ((row.name, torch.randn(row.shape)) for row in parameters(SPEC))
    return write_hf(tmp_path / "source", SPEC, values).folder


def run(*arguments: object) -> str:
    result = CliRunner().invoke(command, ["convert", *map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_json_says_what_was_written(source: Path, tmp_path: Path) -> None:
    told = json.loads(run(source, tmp_path / "new", "--dtype", "bfloat16", "--shard-mib", "1", "--json"))
    assert told["target"] == str(tmp_path / "new")
    assert len(told["files"]) == 2
    tensors = {name: t for file in told["files"] for name, t in load_file(tmp_path / "new" / file).items()}
    assert {t.dtype for t in tensors.values()} == {torch.bfloat16}
    assert told["weight_bytes"] == sum(t.nbytes for t in tensors.values())
    before = load_file(source / "model.safetensors")
    assert all(torch.equal(t, before[name].bfloat16()) for name, t in tensors.items())


def test_float16_is_rounded_once_and_refuses_what_it_cannot_hold(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(source, tmp_path / "half", "--dtype", "float16")
    before = load_file(source / "model.safetensors")
    after = load_file(tmp_path / "half" / "model.safetensors")
    assert all(torch.equal(tensor, before[name].half()) for name, tensor in after.items())
    assert json.loads((tmp_path / "half" / "config.json").read_text())["torch_dtype"] == "float16"

    values = ((row.name, torch.full(row.shape, 65519.0)) for row in parameters(SPEC))
    run(write_hf(tmp_path / "large", SPEC, values).folder, tmp_path / "still", "--dtype", "float16")
    values = ((row.name, torch.full(row.shape, -65520.0)) for row in parameters(SPEC))
    large = write_hf(tmp_path / "larger", SPEC, values).folder
    assert fivefold(["model", "convert", str(large), str(tmp_path / "new"), "--dtype", "float16"]) == 2
    error = capsys.readouterr().err
    assert "has a weight of 65520, float16 ends at 65504; write it as bfloat16" in error
    assert error.count("\n") == 1
    assert not (tmp_path / "new").exists()


def test_a_line_for_people(source: Path, tmp_path: Path) -> None:
    assert run(source, tmp_path / "new") == f"{tmp_path / 'new'}: 3.1 MiB of weights in 1 file\n"


def test_mistakes_are_one_line(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, words in (
        ([tmp_path / "none", tmp_path / "new"], "no checkpoint folder at"),
        ([source, source], "exists and is not an empty folder"),
    ):
        assert fivefold(["model", "convert", *map(str, arguments)]) == 2
        error = capsys.readouterr().err
        assert error.startswith("fivefold: ")
        assert words in error
        assert error.count("\n") == 1

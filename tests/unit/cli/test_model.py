"""`fivefold model show` and `list`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from fivefold.catalog import models
from fivefold.cli.model import command
from fivefold.core.model_spec import require_plain_decoder
from fivefold.errors import ModelError


def run(*arguments: str) -> str:
    result = CliRunner().invoke(command, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_show_json_is_one_object_with_the_counts() -> None:
    shown = json.loads(run("show", "mixtral-8x7b", "--json"))
    assert shown["total_parameters"] == 46_702_792_704
    assert shown["active_parameters"] == 12_879_925_248
    assert set(shown["by_component"]) == {
        "embedding", "attention", "mlp", "router", "experts", "shared_experts", "norm", "head",
    }  # fmt: skip
    assert sum(shown["by_component"].values()) == shown["total_parameters"]
    assert (shown["name"], shown["layers"], shown["hidden"]) == ("mixtral-8x7b", 32, 4096)


def test_show_json_joins_equal_layers() -> None:
    shown = json.loads(run("show", "deepseek-v3", "--json"))
    assert [(b["layers"], b["mlp"]["kind"]) for b in shown["blocks"]] == [(3, "dense"), (58, "moe")]
    per_block = sum(b["layers"] * b["forward_flops_per_token"] for b in shown["blocks"])
    assert per_block + shown["head_flops_per_token"] == pytest.approx(shown["forward_flops_per_token"])


def test_sequence_changes_flops_only() -> None:
    short, long = (json.loads(run("show", "tiny-llama", "--json", "--sequence", s)) for s in ("16", "1024"))
    assert short["total_parameters"] == long["total_parameters"]
    assert short["forward_flops_per_token"] < long["forward_flops_per_token"]


def test_show_table_names_total_and_traits() -> None:
    text = run("show", "gpt-oss-20b")
    assert "20,914,757,184" in text
    assert "attention sinks" in text


def test_show_reads_a_file_and_prints_its_notes(tmp_path: Path) -> None:
    config = {
        "model_type": "mistral", "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 2, "intermediate_size": 176, "vocab_size": 259,
        "max_position_embeddings": 2048,
    }  # fmt: skip
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    assert "sliding_window is absent" in run("show", str(path))
    assert json.loads(run("show", str(path), "--json"))["notes"]


def test_unknown_model_is_a_user_error() -> None:
    with pytest.raises(ModelError, match="did you mean 'tiny-llama'"):
        run("show", "tiny-lama")


def test_list() -> None:
    listed = json.loads(run("list", "--json"))["models"]
    assert [entry["name"] for entry in listed] == models.names()
    assert "tiny-llama" in run("list")


def test_list_says_what_can_be_trained() -> None:
    """Exactly the models that a decoder can be built for."""
    listed = {entry["name"]: entry for entry in json.loads(run("list", "--json"))["models"]}
    for name, entry in listed.items():
        assert entry["runs_here"] == (entry["reason"] is None)
        if entry["runs_here"]:
            require_plain_decoder(models.preset(name))
        else:
            with pytest.raises(ModelError) as caught:
                require_plain_decoder(models.preset(name))
            assert entry["reason"] == str(caught.value)
    assert (listed["tiny-llama"]["runs_here"], listed["gpt2"]["runs_here"]) == (True, False)
    assert "runs here" in run("list")

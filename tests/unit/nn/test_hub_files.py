"""The files beside the weights: only known names, bounded, without code."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from fivefold.errors import ModelError
from fivefold.nn import hub_files as module
from fivefold.nn.hub_files import read_companions


def test_known_names_and_no_other(tmp_path: Path) -> None:
    for name in (
        "tokenizer.json",
        "LICENSE",
        "tokenization_own.py",
        "training_args.bin",
        "config.json",
        "x.json",
    ):
        (tmp_path / name).write_bytes(name.encode())
    assert read_companions(tmp_path) == {"tokenizer.json": b"tokenizer.json", "LICENSE": b"LICENSE"}


def test_settings_lose_the_names_of_code_and_nothing_else(tmp_path: Path) -> None:
    settings = {"eos_token": "</s>", "auto_map": {"AutoTokenizer": ["own.Own", None]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    assert json.loads(read_companions(tmp_path)["tokenizer_config.json"]) == {"eos_token": "</s>"}
    for content in (b'{ "eos_token" : "</s>" }', b"not JSON"):
        (tmp_path / "tokenizer_config.json").write_bytes(content)
        assert read_companions(tmp_path)["tokenizer_config.json"] == content


def test_what_is_no_small_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "merges.txt"
    os.mkfifo(path)
    with pytest.raises(ModelError, match=r"merges.txt: not a regular file"):
        read_companions(tmp_path)
    path.unlink()
    path.mkdir()
    with pytest.raises(ModelError, match=r"merges.txt: Is a directory"):
        read_companions(tmp_path)
    path.rmdir()
    monkeypatch.setattr(module, "MOST_COMPANION_BYTES", 9)
    path.write_text("0123456789")
    with pytest.raises(ModelError, match=r"merges.txt has 10 B, at most 9 B are read"):
        read_companions(tmp_path)

"""Which tokenizer and which config go with an exported model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from fivefold.catalog.models import resolve
from fivefold.data.prepare import PrepareOptions, prepare
from fivefold.errors import DataError, ModelError
from fivefold.train.companions import Companions, find_companions
from fivefold.train.config import TrainConfig

CONFIG = {
    "model_type": "llama", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "intermediate_size": 24, "vocab_size": 300, "max_position_embeddings": 64, "eos_token_id": 7,
}  # fmt: skip
SETTINGS = b'{"eos_token": "<end>", "chat_template": "{{ messages }}"}'


def tokenizer(path: Path, words: str) -> bytes:
    """One token a word; `<end>` is the last."""
    names = [*words.split(), "<unk>", "<end>"]
    made = Tokenizer(models.WordLevel({name: number for number, name in enumerate(names)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.add_special_tokens(["<end>"])
    made.save(str(path))
    return path.read_bytes()


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model folder with its tokenizer, and text prepared with it and with another."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "hf" / "tokenizer_config.json").write_bytes(SETTINGS)
    (tmp_path / "hf" / "LICENSE").write_text("free")
    tokenizer(tmp_path / "hf" / "tokenizer.json", "one two three")
    tokenizer(tmp_path / "other.json", "one four")
    (tmp_path / "text.txt").write_text("one two three four " * 200)
    for out, file in (("own", "hf/tokenizer.json"), ("other", "other.json"), ("bytes", "byte")):
        prepare(
            ["text.txt"], tmp_path / out, PrepareOptions(tokenizer=file, eos_token=None if file == "byte" else "<end>",
            validation_frac=0), workers=1,
        )  # fmt: skip
    return tmp_path


def find(**config: Any) -> Companions:
    made = TrainConfig(**{"model": "hf/config.json", "weights": "hf", **config})
    return find_companions(made, resolve(made.model))


def test_the_tokenizer_of_the_weights_with_all_its_files(here: Path) -> None:
    """As they are, and the config as it is: it names the right tokens."""
    for data in ("own", [{"path": "own"}, {"path": "own", "weight": 2}]):
        found = find(data=data)
        assert found.files == {
            "tokenizer.json": (here / "hf" / "tokenizer.json").read_bytes(),
            "tokenizer_config.json": SETTINGS,
            "LICENSE": b"free",
        }
        assert (found.config, found.left_out) == (CONFIG, None)


def test_another_tokenizer_takes_its_place(here: Path) -> None:
    """Settings, templates and token numbers of the weights' own would be wrong."""
    found = find(data="other")
    assert set(found.files) == {"tokenizer.json", "tokenizer_config.json", "LICENSE"}
    assert found.files["tokenizer.json"] == (here / "other.json").read_bytes()
    settings = json.loads(found.files["tokenizer_config.json"])
    assert (settings["eos_token"], settings["pad_token"]) == ("<end>", "<end>")
    assert "chat_template" not in settings
    tokens = {"bos_token_id": None, "eos_token_id": 3, "pad_token_id": 3}
    assert found.config == {**CONFIG, **tokens}
    assert found.left_out == "the tokenizer of hf is not exported: the data was prepared with another"


@pytest.mark.parametrize("data", ["bytes", "text.txt"])
def test_bytes_have_no_tokenizer_file(here: Path, data: str) -> None:
    found = find(data=data)
    assert set(found.files) == {"LICENSE"}
    assert found.config == {**CONFIG, "bos_token_id": 256, "eos_token_id": 257, "pad_token_id": 258}
    assert found.left_out == "the tokenizer of hf is not exported: the data is in byte tokens"


def test_without_weights_the_folder_of_the_model_counts(here: Path) -> None:
    assert set(find(model="hf", weights=None, data="own").files) == {
        "tokenizer.json",
        "tokenizer_config.json",
        "LICENSE",
    }
    assert set(find(model="hf/config.json", weights=None, data="own").files) == {
        "tokenizer.json",
        "tokenizer_config.json",
    }


def test_a_config_of_another_model_is_not_taken(here: Path) -> None:
    """Weights that go on with another RoPE base: only their token numbers would be right."""
    (here / "wide.json").write_text(json.dumps({**CONFIG, "rope_theta": 5e5}))
    assert find(model="wide.json", data="own").config["rope_theta"] == 5e5
    (here / "hf" / "config.json").write_text(json.dumps({**CONFIG, "hidden_size": 32}))
    assert find(model="tiny-llama", data="own").config == {}


def test_prepared_data_without_its_tokenizer(here: Path) -> None:
    (here / "own" / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match=r"own/tokenizer.json is not the one that the data was prepared with"):
        find(data="own")
    (here / "own" / "tokenizer.json").unlink()
    with pytest.raises(DataError, match=r"cannot read tokenizer.json own/tokenizer.json"):
        find(data="own")


def test_the_form_in_a_checkpoint(here: Path) -> None:
    found = find(data="own")
    assert Companions.from_files(found.to_files()) == found
    assert Companions.from_files({}) == Companions({}, {})
    with pytest.raises(ModelError, match="not a JSON object"):
        Companions.from_files({"config.json": b"["})

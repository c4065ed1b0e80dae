from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from preparing import make_tokenizer, run, texts, write_jsonl

from fivefold.data.batches import PackedDataset
from fivefold.data.corpus import load_corpus
from fivefold.data.mixture import MixtureDataset
from fivefold.data.open import DataSource, check_vocab, open_data
from fivefold.data.prepared import PreparedDataset
from fivefold.errors import DataError


@pytest.fixture
def folders(tmp_path: Path) -> Path:
    for seed, name in enumerate("ab"):
        source = write_jsonl(tmp_path / f"{name}.jsonl", [{"text": text} for text in texts(60, seed)])
        run(source, tmp_path / name, validation_frac=0.2)
    (tmp_path / "c.txt").write_text(" ".join(texts(40, 7)))
    return tmp_path


def sources(folder: Path, *pairs: tuple[str, float]) -> list[DataSource]:
    return [DataSource(path=str(folder / name), weight=weight) for name, weight in pairs]


def test_text_is_read_as_before(folders: Path) -> None:
    path = str(folders / "c.txt")
    found = open_data(path, 8, 5)
    assert isinstance(found, PackedDataset)
    expected = PackedDataset(load_corpus(path), 8, 5)
    assert (found.rows(np.arange(20)).tokens_BS == expected.rows(np.arange(20)).tokens_BS).all()
    assert found.fingerprint == expected.corpus.fingerprint
    assert open_data("builtin", 8, 5, limit_bytes=10_000).vocab == 259


def test_a_prepared_folder_and_its_validation_split(folders: Path) -> None:
    train, held_out = (open_data(str(folders / "a"), 8, 5, split) for split in ("train", "validation"))
    assert isinstance(train, PreparedDataset)
    assert isinstance(held_out, PreparedDataset)
    assert train.documents + held_out.documents == 60
    one = open_data(sources(folders, ("a", 3)), 8, 5)
    assert (one.rows(np.arange(9)).tokens_BS == train.rows(np.arange(9)).tokens_BS).all()


def test_mixtures_of_everything(folders: Path) -> None:
    data = open_data(sources(folders, ("a", 0.5), ("b", 0.25), ("c.txt", 0.25)), 8, 5)
    assert isinstance(data, MixtureDataset)
    assert data.shares == (2, 1, 1)
    rows = data.rows(np.arange(400))
    again = open_data(sources(folders, ("a", 0.5), ("b", 0.25), ("c.txt", 0.25)), 8, 5).rows(np.arange(400))
    assert (rows.tokens_BS == again.tokens_BS).all()
    assert "0.5 " in data.describe()
    other = open_data(sources(folders, ("a", 0.5), ("b", 0.25), ("c.txt", 0.25)), 8, 6).rows(np.arange(400))
    assert (rows.tokens_BS != other.tokens_BS).any()


def test_the_same_folder_twice_is_not_read_in_step(folders: Path) -> None:
    data = open_data(sources(folders, ("a", 1), ("a", 1)), 8, 5)
    tokens = data.rows(np.arange(40)).tokens_BS
    assert (tokens[0::2] != tokens[1::2]).any()


def test_a_folder_prepared_with_weights_is_a_mixture_of_its_sources(tmp_path: Path) -> None:
    a = write_jsonl(tmp_path / "a.jsonl", [{"text": "a" * 20} for n in range(50)])
    b = write_jsonl(tmp_path / "b.jsonl", [{"text": "b" * 20} for n in range(5)])
    run([a, b], tmp_path / "out", weights=(0.25, 0.75))
    data = open_data(str(tmp_path / "out"), 22, 0)
    assert isinstance(data, MixtureDataset)
    tokens = data.rows(np.arange(100)).tokens_BS
    assert [(tokens == ord(letter)).any(axis=1).sum() for letter in "ab"] == [25, 75]


def test_what_cannot_be_opened(folders: Path) -> None:
    with pytest.raises(
        DataError, match=r"c.txt is text without a validation split; make one with `fivefold data pre"
    ):
        open_data(str(folders / "c.txt"), 8, 0, "validation")
    with pytest.raises(DataError, match="empty list"):
        open_data([], 8, 0)
    (folders / "half" / ".work").mkdir(parents=True)
    with pytest.raises(DataError, match="half is not prepared to the end: give the same"):
        open_data(str(folders / "half"), 8, 0)


def test_tokenizers_of_a_mixture_must_agree(folders: Path) -> None:
    pytest.importorskip("tokenizers")
    for n, vocab in enumerate((300, 310)):
        path = make_tokenizer(folders / f"t{n}", vocab=vocab)
        run(folders / "c.txt", folders / f"bpe{n}", tokenizer=str(path))
    for pair in (("a", "bpe0"), ("bpe0", "bpe1"), ("bpe0", "c.txt")):
        with pytest.raises(DataError, match="different tokenizers; a run needs one"):
            open_data(sources(folders, *((name, 1) for name in pair)), 8, 0)


def test_a_tokenizer_larger_than_the_model_is_refused_with_both_numbers(folders: Path) -> None:
    data = open_data(str(folders / "a"), 8, 0)
    check_vocab(data, 259, model="m")
    with pytest.raises(DataError, match="vocabulary of 259, model 'm' has 256"):
        check_vocab(data, 256, model="m")

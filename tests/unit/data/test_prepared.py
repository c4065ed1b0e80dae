from __future__ import annotations

import json
import pickle
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from preparing import run, texts, write_jsonl

import fivefold.data.prepared as prepared_module
from fivefold.data.batches import PackedDataset
from fivefold.data.corpus import build_corpus
from fivefold.data.manifest import read_manifest
from fivefold.data.prepared import PreparedDataset
from fivefold.errors import DataError, WorkloadError

FIELDS = ("tokens_BS", "labels_BS", "loss_mask_BS", "positions_BS", "document_ids_BS")


@pytest.fixture(scope="module")
def rows() -> list[str]:
    return texts(120)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, rows: list[str]) -> Path:
    """Many small shards, so that rows reach over their borders."""
    here = tmp_path_factory.mktemp("prepared")
    write_jsonl(here / "a.jsonl", [{"text": row} for row in rows])
    manifest = run(here / "a.jsonl", here / "out", shard_mib=0.0003)
    assert len(manifest.shards) > 30
    return here / "out"


@pytest.mark.parametrize("seq_len", [2, 7, 64, 1000, 5000])
def test_samples_are_those_of_the_same_text_in_memory(folder: Path, rows: list[str], seq_len: int) -> None:
    """Place by place: only the order of samples is another one."""
    corpus = build_corpus("x", [(str(n), row.encode()) for n, row in enumerate(rows)])
    memory, disk = PackedDataset(corpus, seq_len, 0), PreparedDataset(folder, seq_len, 0)
    assert len(memory) == len(disk)
    numbers = np.arange(len(disk))
    a = memory.rows(numbers[np.argsort(memory.order(numbers))])
    b = disk.rows(numbers[np.argsort(disk.order(numbers))])
    for name in FIELDS:
        assert (getattr(a, name) == getattr(b, name)).all(), name
        assert getattr(b, name).dtype == getattr(a, name).dtype
        assert getattr(b, name).flags.c_contiguous
        assert getattr(b, name).flags.writeable


def test_few_mapped_shards_give_the_same(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = PreparedDataset(folder, 64, 3).rows(np.arange(50))
    monkeypatch.setattr(prepared_module, "OPEN_SHARDS", 2)
    data = PreparedDataset(folder, 64, 3)
    found = data.rows(np.arange(50))
    assert all((getattr(expected, name) == getattr(found, name)).all() for name in FIELDS)
    assert len(data._mapped) <= 2


@settings(deadline=None, max_examples=30)
@given(number=st.integers(0, 10**12), seed=st.integers(0, 2**63 - 1))
def test_sample_k_depends_on_seed_and_k_alone(folder: Path, number: int, seed: int) -> None:
    data = PreparedDataset(folder, 32, seed)
    numbers = np.array([number + 5, number, number + 1])
    batch = data.rows(numbers)
    for row, k in enumerate(numbers.tolist()):
        alone = PreparedDataset(folder, 32, seed).rows(np.array([k]))
        assert (alone.tokens_BS[0] == batch.tokens_BS[row]).all()
        assert (alone.document_ids_BS[0] == batch.document_ids_BS[row]).all()


def test_an_epoch_has_each_sample_once_and_the_next_another_order(folder: Path) -> None:
    data = PreparedDataset(folder, 16, 1)
    n = len(data)
    first, second = data.order(np.arange(n)), data.order(np.arange(n, 2 * n))
    assert sorted(first.tolist()) == sorted(second.tolist()) == list(range(n))
    assert first.tolist() != second.tolist()
    assert PreparedDataset(folder, 16, 2).order(np.arange(n)).tolist() != first.tolist()


def test_validation_is_read_from_its_own_shards(tmp_path: Path, rows: list[str]) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", [{"text": row} for row in rows])
    manifest = run(source, tmp_path / "out", validation_frac=0.3)
    data = PreparedDataset(tmp_path / "out", 8, 0, "validation")
    assert data.documents == manifest.documents("validation") > 10
    assert data.fingerprint != PreparedDataset(tmp_path / "out", 8, 0).fingerprint
    batch = data.rows(np.arange(len(data)))
    expected = manifest.loss_tokens("validation")
    assert batch.valid_tokens == expected


def test_documents_can_be_read_one_by_one(folder: Path, rows: list[str]) -> None:
    data = PreparedDataset(folder, 8, 0)
    for number in (0, 57, 119):
        tokens, counts = data.document_tokens(number)
        assert bytes(tokens[1:-1].tolist()) == rows[number].encode()
        assert counts.all()
    with pytest.raises(DataError, match=r"no document 120; the train split has 0\.\.119"):
        data.document_tokens(120)


def test_it_can_be_sent_to_another_process(folder: Path) -> None:
    data = PreparedDataset(folder, 8, 0)
    expected = data.rows(np.arange(5))
    text = pickle.dumps(data)
    assert len(text) < 200_000  # the files stay where they are
    assert (pickle.loads(text).rows(np.arange(5)).tokens_BS == expected.tokens_BS).all()  # noqa: S301


def test_too_short_for_one_sample(folder: Path) -> None:
    tokens = read_manifest(folder)[0].tokens("train")
    with pytest.raises(
        DataError, match=rf"has {tokens} tokens; one sample needs {tokens + 1} .* at most {tokens - 1}$"
    ):
        PreparedDataset(folder, tokens, 0)
    with pytest.raises(WorkloadError, match="at least 2"):
        PreparedDataset(folder, 1, 0)
    with pytest.raises(DataError, match=r"has no validation split .*--validation-frac 0"):
        PreparedDataset(folder, 8, 0, "validation")


@pytest.fixture
def small(tmp_path: Path) -> Path:
    (tmp_path / "a.txt").write_text("some text to be damaged")
    run(tmp_path / "a.txt", tmp_path / "out")
    return tmp_path / "out"


@pytest.mark.parametrize("name", ["train-00000.tokens", "train-00000.offsets"])
def test_damaged_shards_are_named(small: Path, name: str) -> None:
    raw = (small / name).read_bytes()
    (small / name).write_bytes(raw[:8] + bytes([raw[8] ^ 1]) + raw[9:])
    with pytest.raises(DataError, match=rf"{name} is damaged: its sha256"):
        PreparedDataset(small, 8, 0)
    (small / name).write_bytes(raw[:-1])
    with pytest.raises(
        DataError, match=rf"{name} is damaged: {len(raw) - 1} bytes where the manifest says {len(raw)}"
    ):
        PreparedDataset(small, 8, 0, verify=False)
    (small / name).unlink()
    with pytest.raises(DataError, match=rf"{name} is missing"):
        PreparedDataset(small, 8, 0, verify=False)


def test_a_token_beyond_the_vocabulary_is_found_while_reading(small: Path) -> None:
    path = small / "train-00000.tokens"
    tokens = np.fromfile(path, "<u2")
    tokens[3] = 9999
    tokens.tofile(path)
    data = PreparedDataset(small, 8, 0, verify=False)
    with pytest.raises(
        DataError, match=r"train-00000.tokens is damaged: it holds token 9999 of a vocabulary of 259"
    ):
        data.rows(np.arange(len(data)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema_version": 2}, "written by a newer Fivefold .schema 2; this one reads 1."),
        ({"kind": "other"}, "no manifest of `fivefold data prepare`"),
        ({"tokens": 7}, "sizes of train-00000.tokens do not follow"),
        ({"name": "../../x"}, "shards.0.files.0.name: expected text of the form"),
        ({"extra": 1}, "unknown key 'extra'"),
    ],
)
def test_manifests_that_do_not_hold_are_refused(small: Path, change: dict[str, object], message: str) -> None:
    path = small / "manifest.json"
    data = json.loads(path.read_text())
    ((key, value),) = change.items()
    if key == "tokens":
        data["shards"][0][key] = value
    elif key == "name":
        data["shards"][0]["files"][0][key] = value
    else:
        data[key] = value
    path.write_text(json.dumps(data))
    with pytest.raises(DataError, match=message) as caught:
        PreparedDataset(small, 8, 0)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("text", ["", "{", "[]", "nul", "[" * 100_000])
def test_manifests_that_are_no_json_are_refused(small: Path, text: str) -> None:
    (small / "manifest.json").write_text(text)
    with pytest.raises(DataError, match=r"manifest.json (is damaged|is no manifest)"):
        PreparedDataset(small, 8, 0)


def test_no_manifest(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"cannot read manifest of prepared data .*manifest.json: No such file"
    ):
        PreparedDataset(tmp_path, 8, 0)

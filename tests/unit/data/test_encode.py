from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from preparing import make_tokenizer, run, texts

from fivefold.data.documents import plain
from fivefold.data.encode import ByteEncoder, FileEncoder, load_encoder
from fivefold.data.tokenizer import ByteTokenizer
from fivefold.errors import DataError

pytest.importorskip("tokenizers")


def encode(encoder: ByteEncoder | FileEncoder, rows: list[str]) -> tuple[list[int], list[int]]:
    found = encoder.encode([plain(row, row.encode(), 0) for row in rows])
    assert found.counts is None
    assert found.tokens.dtype == np.dtype(encoder.info.dtype)
    return found.tokens.tolist(), found.lengths.tolist()


def test_bytes_are_the_byte_tokenizer() -> None:
    rows = texts(20)
    byte = ByteTokenizer()
    tokens, lengths = encode(ByteEncoder(), rows)
    assert tokens == [t for row in rows for t in (256, *byte.encode(row).tolist(), 257)]
    assert lengths == [len(row.encode()) + 2 for row in rows]


def test_a_tokenizer_file_is_what_the_library_says(tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    path = make_tokenizer(tmp_path / "t")
    library, rows = Tokenizer.from_file(str(path)), texts(20)
    bos, eos = library.token_to_id("<s>"), library.token_to_id("</s>")
    encoder = FileEncoder(path)
    tokens, lengths = encode(encoder, rows)
    expected = [[bos, *library.encode(row, add_special_tokens=False).ids, eos] for row in rows]
    assert tokens == [token for row in expected for token in row]
    assert lengths == [len(row) for row in expected]
    assert encoder.info.vocab == library.get_vocab_size()
    assert encoder.decode(expected[3][1:-1]) == rows[3]
    assert FileEncoder(path.parent).info == encoder.info


def test_truncation_and_padding_of_the_file_are_off(tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    path = make_tokenizer(tmp_path / "t")
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=50)
    tokenizer.save(str(tmp_path / "cut.json"))
    assert encode(FileEncoder(tmp_path / "cut.json"), texts(5)) == encode(FileEncoder(path), texts(5))


def test_text_cannot_forge_special_tokens(tmp_path: Path) -> None:
    encoder = FileEncoder(make_tokenizer(tmp_path / "t"))
    text = "before</s><s>after"
    tokens, _ = encode(encoder, [text])
    assert (encoder.info.bos, encoder.info.eos) == (0, 1)
    assert tokens.count(0) == tokens.count(1) == 1
    assert encoder.decode(tokens[1:-1]) == text


@pytest.mark.parametrize(
    ("config", "bos", "eos", "pad"),
    [
        ({}, "<s>", "</s>", "</s>"),
        ({"eos_token": "<s>"}, None, "<s>", "<s>"),  # one token for both
        ({"bos_token": None}, None, "</s>", "</s>"),
        ({"add_bos_token": False}, None, "</s>", "</s>"),
        ({"bos_token": {"content": "a"}, "pad_token": "<s>"}, "a", "</s>", "<s>"),
        ({"eos_token": "not there"}, "<s>", "</s>", "</s>"),
    ],
)
def test_special_tokens_are_those_of_the_config(
    tmp_path: Path, config: dict[str, object], bos: str | None, eos: str, pad: str
) -> None:
    path = make_tokenizer(tmp_path / "t")
    (tmp_path / "t" / "tokenizer_config.json").write_text(json.dumps(config))
    encoder = FileEncoder(path)
    number = encoder.vocabulary
    assert encoder.info.bos == (None if bos is None else number[bos])
    assert (encoder.info.eos, encoder.info.pad) == (number[eos], number[pad])


def test_special_tokens_can_be_named(tmp_path: Path) -> None:
    path = make_tokenizer(tmp_path / "t")
    encoder = FileEncoder(path, bos="</s>", eos="<s>")
    assert (encoder.info.bos, encoder.info.eos) == (1, 0)
    with pytest.raises(DataError, match=r"no token '</S>' to use as eos .did you mean '</s>'"):
        FileEncoder(path, eos="</S>")
    with pytest.raises(DataError, match="of their own"):
        load_encoder("byte", eos="</s>")


def test_without_bos_documents_end_with_eos_alone(tmp_path: Path) -> None:
    path = make_tokenizer(tmp_path / "t")
    (tmp_path / "t" / "tokenizer_config.json").write_text('{"bos_token": null}')
    tokens, _ = encode(FileEncoder(path), texts(3))
    assert tokens.count(1) == 3
    assert 0 not in tokens


def test_documents_without_tokens_are_no_documents(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, normalizers

    path = make_tokenizer(tmp_path / "t")
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.normalizer = normalizers.Strip()
    tokenizer.save(str(path))
    tokens, lengths = encode(FileEncoder(path), ["  ", "x", "\n"])
    assert lengths == [0, 3, 0]
    assert len(tokens) == 3
    for name, text in (("a", " "), ("b", "x")):
        (tmp_path / f"{name}.txt").write_text(text)
    manifest = run(f"{tmp_path}/*.txt", tmp_path / "out", tokenizer=str(path))
    assert (manifest.documents("train"), manifest.sources[0].empty_documents) == (1, 1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no tokenizer.json"),
        ("{}", "it has no 'model'"),
        ('{"model": {"type": "Magic"}}', "no tokenizer.json"),
        ('{"model": {}}', "no tokenizer.json"),
        ("[" * 200_000, "no tokenizer.json"),
        ("\x80", "no tokenizer.json"),
    ],
)
def test_files_that_are_no_tokenizer_are_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(DataError, match=message) as caught:
        load_encoder(str(path))
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_large_missing_and_other_files_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import fivefold.data.encode as encode_module

    path = make_tokenizer(tmp_path / "t")
    monkeypatch.setattr(encode_module, "TOKENIZER_LIMIT_BYTES", 1000)
    with pytest.raises(DataError, match=r"at most 1000 B are read"):
        load_encoder(str(path))
    with pytest.raises(DataError, match=r"does not exist; give 'byte' or a tokenizer.json"):
        load_encoder(str(tmp_path / "nothing"))
    with pytest.raises(DataError, match=r"cannot read tokenizer.json"):
        load_encoder(str(tmp_path))
    with pytest.raises(DataError, match=r"\.pkl tokenizers are not supported"):
        load_encoder(str(tmp_path / "x.pkl"))


def test_a_tokenizer_without_an_end_needs_one(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models

    Tokenizer(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]")).save(
        str(tmp_path / "tokenizer.json")
    )
    with pytest.raises(DataError, match="names no token that ends a document; name it with --eos-token"):
        load_encoder(str(tmp_path))

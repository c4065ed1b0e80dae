from __future__ import annotations

import errno
import hashlib
import os
import sysconfig
import time
from pathlib import Path

import numpy as np
import pytest

from fivefold.data.corpus import Corpus, build_corpus, load_corpus
from fivefold.data.tokenizer import ByteTokenizer
from fivefold.errors import DataError

BOS, EOS = ByteTokenizer.bos, ByteTokenizer.eos


def texts(corpus: Corpus) -> dict[str, bytes]:
    """The documents, read back from tokens and offsets; checks the bos and eos of each."""
    out = {}
    for name, start, end in zip(corpus.names, corpus.offsets[:-1], corpus.offsets[1:]):
        document = corpus.tokens[start:end]
        assert (document[0], document[-1]) == (BOS, EOS)
        out[name] = document[1:-1].astype(np.uint8).tobytes()
    assert corpus.offsets[-1] == len(corpus.tokens)
    return out


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "one.md").write_text("é one")
    (tmp_path / "a.txt").write_text("first")
    (tmp_path / "z.py").write_text("last")
    (tmp_path / "empty.py").write_text("")
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\xff")
    return tmp_path


def test_builtin_corpus_is_the_source_of_this_python() -> None:
    start = time.process_time()
    corpus = load_corpus()
    assert time.process_time() - start < 1.5
    root = Path(sysconfig.get_paths()["stdlib"])
    documents = texts(corpus)
    for name in ("argparse.py", "asyncio/tasks.py"):
        assert documents[name] == (root / name).read_bytes()
    assert list(documents) == sorted(documents)
    assert corpus.text_bytes == sum(map(len, documents.values())) > 4_000_000
    parts = {part for name in documents for part in name.split("/")[:-1]}
    assert not parts & {"site-packages", "dist-packages", "__pycache__", "test", "tests"}
    assert load_corpus().fingerprint == corpus.fingerprint


def test_tokens_offsets_and_fingerprint_by_hand() -> None:
    corpus = build_corpus("x", [("a", b"AB"), ("b", b"C")])
    assert corpus.tokens.tolist() == [BOS, 65, 66, EOS, BOS, 67, EOS]
    assert corpus.offsets.tolist() == [0, 4, 7]
    assert (corpus.documents, corpus.text_bytes) == (2, 3)
    raw = b"".join(t.to_bytes(2, "little") for t in [BOS, 65, 66, EOS, BOS, 67, EOS])
    raw += b"".join(o.to_bytes(8, "little") for o in [0, 4, 7])
    assert corpus.fingerprint == hashlib.sha256(raw).hexdigest()


def test_tokens_cannot_be_written() -> None:
    corpus = build_corpus("x", [("a", b"AB")])
    with pytest.raises(ValueError, match="read-only"):
        corpus.tokens[0] = 1


def test_fingerprint_sees_content_and_borders() -> None:
    prints = {
        build_corpus("x", documents).fingerprint
        for documents in (
            [("a", b"AB"), ("b", b"C")],
            [("a", b"A"), ("b", b"BC")],
            [("a", b"AB"), ("b", b"D")],
            [("b", b"C"), ("a", b"AB")],
        )
    }
    assert len(prints) == 4
    assert build_corpus("y", [("other", b"AB")]).fingerprint == build_corpus("x", [("a", b"AB")]).fingerprint


def test_folder_takes_text_files_in_sorted_order(folder: Path) -> None:
    corpus = load_corpus(str(folder))
    assert texts(corpus) == {"a.txt": b"first", "b/one.md": "é one".encode(), "z.py": b"last"}
    assert list(corpus.names) == sorted(corpus.names)
    assert not corpus.cut


def test_file_and_glob(folder: Path) -> None:
    assert list(texts(load_corpus(str(folder / "z.py"))).values()) == [b"last"]
    found = texts(load_corpus(f"{folder}/**/*.[mt]*"))
    assert list(found.values()) == [b"first", "é one".encode()]
    (folder / "odd[1].weird").write_text("any name")
    assert list(texts(load_corpus(str(folder / "odd[1].weird"))).values()) == [b"any name"]


def test_limit_cuts_at_a_whole_letter_and_says_so(folder: Path) -> None:
    corpus = load_corpus(str(folder), limit_bytes=6)  # "first" and the first half of "é"
    assert texts(corpus) == {"a.txt": b"first"}
    assert corpus.cut
    assert "cut at the limit of 6 B" in corpus.describe()
    assert texts(load_corpus(str(folder), limit_bytes=7)) == {"a.txt": b"first", "b/one.md": "é".encode()}
    exact = load_corpus(str(folder), limit_bytes=15)
    assert exact.text_bytes == 15
    assert not exact.cut
    assert "(cut" not in exact.describe()


def test_no_text_files(tmp_path: Path) -> None:
    (tmp_path / "x.bin").write_bytes(b"1")
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(
        DataError, match=r"holds no text files with text in them \(\*.py, \*.txt, \*.md ...\)$"
    ):
        load_corpus(str(tmp_path))


def test_missing_and_impossible_paths(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="does not exist; give a file, a folder, a glob, or 'builtin'"):
        load_corpus(str(tmp_path / "nothing"))
    with pytest.raises(DataError, match="holds no text files"):
        load_corpus(f"{tmp_path}/*.txt")
    for name in ("a\0b", "x" * 5000):
        with pytest.raises(DataError):
            load_corpus(name)
    os.mkfifo(tmp_path / "pipe.txt")
    with pytest.raises(DataError, match="neither a file nor a folder"):
        load_corpus(str(tmp_path / "pipe.txt"))
    with pytest.raises(DataError, match="holds no text files"):
        load_corpus(str(tmp_path))
    with pytest.raises(DataError, match="at least 1 byte"):
        load_corpus(limit_bytes=0)


def test_not_text(tmp_path: Path) -> None:
    (tmp_path / "bad.txt").write_bytes(b"abc\xff")
    with pytest.raises(DataError, match=r"bad.txt is not UTF-8 text: invalid start byte at byte 3"):
        load_corpus(str(tmp_path))
    (tmp_path / "bad.txt").write_bytes("é".encode()[:1])
    with pytest.raises(DataError, match="not UTF-8"):
        load_corpus(str(tmp_path))


def test_unreadable_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "secret.txt").write_text("x")

    def refuse(*_: object) -> None:  # chmod does not stop root
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(DataError, match="Permission denied"):
        load_corpus(str(tmp_path))


def test_link_cycles_end(folder: Path) -> None:
    (folder / "b" / "loop").symlink_to(folder)
    assert load_corpus(str(folder)).documents == 3

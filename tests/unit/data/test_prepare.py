from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from preparing import contents, make_tokenizer, run, texts, write_jsonl

import fivefold.data.work as work_module
from fivefold.data.corpus import load_corpus
from fivefold.data.manifest import Manifest, check_sums, read_manifest
from fivefold.data.sources import PIECE_BYTES, cut_into_units, find_files
from fivefold.errors import DataError


def stream(folder: Path, split: str = "train") -> np.ndarray:
    """All tokens of a split, by reading the files as their description says."""
    manifest, _ = read_manifest(folder)
    files = [shard.files[0].name for shard in manifest.shards if shard.split == split]
    dtype = "<u2" if manifest.tokenizer.vocab <= 65536 else "<u4"
    return np.concatenate([np.fromfile(folder / name, dtype=dtype) for name in files])


def documents(folder: Path, split: str = "train") -> list[bytes]:
    """Documents of byte tokens, split at eos by hand."""
    out, current = [], bytearray()
    for token in stream(folder, split).tolist():
        if token == 257:
            out.append(bytes(current))
            current.clear()
        elif token == 256:
            assert not current
        else:
            current.append(token)
    assert not current
    return out


def test_a_folder_of_text_is_what_training_on_the_text_reads(tmp_path: Path) -> None:
    source = tmp_path / "text"
    for n, text in enumerate(texts(30)):
        path = source / f"d{n % 3}" / f"{n}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    (source / "empty.txt").touch()
    (source / "picture.png").write_bytes(b"\xff")
    manifest = run(source, tmp_path / "out", shard_mib=0.001)
    corpus = load_corpus(str(source))
    assert (stream(tmp_path / "out") == corpus.tokens).all()
    offsets = np.concatenate(
        [np.fromfile(tmp_path / "out" / s.files[1].name, "<i8")[1:] for s in manifest.shards[:1]]
    )
    assert offsets.tolist() == corpus.offsets[1 : len(offsets) + 1].tolist()
    assert manifest.documents("train") == corpus.documents
    assert len(manifest.shards) > 2
    check_sums(tmp_path / "out", manifest.shards)


@pytest.mark.parametrize("shard_mib", [0.0002, 0.001, 64])
def test_lines_are_documents_wherever_units_are_cut(tmp_path: Path, shard_mib: float) -> None:
    rows = texts(100)
    source = write_jsonl(tmp_path / "a.jsonl", [{"text": text, "id": n} for n, text in enumerate(rows)])
    manifest = run(source, tmp_path / "out", shard_mib=shard_mib)
    assert documents(tmp_path / "out") == [row.encode() for row in rows]
    assert (len(manifest.shards) > 20) == (shard_mib < 0.001)


def test_parquet_and_json_lines_of_the_same_text_are_the_same(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    rows = texts(100)
    write_jsonl(tmp_path / "a.jsonl", [{"body": text} for text in rows])
    for name, kind in (("plain", pa.string()), ("large", pa.large_string()), ("dict", None)):
        column = pa.array(rows, kind) if kind else pa.array(rows).dictionary_encode()
        table = pa.table({"n": list(range(100)), "body": column})
        parquet.write_table(table, tmp_path / f"{name}.parquet", row_group_size=13)
        manifest = run(tmp_path / f"{name}.parquet", tmp_path / name, shard_mib=0.001, text_column="body")
        assert documents(tmp_path / name) == [row.encode() for row in rows]
        assert len(manifest.shards) > 3
    lines = run(tmp_path / "a.jsonl", tmp_path / "lines", text_column="body")
    assert read_manifest(tmp_path / "plain")[0].sources[0].documents == lines.sources[0].documents


def test_a_large_text_is_cut_after_lines_and_nothing_is_lost(tmp_path: Path) -> None:
    line = "a line of text, with é in it\n"
    text = (line * (3 * PIECE_BYTES // len(line.encode()))).encode()
    (tmp_path / "big.txt").write_bytes(text)
    run(tmp_path / "big.txt", tmp_path / "out", shard_mib=1)
    found = documents(tmp_path / "out")
    assert b"".join(found) == text
    assert len(found) == 3
    assert all(document.endswith(b"\n") for document in found)


def test_a_large_text_without_lines_is_cut_between_letters(tmp_path: Path) -> None:
    text = "日".encode() * (PIECE_BYTES // 2)
    (tmp_path / "big.txt").write_bytes(text)
    run(tmp_path / "big.txt", tmp_path / "out")
    found = documents(tmp_path / "out")
    assert b"".join(found) == text
    assert len(found) == 2
    assert all(document.decode() for document in found)


def test_the_split_follows_the_text_alone(tmp_path: Path) -> None:
    rows = texts(400)
    write_jsonl(tmp_path / "a.jsonl", [{"text": text} for text in rows])
    write_jsonl(tmp_path / "b.jsonl", [{"text": text} for text in [*reversed(rows), *rows[:50]]])
    run(tmp_path / "a.jsonl", tmp_path / "a", validation_frac=0.2)
    run(tmp_path / "b.jsonl", tmp_path / "b", validation_frac=0.2, shard_mib=0.001)
    train, held_out = (documents(tmp_path / "a", split) for split in ("train", "validation"))
    assert sorted(train + held_out) == sorted(row.encode() for row in rows)
    assert not set(train) & set(held_out)
    assert 50 < len(held_out) < 110  # 80 +- 4 standard deviations
    assert set(documents(tmp_path / "b", "validation")) == set(held_out)
    assert set(documents(tmp_path / "b", "train")) == set(train)


def test_a_wider_share_keeps_what_was_held_out(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", [{"text": text} for text in texts(200)])
    held_out = []
    for n, frac in enumerate((0.1, 0.3)):
        run(source, tmp_path / str(n), validation_frac=frac)
        held_out.append(set(documents(tmp_path / str(n), "validation")))
    assert held_out[0] < held_out[1]


def test_several_sources_come_in_the_order_given(tmp_path: Path) -> None:
    a = write_jsonl(tmp_path / "a.jsonl", [{"text": f"a{n}"} for n in range(9)])
    (tmp_path / "b.txt").write_text("plain")
    manifest = run([tmp_path / "b.txt", a], tmp_path / "out", weights=(1, 3))
    assert documents(tmp_path / "out") == [b"plain"] + [b"a%d" % n for n in range(9)]
    assert [(s.documents, s.weight) for s in manifest.sources] == [(1, 1), (9, 3)]
    assert [shard.source for shard in manifest.shards] == [0, 1]


def test_the_fingerprint_of_a_source_is_that_of_its_text(tmp_path: Path) -> None:
    rows = texts(20)
    for name, keys in (("a", ("text", "x")), ("b", ("x", "text"))):
        write_jsonl(
            tmp_path / f"{name}.jsonl", [{k: row if k == "text" else 1 for k in keys} for row in rows]
        )
    changed = [*rows[:-1], rows[-1] + "!"]
    write_jsonl(tmp_path / "c.jsonl", [{"text": row} for row in changed])
    prints = [run(tmp_path / f"{n}.jsonl", tmp_path / n).sources[0].fingerprint for n in "abc"]
    assert prints[0] == prints[1] != prints[2]


def test_large_vocabularies_take_four_bytes(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    words = {f"w{n}": n for n in range(70_000)} | {"</s>": 70_000}
    model = tokenizers.models.WordLevel(words, unk_token="w0")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "a.txt").write_text("w69999 w1 w65536")
    manifest = run(tmp_path / "a.txt", tmp_path / "out", tokenizer=str(tmp_path / "tokenizer.json"))
    assert stream(tmp_path / "out").tolist() == [69999, 1, 65536, 70000]
    assert manifest.tokenizer.vocab == 70_001


def test_units_do_not_depend_on_how_many_files_there_are(tmp_path: Path) -> None:
    """Equal shares: no unit is more than a file's grain above the others."""
    for n in range(200):
        (tmp_path / f"{n:03}.txt").write_bytes(b"x" * 1000)
    files = find_files([str(tmp_path)], "auto", "text")
    units = cut_into_units(files, 50_000)
    sizes = [sum(files[part.file].bytes for part in unit.parts) for unit in units]
    assert sizes == [50_000] * 4


class Killed(BaseException):
    """Stands for the end of the process at a place."""


@pytest.fixture
def die_at(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """`die_at(n)`: raise Killed at the n-th call that reports progress; 0 lets everything pass."""

    def arm(count: int) -> None:
        calls = [0]
        original = work_module._Meter.add

        def add(self: object, unit: int, size: int) -> None:
            calls[0] += 1
            if calls[0] == count:
                raise Killed
            original(self, unit, size)  # type: ignore[arg-type]

        monkeypatch.undo()
        monkeypatch.setattr(work_module._Meter, "add", add)

    return arm


def test_an_interrupted_run_goes_on_and_ends_in_the_same_bytes(
    tmp_path: Path, die_at: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", [{"text": text} for text in texts(300)])
    options = {"validation_frac": 0.2, "shard_mib": 0.005, "tokenizer": str(make_tokenizer(tmp_path / "t"))}
    whole = run(source, tmp_path / "whole", **options)
    units = len({shard.files[0].name.split("-")[1] for shard in whole.shards})
    assert units >= 4
    kept = 0
    for at in range(1, units + 1):
        out = tmp_path / f"cut{at}"
        die_at(at)
        with pytest.raises(Killed):
            run(source, out, **options)
        assert not (out / "manifest.json").exists()
        before = {path.name: path.stat().st_mtime_ns for path in out.glob("*-*.tokens")}
        die_at(0)
        run(source, out, **options)
        assert contents(out) == contents(tmp_path / "whole")
        after = {path.name: path.stat().st_mtime_ns for path in out.glob("*-*.tokens")}
        kept += len([name for name in before if before[name] == after[name]])
        assert all(before[name] == after[name] for name in before)  # finished shards are not made again
    assert kept > 0


@pytest.mark.parametrize("damage", ["flip", "cut", "remove", "record"])
def test_a_finished_shard_that_was_damaged_is_made_again(
    tmp_path: Path, die_at: Callable[[int], None], damage: str
) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", [{"text": text} for text in texts(300)])
    run(source, tmp_path / "whole", shard_mib=0.005)
    out = tmp_path / "out"
    die_at(4)
    with pytest.raises(Killed):
        run(source, out, shard_mib=0.005)
    shard = out / "train-00001.tokens"
    raw = bytearray(shard.read_bytes())
    raw[10] ^= 1
    if damage == "flip":
        shard.write_bytes(raw)
    elif damage == "cut":
        shard.write_bytes(raw[:-1])
    elif damage == "remove":
        shard.unlink()
    else:
        (out / ".work" / "unit-00001.json").write_text('{"shards": [')
    die_at(0)
    run(source, out, shard_mib=0.005)
    assert contents(out) == contents(tmp_path / "whole")


def test_what_is_unfinished_is_not_mixed_with_anything_else(
    tmp_path: Path, die_at: Callable[[int], None]
) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", [{"text": text} for text in texts(300)])
    out = tmp_path / "out"
    die_at(3)
    with pytest.raises(Killed):
        run(source, out, shard_mib=0.005)
    die_at(0)
    with pytest.raises(DataError, match=r"unfinished preparation with other options; .*--restart"):
        run(source, out, shard_mib=0.004)
    os.utime(source, ns=(1, 1))
    with pytest.raises(DataError, match="unfinished preparation with other files"):
        run(source, out, shard_mib=0.005)
    run(source, out, shard_mib=0.02, restart=True)
    run(source, tmp_path / "whole", shard_mib=0.02)
    assert contents(out) == contents(tmp_path / "whole")


def test_a_finished_folder_is_not_overwritten(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", [{"text": text} for text in texts(30)])
    run(source, tmp_path / "out")
    before = contents(tmp_path / "out")
    with pytest.raises(DataError, match="prepared already"):
        run(source, tmp_path / "out", shard_mib=0.001)
    assert contents(tmp_path / "out") == before
    run(source, tmp_path / "out", shard_mib=0.001, restart=True)
    run(source, tmp_path / "other", shard_mib=0.001)
    assert contents(tmp_path / "out") == contents(tmp_path / "other")


def test_killed_between_the_manifest_and_the_clearing_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", [{"text": text} for text in texts(30)])
    remove = shutil.rmtree

    def killed(*_: object, **__: object) -> None:
        raise Killed

    monkeypatch.setattr(shutil, "rmtree", killed)
    with pytest.raises(Killed):
        run(source, tmp_path / "out")
    monkeypatch.setattr(shutil, "rmtree", remove)
    manifest = run(source, tmp_path / "out")
    assert manifest == read_manifest(tmp_path / "out")[0]
    assert not (tmp_path / "out" / ".work").exists()


def test_progress_ends_at_all(tmp_path: Path) -> None:
    from fivefold.data.prepare import PrepareOptions, prepare

    source = write_jsonl(tmp_path / "a.jsonl", [{"text": text} for text in texts(100)])
    seen: list[tuple[int, int, int, int]] = []
    options = PrepareOptions(validation_frac=0, shard_mib=0.002)
    prepare([str(source)], tmp_path / "out", options, workers=1, progress=lambda *now: seen.append(now))
    assert seen[-1][0] == seen[-1][1] == source.stat().st_size
    assert seen[-1][2] == seen[-1][3] == len(seen)


def test_the_manifest_is_plain_json(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("abc")
    manifest = run(tmp_path / "a.txt", tmp_path / "out")
    data = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert data["schema_version"] == 1
    assert data["shards"][0]["tokens"] == 5
    assert Manifest.model_validate(data) == manifest
    assert sorted(contents(tmp_path / "out")) == [
        "manifest.json",
        "train-00000.offsets",
        "train-00000.tokens",
    ]

"""Every kind of bad input ends in one line that names the file; with `skip`, broken records are counted."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import pytest
from preparing import contents, run, texts, write_jsonl

from fivefold.data.shards import Output
from fivefold.errors import DataError


def refused(match: str, *args: Any, **options: Any) -> str:
    with pytest.raises(DataError, match=match) as caught:
        run(*args, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


BROKEN = [
    (b'{"text": "x"', "not JSON: "),
    (b"hello", "not JSON: "),
    (b'["text"]', "not a JSON object but a list"),
    (b'{"body": "x"}', r"no key 'text' .its keys: body; choose with --text-column"),
    (b'{"text": null}', "its 'text' is a NoneType, not text"),
    (b'{"text": 5}', "its 'text' is a int, not text"),
    (b'{"text": "\xff"}', "not UTF-8: invalid start byte at byte 10 of the line"),
    (b'{"text": "\\ud800"}', "text that cannot be written as UTF-8"),
    (b'{"text": ' + b"[" * 100_000, "nested too deeply|not JSON"),
    (b'{"text": ' + b"9" * 10_000 + b"}", "."),
]


@pytest.mark.parametrize(("line", "message"), BROKEN, ids=range(len(BROKEN)))
@pytest.mark.parametrize("shard_mib", [64, 0.0001])
def test_a_broken_line_is_named(tmp_path: Path, line: bytes, message: str, shard_mib: float) -> None:
    rows = [json.dumps({"text": text}).encode() for text in texts(30)]
    rows[17:17] = [b"", line]  # line 19; a blank line is nothing
    source = tmp_path / "a.jsonl"
    source.write_bytes(b"\n".join(rows))
    refused(rf"a\.jsonl:19: ({message})", source, tmp_path / "out", shard_mib=shard_mib)
    manifest = run(source, tmp_path / "out", shard_mib=shard_mib, on_error="skip")
    assert (manifest.documents("train"), manifest.skipped) == (30, 1)
    assert len(manifest.skipped_examples) == 1
    assert manifest.skipped_examples[0].startswith(f"{source}:19: ")


def test_what_was_finished_before_a_broken_line_is_kept_for_skip(tmp_path: Path) -> None:
    rows = [json.dumps({"text": text}).encode() for text in texts(100)]
    source = tmp_path / "a.jsonl"
    source.write_bytes(b"\n".join([*rows[:60], b"broken", *rows[60:]]))
    refused("a.jsonl:61", source, tmp_path / "out", shard_mib=0.002)
    before = {p.name: p.stat().st_mtime_ns for p in (tmp_path / "out").glob("*.tokens")}
    assert before
    run(source, tmp_path / "out", shard_mib=0.002, on_error="skip")
    assert all((tmp_path / "out" / name).stat().st_mtime_ns == when for name, when in before.items())
    run(source, tmp_path / "other", shard_mib=0.002, on_error="skip")
    assert contents(tmp_path / "out") == contents(tmp_path / "other")


def test_stop_does_not_accept_what_skip_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import fivefold.data.prepare as prepare_module

    source = tmp_path / "a.jsonl"
    source.write_bytes(b'{"text": "x"}\nbroken\n')

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "manifest.json")

    with monkeypatch.context() as patched:
        patched.setattr(prepare_module, "_finish", full)
        refused("No space", source, tmp_path / "out", on_error="skip")
    refused("a.jsonl:2", source, tmp_path / "out")


def test_a_byte_order_mark_and_windows_lines_are_fine(tmp_path: Path) -> None:
    source = tmp_path / "a.jsonl"
    source.write_bytes(b'\xef\xbb\xbf{"text": "a"}\r\n\r\n{"text": "b"}\r\n')
    assert run(source, tmp_path / "out").documents("train") == 2


def test_a_line_without_end_is_not_read_into_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import fivefold.data.documents as documents_module

    monkeypatch.setattr(documents_module, "DOCUMENT_LIMIT_BYTES", 1000)
    source = write_jsonl(tmp_path / "a.jsonl", [{"text": "a"}, {"text": "x" * 5000}, {"text": "b"}])
    refused(r"a.jsonl:2: a line of 4.9 KiB; at most 1000 B", source, tmp_path / "out")
    manifest = run(source, tmp_path / "out", on_error="skip")
    assert (manifest.documents("train"), manifest.skipped) == (2, 1)


def test_text_that_is_not_utf8_is_named_with_line_and_byte(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"one\ntwo\nth\xffree\n")
    (tmp_path / "b.txt").write_bytes(b"fine")
    refused(r"a.txt:3: not UTF-8: invalid start byte at byte 10", tmp_path, tmp_path / "out")
    manifest = run(f"{tmp_path}/*.txt", tmp_path / "out", on_error="skip")
    assert (manifest.documents("train"), manifest.skipped) == (1, 1)


def test_parquet_that_does_not_hold(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    table = pa.table({"n": [1, 2, 3], "body": ["a", None, "c"]})
    path = tmp_path / "a.parquet"
    parquet.write_table(table, path)
    refused(
        r"a.parquet has no column 'text'; its columns: n, body .choose with --text-column",
        path,
        tmp_path / "o",
    )
    refused(r"column 'n' holds int64, not text; columns of text: body", path, tmp_path / "o", text_column="n")
    refused(r"a.parquet: row 1: its 'body' is null", path, tmp_path / "o", text_column="body")
    manifest = run(path, tmp_path / "o", text_column="body", on_error="skip")
    assert (manifest.documents("train"), manifest.skipped) == (2, 1)
    raw = path.read_bytes()
    path.write_bytes(raw[: len(raw) // 2])
    refused(r"a.parquet is no whole Parquet file", path, tmp_path / "p", text_column="body")
    path.write_bytes(b"")
    refused(r"a.parquet is no whole Parquet file", path, tmp_path / "p", text_column="body")


def test_parquet_damaged_inside(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    path = tmp_path / "a.parquet"
    parquet.write_table(pa.table({"text": texts(3000)}), path, compression="zstd")
    raw = bytearray(path.read_bytes())
    raw[100:3000] = bytes(2900)
    path.write_bytes(raw)
    refused(r"a.parquet is damaged at row \d+: ", path, tmp_path / "out")


@pytest.mark.parametrize("suffix", [".pkl", ".pickle", ".pt", ".pth", ".bin", ".npy", ".safetensors"])
def test_pickles_and_tensors_are_refused_by_name(tmp_path: Path, suffix: str) -> None:
    (tmp_path / f"a{suffix}").write_bytes(b"x")
    refused(
        rf"\{suffix} files are not supported .pickles can run code.",
        tmp_path / f"a{suffix}",
        tmp_path / "out",
    )
    refused(rf"\{suffix} files are not supported", f"{tmp_path}/a*", tmp_path / "out", format="text")


def test_archives_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl.gz").write_bytes(b"x")
    refused(r"\.gz files are not supported; unpack it first", tmp_path / "a.jsonl.gz", tmp_path / "out")


def test_sources_with_nothing_in_them(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "a.txt").touch()
    write_jsonl(tmp_path / "b.jsonl", [{"text": ""}, {"text": ""}])
    refused("does not exist; give files, folders, globs, or 'builtin'", tmp_path / "x", tmp_path / "out")
    refused(r"empty holds no files to read .\*\.py", tmp_path / "empty", tmp_path / "out")
    refused("matches no file", f"{tmp_path}/*.nothing", tmp_path / "out")
    refused("a.txt holds no text .1 files, all empty.", tmp_path / "a.txt", tmp_path / "out")
    refused("b.jsonl holds no documents with text", tmp_path / "b.jsonl", tmp_path / "out")
    (tmp_path / "c.jsonl").write_text("broken\n")
    said = refused("c.jsonl holds no documents", tmp_path / "c.jsonl", tmp_path / "out", on_error="skip")
    assert said.endswith("1 were skipped as broken")
    assert not (tmp_path / "out").exists()


def test_empty_splits_name_the_numbers(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", [{"text": text} for text in texts(5)])
    refused(
        r"validation split is empty: none of 5 documents .* share of 1e-05",
        source,
        tmp_path / "o",
        validation_frac=1e-5,
    )
    refused(r"training split is empty: all of 5 documents", source, tmp_path / "o", validation_frac=0.99999)
    run(source, tmp_path / "o", validation_frac=0)  # nothing of the failed ones is in the way


def test_a_full_disk_keeps_what_is_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", [{"text": text} for text in texts(200)])
    run(source, tmp_path / "whole", shard_mib=0.002)
    out, written = tmp_path / "out", [0]
    original = Output.write

    def write(self: Output, data: Any) -> None:
        written[0] += data.nbytes
        if written[0] > 15_000:
            self.file.close()
            self.file = Path("/dev/full").open("wb", buffering=0)  # noqa: SIM115
        original(self, data)

    with monkeypatch.context() as patched:
        patched.setattr(Output, "write", write)
        said = refused("cannot write .*train-.*No space left on device", source, out, shard_mib=0.002)
    assert "units are finished and kept: the same command goes on from there" in said
    before = {p.name: p.stat().st_mtime_ns for p in out.glob("*.tokens")}
    assert before
    run(source, out, shard_mib=0.002)
    assert all((out / name).stat().st_mtime_ns == when for name, when in before.items())
    assert contents(out) == contents(tmp_path / "whole")


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    refused(r"cannot write to .*a.txt/out: Not a directory", tmp_path / "a.txt", tmp_path / "a.txt" / "out")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weights": (1, 2)}, "2 weights for 1 sources"),
        ({"weights": (0.1234567,) * 1, "workers": 0}, "workers must be at least 1, got 0"),
    ],
)
def test_options_that_do_not_hold(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    (tmp_path / "a.txt").write_text("text")
    refused(message, tmp_path / "a.txt", tmp_path / "out", **options)

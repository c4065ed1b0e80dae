"""Files of the safetensors library read by us and the reverse; and files that somebody damaged or made up."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from fivefold.errors import ModelError
from fivefold.nn.safetensors_io import FLOATS, MOST_HEADER_BYTES, TensorFile, read_header, read_region

TENSORS = {
    "a": torch.arange(60.0).view(10, 6),
    "b": torch.arange(7, dtype=torch.bfloat16),
    "c": torch.arange(12, dtype=torch.float64).view(3, 4),
    "d": torch.zeros(0, 4),
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    save_file(TENSORS, tmp_path / "x.safetensors", {"format": "pt"})
    return tmp_path / "x.safetensors"


def parts(path: Path) -> tuple[dict[str, Any], bytes]:
    """The header and the data of a file, by the format's definition."""
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def put_together(path: Path, header: Any, data: bytes) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def test_header_of_the_library(path: Path) -> None:
    header = read_header(path)
    assert {name: entry.shape for name, entry in header.entries.items()} == {
        name: tuple(tensor.shape) for name, tensor in TENSORS.items()
    }
    assert {name: FLOATS[entry.dtype] for name, entry in header.entries.items()} == {
        name: tensor.dtype for name, tensor in TENSORS.items()
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_every_region(path: Path, dtype: torch.dtype) -> None:
    """All rectangles of a 10 x 6 tensor and all stretches of 7, into a target of equal and of larger size."""
    entries = read_header(path).entries
    for top in range(10):
        for bottom in range(top, 11):
            for left, right in [(0, 6), (0, 2), (2, 4), (5, 6), (3, 3)]:
                want = TENSORS["a"][top:bottom, left:right].to(dtype)
                for more in (0, 2):
                    into = torch.full((bottom - top + more, right - left + more), -1.0, dtype=dtype)
                    n = read_region(entries["a"], (slice(top, bottom), slice(left, right)), into)
                    assert n == want.numel() * 4
                    assert torch.equal(into[: bottom - top, : right - left], want)
                    assert int((into == -1).sum()) == into.numel() - want.numel()
    for start in range(8):
        into = torch.zeros(7 - start, dtype=dtype)
        assert read_region(entries["b"], (slice(start, 7),), into) == 2 * (7 - start)
        assert torch.equal(into, TENSORS["b"][start:].to(dtype))


def test_the_library_reads_what_we_write(tmp_path: Path) -> None:
    """Values in parts, in any order, of another dtype; narrow tensors of odd sizes first."""
    file = TensorFile(
        tmp_path / "y.safetensors",
        {"b": (torch.bfloat16, (7,)), "a": (torch.float32, (10, 6)), "c": (torch.float64, (3, 4))},
    )
    file.write("a", 4, TENSORS["a"][4:].double())
    file.write("c", 0, TENSORS["c"].t().contiguous().t())
    file.write("b", 0, TENSORS["b"].float())
    file.write("a", 0, TENSORS["a"][:4])
    file.close()
    got = load_file(tmp_path / "y.safetensors")
    assert set(got) == {"a", "b", "c"}
    for name, tensor in got.items():
        assert tensor.dtype == TENSORS[name].dtype
        assert torch.equal(tensor, TENSORS[name])
    with safe_open(tmp_path / "y.safetensors", "pt") as opened:
        assert opened.metadata() == {"format": "pt"}
    assert file.size_bytes == (tmp_path / "y.safetensors").stat().st_size
    read_header(tmp_path / "y.safetensors")


def test_a_file_with_values_missing_is_our_fault(tmp_path: Path) -> None:
    file = TensorFile(tmp_path / "y.safetensors", {"a": (torch.float32, (10, 6))})
    file.write("a", 0, TENSORS["a"][:9])
    with pytest.raises(AssertionError, match="24 bytes were declared but not written"):
        file.close()
    file.abandon()


def entry(dtype: Any = "F32", shape: Any = (2, 2), offsets: Any = (0, 16)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


HEADERS: dict[str, tuple[Any, str]] = {
    "shape larger than its bytes": (
        {"x": entry(shape=[2, 3])},
        r"tensor 'x' lies: F32 \[2, 3\] takes 24 bytes.*16",
    ),
    "product beyond 64 bits": ({"x": entry(shape=[2**62, 2**62])}, "lies"),
    "beyond the file": ({"x": entry(shape=[10**6], offsets=[0, 4 * 10**6])}, "ends at byte 4000.*cut short"),
    "overlap": ({"x": entry(), "y": entry(shape=[2], offsets=[8, 16])}, "tensor 'y' .* overlaps tensor 'x'"),
    "the same bytes twice": ({"x": entry(), "y": entry()}, "tensor 'y' .* overlaps tensor 'x'"),
    "hole": ({"x": entry(shape=[2], offsets=[8, 16])}, "tensor 'x' .* leaves a hole after the header"),
    "bytes left over": ({"x": entry(shape=[3], offsets=[0, 12])}, "4 bytes after its last tensor"),
    "nothing but data": ({}, "16 bytes after its last tensor"),
    "end before begin": ({"x": entry(offsets=[16, 0])}, r"data_offsets \[16, 0\]"),
    "negative": ({"x": entry(offsets=[-16, 0])}, "data_offsets"),
    "one offset": ({"x": entry(offsets=[0])}, "data_offsets"),
    "offsets as text": ({"x": entry(offsets=["0", "16"])}, "data_offsets"),
    "negative shape": ({"x": entry(shape=[-2, -2])}, "shape"),
    "fraction": ({"x": entry(shape=[2.0, 2.0])}, "shape"),
    "true": ({"x": entry(shape=[True, 4])}, "shape"),
    "many dims": ({"x": entry(shape=[1] * 99 + [4])}, "shape .*at most 8"),
    "unknown dtype": ({"x": entry(dtype="F33")}, "tensor 'x' has dtype 'F33'"),
    "dtype that is no text": ({"x": entry(dtype=["F32"])}, "has dtype"),
    "entry that is no object": ({"x": [1, 2]}, "must have exactly dtype, shape and data_offsets"),
    "field too many": ({"x": {**entry(), "more": 1}}, "must have exactly"),
    "field too few": ({"x": {"dtype": "F32", "shape": [4]}}, "must have exactly"),
    "a list": ([1], "must be a JSON object"),
    "no JSON": (b"{", "the header is not valid"),
    "no text": (b"\xff\xfe{}", "the header is not valid"),
    "deep": (b"[" * 100_000, "nested too deeply"),
    "a number of 5000 digits": (b'{"x": 1' + b"0" * 5000 + b"}", "the header is not valid"),
    "a name twice": (
        b'{"x":{"dtype":"F32","shape":[4],"data_offsets":[0,16]},"x":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}}',
        "'x' stands there twice",
    ),
    "a long name over lines": ({"a\nb" * 999: entry(dtype="F33")}, "has dtype 'F33'"),
}


@pytest.mark.parametrize("name", HEADERS)
def test_headers_that_lie(name: str, tmp_path: Path) -> None:
    header, message = HEADERS[name]
    path = tmp_path / "x.safetensors"
    put_together(path, header, bytes(16))
    with pytest.raises(ModelError, match=message) as caught:
        read_header(path)
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 600


def test_files_that_are_cut_short(path: Path) -> None:
    """At every length: never accepted, always one line."""
    content = path.read_bytes()
    for length in range(len(content)):
        path.write_bytes(content[:length])
        with pytest.raises(ModelError, match=r"safetensors") as caught:
            read_header(path)
        assert "\n" not in str(caught.value)


def test_a_huge_header_is_not_read(path: Path) -> None:
    for length in (MOST_HEADER_BYTES + 1, 2**63, 2**64 - 1):
        path.write_bytes(length.to_bytes(8, "little") + b"{}" * 50)
        with pytest.raises(ModelError, match=f"its header has {length} bytes, at most"):
            read_header(path)


def test_what_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.safetensors")
    (tmp_path / "folder.safetensors").mkdir()
    for name in ("pipe", "folder"):
        with pytest.raises(ModelError, match="is not a regular file"):
            read_header(tmp_path / f"{name}.safetensors")
    with pytest.raises(ModelError, match="No such file"):
        read_header(tmp_path / "none.safetensors")


def test_a_file_that_is_cut_after_it_was_opened(path: Path) -> None:
    """A map of it would end the process."""
    entries = read_header(path).entries
    os.truncate(path, entries["a"].start + 100)
    for columns in (slice(0, 6), slice(1, 3)):
        into = torch.zeros(10, columns.stop - columns.start)
        with pytest.raises(ModelError, match=r"cut short: \d+ bytes are missing after byte"):
            read_region(entries["a"], (slice(0, 10), columns), into)
    path.unlink()
    with pytest.raises(ModelError, match="No such file"):
        read_region(entries["a"], (slice(0, 10), slice(0, 6)), torch.zeros(10, 6))


def damage(content: bytes, chance: random.Random) -> bytes:
    """Up to four bytes or runs of bytes changed, put in or taken out, in the length and the header above all."""
    damaged = bytearray(content)
    for _ in range(chance.randint(1, 4)):
        at, kind = chance.randrange(min(len(damaged), 8 + 400)), chance.random()
        some = bytes(chance.choices(b'0123456789[]{}",:.-eF\x00\xff', k=chance.randint(1, 5)))
        if kind < 0.6:
            damaged[at] = some[0]
        elif kind < 0.7:
            damaged[at] = chance.randrange(256)
        elif kind < 0.85:
            del damaged[at : at + len(some)]
        else:
            damaged[at:at] = some
    return bytes(damaged)


def test_random_damage_gives_a_header_that_holds_or_one_line(path: Path) -> None:
    """1,000 files; what is accepted can be read to the last byte."""
    content, chance = path.read_bytes(), random.Random(0)
    messages = []
    for _ in range(1000):
        path.write_bytes(damage(content, chance))
        try:
            entries = read_header(path).entries
        except ModelError as error:
            messages.append(str(error))
            continue
        for one in entries.values():
            if one.dtype in FLOATS and 1 <= len(one.shape) <= 2:
                into = torch.empty(one.shape)
                assert read_region(one, [slice(0, n) for n in one.shape], into) == one.stop - one.start
    assert 600 < len(messages) < 1000
    assert not [message for message in messages if "\n" in message]

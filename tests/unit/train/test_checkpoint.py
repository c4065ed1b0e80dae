"""The format of a checkpoint: any region from any pieces, and one clear line for whatever is damaged."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor

from fivefold.errors import CheckpointError
from fivefold.train import checkpoint as module
from fivefold.train.checkpoint import (
    Manifest,
    Piece,
    Region,
    abandoned,
    checkpoints,
    merge_tensors,
    write_pieces,
)
from fivefold.train.checkpoint_reader import Reader, check_files

KEY = "weights/layers.0.mlp.up.weight"


def region(*parts: tuple[int, int]) -> Region:
    return tuple(slice(start, stop) for start, stop in parts)


def write(folder: Path, ranks: list[list[Piece]]) -> Manifest:
    """A checkpoint of step 4 as these ranks write it."""
    folder.mkdir(parents=True, exist_ok=True)
    parts = [write_pieces(folder, rank, pieces) for rank, pieces in enumerate(ranks)]
    manifest = Manifest(
        step=4,
        next_sample=32,
        updates=4,
        seed=0,
        data="abc",
        plan={},
        tensors=merge_tensors([tensors for tensors, _ in parts]),
        files={name: entry for _, files in parts for name, entry in files.items()},
    )
    (folder / "manifest.json").write_text(manifest.to_json())
    return manifest


def cut(values: Tensor, rows: list[int], columns: list[int]) -> list[Piece]:
    """One piece for each cell of a grid of boundaries."""
    cells = itertools.product(itertools.pairwise(rows), itertools.pairwise(columns))
    return [
        Piece(KEY, tuple(values.shape), region(r, c), values[r[0] : r[1], c[0] : c[1]].contiguous())
        for r, c in cells
    ]


@pytest.fixture
def values() -> Tensor:
    return torch.randn(7, 5, dtype=torch.float64)


@pytest.fixture
def saved(tmp_path: Path, values: Tensor) -> Path:
    """Two ranks, each with half of the rows."""
    folder = tmp_path / "step-00000004"
    pieces = cut(values, [0, 4, 7], [0, 5])
    write(folder, [[pieces[0]], [pieces[1]]])
    return folder


def load(folder: Path) -> Tensor:
    """As one rank loads the whole tensor."""
    manifest = Manifest.load(folder)
    check_files(folder, manifest, rank=0, ranks=1)
    target = torch.full((7, 5), torch.nan, dtype=torch.float64)
    Reader(folder, manifest).read_into(target, KEY, (7, 5), region((0, 7), (0, 5)))
    return target


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_every_region_from_every_cut(tmp_path: Path, dtype: torch.dtype) -> None:
    """Brute force: all row ranges and column ranges, from four ways to cut, and only their own bytes are read."""
    values = torch.randn(7, 5, dtype=torch.float64).to(dtype)
    cuts = [([0, 7], [0, 5]), ([0, 2, 4, 6, 7], [0, 5]), ([0, 7], [0, 3, 5]), ([0, 4, 7], [0, 1, 4, 5])]
    for number, (rows, columns) in enumerate(cuts):
        folder = tmp_path / str(number)
        pieces = cut(values, rows, columns)
        manifest = write(folder, [pieces[0::2], pieces[1::2]])
        assert Manifest.load(folder) == manifest
        for a, b in itertools.combinations(range(8), 2):
            for c, d in itertools.combinations(range(6), 2):
                reader = Reader(folder, manifest)
                target = torch.full((b - a, d - c), torch.nan, dtype=dtype)
                reader.read_into(target, KEY, (7, 5), region((a, b), (c, d)))
                assert torch.equal(target, values[a:b, c:d])
                assert reader.bytes_read == target.numel() * target.itemsize


def test_an_empty_region_reads_nothing(saved: Path) -> None:
    """What the last rank holds of a vocabulary that is smaller than its padding."""
    reader = Reader(saved, Manifest.load(saved))
    reader.read_into(torch.empty(0, 5, dtype=torch.float64), KEY, (7, 5), region((7, 7), (0, 5)))
    assert reader.bytes_read == 0


def test_a_rank_without_pieces_writes_no_file(tmp_path: Path) -> None:
    assert write_pieces(tmp_path, 3, []) == ({}, {})
    assert list(tmp_path.iterdir()) == []


def test_files_can_be_read_by_others(saved: Path, values: Tensor) -> None:
    """They are plain safetensors."""
    found = safetensors.torch.load_file(saved / "rank-00001.safetensors")
    assert list(found) == [f"{KEY}@4,0"]
    assert torch.equal(found[f"{KEY}@4,0"], values[4:])


# ---------------------------------------------------------------------------------------------------------------------


def flip(folder: Path) -> None:
    path = folder / "rank-00001.safetensors"
    data = bytearray(path.read_bytes())
    data[-3] ^= 0x10
    path.write_bytes(data)


def truncate(folder: Path) -> None:
    path = folder / "rank-00001.safetensors"
    os.truncate(path, path.stat().st_size - 1)


def forge(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the manifest and make its checksum right again."""
    path = folder / "manifest.json"
    data = json.loads(path.read_text())
    del data["checksum"]
    change(data)
    text = json.dumps(data, sort_keys=True, separators=(",", ":"))
    path.write_text(json.dumps({**data, "checksum": hashlib.sha256(text.encode()).hexdigest()}))


def refile(folder: Path, content: bytes) -> None:
    """Put another file in place, and let the manifest agree with it."""
    (folder / "rank-00001.safetensors").write_bytes(content)
    entry = {"size_bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    forge(folder, lambda data: data["files"].update({"rank-00001.safetensors": entry}))


def lie(folder: Path, **changes: Any) -> None:
    """A header that says something else than the manifest, or than there is."""
    old = (folder / "rank-00001.safetensors").read_bytes()
    size = struct.unpack("<Q", old[:8])[0]
    header = json.loads(old[8 : 8 + size])
    header[f"{KEY}@4,0"].update(changes)
    text = json.dumps(header).encode()
    refile(folder, struct.pack("<Q", len(text)) + text + old[8 + size :])


def edit(folder: Path, old: str, new: str) -> None:
    path = folder / "manifest.json"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


def piece(data: dict[str, Any], number: int) -> dict[str, Any]:
    found: dict[str, Any] = data["tensors"][KEY]["pieces"][number]
    return found


FAULTS: list[tuple[str, Callable[[Path], object], str]] = [
    (
        "flipped bit",
        flip,
        r"rank-00001.safetensors is damaged: its checksum is not .*remove this one's folder",
    ),
    ("truncated", truncate, r"rank-00001.safetensors is damaged: \d+ bytes, its manifest says \d+"),
    ("no file", lambda f: (f / "rank-00000.safetensors").unlink(), r"cannot read .*No such file"),
    ("no manifest", lambda f: (f / "manifest.json").unlink(), "is no checkpoint: it has no manifest.json"),
    (
        "cut manifest",
        lambda f: os.truncate(f / "manifest.json", 300),
        "manifest.json is damaged: not a JSON text",
    ),
    ("empty manifest", lambda f: os.truncate(f / "manifest.json", 0), "damaged: not a JSON text"),
    ("binary", lambda f: (f / "manifest.json").write_bytes(b"\xff\xfe\x00"), "is not UTF-8 text"),
    ("a list", lambda f: (f / "manifest.json").write_text("[1]"), "damaged: not a JSON object"),
    ("deep", lambda f: (f / "manifest.json").write_text("[" * 200_000), "damaged: not a JSON text"),
    (
        "long",
        lambda f: (f / "manifest.json").write_text('{"step": 1' + "0" * 9999),
        "damaged: not a JSON text",
    ),
    (
        "changed digit",
        lambda f: edit(f, '"step": 4', '"step": 5'),
        "its content is not what its checksum says",
    ),
    ("newer", lambda f: edit(f, '"schema_version": 1', '"schema_version": 2'), "schema version 2 .* reads 1"),
    (
        "no version",
        lambda f: edit(f, '"schema_version"', '"version"'),
        "schema version None is not supported",
    ),
    ("missing key", lambda f: forge(f, lambda d: d.pop("seed")), "missing key 'seed'"),
    ("unknown key", lambda f: forge(f, lambda d: d.update(more=1)), "unknown key 'more'"),
    ("negative step", lambda f: forge(f, lambda d: d.update(step=-1)), "step: .*got -1"),
    (
        "leads out",
        lambda f: forge(
            f, lambda d: d["files"].update({"../../secret": d["files"]["rank-00000.safetensors"]})
        ),
        r"files.*\.\./\.\./secret",
    ),
    (
        "piece leads out",
        lambda f: forge(f, lambda d: piece(d, 0).update(file="/etc/passwd")),
        "pieces.0.file.*/etc/passwd",
    ),
    (
        "file not listed",
        lambda f: forge(f, lambda d: piece(d, 0).update(file="rank-00009.safetensors")),
        "rank-00009.safetensors, which has a piece of .*up.weight, is not among its files",
    ),
    (
        "piece outside",
        lambda f: forge(f, lambda d: piece(d, 1).update(start=[5, 0])),
        r"piece at \[5, 0\] of shape \[3, 5\] is not inside \[7, 5\]",
    ),
    (
        "negative start",
        lambda f: forge(f, lambda d: piece(d, 1).update(start=[-1, 0])),
        r"\[-1, 0\] .* not inside",
    ),
    ("dims", lambda f: forge(f, lambda d: piece(d, 1).update(start=[4])), r"piece at \[4\] .* not inside"),
    (
        "a piece too few",
        lambda f: forge(f, lambda d: d["tensors"][KEY]["pieces"].pop()),
        "the pieces of .*up.weight hold 20 of 35 elements",
    ),
    (
        "a piece twice: as many elements, and a gap",
        lambda f: forge(
            f, lambda d: d["tensors"][KEY]["pieces"].append({**piece(d, 0), "start": [3, 0], "shape": [4, 5]})
        ),
        r"the piece at \[\d, 0\] has elements that another one has as well",
    ),
    ("more updates than steps", lambda f: forge(f, lambda d: d.update(updates=9)), "9 updates in 4 steps"),
    (
        "another step than its folder says",
        lambda f: forge(f, lambda d: d.update(step=3, updates=3)),
        "holds the checkpoint of step 3: rename it to step-00000003",
    ),
    (
        "another name",
        lambda f: forge(f, lambda d: piece(d, 1).update(name="what")),
        "rank-00001.safetensors: what: .*(does not contain|not found)",
    ),
    ("dtype", lambda f: forge(f, lambda d: d["tensors"][KEY].update(dtype="float16")), "dtype.*float16"),
    (
        "wrong dtype",
        lambda f: forge(f, lambda d: d["tensors"][KEY].update(dtype="float32")),
        "is float32, the run",
    ),
    (
        "gone tensor",
        lambda f: forge(f, lambda d: d["tensors"].update(other=d["tensors"].pop(KEY))),
        "the tensor 'weights/layers.0.mlp.up.weight' is missing",
    ),
    (
        "wrong shape",
        lambda f: forge(f, lambda d: d["tensors"][KEY].update(shape=[8, 5])),
        r"up.weight has shape \[8, 5\], the model wants \[7, 5\]",
    ),
    ("header: another shape", lambda f: lie(f, shape=[5, 3]), r"shape \[5, 3\], its manifest says \[3, 5\]"),
    (
        "header: another dtype",
        lambda f: lie(f, dtype="F32", data_offsets=[0, 60]),
        "rank-00001.safetensors: ",
    ),
    ("header: long data", lambda f: lie(f, data_offsets=[0, 10**12]), "rank-00001.safetensors: "),
    ("header: negative", lambda f: lie(f, data_offsets=[-8, 112]), "rank-00001.safetensors: "),
    ("header: huge", lambda f: refile(f, struct.pack("<Q", 2**60) + b"{}"), "rank-00001.safetensors: "),
    ("header: none", lambda f: refile(f, b""), "rank-00001.safetensors: "),
    ("header: no JSON", lambda f: refile(f, struct.pack("<Q", 4) + b"nope"), "rank-00001.safetensors: "),
]


@pytest.mark.parametrize(("fault", "words"), [f[1:] for f in FAULTS], ids=[f[0] for f in FAULTS])
def test_damage_is_one_line(saved: Path, fault: Callable[[Path], object], words: str) -> None:
    fault(saved)
    with pytest.raises(CheckpointError, match=words) as caught:
        load(saved)
    assert "\n" not in str(caught.value)
    assert str(saved) in str(caught.value)


def test_undamaged(saved: Path, values: Tensor) -> None:
    assert torch.equal(load(saved), values)


def test_a_huge_manifest_is_not_read(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LARGEST_MANIFEST_BYTES", 500)
    with pytest.raises(CheckpointError, match=r"manifest.json has .*; at most 500 B are read"):
        Manifest.load(saved)


def test_each_file_is_hashed_by_one_rank(saved: Path) -> None:
    """Every rank looks at every size; the ranks share the work of the checksums."""
    flip(saved)
    manifest = Manifest.load(saved)
    check_files(saved, manifest, rank=0, ranks=2)
    with pytest.raises(CheckpointError, match=r"rank-00001.safetensors is damaged"):
        check_files(saved, manifest, rank=1, ranks=2)


def test_what_is_a_checkpoint(tmp_path: Path, values: Tensor) -> None:
    """Only a folder of that name with a manifest; by step, also above 99,999,999."""
    for name in (
        "step-00000020",
        "step-00000003",
        "step-123456789",
        "step-00000030.partial",
        "step-4",
        "other",
    ):
        write(tmp_path / name, [cut(values, [0, 7], [0, 5])])
    (tmp_path / "step-00000040").mkdir()
    (tmp_path / "step-mine.partial").mkdir()
    (tmp_path / "step-00000050").write_text("a file")
    assert [step for step, _ in checkpoints(tmp_path)] == [3, 20, 123456789]
    assert [path.name for path in abandoned(tmp_path)] == ["step-00000030.partial"]
    assert checkpoints(tmp_path / "absent") == []
    with pytest.raises(CheckpointError, match=r"cannot look for checkpoints in .*Not a directory"):
        checkpoints(tmp_path / "step-00000050")

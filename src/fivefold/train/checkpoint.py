"""The format of a checkpoint: safetensors files of tensor pieces, and a manifest that says what they are.

    step-00000100/
      manifest.json             written last: step, plan, data position, every tensor's pieces, every file's checksum
      rank-00000.safetensors    the pieces that rank 0 wrote
      ...
      model/                    what an export needs beside the weights: config.json, tokenizer files

Names are global (`weights/layers.3.mlp.down.weight`) and every piece says which region of the global tensor it is,
so a run saved under one layout is read under any other: each rank reads only the bytes of its own regions.
Nothing in it is ever executed: no pickle. A folder without a manifest is not a checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import torch
from pydantic import Field, JsonValue, StringConstraints, model_validator
from torch import Tensor

from fivefold.core.loss_scale import LossScaleState
from fivefold.core.regular_file import read_text
from fivefold.core.value import Value
from fivefold.errors import CheckpointError, ConfigError, ModelError
from fivefold.nn.hub_files import COMPANIONS, MOST_COMPANION_BYTES, read_small
from fivefold.nn.safetensors_io import TensorFile, byte_view
from fivefold.units import MIB

MANIFEST = "manifest.json"
SCHEMA_VERSION: Literal[1] = 1
LARGEST_MANIFEST_BYTES = 512 * MIB
HASH_CHUNK_BYTES = 32 * MIB
"""Each chunk takes Python's lock from a step that is under way twice, so they are few."""
OTHER_ONE = "to resume from an earlier checkpoint, remove this one's folder"
PARTIAL = ".partial"
MODEL = "model"
"""Folder of the files that an export needs beside the weights."""
FOLDER_NAME = re.compile(r"step-([0-9]{8,})")
DTYPES: dict[str, torch.dtype] = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
}

Region = tuple[slice, ...]
FileName = Annotated[str, StringConstraints(pattern=r"^rank-[0-9]{5,}\.safetensors$")]
"""Nothing that could lead out of the checkpoint's folder."""


class PieceEntry(Value):
    """One piece of a tensor: the tensor `name` in `file` is the region that starts at `start`."""

    file: FileName
    name: str
    start: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def region(self) -> Region:
        return tuple(slice(a, a + n) for a, n in zip(self.start, self.shape))


class TensorEntry(Value):
    """A global tensor and where its pieces are."""

    shape: tuple[int, ...]
    dtype: Literal["float64", "float32", "bfloat16"]
    pieces: tuple[PieceEntry, ...]

    @model_validator(mode="after")
    def _pieces_inside(self) -> Self:
        for piece in self.pieces:
            places = list(zip(piece.start, piece.shape, self.shape))
            fits = len(piece.start) == len(piece.shape) == len(self.shape)
            if not fits or any(start < 0 or n < 1 or start + n > size for start, n, size in places):
                raise ValueError(
                    f"piece at {list(piece.start)} of shape {list(piece.shape)} is not inside {list(self.shape)}"
                )
        if twice := _stored_twice(self.pieces):
            raise ValueError(f"the piece at {list(twice.start)} has elements that another one has as well")
        return self


def _stored_twice(pieces: Sequence[PieceEntry]) -> PieceEntry | None:
    """A piece that overlaps another one: counts of elements would hide the gap that it leaves elsewhere.

    In order of first rows, so that each is compared only with those whose rows it shares.
    """
    before: list[PieceEntry] = []
    for piece in sorted(pieces, key=lambda one: one.start):
        before = [one for one in before if not one.shape or one.region[0].stop > piece.start[0]]
        if any(overlap(one.region, piece.region) is not None for one in before):
            return piece
        before.append(piece)
    return None


class FileEntry(Value):
    """What a file must be."""

    size_bytes: int = Field(ge=0)
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")


class Manifest(Value):
    """Everything that a checkpoint says of itself."""

    schema_version: Literal[1] = SCHEMA_VERSION
    step: int = Field(ge=0)
    """Steps that were taken: the next one to take has this number, counted from 0."""
    next_sample: int = Field(ge=0)
    updates: int = Field(ge=0)
    """Updates of the optimizer; fewer than steps where steps were skipped."""
    loss_scale: LossScaleState | None = None
    """Of the next step; a run in float16 has one."""
    seed: int
    data: str
    """Fingerprint of the data."""
    plan: dict[str, JsonValue]
    tensors: dict[str, TensorEntry]
    files: dict[FileName, FileEntry]
    model_files: dict[str, FileEntry] = Field(default_factory=dict)
    """In the folder `model`."""

    @model_validator(mode="after")
    def _model_files_known(self) -> Self:
        for name in self.model_files:
            if name not in ("config.json", *COMPANIONS):
                raise ValueError(f"{name!r} is no file of a model")
        return self

    @model_validator(mode="after")
    def _no_more_updates_than_steps(self) -> Self:
        if self.updates > self.step:
            raise ValueError(f"{self.updates} updates in {self.step} steps")
        return self

    @model_validator(mode="after")
    def _files_listed(self) -> Self:
        for key, entry in self.tensors.items():
            for piece in entry.pieces:
                if piece.file not in self.files:
                    raise ValueError(f"{piece.file}, which has a piece of {key}, is not among its files")
        return self

    def to_json(self) -> str:
        """The file form: JSON with a checksum of everything else in it."""
        data = self.model_dump(mode="json")
        return json.dumps({**data, "checksum": _json_sha256(data)}, indent=1, allow_nan=False)

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Read the manifest of a checkpoint. Raises: CheckpointError in one line."""
        path = folder / MANIFEST
        try:
            there = path.exists()
        except OSError:
            there = True  # whoever reads it is told why it cannot be looked at
        if not there:
            inside = sorted(folder.glob("step-????????/" + MANIFEST))[-1:]
            hint = "".join(f"; {path.parent} is one" for path in inside)
            raise CheckpointError(f"{folder} is no checkpoint: it has no {MANIFEST}{hint}")
        try:
            data = json.loads(read_text(path, LARGEST_MANIFEST_BYTES, "manifest", CheckpointError))
        except (ValueError, RecursionError):
            raise CheckpointError(f"{path} is damaged: not a JSON text") from None
        if not isinstance(data, dict):
            raise CheckpointError(f"{path} is damaged: not a JSON object")
        version = data.get("schema_version")
        if version != SCHEMA_VERSION:
            raise CheckpointError(
                f"{path}: schema version {version!r} is not supported; this version reads {SCHEMA_VERSION}"
            )
        if data.pop("checksum", None) != _json_sha256(data):
            raise CheckpointError(f"{path} is damaged: its content is not what its checksum says")
        try:
            found = cls.read(data, where=str(path))
        except ConfigError as error:
            raise CheckpointError(str(error)) from None
        named = FOLDER_NAME.fullmatch(folder.name)
        if named and int(named[1]) != found.step:  # the keep rule goes by names
            raise CheckpointError(
                f"{folder} holds the checkpoint of step {found.step}: rename it to step-{found.step:08d}"
            )
        return found


@dataclass(frozen=True)
class Piece:
    """A part of a global tensor in memory: `values` are those of `region`."""

    key: str
    shape: tuple[int, ...]
    region: Region
    values: Tensor

    @property
    def name(self) -> str:
        """Its name inside a file: unique, since no two pieces of a tensor start at the same place."""
        return f"{self.key}@{','.join(str(part.start) for part in self.region)}"


WRITE_BLOCK_BYTES = 4 * MIB
"""What is written and hashed before the writer may rest."""


def write_pieces(
    folder: Path,
    rank: int,
    pieces: Sequence[Piece],
    *,
    rest: Callable[[float], object] = lambda worked_s: None,
) -> tuple[dict[str, TensorEntry], dict[str, FileEntry]]:
    """Write this rank's pieces to its file, down to the disk. Returns its part of the manifest. Raises: OSError.

    `rest(seconds)` is called after every block with the seconds that it took.
    """
    if not pieces:
        return {}, {}
    path = folder / f"rank-{rank:05d}.safetensors"
    path.unlink(missing_ok=True)
    by_name = {piece.name: piece.values for piece in pieces}
    file = TensorFile(path, {name: (values.dtype, tuple(values.shape)) for name, values in by_name.items()})
    try:
        digest = hashlib.sha256(file.header)
        for name in file.names:
            values = by_name[name]
            rows = values if values.ndim else values.reshape(1)
            step = max(1, WRITE_BLOCK_BYTES // max(1, rows[:1].numel() * rows.itemsize))
            for first in range(0, rows.shape[0], step):
                began = time.perf_counter()
                block = rows[first : first + step]
                file.write(name, first, block)
                digest.update(byte_view(block))
                rest(time.perf_counter() - began)
        file.close()
    finally:
        file.abandon()
    entries = [{piece.key: _entry(piece, path.name)} for piece in pieces]
    return merge_tensors(entries), {
        path.name: FileEntry(size_bytes=file.size_bytes, sha256=digest.hexdigest())
    }


def write_model_files(folder: Path, files: Mapping[str, bytes]) -> dict[str, FileEntry]:
    """Write what an export needs beside the weights; returns its part of the manifest. Raises: OSError."""
    if not files:
        return {}
    (folder / MODEL).mkdir(exist_ok=True)
    for name, content in files.items():
        (folder / MODEL / name).write_bytes(content)
        sync(folder / MODEL / name)
    sync(folder / MODEL)
    return {
        name: FileEntry(size_bytes=len(content), sha256=hashlib.sha256(content).hexdigest())
        for name, content in files.items()
    }


def read_model_files(folder: Path, manifest: Manifest) -> dict[str, bytes]:
    """What `write_model_files` wrote. Raises: CheckpointError for a file that is not what the manifest says."""
    found: dict[str, bytes] = {}
    for name, entry in manifest.model_files.items():
        path = folder / MODEL / name
        try:
            content = read_small(path, MOST_COMPANION_BYTES)
        except ModelError as error:
            raise CheckpointError(str(error)) from None
        if content is None or hashlib.sha256(content).hexdigest() != entry.sha256:
            fault = (
                "is missing" if content is None else "is damaged: its checksum is not that of the manifest"
            )
            raise CheckpointError(f"{path} {fault}")
        found[name] = content
    return found


def _entry(piece: Piece, file: str) -> TensorEntry:
    """A tensor of which this is the only piece."""
    start = tuple(part.start for part in piece.region)
    written = PieceEntry(file=file, name=piece.name, start=start, shape=tuple(piece.values.shape))
    dtype = str(piece.values.dtype).removeprefix("torch.")
    return TensorEntry(shape=piece.shape, dtype=dtype, pieces=(written,))  # type: ignore[arg-type]


def merge_tensors(parts: Sequence[dict[str, TensorEntry]]) -> dict[str, TensorEntry]:
    """One entry per tensor from the entries of all ranks."""
    pieces: dict[str, list[PieceEntry]] = {}
    entries: dict[str, TensorEntry] = {}
    for part in parts:
        for key, entry in part.items():
            entries[key] = entry
            pieces.setdefault(key, []).extend(entry.pieces)
    return {key: entry.replace(pieces=tuple(pieces[key])) for key, entry in entries.items()}


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk. Raises: OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _json_sha256(data: dict[str, Any]) -> str:
    text = json.dumps(data, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def file_sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        buffer = memoryview(bytearray(min(HASH_CHUNK_BYTES, max(1, os.fstat(file.fileno()).st_size))))
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
    return digest.hexdigest()


def overlap(a: Region, b: Region) -> Region | None:
    """What two regions of a tensor have in common; None: nothing."""
    common = tuple(slice(max(x.start, y.start), min(x.stop, y.stop)) for x, y in zip(a, b))
    return None if any(part.start >= part.stop for part in common) else common


def checkpoints(folder: Path) -> list[tuple[int, Path]]:
    """The complete checkpoints of a folder as (step, path), oldest first."""
    try:
        found = [(FOLDER_NAME.fullmatch(path.name), path) for path in folder.iterdir()]
        return sorted((int(match[1]), path) for match, path in found if match and (path / MANIFEST).is_file())
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(f"cannot look for checkpoints in {folder}: {error.strerror}") from None


def abandoned(folder: Path) -> list[Path]:
    """Folders of saves that were never finished. Raises: OSError."""
    partial = [path for path in folder.iterdir() if path.name.endswith(PARTIAL)]
    return [path for path in partial if FOLDER_NAME.fullmatch(path.name.removesuffix(PARTIAL))]

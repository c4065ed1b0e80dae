"""Hugging Face checkpoints written whole or not at all, tensor by tensor.

Everything goes to a hidden folder beside the target, which takes the target's name at the very end. The files and what
each holds follow from the model alone, so several processes can each write files of their own without a word.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fivefold.core.families.write import difference, to_config
from fivefold.core.file_lock import hold
from fivefold.core.layout import Layout
from fivefold.core.model_spec import ModelSpec
from fivefold.core.sharding import stored
from fivefold.errors import ModelError
from fivefold.nn.hub import INDEX, SINGLE, HFCheckpoint
from fivefold.nn.hub_files import read_companions
from fivefold.nn.hub_names import Place, places, tensors
from fivefold.nn.safetensors_io import CODES, TensorFile
from fivefold.units import GIB, format_bytes

MAX_SHARD_BYTES = 5 * GIB
"""Of one file, unless a single tensor is larger."""
_NOT_CARRIED = ("auto_map", "quantization_config", "_name_or_path", "torch_dtype", "dtype")
"""Fields of a source's config that do not hold for what is written: its code files, its own dtype, ..."""

Tensors = dict[str, tuple[torch.dtype, tuple[int, ...]]]


@dataclass(frozen=True)
class Written:
    """A finished checkpoint."""

    folder: Path
    files: tuple[str, ...]
    bytes: int


@dataclass(frozen=True)
class _File:
    name: str
    group: int
    tensors: Tensors


class HFWriter:
    """One checkpoint on its way: `begin` and `commit` on one process, `put` on every one that has values.

    `dtype`: one for all, or by parameter name. `groups`: the names of the parameters that each process writes; no
    file holds tensors of two groups. `config`: a whole config.json to keep, or fields to add to the one that is made
    from the model, such as those that name tokens. `companions`: other files by name, such as tokenizer.json.
    Raises: ModelError; from `begin`, `put` and `commit` also for a disk that is full or cannot be written.
    """

    def __init__(
        self,
        folder: str | Path,
        spec: ModelSpec,
        *,
        dtype: str | Mapping[str, str],
        config: Mapping[str, Any] | None = None,
        max_shard_bytes: int = MAX_SHARD_BYTES,
        groups: Sequence[Sequence[str]] | None = None,
        companions: Mapping[str, bytes] | None = None,
    ) -> None:
        self.folder = Path(folder).absolute()
        self.temporary = self.folder.with_name(f".{self.folder.name}.partial")
        self._companions = companions or {}
        names = [row.name for row in stored(spec)]
        self._groups = groups or [names]
        dtypes = dict.fromkeys(names, dtype) if isinstance(dtype, str) else dtype
        self._config = _config(spec, config, dtypes)
        family = ModelSpec.from_config(self._config, name=spec.name).family
        spec = spec.replace(family=family)
        self._places, shapes = places(spec), tensors(spec)
        self._shape_of = {row.name: row.shape for row in stored(spec)}
        self._files = self._plan(shapes, dtypes, max_shard_bytes)
        self._file_of = {name: file for file in self._files for name in file.tensors}
        self._open: dict[str, TensorFile] = {}
        self._done: set[str] = set()
        self._held: int | None = None
        self._left = {file.name: self._rows_of(file) for file in self._files}
        self.bytes = sum(
            dtype.itemsize * torch.Size(shape).numel()
            for f in self._files
            for dtype, shape in f.tensors.values()
        )

    @property
    def files(self) -> tuple[str, ...]:
        """The names of the weight files, of all groups."""
        return tuple(file.name for file in self._files)

    def begin(self) -> None:
        """Refuse a target that exists or is being written or a disk without room; remove what a killed run left."""
        self.refuse_taken()
        try:
            self.folder.parent.mkdir(parents=True, exist_ok=True)
            if self.temporary.is_dir():
                self._hold()
                shutil.rmtree(self.temporary, ignore_errors=True)
            self.temporary.mkdir()
            self._hold()
            free = shutil.disk_usage(self.temporary).free
        except OSError as error:
            raise self._cannot(error) from None
        if free < self.bytes:
            self.abort()
            raise ModelError(
                f"no room for {self.folder}: the model takes {format_bytes(self.bytes)}, "
                f"the disk has {format_bytes(free)} free"
            )

    def _hold(self) -> None:
        """Raises: ModelError where another process writes there."""
        self._let_go()
        self._held = os.open(self.temporary, os.O_RDONLY | os.O_DIRECTORY)
        if not hold(self._held):
            self._let_go()
            raise ModelError(f"another process is writing {self.folder}; wait for it, or give another folder")

    def _let_go(self) -> None:
        if self._held is not None:
            os.close(self._held)
        self._held = None

    def refuse_taken(self) -> None:
        """Raises: ModelError for a target that holds something."""
        if self.folder.exists() and (not self.folder.is_dir() or any(self.folder.iterdir())):
            raise ModelError(f"{self.folder} exists and is not an empty folder; give a new one")

    def put(self, name: str, values: Tensor) -> None:
        """Write one whole parameter, without padding. Its file is finished with its last parameter."""
        shape, of_it = self._shape_of[name], self._places[name]
        if tuple(values.shape) != shape:
            raise ModelError(f"{name} is {list(values.shape)}, the model's is {list(shape)}")
        for place, matrix in zip(of_it, values if len(shape) == 3 else [values], strict=True):
            self._put(place, matrix)
        self._done.add(name)

    def _put(self, place: Place, values: Tensor) -> None:
        file = self._file_of[place.tensor]
        try:
            if file.name not in self._open:
                self.temporary.mkdir(
                    exist_ok=True
                )  # on a shared file system another node may have made it just now
                self._open[file.name] = TensorFile(self.temporary / file.name, file.tensors)
            self._open[file.name].write(place.tensor, place.first, values)
            self._left[file.name] -= place.rows
            if self._left[file.name] == 0:
                self._open.pop(file.name).close()
        except OSError as error:
            raise self._cannot(error) from None

    def check_done(self, group: int = 0) -> None:
        """Whether all parameters of a group were put here. Raises: ModelError naming the first that was not."""
        missing = [name for name in self._groups[group] if name not in self._done]
        if missing:
            raise ModelError(
                f"no values for {missing[0]}: {len(missing)} of {len(self._groups[group])} parameters are missing"
            )

    def commit(self) -> Written:
        """Write index, config and companions, and give the folder its name. All groups must be done."""
        try:
            for file in self._files:
                self._check_file(file)
            if len(self._files) > 1:
                weight_map = {name: file.name for file in self._files for name in sorted(file.tensors)}
                index = {"metadata": {"total_size": self.bytes}, "weight_map": weight_map}
                _write_text(self.temporary / INDEX, json.dumps(index, indent=2))
            for name, content in self._companions.items():
                _write(self.temporary / name, content)
            _write_text(self.temporary / "config.json", json.dumps(self._config, indent=2))
            _sync_folder(self.temporary)
            os.rename(self.temporary, self.folder)
            _sync_folder(self.folder.parent)
        except OSError as error:
            raise self._cannot(error) from None
        self._let_go()
        return Written(self.folder, self.files, self.bytes)

    def abandon(self) -> None:
        """Close what this process has open."""
        for file in self._open.values():
            file.abandon()
        self._open.clear()

    def abort(self) -> None:
        """Remove everything that was written, if it is this process that began."""
        self.abandon()
        if self._held is not None:
            shutil.rmtree(self.temporary, ignore_errors=True)
        self._let_go()

    def _plan(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        dtypes: Mapping[str, str],
        most: int,
    ) -> list[_File]:
        contents: list[tuple[int, Tensors]] = []
        placed: set[str] = set()
        for group, names in enumerate(self._groups):
            room = 0
            for name in names:
                for tensor in (place.tensor for place in self._places[name]):
                    if tensor in placed:
                        continue  # the next part of a fused one
                    placed.add(tensor)
                    entry = (_float(dtypes[name]), shapes[tensor])
                    size = entry[0].itemsize * torch.Size(entry[1]).numel()
                    if not contents or contents[-1][0] != group or size > room:
                        contents.append((group, {}))
                        room = most
                    contents[-1][1][tensor] = entry
                    room -= size
        n = len(contents)
        names_of = [SINGLE] if n == 1 else [f"model-{i + 1:05d}-of-{n:05d}.safetensors" for i in range(n)]
        return [_File(name, group, tensors) for name, (group, tensors) in zip(names_of, contents)]

    def _rows_of(self, file: _File) -> int:
        return sum(shape[0] for _, shape in file.tensors.values())

    def _check_file(self, file: _File) -> None:
        if not (self.temporary / file.name).is_file():
            raise ModelError(
                f"{self.temporary / file.name} was not written, or {self.folder.parent} is not on a file system "
                f"that all nodes share"
            )

    def _cannot(self, error: OSError) -> ModelError:
        return ModelError(
            f"cannot write {self.folder}: {error.strerror or error} "
            f"(the model takes {format_bytes(self.bytes)}); nothing of it is left there"
        )


def write_hf(
    folder: str | Path,
    spec: ModelSpec,
    values: Iterable[tuple[str, Tensor]],
    *,
    dtype: str | Mapping[str, str] = "float32",
    config: Mapping[str, Any] | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    companions: Mapping[str, bytes] | None = None,
) -> Written:
    """Write a checkpoint that transformers loads, from one process; `values`: (parameter, whole tensor), any order.

    Memory: what `values` yields, and one block of 4 MiB where the dtype changes.
    Raises: ModelError for a target that exists, a disk that is full, a model that no family can express, or a
            parameter without values; the target is then as it was.
    """
    writer = HFWriter(
        folder, spec, dtype=dtype, config=config, max_shard_bytes=max_shard_bytes, companions=companions
    )
    writer.begin()
    try:
        for name, tensor in values:
            writer.put(name, tensor)
            del tensor  # before the next one is made
        writer.check_done()
        return writer.commit()
    except BaseException:
        writer.abort()
        raise


def convert(
    source: str | Path, target: str | Path, *, dtype: str | None, max_shard_bytes: int = MAX_SHARD_BYTES
) -> Written:
    """Write the checkpoint in folder `source` anew: other files, other dtype (None: each tensor keeps its own).

    Memory: one parameter. Raises: ModelError for a source that cannot be read, a target that cannot be written, or a
            weight that is too large for float16.
    """
    checkpoint = HFCheckpoint.open(source)
    alone = Layout()
    rows = stored(checkpoint.spec)
    dtypes = {row.name: dtype or checkpoint.dtype_of(row.name) for row in rows}
    # Into float16 from what is stored: once converted, a weight that is too large could not be told from infinity.
    read_as = {
        name: checkpoint.dtype_of(name) if target_dtype == "float16" else target_dtype
        for name, target_dtype in dtypes.items()
    }
    values = ((row.name, checkpoint.read(row, alone, alone.coordinate(0), read_as[row.name])) for row in rows)
    return write_hf(
        target,
        checkpoint.spec,
        values,
        dtype=dtypes,
        config=checkpoint.config,
        max_shard_bytes=max_shard_bytes,
        companions=read_companions(checkpoint.folder),
    )


def _config(spec: ModelSpec, given: Mapping[str, Any] | None, dtypes: Mapping[str, str]) -> dict[str, Any]:
    """The config to write: the given one if it is whole and describes this model, else made from the spec.

    Raises: ModelError naming the first thing that the given config has different.
    """
    given = given or {}
    whole = "model_type" in given
    config = {**({} if whole else to_config(spec)), **given}
    fault = difference(spec, ModelSpec.from_config(config, name=spec.name)) if given else None
    if fault is not None:
        raise ModelError(f"the config to write describes another model than {spec.name}: {fault}")
    config = {key: value for key, value in config.items() if key not in _NOT_CARRIED}
    # One name for mixed dtypes: the one that most parameters have.
    most = max(set(dtypes.values()), key=list(dtypes.values()).count)
    return {**config, "torch_dtype": most}


def _float(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if dtype not in CODES:
        known = ", ".join(str(known).removeprefix("torch.") for known in CODES)
        raise ModelError(f"weights cannot be written as {name!r}; can: {known}")
    assert isinstance(dtype, torch.dtype)
    return dtype


def _write_text(path: Path, text: str) -> None:
    _write(path, f"{text}\n".encode())


def _write(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(path: Path) -> None:
    """Put the names in a folder on the disk, where the system can."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)

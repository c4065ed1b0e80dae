"""Reading a checkpoint: files against their checksums, and any region of any tensor from the pieces that cover it."""

from __future__ import annotations

from math import prod
from pathlib import Path

import torch
from torch import Tensor

from fivefold.errors import CheckpointError, ModelError
from fivefold.nn.safetensors_io import CODES, Header, read_header, read_region
from fivefold.train.checkpoint import (
    DTYPES,
    OTHER_ONE,
    Manifest,
    PieceEntry,
    Region,
    file_sha256,
    overlap,
)


def check_files(folder: Path, manifest: Manifest, *, rank: int, ranks: int) -> None:
    """Check this rank's share of the files (each file once over all ranks) against size and checksum.

    Raises: CheckpointError naming the file.
    """
    for number, (name, entry) in enumerate(sorted(manifest.files.items())):
        path = folder / name
        try:
            size = path.stat().st_size
            if size != entry.size_bytes:
                raise CheckpointError(
                    f"{path} is damaged: {size} bytes, its manifest says {entry.size_bytes}; {OTHER_ONE}"
                )
            if number % ranks == rank and file_sha256(path) != entry.sha256:
                raise CheckpointError(
                    f"{path} is damaged: its checksum is not the one in the manifest; {OTHER_ONE}"
                )
        except OSError as error:
            raise CheckpointError(f"cannot read {path}: {error.strerror}; {OTHER_ONE}") from None


class Reader:
    """Reads regions of global tensors. `bytes_read` counts the tensor bytes that were asked of files."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder, self.manifest = folder, manifest
        self.bytes_read = 0
        self._headers: dict[str, Header] = {}

    def read(self, key: str, shape: tuple[int, ...]) -> Tensor:
        """The whole tensor `key`, in the dtype that it was saved in. Raises: as `read_into`."""
        entry = self.manifest.tensors.get(key)
        dtype = DTYPES["float32" if entry is None else entry.dtype]
        size, there = prod(shape) * dtype.itemsize, sum(f.size_bytes for f in self.manifest.files.values())
        if size > there:
            raise CheckpointError(f"{self.folder}: {key} takes {size} bytes, all files together have {there}")
        target = torch.empty(shape, dtype=dtype)
        self.read_into(target, key, shape, tuple(slice(0, n) for n in shape))
        return target

    def read_into(self, target: Tensor, key: str, shape: tuple[int, ...], region: Region) -> None:
        """Fill `target` with the region of the tensor `key`.

        Raises: CheckpointError where the tensor is missing, has another shape or dtype, or its pieces do not cover it.
        """
        entry = self.manifest.tensors.get(key)
        if entry is None:
            raise CheckpointError(f"{self.folder}: the tensor {key!r} is missing")
        if entry.shape != shape:
            raise CheckpointError(
                f"{self.folder}: {key} has shape {list(entry.shape)}, the model wants {list(shape)}"
            )
        if DTYPES[entry.dtype] != target.dtype:
            raise CheckpointError(f"{self.folder}: {key} is {entry.dtype}, the run wants {target.dtype}")
        filled = 0
        for piece in entry.pieces:
            common = overlap(region, piece.region)
            if common is None:
                continue
            inside = tuple(slice(c.start - p.start, c.stop - p.start) for c, p in zip(common, piece.region))
            place = target[tuple(slice(c.start - r.start, c.stop - r.start) for c, r in zip(common, region))]
            direct = place.is_cpu and place.is_contiguous()
            values = place if direct else torch.empty(place.shape, dtype=place.dtype)
            self._read(piece, inside, values)
            if not direct:
                place.copy_(values)
            filled += values.numel()
        if filled != target.numel():
            raise CheckpointError(
                f"{self.folder}: the pieces of {key} hold {filled} of {target.numel()} elements"
            )

    def _read(self, piece: PieceEntry, inside: Region, into: Tensor) -> None:
        """Positioned reads: a map would keep pages in memory, and end the process where a file is cut short."""
        path = self.folder / piece.file
        try:
            if piece.file not in self._headers:
                self._headers[piece.file] = read_header(path)
            stored = self._headers[piece.file].entries.get(piece.name)
            if stored is None:
                raise ModelError("not found in its header")
            if stored.shape != piece.shape:
                raise ModelError(f"shape {list(stored.shape)}, its manifest says {list(piece.shape)}")
            if stored.dtype != CODES[into.dtype]:
                raise ModelError(f"{stored.dtype}, its manifest says {CODES[into.dtype]}")
            self.bytes_read += read_region(stored, inside, into)
        except ModelError as error:
            raise CheckpointError(f"{path}: {piece.name}: {error}") from None

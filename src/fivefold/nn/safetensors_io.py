"""Safetensors files, read and written by region: only the bytes that are asked for pass through memory.

    8 bytes     length of the header, little-endian
    header      JSON: name -> dtype, shape, data_offsets [begin, end) counted from the end of the header
    data        the tensors, without holes or overlaps

Positioned reads instead of a memory map: a row-parallel shard is a short piece of every row, a map would load the
pages between them, and a file that is cut short while it is mapped ends the process. Files are untrusted: everything
the header says is checked against the size of the file before anything is read.
Source: the format's specification, https://github.com/huggingface/safetensors (README, "Format").
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fivefold.errors import ModelError
from fivefold.units import MIB

MOST_HEADER_BYTES = 32 * MIB
"""Room for some 300,000 tensors; the format itself allows 100 MB."""
MOST_DIMS = 8
BLOCK_BYTES = 4 * MIB
"""Bytes in flight where a dtype is converted."""

BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32,
    "F32": 32, "I64": 64, "U64": 64, "F64": 64, "C64": 64,
}  # fmt: skip
"""Bits of one element of every dtype that the format knows."""

FLOATS = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
"""What weights can be read from."""
CODES = {dtype: code for code, dtype in FLOATS.items()}


@dataclass(frozen=True, slots=True)
class Entry:
    """Where one tensor lies: bytes [start, stop) of its file."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Header:
    """What one file holds, checked. `size_bytes`: of the header itself, as read."""

    entries: Mapping[str, Entry]
    size_bytes: int


def read_header(path: Path) -> Header:
    """The header of a file, every statement in it checked against the file's size.

    Raises: ModelError naming the file, and the tensor that is at fault.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a pipe under that name must not block
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                raise ModelError(f"{path} is not a regular file")
            length, content = _header_text(fd, status.st_size, path)
        finally:
            os.close(fd)
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}") from None
    raw = _header_json(content, path)
    raw.pop("__metadata__", None)
    data = 8 + length
    entries = {name: _entry(name, value, data, status.st_size, path) for name, value in raw.items()}
    _check_cover(entries, data, status.st_size, path)
    return Header(entries, data)


def _header_text(fd: int, size: int, path: Path) -> tuple[int, bytes]:
    start = os.pread(fd, 8, 0)
    if len(start) < 8:
        raise ModelError(f"{path} is not a safetensors file: {size} bytes, the header's length alone takes 8")
    length = int.from_bytes(start, "little")
    if length > MOST_HEADER_BYTES:
        raise ModelError(
            f"{path} says that its header has {length} bytes, at most {MOST_HEADER_BYTES}: damaged, or no safetensors"
        )
    if length > size - 8:
        raise ModelError(f"{path} is cut short: its header needs {8 + length} bytes, the file has {size}")
    content = bytearray(length)
    _read_into(fd, 8, memoryview(content), path)
    return length, bytes(content)


def _header_json(content: bytes, path: Path) -> dict[str, Any]:
    try:
        raw = json.loads(content.decode("utf-8"), object_pairs_hook=unique_keys)
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error).splitlines()[0]
        raise ModelError(f"{path}: the header is not valid: {reason}") from None
    if not isinstance(raw, dict):
        raise ModelError(f"{path}: the header must be a JSON object")
    return raw


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """For `json.loads`: an object whose keys are all different. Raises: ValueError naming the first that is not."""
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise ValueError(f"{short(key)} stands there twice")
        result[key] = value
    return result


def short(value: Any) -> str:
    """A name or value from a file, in one line of bounded length."""
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:97]}..."


def _entry(name: str, value: Any, data: int, size: int, path: Path) -> Entry:
    where = f"{path}: tensor {short(name)}"
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        raise ModelError(f"{where} must have exactly dtype, shape and data_offsets")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in BITS:
        raise ModelError(
            f"{where} has dtype {short(dtype)}, which is not known; known: {', '.join(sorted(BITS))}"
        )
    if not _are_sizes(shape) or len(shape) > MOST_DIMS:
        raise ModelError(f"{where} has shape {short(shape)}; at most {MOST_DIMS} whole numbers of at least 0")
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise ModelError(f"{where} has data_offsets {short(offsets)}; they must be [begin, end]")
    bits, length = prod(shape) * BITS[dtype], offsets[1] - offsets[0]
    if bits != 8 * length:
        raise ModelError(
            f"{where} lies: {dtype} {short(shape)} takes {bits // 8} bytes, its data_offsets span {length}"
        )
    if data + offsets[1] > size:
        raise ModelError(
            f"{where} ends at byte {data + offsets[1]}, but the file has {size}: it is cut short"
        )
    return Entry(path, dtype, tuple(shape), data + offsets[0], data + offsets[1])


def _are_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(size) is int and 0 <= size < 2**63 for size in value)


def _check_cover(entries: Mapping[str, Entry], data: int, size: int, path: Path) -> None:
    """Tensors follow one another, as the format demands: bytes that two share or none owns hide something."""
    end, before = data, "the header"
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].stop)):
        if entry.start != end:
            fault = "overlaps" if entry.start < end else "leaves a hole after"
            raise ModelError(
                f"{path}: tensor {short(name)} at byte {entry.start} {fault} {before}, which ends at {end}"
            )
        end, before = entry.stop, f"tensor {short(name)}"
    if end != size:
        raise ModelError(f"{path} has {size - end} bytes after its last tensor, which ends at byte {end}")


# ---------------------------------------------------------------------------------------------------------------------


def read_region(entry: Entry, region: Sequence[slice], into: Tensor) -> int:
    """Read a region of a tensor of one to three dims to the beginning of `into`, converting the dtype; bytes read.

    Shapes: region [a:b], [a:b, c:d] or a stack of such, [e:f, a:b, c:d]; into: contiguous, as many dims, at least as
            large; its rest is not touched.
    Memory: nothing beside `into`; one block where dtypes differ.
    Raises: ModelError if the file ends too soon.
    """
    if len(region) == 3:
        first = region[0].start
        return sum(
            read_region(_matrix(entry, i), region[1:], into[i - first]) for i in range(first, region[0].stop)
        )
    columns = entry.shape[-1]
    rows, part = (slice(0, 1), *region) if len(region) == 1 else region
    count, width = rows.stop - rows.start, part.stop - part.start
    if count <= 0 or width <= 0:
        return 0
    into = into.view(-1, into.shape[-1])
    source, itemsize = FLOATS[entry.dtype], BITS[entry.dtype] // 8
    try:
        fd = os.open(entry.path, os.O_RDONLY)
    except OSError as error:
        raise ModelError(f"cannot read {entry.path}: {error.strerror}") from None
    try:
        direct = source == into.dtype
        step = count if direct else min(count, max(1, BLOCK_BYTES // (width * itemsize)))
        staging = into if direct else torch.empty(step, width, dtype=source)
        for first in range(0, count, step):
            n = min(step, count - first)
            block = staging[:n]
            at = entry.start + ((rows.start + first) * columns + part.start) * itemsize
            _read_rows(fd, at, columns * itemsize, byte_view(block), width * itemsize, n, entry.path)
            if not direct:
                into[first : first + n, :width] = block
    finally:
        os.close(fd)
    return int(count * width * itemsize)


def _matrix(entry: Entry, index: int) -> Entry:
    """One of the matrices that are stacked in a tensor of three dims."""
    size = (entry.stop - entry.start) // max(1, entry.shape[0])
    start = entry.start + index * size
    return Entry(entry.path, entry.dtype, entry.shape[1:], start, start + size)


def _read_rows(fd: int, at: int, stride: int, out: memoryview, width: int, count: int, path: Path) -> None:
    """Read `width` bytes of each of `count` rows that begin every `stride` bytes of the file, from `at` on."""
    out_stride = len(out) // count
    if width == stride == out_stride:
        _read_into(fd, at, out, path)
        return
    for row in range(count):
        start = row * out_stride
        _read_into(fd, at + row * stride, out[start : start + width], path)


def _read_into(fd: int, at: int, out: memoryview, path: Path) -> None:
    while out:
        try:
            n = os.preadv(fd, [out], at)
        except OSError as error:
            raise ModelError(f"cannot read {path}: {error.strerror}") from None
        if n == 0:
            raise ModelError(f"{path} is cut short: {len(out)} bytes are missing after byte {at}")
        out, at = out[n:], at + n


def byte_view(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, writable, without a copy."""
    values: Any = tensor.reshape(-1).view(torch.uint8).numpy()
    return memoryview(values)


# ---------------------------------------------------------------------------------------------------------------------


class TensorFile:
    """A file being written: all tensors are declared first, their values come in any order and in parts.

    Raises: OSError (full disk, no permission) from every method.
    """

    def __init__(self, path: Path, tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> None:
        self.path = path
        self.header, self._entries, self.size_bytes = _layout_of(path, tensors)
        self._left = sum(entry.stop - entry.start for entry in self._entries.values())
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0), 0o666)
        _write_all(self._fd, 0, memoryview(self.header))

    @property
    def names(self) -> list[str]:
        """The tensors in the order in which they stand in the file, after the header."""
        return list(self._entries)

    def write(self, name: str, first: int, values: Tensor) -> None:
        """Write `values` as rows of tensor `name` from row `first` on, converted to its dtype by blocks.

        Raises: ModelError for a finite value beyond float16, which would be written as infinity.
        """
        entry = self._entries[name]
        dtype, itemsize = FLOATS[entry.dtype], BITS[entry.dtype] // 8
        at = entry.start + first * prod(entry.shape[1:]) * itemsize
        assert at + values.numel() * itemsize <= entry.stop, f"{name}: {values.numel()} values do not fit"
        flat = values.detach().reshape(-1)
        step = flat.numel() if flat.dtype == dtype and flat.is_cpu else BLOCK_BYTES // itemsize
        for start in range(0, flat.numel(), max(1, step)):
            block = flat[start : start + step].to(device="cpu", dtype=dtype)
            if dtype == torch.float16 and flat.dtype != dtype:
                _check_range(name, flat[start : start + step], block)
            _write_all(self._fd, at + start * itemsize, byte_view(block))
            del block  # before the next one is made
        self._left -= flat.numel() * itemsize

    def close(self) -> None:
        """Put everything on the disk. All values must have been written."""
        assert self._left == 0, f"{self.path}: {self._left} bytes were declared but not written"
        os.fsync(self._fd)
        self.abandon()

    def abandon(self) -> None:
        """Close the file as it is."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _layout_of(
    path: Path, tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
) -> tuple[bytes, dict[str, Entry], int]:
    """The header's bytes, where each tensor goes, and the size of the file. Wide dtypes first: all are aligned."""
    order = sorted(tensors.items(), key=lambda item: -item[1][0].itemsize)
    offset, spans = 0, []
    for name, (dtype, shape) in order:
        spans.append((name, CODES[dtype], shape, offset, offset + prod(shape) * dtype.itemsize))
        offset = spans[-1][-1]
    raw: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    for name, code, shape, start, stop in spans:
        raw[name] = {"dtype": code, "shape": list(shape), "data_offsets": [start, stop]}
    text = json.dumps(raw, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    data = 8 + len(text)
    entries = {
        name: Entry(path, code, tuple(shape), data + start, data + stop)
        for name, code, shape, start, stop in spans
    }
    return len(text).to_bytes(8, "little") + text, entries, data + offset


def _write_all(fd: int, at: int, data: memoryview) -> None:
    while data:
        n = os.pwrite(fd, data, at)
        data, at = data[n:], at + n


def _check_range(name: str, values: Tensor, written: Tensor) -> None:
    lost = written.isinf() & values.cpu().isfinite()
    if lost.any():
        largest = values.cpu()[lost].abs().max()
        raise ModelError(f"{name} has a weight of {largest:.6g}, float16 ends at 65504; write it as bfloat16")

"""The values of a module that is not ours in safetensors files: by its own names, or each expert in tensors of its own.

Modules of transformers stack experts, [E, ., .]; the checkpoints that are published for them, and that it writes, hold
every matrix of every expert apart.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from fivefold.errors import ModelError
from fivefold.nn.safetensors_io import FLOATS, Entry, read_header, read_region

APART: Mapping[str, Sequence[tuple[str, ...]]] = {
    "mlp.gate.weight": [("block_sparse_moe.gate.weight",)],
    "mlp.experts.gate_up_proj": [
        ("mlp.experts.{}.gate_proj.weight", "mlp.experts.{}.up_proj.weight"),
        ("block_sparse_moe.experts.{}.w1.weight", "block_sparse_moe.experts.{}.w3.weight"),
    ],
    "mlp.experts.down_proj": [
        ("mlp.experts.{}.down_proj.weight",),
        ("block_sparse_moe.experts.{}.w2.weight",),
    ],
}
"""The end of a parameter's name -> what files can call it instead: the tensors whose rows follow one another, {} the
number of an expert. The second form is Mixtral's."""


COMPUTED = re.compile(r"\.rotary_emb\.inv_freq$")
"""What older checkpoints hold beside parameters, and modules compute themselves."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A tensor of a file that is a parameter, or some rows of one expert's matrix in it."""

    entry: Entry
    expert: int | None = None
    first: int = 0
    """The row of the matrix that it begins at."""


def open_folder(folder: Path) -> dict[str, Entry]:
    """All tensors of a folder: of its files model*.safetensors, or of all where none is called so.

    Raises: ModelError where it has no safetensors files, or a tensor twice.
    """
    files = sorted(folder.glob("model*.safetensors")) or sorted(folder.glob("*.safetensors"))
    if not files:
        raise ModelError(f"no safetensors files in {folder}; give the folder that holds the module's weights")
    there: dict[str, Entry] = {}
    for file in files:
        for name, entry in read_header(file).entries.items():
            if name in there:
                raise ModelError(
                    f"{folder} has {name} in {there[name].path.name} and in {file.name}; leave one of them"
                )
            there[name] = entry
    return there


def find(there: Mapping[str, Entry], name: str, shape: tuple[int, ...], folder: Path) -> list[Piece]:
    """What a parameter is read from. Raises: ModelError naming the tensor that is missing, too much, or differs."""
    if name in there:
        return [Piece(_matching(there, name, shape, folder))]
    for end, forms in APART.items():
        prefix = name.removesuffix(end)
        for form in forms if prefix != name else ():
            tensors = [prefix + tensor for tensor in form]
            if "{}" not in tensors[0]:
                if tensors[0] in there:
                    return [Piece(_matching(there, tensors[0], shape, folder))]
            elif any(tensor.format(e) in there for tensor in tensors for e in range(shape[0] + 1)):
                return list(_pieces(there, tensors, shape, folder))
    return [Piece(_matching(there, name, shape, folder))]


def refuse_others(
    there: Mapping[str, Entry], known: Iterable[Entry], names: Iterable[str], folder: Path
) -> None:
    """`known`, `names`: tensors that the module has. Raises: ModelError naming those that it has not."""
    used, buffers = {id(entry) for entry in known}, set(names)
    others = [name for name, entry in there.items() if id(entry) not in used and name not in buffers]
    others = [name for name in others if not COMPUTED.search(name)]
    if others:
        more = f" and {len(others) - 1} more" if len(others) > 1 else ""
        raise ModelError(f"{folder} has {min(others)}{more}, which the module has not: it is another model")


def _pieces(
    there: Mapping[str, Entry], tensors: Sequence[str], shape: tuple[int, ...], folder: Path
) -> Iterator[Piece]:
    E, rows, columns = shape
    size = rows // len(tensors)
    extra = tensors[0].format(E)
    if extra in there:
        raise ModelError(
            f"{folder} has {extra}, but the module has {E} experts, 0 to {E - 1}: it is another model"
        )
    for expert in range(E):
        for i, tensor in enumerate(tensors):
            yield Piece(_matching(there, tensor.format(expert), (size, columns), folder), expert, i * size)


def read(pieces: Sequence[Piece], region: tuple[slice, ...], into: Tensor) -> None:
    """Read a region of a parameter to the beginning of `into`, converting the dtype."""
    for piece in pieces:
        if piece.expert is None:
            read_region(piece.entry, region, into)
            continue
        experts, rows, columns = region
        start = max(rows.start, piece.first)
        stop = min(rows.stop, piece.first + piece.entry.shape[0])
        if experts.start <= piece.expert < experts.stop and start < stop:
            part = into[piece.expert - experts.start, start - rows.start : stop - rows.start]
            read_region(piece.entry, (slice(start - piece.first, stop - piece.first), columns), part)


def _matching(there: Mapping[str, Entry], name: str, shape: tuple[int, ...], folder: Path) -> Entry:
    if name not in there:
        raise ModelError(
            f"{folder} has no values for {name}; its first tensors are {', '.join(sorted(there)[:4])}"
        )
    if there[name].shape != shape:
        raise ModelError(
            f"{folder} has {name} {list(there[name].shape)}, the module {list(shape)}: it is another model"
        )
    if there[name].dtype not in FLOATS:
        raise ModelError(
            f"{folder} has {name} as {there[name].dtype}; values are read from {', '.join(FLOATS)}"
        )
    return there[name]

"""The initial values of a module that is not ours: its own, or those of safetensors files where it has none."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from fivefold.core.layout import Layout, MeshAxis
from fivefold.core.sharding import ParameterRow
from fivefold.errors import ModelError
from fivefold.nn.own import Parts
from fivefold.nn.own_files import Piece, find, open_folder, read, refuse_others
from fivefold.nn.safetensors_io import Entry, read_region


@contextmanager
def empty_parameters() -> Iterator[None]:
    """Modules that are made inside have parameters without memory; their buffers, such as frequencies, have values.

    Memory: one parameter at a time. For `parallelize(..., weights=folder)`, which reads this rank's part only.
    """
    own = nn.Module.register_parameter

    def register(self: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:  # one that is shared stays one
            parameter = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
        own(self, name, parameter)

    nn.Module.register_parameter = register  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = own  # type: ignore[method-assign]


class OwnValues:
    """The values that a module has when this is made. `folder`: read them from its safetensors files instead.

    Files have the module's own names, as `safetensors.torch.save_model` writes them, or the experts of Mixtral and
    Qwen-MoE each in tensors of their own, as `save_pretrained` does. Buffers of floating point that a module saves are
    read as well, where the files have them.
    Raises: ModelError naming the parameter that has no values, or differs in shape, or that the module has not.
    """

    def __init__(self, parts: Parts, folder: Path | None) -> None:
        self._whole: dict[str, Tensor] = {}
        self._pieces: dict[str, list[Piece]] = {}
        there = open_folder(folder) if folder is not None else {}
        for part in parts.names:
            for inner, parameter in parts.module(part).named_parameters():
                name, own = f"{part}.{inner}", f"{parts.names[part]}.{inner}"
                if folder is None:
                    if parameter.is_meta:
                        raise ModelError(f"{parts.kind}: {own} has no values; give a folder of weights")
                    self._whole[name] = parameter.detach()
                    continue
                if name == "head.weight" and parts.tied and own not in there:
                    own = parts.own_name("embedding.weight")
                self._pieces[name] = find(there, own, tuple(parameter.shape), folder)
        self._buffers: dict[str, Entry] = {}
        saved = parts.root.state_dict(keep_vars=True) if folder is not None else {}
        for name, buffer in parts.root.named_buffers():
            if folder is not None and name in saved and name in there and buffer.is_floating_point():
                self._buffers[name] = find(there, name, tuple(buffer.shape), folder)[0].entry
            if buffer.is_meta:
                raise ModelError(
                    f"{parts.kind}: the buffer {name} has no values; make the module within "
                    f"fivefold.empty_parameters(), which leaves buffers as they are"
                )

        if folder is not None:
            known = (piece.entry for pieces in self._pieces.values() for piece in pieces)
            refuse_others(there, known, (name for name, _ in parts.root.named_buffers()), folder)

    def buffer(self, name: str, own: Tensor) -> Tensor:
        """The values of a buffer, by the module's name: `own` where files hold none."""
        if name not in self._buffers:
            return own
        values, size = torch.empty(own.shape, dtype=own.dtype), own.numel()
        read_region(replace(self._buffers[name], shape=(size,)), (slice(0, size),), values.view(-1))
        return values

    def __call__(
        self, row: ParameterRow, layout: Layout, coordinate: Mapping[MeshAxis, int], dtype: str
    ) -> Tensor:
        """This rank's part of a parameter, on the module's device or the CPU, padding zero: a `ValueSource`."""
        region, shape, kind = row.region(layout, coordinate), row.local_shape(layout), getattr(torch, dtype)
        if row.name in self._pieces:
            part = torch.zeros(shape, dtype=kind)
            read(self._pieces[row.name], region, part)
            return part
        whole = self._whole[row.name]
        if tuple(whole.shape) == shape and all(cut.start == 0 for cut in region):
            return whole.to(kind)
        part = whole.new_zeros(shape, dtype=kind)  # a copy: a view would keep the whole in memory
        part[tuple(slice(0, cut.stop - cut.start) for cut in region)] = whole[region]
        return part

    def let_go(self) -> None:
        """Forget the module's whole parameters."""
        self._whole.clear()

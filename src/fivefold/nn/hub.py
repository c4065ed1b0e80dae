"""Hugging Face checkpoints of every family that runs, read by region.

names       `hub_names.py`: which tensor, and which of its rows, hold each parameter of our decoder
checkpoint  a folder of config.json and safetensors, checked as a whole before a value is read
hub names   `owner/model` is downloaded where that is possible; a folder is a folder
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fivefold.core.families.write import difference
from fivefold.core.layout import Layout, MeshAxis
from fivefold.core.model_config import load_json
from fivefold.core.model_spec import ModelSpec
from fivefold.core.regular_file import read_limited
from fivefold.core.sharding import ParameterRow, stored
from fivefold.errors import ModelError
from fivefold.nn.hub_files import COMPANIONS
from fivefold.nn.hub_names import Place, experts_among, places, tensors
from fivefold.nn.safetensors_io import (
    FLOATS,
    Entry,
    read_header,
    read_region,
    short,
    unique_keys,
)
from fivefold.units import MIB

ValueSource = Callable[[ParameterRow, Layout, Mapping[MeshAxis, int], str], Tensor]
"""Where a rank's values come from: (row, layout, coordinate, dtype) -> its part, padding zero. `HFCheckpoint.read`."""

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
MOST_INDEX_BYTES = 64 * MIB

_BUFFERS = re.compile(r"\.rotary_emb\.inv_freq$")
"""What old files hold beside parameters: angles that follow from the config."""
_LAYER = re.compile(r"model\.layers\.(\d{1,5})\.")


class HFCheckpoint:
    """A folder with config.json and model.safetensors, or shards and their index. Holds no file open.

    spec        the model of config.json              config      config.json as it is
    bytes_read  so far, in this process, with headers and index
    """

    def __init__(self, folder: Path, spec: ModelSpec, config: Mapping[str, Any]) -> None:
        """Use `open`."""
        self.folder, self.spec, self.config = folder, spec, config
        self.bytes_read = 0
        self._places, self._shapes = places(spec), tensors(spec)
        self._shape_of = {row.name: row.shape for row in stored(spec)}
        self._entries = self._find()
        self._check()

    @classmethod
    def open(cls, folder: str | Path) -> HFCheckpoint:
        """Read config.json and all headers, and check that every tensor is there, with its shape, and no other.

        Raises: ModelError, one line that names the file and the tensor or field.
        """
        path = Path(folder)
        if not path.is_dir():
            raise ModelError(f"no checkpoint folder at {path}")
        config = load_json(path / "config.json")
        quantised = config.get("quantization_config")
        if quantised:
            method = quantised.get("quant_method") if isinstance(quantised, Mapping) else quantised
            raise ModelError(
                f"{path} is quantised ({short(method)}); give the checkpoint that it was made from"
            )
        return cls(path, ModelSpec.from_config(path), config)

    def read(
        self, row: ParameterRow, layout: Layout, coordinate: Mapping[MeshAxis, int], dtype: str
    ) -> Tensor:
        """This rank's part of one parameter, on the CPU, padding zero; a `ValueSource`.

        Memory: the part, and one block of 4 MiB where the dtype differs from the file's.
        Raises: ModelError for a parameter of another model, or a file that was cut short meanwhile.
        """
        name = row.tied_to or row.name
        if self._shape_of.get(name) != row.shape:
            raise ModelError(
                f"{self.folder} has {name} {list(self._shape_of.get(name, ()))}, the model to be filled "
                f"{list(row.shape)}: it is another model"
            )
        region = row.region(layout, coordinate)
        part = torch.zeros(row.local_shape(layout), dtype=getattr(torch, dtype))
        if len(row.shape) < 3:
            self._read(self._places[name][0], region, part)
            return part
        for into, place in zip(
            part, self._places[name][region[0]]
        ):  # stacked matrices, each a tensor of its own
            self._read(place, region[1:], into)
        return part

    def _read(self, place: Place, region: Sequence[slice], part: Tensor) -> None:
        rows = slice(region[0].start + place.first, region[0].stop + place.first)
        self.bytes_read += read_region(self._entries[place.tensor], (rows, *region[1:]), part)
        twin = self._twin(place.tensor)
        if twin is not None:
            self._check_twin(twin, place.tensor, (rows, *region[1:]), part)

    def check_model(self, spec: ModelSpec) -> None:
        """Shapes alone do not tell: fewer layers, a tied head, other angles, windows or heads would all be filled.

        Raises: ModelError where `spec` computes something else, its name and its longest sequence aside.
        """
        fault = difference(self.spec, spec.replace(max_positions=self.spec.max_positions))
        if fault is not None:
            raise ModelError(
                f"{self.folder} holds weights of another model than {spec.name}: there {fault}; "
                f"use model={self.folder}, or change its config.json if this is meant"
            )

    def dtype_of(self, name: str) -> str:
        """The dtype in which a parameter is stored: `bfloat16`."""
        return str(FLOATS[self._entries[self._places[name][0].tensor].dtype]).removeprefix("torch.")

    def _find(self) -> dict[str, Entry]:
        """All tensors of all files, from their headers; the index must agree with them."""
        single, index = self.folder / SINGLE, self.folder / INDEX
        if single.exists():
            return self._header_of(single)
        if not index.exists():
            raise ModelError(_nothing_to_read(self.folder))
        weight_map = self._weight_map(index)
        entries: dict[str, Entry] = {}
        for file in sorted(set(weight_map.values())):
            for name, entry in self._header_of(self.folder / file).items():
                listed = weight_map.get(name)
                if listed != file:
                    where = f"lists it in {short(listed)}" if listed else "does not list it"
                    raise ModelError(f"{self.folder / file} has tensor {short(name)}, but {INDEX} {where}")
                entries[name] = entry
        for name, file in weight_map.items():
            if name not in entries:
                raise ModelError(f"{index} lists tensor {short(name)} in {file}, which does not have it")
        return entries

    def _header_of(self, path: Path) -> dict[str, Entry]:
        header = read_header(path)
        self.bytes_read += header.size_bytes
        return dict(header.entries)

    def _weight_map(self, index: Path) -> dict[str, str]:
        try:
            content = read_limited(index, MOST_INDEX_BYTES, "index", ModelError)
            self.bytes_read += len(content)
            raw = json.loads(content.decode("utf-8"), object_pairs_hook=unique_keys)
        except (ValueError, RecursionError) as error:
            reason = "nested too deeply" if isinstance(error, RecursionError) else str(error).splitlines()[0]
            raise ModelError(f"{index} is not valid: {reason}") from None
        weight_map = raw.get("weight_map") if isinstance(raw, dict) else None
        if not isinstance(weight_map, dict) or not weight_map:
            raise ModelError(f"{index} has no 'weight_map'")
        for name, file in weight_map.items():
            if not isinstance(file, str) or not re.fullmatch(r"[\w][\w.-]{0,200}\.safetensors", file):
                raise ModelError(
                    f"{index}: tensor {short(name)} is in {short(file)}; "
                    f"only .safetensors files of the same folder are read"
                )
        return weight_map

    def _check(self) -> None:
        missing = sorted(set(self._shapes) - set(self._entries))
        if missing:
            hint = ""
            if missing == ["lm_head.weight"]:
                hint = " (config.json says tie_word_embeddings: false)"
            raise ModelError(
                f"{self.folder} lacks {_named(missing)} of the {self.spec.family} in config.json{hint}"
            )
        extra = [
            name for name in self._entries if name not in self._shapes and not self._is_known_extra(name)
        ]
        if extra:
            raise ModelError(
                f"{self.folder} has {_named(sorted(extra))}, which the {self.spec.family} in config.json does not have"
            )
        twin = {"lm_head.weight": self._shapes["model.embed_tokens.weight"]} if self._tied_twice() else {}
        for name, shape in {**self._shapes, **twin}.items():
            entry = self._entries[name]
            if entry.shape != shape:
                raise ModelError(
                    f"{entry.path}: tensor {short(name)} is {list(entry.shape)}, by config.json it is {list(shape)}"
                )
            if entry.dtype not in FLOATS:
                raise ModelError(
                    f"{entry.path}: tensor {short(name)} is {entry.dtype}; weights are {', '.join(FLOATS)}"
                )

    def _is_known_extra(self, name: str) -> bool:
        """Angles, a head that is the embedding, and layers that predict further tokens: they come after the last."""
        beyond = _LAYER.match(name)
        predicts = self.config.get("num_nextn_predict_layers") or 0
        if beyond and isinstance(predicts, int) and 0 <= int(beyond[1]) - self.spec.layers < predicts:
            return True
        return bool(_BUFFERS.search(name)) or (name == "lm_head.weight" and self.spec.tied_embeddings)

    def _tied_twice(self) -> bool:
        return self.spec.tied_embeddings and "lm_head.weight" in self._entries

    def _twin(self, tensor: str) -> Entry | None:
        """Some files of tied models store the embedding a second time, as the head."""
        if tensor == "model.embed_tokens.weight" and self._tied_twice():
            return self._entries["lm_head.weight"]
        return None

    def _check_twin(self, twin: Entry, tensor: str, region: Sequence[slice], part: Tensor) -> None:
        other = torch.zeros_like(part)
        self.bytes_read += read_region(twin, region, other)
        if not torch.equal(other.view(torch.uint8), part.view(torch.uint8)):
            raise ModelError(
                f"{self.folder}: config.json says tie_word_embeddings, but lm_head.weight differs from {tensor}"
            )


def _nothing_to_read(folder: Path) -> str:
    pickles = sorted(
        path.name for ending in ("*.bin", "*.pt", "*.pth", "*.ckpt") for path in folder.glob(ending)
    )
    if pickles:
        return (
            f"{folder} has {pickles[0]} but no {SINGLE}: pickle files can run code and are refused; "
            f"load and save it with transformers, which writes safetensors"
        )
    return f"{folder} has neither {SINGLE} nor {INDEX}"


def _named(names: Sequence[str]) -> str:
    """Whole experts by their numbers, anything else by its tensors."""
    return experts_among(names) or _listed(names)


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"tensor {', '.join(short(name) for name in names[:3])}{more}"


HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[\w.-]{1,96}(?:@[\w./-]{1,100})?")


def local_folder(text: str) -> Path:
    """The folder of a checkpoint: `text` itself, or a download of the hub name `owner/model` or `owner/model@revision`.

    Raises: ModelError where there is no such folder, no huggingface_hub, or no way to the hub.
    """
    try:
        path = Path(text).expanduser()
        if text and path.is_dir():
            return path
        taken = path.exists()
    except (OSError, ValueError, RuntimeError):  # cannot be a path: too long, a zero byte, an unknown home
        taken = False
    if not HUB_NAME.fullmatch(text) or taken:
        raise ModelError(f"no checkpoint folder at {short(text)}; give a folder, or a hub name owner/model")
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise ModelError(
            f"no folder {text}; to download it by that name: pip install 'fivefold[hub]'"
        ) from None
    name, _, revision = text.partition("@")
    wanted = ["*.safetensors", INDEX, "config.json", *COMPANIONS]
    try:
        return Path(snapshot_download(name, revision=revision or None, allow_patterns=wanted))
    except Exception as error:  # whatever the network, the hub or its client has to say
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise ModelError(f"no folder {text}, and it cannot be downloaded: {reason[:300]}") from None

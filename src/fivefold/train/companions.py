"""What an exported model needs beside its weights, so that others can load and talk to it.

    config.json       that of the model or of the weights it started from, if it describes this model; else only the
                      fields that name tokens, for the config that is made from the model
    tokenizer files   of the folder that the weights came from, if the data was prepared with its tokenizer.json;
                      else the tokenizer.json that the data was prepared with, and settings that name its tokens

They are read before training begins, and kept in every checkpoint: a checkpoint can be exported when all else is gone.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fivefold.catalog.models import names as presets
from fivefold.core.families.write import difference
from fivefold.core.model_config import load_json
from fivefold.core.model_spec import ModelSpec
from fivefold.core.regular_file import read_limited
from fivefold.data.encode import ByteEncoder
from fivefold.data.manifest import TOKENIZER_COPY, TokenizerInfo, is_prepared, read_manifest
from fivefold.errors import DataError, ModelError
from fivefold.nn.hub_files import (
    MOST_COMPANION_BYTES,
    TOKENIZER,
    TOKENIZER_CONFIG,
    TOKENIZER_FILES,
    read_companions,
)
from fivefold.train.config import TrainConfig

CONFIG = "config.json"


@dataclass(frozen=True)
class Companions:
    """`config`: a whole config.json, or fields for the one that is made from the model. `files`: contents by name."""

    config: Mapping[str, Any]
    files: Mapping[str, bytes]
    left_out: str | None = None
    """What the folder of the weights has and the export does not, and why."""

    def to_files(self) -> dict[str, bytes]:
        """All as files, the config among them: the form in a checkpoint."""
        return {CONFIG: json.dumps(self.config, indent=1).encode(), **self.files}

    @classmethod
    def from_files(cls, files: Mapping[str, bytes]) -> Companions:
        """The inverse of `to_files`. Raises: ModelError for a config that is no JSON object."""
        rest = dict(files)
        try:
            config = json.loads(rest.pop(CONFIG, b"{}"))
        except (ValueError, RecursionError):
            config = None
        if not isinstance(config, dict):
            raise ModelError(f"{CONFIG} of the checkpoint is not a JSON object")
        return cls(config, rest)


def find_companions(config: TrainConfig, spec: ModelSpec) -> Companions:
    """Read the companions of a run. Memory: their size, some MiB.

    Raises: ModelError for a file that is too large or cannot be read, DataError for prepared data that lacks its
            tokenizer.json.
    """
    folder = _model_folder(config)
    beside = {} if folder is None else read_companions(folder)
    info, raw = _tokenizer(config)
    own = _own_config(config, spec)
    if info.sha256 == hashlib.sha256(beside.get(TOKENIZER, b"")).hexdigest():
        return Companions(own, beside)
    rest = {name: content for name, content in beside.items() if name not in TOKENIZER_FILES}
    left_out = None
    if TOKENIZER in beside:
        reads = "is in byte tokens" if raw is None else "was prepared with another"
        left_out = f"the tokenizer of {folder} is not exported: the data {reads}"
    tokens = {"bos_token_id": info.bos, "eos_token_id": info.eos, "pad_token_id": info.pad}
    if raw is not None:
        settings = _settings(info, raw, spec.max_positions)
        rest |= {TOKENIZER: raw, TOKENIZER_CONFIG: json.dumps(settings, indent=2).encode()}
    return Companions({**own, **tokens}, rest, left_out)


def _model_folder(config: TrainConfig) -> Path | None:
    """The folder of the weights; without weights, that of the model's config."""
    if config.weights is not None:
        return Path(config.weights)
    path = Path(config.model).expanduser()
    return path if path.is_dir() and config.model.strip().lower() not in presets() else None


def _own_config(config: TrainConfig, spec: ModelSpec) -> dict[str, Any]:
    """The first config.json at hand that describes this model; {} where there is none."""
    for text in (config.model, config.weights):
        path = Path(text or "").expanduser()
        path = path / CONFIG if path.is_dir() else path
        if text is None or not path.is_file():
            continue
        found = dict(load_json(path))
        same = difference(spec, ModelSpec.from_config(found, name=spec.name)) is None
        if same and "text_config" not in found:  # else it is the config of more than a language model
            return found
    return {}


def _tokenizer(config: TrainConfig) -> tuple[TokenizerInfo, bytes | None]:
    """Of the data (all sources of a mixture have the same one), and its tokenizer.json; bytes have none."""
    path = config.data if isinstance(config.data, str) else config.data[0].path
    folder = Path(path).expanduser()
    info = read_manifest(folder)[0].tokenizer if is_prepared(folder) else ByteEncoder().info
    if info.kind == "byte":
        return info, None
    file = folder / TOKENIZER_COPY
    raw = read_limited(file, MOST_COMPANION_BYTES, "tokenizer.json", DataError)
    if hashlib.sha256(raw).hexdigest() != info.sha256:
        raise DataError(f"{file} is not the one that the data was prepared with; prepare the data again")
    return info, raw


def _settings(info: TokenizerInfo, raw: bytes, max_positions: int) -> dict[str, Any]:
    """A tokenizer_config.json for a tokenizer without one: loaders would guess its parts from the model's family."""
    try:
        tokenizer = json.loads(raw)
        names = {number: name for name, number in _vocabulary(tokenizer).items()}
        names |= {token["id"]: token["content"] for token in tokenizer.get("added_tokens") or ()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise DataError(f"{TOKENIZER} of the data is not one; prepare the data again") from None
    special = {"bos_token": info.bos, "eos_token": info.eos, "pad_token": info.pad}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_positions,
        "clean_up_tokenization_spaces": False,
        **{key: names[number] for key, number in special.items() if number in names},
    }


def _vocabulary(tokenizer: dict[str, Any]) -> dict[str, int]:
    """Name -> number; models of the kind Unigram list [name, score]."""
    found = tokenizer["model"].get("vocab", {})
    return found if isinstance(found, dict) else {name: number for number, (name, _) in enumerate(found)}

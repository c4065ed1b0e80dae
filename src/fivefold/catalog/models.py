"""Models by name: the presets of `models.yaml`, and `resolve` for whatever a person types for a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import Field

from fivefold.catalog.files import read
from fivefold.core.model_spec import BlockSpec, ModelSpec
from fivefold.core.value import Value
from fivefold.errors import ModelError, nearest


class BlockGroup(Value):
    """`pattern`, `repeat` times over."""

    repeat: int = Field(gt=0)
    pattern: tuple[BlockSpec, ...] = Field(min_length=1)


def names() -> list[str]:
    """The names of all presets, in the order of the file."""
    return list(_entries())


def source(name: str) -> str:
    """Where the sizes of a preset come from."""
    return str(_entries()[name]["source"])


def preset(name: str) -> ModelSpec:
    """The preset of that exact name."""
    entry = dict(_entries()[name])
    del entry["source"]
    groups = [BlockGroup.read(group, where=f"preset {name}") for group in entry.pop("blocks")]
    blocks = tuple(block for group in groups for block in group.pattern * group.repeat)
    return ModelSpec.read({"name": name, **entry, "blocks": blocks}, where=f"preset {name}")


def resolve(text: str) -> ModelSpec:
    """The model that `text` names: a preset, a `config.json`, or a folder that holds one.

    Raises: ModelError naming the nearest preset, or the field of the file that is not supported.
    """
    name = text.strip().lower()
    if name in names():
        return preset(name)
    try:
        path = Path(text).expanduser()
        exists = bool(name) and path.exists()
    except (OSError, ValueError, RuntimeError):  # cannot be a path: too long, a zero byte, an unknown home
        exists = False
    if exists:
        return ModelSpec.from_config(path)
    if text.endswith(".json") or text.startswith((".", "~", "/")):
        raise ModelError(
            f"no model config at {text[:200]}; give a config.json, a folder that holds one, or a preset"
        )
    raise ModelError(
        f"no preset {text[:80]!r}{nearest(name, names())}; give the path of a config.json or of its folder, "
        f"or one of: {', '.join(names())}"
    )


def _entries() -> dict[str, dict[str, Any]]:
    entries: dict[str, dict[str, Any]] = read("models.yaml")
    return entries

"""Devices and what their vendors state of them, read from `devices.yaml` beside this file."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import Any, Literal

import yaml

from fivefold.core.value import Value
from fivefold.errors import ClusterError, nearest
from fivefold.units import GIB, GIGA, TERA


class Device(Value):
    """One device. A figure that no datasheet gives is None."""

    name: str
    half: Literal["bfloat16", "float16"] | None
    """Format of the 16-bit peak."""
    peak_flops_per_s: float | None
    """Dense 16-bit matrix products with 32-bit sums."""
    memory_bytes: int | None
    memory_bytes_per_s: float | None
    link: str
    link_bytes_per_s: float | None
    """To the other devices of the node: one direction, all lanes of one device."""
    source: str


@cache
def devices() -> tuple[Device, ...]:
    """The whole table."""
    rows = yaml.safe_load(files(__package__).joinpath("devices.yaml").read_text(encoding="utf-8"))
    return tuple(_device(row) for row in rows)


def find(name: str) -> Device:
    """The device of this name, in upper or lower case. Raises ClusterError with the nearest known name."""
    known = {device.name: device for device in devices()}
    for device in known.values():
        if device.name.lower() == name.strip().lower():
            return device
    starts = [known_name for known_name in known if known_name.lower().startswith(name.strip().lower())]
    hint = (
        f" (did you mean {' or '.join(map(repr, starts))}?)"
        if name.strip() and starts
        else nearest(name, known)
    )
    raise ClusterError(f"unknown device {name[:60]!r}{hint}; known: {', '.join(known)}")


def _device(row: dict[str, Any]) -> Device:
    def scaled(key: str, unit: float) -> float | None:
        return None if row[key] is None else row[key] * unit

    return Device(
        name=row["name"],
        half=row["half"],
        peak_flops_per_s=scaled("tflops", TERA),
        memory_bytes=None if row["memory_gib"] is None else row["memory_gib"] * GIB,
        memory_bytes_per_s=scaled("memory_gb_s", GIGA),
        link=row["link"],
        link_bytes_per_s=scaled("link_gb_s", GIGA),
        source=row["source"],
    )

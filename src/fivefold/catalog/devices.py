"""Devices and what their vendors state of them, read from `devices.yaml` beside this file."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, Literal

from fivefold.catalog.files import rows
from fivefold.core.cluster import Precision
from fivefold.core.value import Value
from fivefold.errors import ClusterError, nearest
from fivefold.units import GIB, GIGA, TERA


class Device(Value):
    """One device. A figure that no datasheet gives is None."""

    name: str
    half: Literal["bfloat16", "float16"] | None
    """The 16-bit format of training."""
    peaks: Mapping[Precision, float]
    """FLOP/s of dense matrix products by format, with 32-bit sums."""
    memory_bytes: int | None
    memory_bytes_per_s: float | None
    link: str
    link_bytes_per_s: float | None
    """To the other devices of the node: one direction, all lanes of one device."""
    host_bytes_per_s: float | None
    """To the host: one direction."""
    aliases: tuple[str, ...]
    source: str

    @property
    def peak_flops_per_s(self) -> float | None:
        """The dense 16-bit peak."""
        return None if self.half is None else self.peaks[self.half]


@cache
def devices() -> tuple[Device, ...]:
    """The whole table."""
    return tuple(_device(row) for row in rows("devices.yaml"))


def find(name: str) -> Device:
    """The device of this name or alias, in upper or lower case. Raises ClusterError with the nearest known name."""
    wanted = name.strip().lower()
    for device in devices():
        if wanted in (known.lower() for known in (device.name, *device.aliases)):
            return device
    names = [device.name for device in devices()]
    starts = [known for known in names if known.lower().startswith(wanted)]
    hint = f" (did you mean {' or '.join(map(repr, starts))}?)" if wanted and starts else nearest(name, names)
    raise ClusterError(f"unknown device {name[:60]!r}{hint}; known: {', '.join(names)}")


def _device(row: dict[str, Any]) -> Device:
    def scaled(key: str, unit: float) -> float | None:
        return None if row[key] is None else row[key] * unit

    return Device(
        name=row["name"],
        half=row["half"],
        peaks={precision: figure * TERA for precision, figure in row["tflops"].items()},
        memory_bytes=None if row["memory_gib"] is None else row["memory_gib"] * GIB,
        memory_bytes_per_s=scaled("memory_gb_s", GIGA),
        link=row["link"],
        link_bytes_per_s=scaled("link_gb_s", GIGA),
        host_bytes_per_s=scaled("host_gb_s", GIGA),
        aliases=tuple(row["aliases"]),
        source=row["source"],
    )

"""The machines a job runs on: a list of node kinds, so that mixed hardware can be written down.

Text form: `4x8 A100-80GB` (4 nodes of 8 devices), `8 H100` (one node), `32xA100-80GB` (32 devices in their usual
nodes), `2x8 H100 + 4x8 A100-80GB`, `cpu`; the network of a part after a comma: `4 nodes x 8 H100, 400 Gb/s` (each
device's own), `800 Gb/s per node`, `4x200 Gb/s` (4 adapters in a node), or its name: `ib-ndr`.
The file form (YAML) adds what a datasheet does not know, and devices that no catalog has:

    nodes:
      - {count: 4, devices_per_node: 8, device: A100-80GB, network_gbit_s: 200}
      - {count: 1, devices_per_node: 8, device: Mine, memory_gib: 64, memory_gb_s: 1600, link_gb_s: 200,
         peak_tflops: {bfloat16: 300, float8: 600}}
"""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from pathlib import Path
from typing import Any, Literal, Self

import yaml
from pydantic import Field, model_validator

from fivefold.core import regular_file
from fivefold.core.cluster_text import CPU, read_text
from fivefold.core.value import Value
from fivefold.errors import ClusterError, ConfigError
from fivefold.units import GIB, GIGA, KIB, MICRO, TERA

Precision = Literal["float32", "tfloat32", "float16", "bfloat16", "float8", "float4"]

_MAX_FILE_BYTES = 64 * KIB
_MAX_DEPTH = 10

MOST_DEVICES = 10_000_000
LARGEST = 1e18
"""No memory, rate, peak or price of a device is more: a larger figure is in another unit."""
SMALLEST_RATE = 1.0
"""Nor is any bandwidth or peak less."""
LONGEST_LATENCY_S = 10.0

_FRIENDLY: dict[str, tuple[str, float]] = {
    "memory_gib": ("memory_bytes", GIB),
    "memory_gb_s": ("memory_bytes_per_s", GIGA),
    "link_gb_s": ("intra_node_bytes_per_s", GIGA),
    "host_gb_s": ("host_bytes_per_s", GIGA),
    "network_gbit_s": ("inter_node_bytes_per_s", GIGA / 8),
    "link_latency_us": ("intra_node_latency_s", MICRO),
    "network_latency_us": ("inter_node_latency_s", MICRO),
    "peak_tflops": ("peak_flops_per_s", TERA),
}
"""Keys that a file may use in place of the fields, in the units of datasheets."""


class NodeKind(Value):
    """Nodes that are alike. Fields left at None are looked up by device name where they are needed."""

    count: int = Field(default=1, gt=0, le=MOST_DEVICES)
    devices_per_node: int = Field(default=1, gt=0, le=MOST_DEVICES)
    """Devices that reach each other through the device link."""
    device: str = Field(min_length=1, max_length=100)
    memory_bytes: int | None = Field(default=None, gt=0, le=LARGEST)
    """Memory of one device."""
    memory_bytes_per_s: float | None = Field(default=None, ge=SMALLEST_RATE, le=LARGEST)
    peak_flops_per_s: Mapping[Precision, float] | None = None
    """Dense matrix products by format."""
    host_bytes_per_s: float | None = Field(default=None, ge=SMALLEST_RATE, le=LARGEST)
    """One device to its host, one direction."""
    intra_node_bytes_per_s: float | None = Field(default=None, ge=SMALLEST_RATE, le=LARGEST)
    """One device to its peers inside the node, one direction."""
    inter_node_bytes_per_s: float | None = Field(default=None, ge=SMALLEST_RATE, le=LARGEST)
    """One device's share of the network between nodes, one direction."""
    intra_node_latency_s: float | None = Field(default=None, ge=0, le=LONGEST_LATENCY_S)
    inter_node_latency_s: float | None = Field(default=None, ge=0, le=LONGEST_LATENCY_S)
    network: str | None = Field(default=None, max_length=100)
    """A network of the catalog, for what of it is not given."""
    price_per_hour: float | None = Field(default=None, gt=0, le=LARGEST)
    """Of one device, in any currency."""

    @model_validator(mode="before")
    @classmethod
    def _friendly_units(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        data = dict(data)
        for key, (field, unit) in _FRIENDLY.items():
            if key not in data:
                continue
            if field in data:
                raise ValueError(f"{key} and {field} are the same figure; give one of them")
            figure = _scaled(data.pop(key), unit, key)
            whole = field == "memory_bytes" and isinstance(figure, float) and isfinite(figure)
            data[field] = round(figure) if whole else figure
        return data

    @model_validator(mode="after")
    def _printable(self) -> Self:
        if not self.device.isprintable():
            raise ValueError(f"the name of a device has printable characters only, got {self.device!r}")
        return self

    @model_validator(mode="after")
    def _positive_peaks(self) -> Self:
        for precision, figure in (self.peak_flops_per_s or {}).items():
            if not SMALLEST_RATE <= figure <= LARGEST:
                raise ValueError(
                    f"the peak of {precision} must be a positive number, {SMALLEST_RATE:g} to {LARGEST:g} FLOP/s, "
                    f"got {figure:g}"
                )
        return self

    @property
    def devices(self) -> int:
        return self.count * self.devices_per_node

    def __str__(self) -> str:
        if self.device == CPU and self.devices == 1:
            return CPU
        nodes = f"{self.count}x" if self.count > 1 else ""
        network = ""
        if self.network is not None:
            network = f", {self.network}"
        elif self.inter_node_bytes_per_s is not None:
            network = f", {self.inter_node_bytes_per_s * 8 / GIGA:.12g} Gb/s"
        return f"{nodes}{self.devices_per_node} {self.device}{network}"


def _scaled(value: Any, unit: float, key: str) -> Any:
    if isinstance(value, dict):
        return {name: _scaled(figure, unit, f"{key}.{name}") for name, figure in value.items()}
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{key} must be a number, got {str(value)[:60]!r}")
    try:
        return value * unit
    except OverflowError:
        raise ValueError(f"{key} is too large a number") from None


class Cluster(Value):
    """Node kinds in rank order. In a config, the text form may stand in place of the fields."""

    nodes: tuple[NodeKind, ...] = Field(min_length=1, max_length=100)

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read the text form, or the YAML file at this path. Raises ClusterError."""
        if text.endswith((".yaml", ".yml", ".json")):
            return cls._checked(_read_yaml(Path(text)), text)
        return cls._checked(read_text(text), "cluster")

    @classmethod
    def _checked(cls, data: Any, where: str) -> Self:
        try:
            return cls.read(data, where=where)
        except ConfigError as error:
            raise ClusterError(str(error)) from None

    @model_validator(mode="before")
    @classmethod
    def _accept_text(cls, data: Any) -> Any:
        return read_text(data) if isinstance(data, str) else data

    @model_validator(mode="after")
    def _limited(self) -> Self:
        if self.devices > MOST_DEVICES:
            raise ValueError(f"{self.devices:,} devices; at most {MOST_DEVICES:,} are planned for")
        return self

    @property
    def devices(self) -> int:
        """All devices of all nodes."""
        return sum(kind.devices for kind in self.nodes)

    @property
    def homogeneous(self) -> bool:
        """Whether all nodes are alike."""
        return all(kind.replace(count=1) == self.nodes[0].replace(count=1) for kind in self.nodes)

    @property
    def devices_per_node(self) -> int:
        """Devices of every node. Raises ClusterError where nodes differ in it."""
        sizes = sorted({kind.devices_per_node for kind in self.nodes})
        if len(sizes) > 1:
            raise ClusterError(f"nodes of {self} differ in size: {' and '.join(map(str, sizes))} devices")
        return sizes[0]

    @property
    def is_cpu(self) -> bool:
        """Whether ranks are processes without a device of their own; any number of them fits."""
        return all(kind.device == CPU for kind in self.nodes)

    def __str__(self) -> str:
        return " + ".join(map(str, self.nodes))


def _read_yaml(path: Path) -> Any:
    text = regular_file.read_text(path, _MAX_FILE_BYTES, "cluster file", ClusterError)
    try:
        _refuse_bombs(text, path)
        return yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f" (line {mark.line + 1})" if mark else ""
        raise ClusterError(f"cluster file {path} is not YAML{where}") from None


def _refuse_bombs(text: str, path: Path) -> None:
    """Refuse what lets a small file stand for a huge one: aliases, and nesting that takes quadratic time."""
    depth = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        if isinstance(event, yaml.AliasEvent):
            raise ClusterError(f"cluster file {path} uses YAML aliases (*name); write the values out")
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > _MAX_DEPTH:
            raise ClusterError(f"cluster file {path} nests deeper than {_MAX_DEPTH} levels")

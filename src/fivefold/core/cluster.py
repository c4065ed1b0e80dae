"""The machines a job runs on: a list of node kinds, so that mixed hardware can be written down.

Text form: `4x8 A100-80GB` (4 nodes of 8 devices), `8 H100` (one node), `2x8 H100 + 4x8 A100-80GB`, `cpu`.
The file form (YAML) adds what a datasheet does not know:

    nodes:
      - {count: 4, devices_per_node: 8, device: A100-80GB, inter_node_bytes_per_s: 25.0e9}
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Self

import yaml
from pydantic import Field, model_validator

from fivefold.core.value import Value
from fivefold.errors import ClusterError, ConfigError
from fivefold.units import KIB, format_bytes

CPU = "cpu"
_FORM = "write 4x8 A100-80GB (nodes x devices, then the device), 8 H100, cpu, or a .yaml file"
_PART = re.compile(
    r"(?:(?:([0-9]{1,7})\s*x\s*)?([0-9]{1,7})\s+)?([A-Za-z][A-Za-z0-9._-]*(?: [A-Za-z0-9._-]+)*)"
)
_MAX_FILE_BYTES = 64 * KIB
_MAX_DEPTH = 10


class NodeKind(Value):
    """Nodes that are alike. Fields left at None are looked up by device name where they are needed."""

    count: int = Field(default=1, gt=0)
    devices_per_node: int = Field(default=1, gt=0)
    device: str = Field(min_length=1, max_length=100)
    memory_bytes: int | None = Field(default=None, gt=0)
    """Memory of one device."""
    intra_node_bytes_per_s: float | None = Field(default=None, gt=0)
    """One device to its peers inside the node, one direction."""
    inter_node_bytes_per_s: float | None = Field(default=None, gt=0)
    """One device's share of the network between nodes, one direction."""
    intra_node_latency_s: float | None = Field(default=None, ge=0)
    inter_node_latency_s: float | None = Field(default=None, ge=0)

    @property
    def devices(self) -> int:
        return self.count * self.devices_per_node

    def __str__(self) -> str:
        if self.count > 1:
            return f"{self.count}x{self.devices_per_node} {self.device}"
        if self.device == CPU and self.devices_per_node == 1:
            return CPU
        return f"{self.devices_per_node} {self.device}"


class Cluster(Value):
    """Node kinds in rank order. In a config, the text form may stand in place of the fields."""

    nodes: tuple[NodeKind, ...] = Field(min_length=1)

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read the text form, or the YAML file at this path. Raises ClusterError."""
        if text.endswith((".yaml", ".yml", ".json")):
            return cls._checked(_read_yaml(Path(text)), text)
        return cls._checked(_read_text(text), "cluster")

    @classmethod
    def _checked(cls, data: Any, where: str) -> Self:
        try:
            return cls.read(data, where=where)
        except ConfigError as error:
            raise ClusterError(str(error)) from None

    @model_validator(mode="before")
    @classmethod
    def _accept_text(cls, data: Any) -> Any:
        return _read_text(data) if isinstance(data, str) else data

    @property
    def devices(self) -> int:
        """All devices of all nodes."""
        return sum(kind.devices for kind in self.nodes)

    @property
    def homogeneous(self) -> bool:
        """Whether all nodes are alike."""
        return len({kind.replace(count=1) for kind in self.nodes}) == 1

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


def _read_text(text: str) -> dict[str, Any]:
    if len(text) > 1000:
        raise ClusterError(f"cluster text has {len(text)} characters; at most 1000 are read")
    nodes = []
    for part in text.split("+"):
        match = _PART.fullmatch(part.strip())
        if match is None:
            raise ClusterError(f"cannot read cluster {part.strip()[:60]!r}; {_FORM}")
        count, devices, device = match.groups()
        if devices is None and device.lower() != CPU:
            raise ClusterError(
                f"cluster {device!r} has no number of devices; nearest: '8 {device}' (one node of 8)"
            )
        if 0 in (int(count or 1), int(devices or 1)):
            raise ClusterError(f"cluster {part.strip()!r}: nodes and devices must be at least 1")
        nodes.append(
            {
                "count": int(count or 1),
                "devices_per_node": int(devices or 1),
                "device": CPU if device.lower() == CPU else device,
            }
        )
    return {"nodes": nodes}


def _read_yaml(path: Path) -> Any:
    try:
        size = path.stat().st_size
        if size > _MAX_FILE_BYTES:
            limit = format_bytes(_MAX_FILE_BYTES)
            raise ClusterError(f"cluster file {path} has {format_bytes(size)}; at most {limit} are read")
        text = path.read_text(encoding="utf-8")
        _refuse_bombs(text, path)
        return yaml.safe_load(text)
    except OSError as error:
        raise ClusterError(f"cannot read cluster file {path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError, ValueError) as error:
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

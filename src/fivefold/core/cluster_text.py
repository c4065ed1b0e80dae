"""The text form of a cluster, read into the fields of its node kinds."""

from __future__ import annotations

import re
from typing import Any

from fivefold.errors import ClusterError
from fivefold.units import GIGA

CPU = "cpu"

_FORM = (
    "write 4x8 A100-80GB (nodes x devices, then the device), 32xA100-80GB or 8 H100 (devices), cpu, or a .yaml file; "
    "the network after a comma: 4x8 H100, 400 Gb/s"
)
_NAME = r"[A-Za-z][A-Za-z0-9._-]*(?: [A-Za-z0-9._-]+)*"
_PART = re.compile(
    rf"(?:(?:([0-9]{{1,7}})\s*(?:nodes?\s*)?x\s*)?([0-9]{{1,7}})\s*(?:x\s*|\s)(?:gpus?\s+)?)?({_NAME})"
)
_RATE = re.compile(
    r"(?:([0-9]{1,3})\s*x\s*)?([0-9]{1,6}(?:\.[0-9]{1,6})?)\s*(Gb|Gbit|GB)/s(?:\s+per\s+(node|device|gpu))?",
    re.I,
)
_THOUSANDS = re.compile(r"[0-9]{1,3}(?:,[0-9]{3})+(?=\s|x)")
_NETWORK = re.compile(r"[A-Za-z][A-Za-z0-9.-]*")


def read_text(text: str) -> dict[str, Any]:
    """The fields of a `Cluster`. Raises: ClusterError with what was expected."""
    if len(text) > 1000:
        raise ClusterError(f"cluster text has {len(text)} characters; at most 1000 are read")
    return {"nodes": [_kind(part.strip()) for part in text.split("+")]}


def _kind(part: str) -> dict[str, Any]:
    if thousands := _THOUSANDS.match(part):
        part = thousands[0].replace(",", "") + part[thousands.end() :]
    machines, comma, network = part.partition(",")
    match = _PART.fullmatch(machines.strip())
    if match is None:
        raise ClusterError(f"cannot read cluster {part[:60]!r}; {_FORM}")
    count, devices, device = match.groups()
    if devices is None and device.lower() != CPU:
        raise ClusterError(
            f"cluster {device!r} has no number of devices; nearest: '8 {device}' (one node of 8)"
        )
    if 0 in (int(count or 1), int(devices or 1)):
        raise ClusterError(f"cluster {part!r}: nodes and devices must be at least 1")
    kind: dict[str, Any] = {
        "count": int(count or 1),
        "devices_per_node": int(devices or 1),
        "device": CPU if device.lower() == CPU else device,
    }
    nodes_of = kind["devices_per_node"] if count else None
    return {**kind, **_network(network.strip(), nodes_of)} if comma else kind


def _network(text: str, devices_per_node: int | None) -> dict[str, Any]:
    """What follows the comma: each device's share of the network, or the network's name."""
    rate = _RATE.fullmatch(text)
    if rate is None:
        if _NETWORK.fullmatch(text):
            return {"network": text.lower()}
        raise ClusterError(
            f"cannot read network {text[:60]!r}; write 400 Gb/s (of each device), 800 Gb/s per node, "
            "4x200 Gb/s (4 adapters in a node), or a name such as ib-ndr"
        )
    adapters, figure, unit, per = rate.groups()
    bytes_per_s = float(figure) * (GIGA if unit == "GB" else GIGA / 8)
    if not bytes_per_s:
        raise ClusterError(f"network {text!r}: the rate must be more than 0")
    if adapters and (per or "node").lower() != "node":
        raise ClusterError(f"network {text!r}: adapters are counted per node; leave out 'per {per}'")
    if adapters or (per or "").lower() == "node":
        if devices_per_node is None:
            raise ClusterError(f"network {text!r} is per node; write the nodes as well: 4x8 H100, {text}")
        bytes_per_s *= int(adapters or 1) / devices_per_node
    return {"inter_node_bytes_per_s": bytes_per_s}

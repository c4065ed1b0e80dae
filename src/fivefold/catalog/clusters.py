"""Clusters with every figure that a prediction needs: as given, or else as device, node and network have it."""

from __future__ import annotations

from functools import cache
from typing import Any

from fivefold.catalog.devices import Device, devices, find
from fivefold.catalog.files import rows
from fivefold.core.cluster import Cluster, NodeKind, Precision
from fivefold.core.layout_checks import divisors
from fivefold.core.value import Value
from fivefold.errors import ClusterError, nearest
from fivefold.units import GIGA, MICRO


class NodeType(Value):
    """The usual node of a device."""

    name: str
    device: str
    devices: int
    part: int
    """A node may be used in part, in multiples of so many devices."""
    network: str | None
    intra_node_latency_s: float | None
    source: str


class Network(Value):
    """A network between nodes."""

    name: str
    bytes_per_s: float
    """What one device can send, one direction."""
    latency_s: float
    source: str


@cache
def node_types() -> dict[str, NodeType]:
    """The usual node of each device, by the device's name."""
    return {row["device"]: _node_type(row) for row in rows("nodes.yaml")}


@cache
def networks() -> dict[str, Network]:
    """All networks by name."""
    return {
        row["name"]: Network(
            name=row["name"], bytes_per_s=row["gbit_s"] * GIGA / 8, latency_s=row["latency_us"] * MICRO,
            source=row["source"],
        )
        for row in rows("networks.yaml")
    }  # fmt: skip


def named() -> dict[str, str]:
    """The clusters known by name, as text."""
    return {row["name"]: row["cluster"] for row in rows("clusters.yaml")}


def resolve(text: str) -> Cluster:
    """The cluster that `text` names: one of the catalog, a text form, or a YAML file; complete.

    Raises: ClusterError naming what cannot be read, or the figure that neither text nor catalog has.
    """
    return complete(Cluster.parse(named().get(text.strip().lower(), text)))


def complete(cluster: Cluster) -> Cluster:
    """The same cluster with every figure filled in, and neighbours that are alike as one kind.

    Raises: ClusterError naming a figure that nobody states.
    """
    kinds: list[NodeKind] = []
    for kind in cluster.nodes:
        made = _complete(kind, cluster)
        if kinds and kinds[-1].replace(count=made.count) == made:
            made = made.replace(count=made.count + kinds.pop().count)
        kinds.append(made)
    return Cluster(nodes=tuple(kinds))


def assumptions(given: Cluster) -> list[str]:
    """What `complete` adds to a cluster beyond the datasheet of its device, in words."""
    said = []
    for kind in given.nodes:
        node = node_types().get(_name(kind))
        if node is None or kind.device == "cpu":
            continue
        size = _node_size(kind, node)
        if "devices_per_node" not in kind.model_fields_set:
            said.append(
                f"devices_per_node is not given: nodes of one {node.device}; usual are {node.devices}"
            )
        if size != kind.devices_per_node:
            said.append(f"{kind.devices} {node.device} are nodes of {size}, as {node.name} has")
        many = len(given.nodes) > 1 or kind.count > 1 or size != kind.devices_per_node
        if many and kind.network is None and kind.inter_node_bytes_per_s is None and node.network:
            rate = networks()[node.network].bytes_per_s * 8 / GIGA
            said.append(f"the network is that of {node.name}, {rate:g} Gb/s for each device")
    return said


def peak(kind: NodeKind, precision: Precision) -> float:
    """FLOP/s of dense matrix products of one device of a complete cluster, with 32-bit sums.

    Raises: ClusterError for a format that its matrix units do not have.
    """
    peaks = kind.peak_flops_per_s or {}
    if precision not in peaks:
        raise ClusterError(
            f"{kind.device} has no stated peak for {precision}; known: {', '.join(peaks) or 'none'}"
        )
    return peaks[precision]


def _complete(kind: NodeKind, cluster: Cluster) -> NodeKind:
    if kind.device == "cpu":
        return kind
    device = _device(kind)
    node = node_types().get(device.name) if device else None
    size = _node_size(kind, node)
    count = kind.devices // size
    network = _network(kind, node)
    known: dict[str, Any] = {"count": count, "devices_per_node": size}
    if device is not None:
        known |= {
            "device": device.name,
            "memory_bytes": device.memory_bytes,
            "memory_bytes_per_s": device.memory_bytes_per_s,
            "peak_flops_per_s": device.peaks,
            "host_bytes_per_s": device.host_bytes_per_s,
            "intra_node_bytes_per_s": device.link_bytes_per_s,
        }
    known["intra_node_latency_s"] = node.intra_node_latency_s if node else None
    if network is not None:
        known |= {"inter_node_bytes_per_s": network.bytes_per_s, "inter_node_latency_s": network.latency_s}
    given = kind.model_dump(exclude_none=True, exclude={"device", "count", "devices_per_node"})
    full = kind.replace(**{**known, **given})
    _require(full, several=len(cluster.nodes) > 1 or count > 1)
    return full


def _require(kind: NodeKind, *, several: bool) -> None:
    needed = {
        "memory_bytes": "memory_gib",
        "memory_bytes_per_s": "memory_gb_s",
        "peak_flops_per_s": "peak_tflops",
        **({"intra_node_bytes_per_s": "link_gb_s"} if kind.devices_per_node > 1 else {}),
        **({"inter_node_bytes_per_s": "network_gbit_s"} if several else {}),
    }
    missing = [key for field, key in needed.items() if not getattr(kind, field)]
    if missing == ["network_gbit_s"]:
        raise ClusterError(
            f"{kind}: no usual network is known between nodes of {kind.device}; say it, as in '{kind}, 100 Gb/s'"
        )
    if missing:
        raise ClusterError(
            f"{kind.device} is not in the catalog, so a cluster file must give {', '.join(missing)} of its node"
        )


def _device(kind: NodeKind) -> Device | None:
    """The device of the catalog, or None for one whose figures a file gives."""
    known = {name.lower() for device in devices() for name in (device.name, *device.aliases)}
    if kind.device.lower() not in known and kind.memory_bytes is not None:
        return None
    return find(kind.device)


def _name(kind: NodeKind) -> str:
    device = _device(kind)
    return device.name if device else kind.device


def _node_size(kind: NodeKind, node: NodeType | None) -> int:
    """Devices of a node: as given, but `128 H100` are usual nodes, or the largest parts of one that are equal."""
    devices = kind.devices_per_node
    if node is None or kind.count > 1 or devices <= node.devices or kind.intra_node_bytes_per_s:
        return devices
    sizes = [size for size in divisors(devices) if size <= node.devices and size % node.part == 0]
    if not sizes:
        below = devices // node.devices * node.devices
        equal = max(size for size in divisors(devices) if size <= node.devices)
        raise ClusterError(
            f"{devices} {kind.device} are not whole nodes of {node.devices} ({node.name}); nearest: {below} or "
            f"{below + node.devices}, or write the nodes: {devices // equal}x{equal} {kind.device}"
        )
    return sizes[-1]


def _network(kind: NodeKind, node: NodeType | None) -> Network | None:
    name = kind.network or (node.network if node else None)
    if name is None:
        return None
    if name not in networks():
        raise ClusterError(
            f"unknown network {name[:60]!r}{nearest(name, networks())}; known: {', '.join(networks())}, "
            "or its rate: 400 Gb/s"
        )
    return networks()[name]


def _node_type(row: dict[str, Any]) -> NodeType:
    latency = row["intra_latency_us"]
    return NodeType(
        name=row["name"],
        device=row["device"],
        devices=row["devices"],
        part=row.get("tray", row["devices"]),
        network=row["network"],
        intra_node_latency_s=None if latency is None else latency * MICRO,
        source=row["source"],
    )

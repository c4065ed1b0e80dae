"""Device and network of a run, from the texts of a runs table and the catalog."""

from __future__ import annotations

import re
from dataclasses import dataclass

from fivefold.catalog.clusters import networks, node_types
from fivefold.catalog.devices import Device, devices, find
from fivefold.core.cluster import Precision
from fivefold.errors import ClusterError
from fivefold.units import GIGA

FAMILIES = {
    "V100": "V100", "A100-40GB": "A100", "A100-80GB": "A100", "A800": "A100", "H100": "H100", "H100-96GB": "H100-500W",
    "H800": "H100", "H200": "H100", "H20": "H100", "B200": "B200", "B300": "B200", "GB200": "GB200", "GB300": "GB200",
    "MI250X": "MI200", "MI300X": "MI300", "MI325X": "MI300", "MI355X": "MI350",
}  # fmt: skip
"""Device -> the family whose coefficients it has; a Grace host launches kernels at another pace than an x86 one."""
OTHER = "other device"

ADAPTERS = {"hdr": 200, "ndr": 400, "edr": 100, "omni-path": 100}
"""Gb/s of one adapter."""
DOMAIN = re.compile(r"nvl(?:ink)?-?(72|36)")
SLOWEST = 12.5 * GIGA
"""Bytes/s of a device's share of a network that nothing is said of: 100 Gb/s."""


@dataclass(frozen=True)
class Hardware:
    """What the price of a run needs of its device and its network."""

    family: str
    peak_flops_per_s: float
    peak_low_flops_per_s: float
    memory_bytes_per_s: float
    link_bytes_per_s: float
    nic_bytes_per_s: float
    domain: int
    """Devices that reach each other over the fast link."""


def hardware(gpu: str, bits: int, interconnect: str, devices_per_node: int | None) -> Hardware:
    """Raises: ClusterError for a device that is not in the catalog, or has no such figure."""
    device = _find(gpu)
    node = node_types().get(device.name)
    size = devices_per_node or (node.devices if node else 8)
    if device.peak_flops_per_s is None or not device.memory_bytes_per_s:
        raise ClusterError(f"{device.name} has no stated peak or bandwidth")
    usual = networks()[node.network].bytes_per_s if node and node.network else SLOWEST
    words = interconnect.lower()
    match = DOMAIN.search(words)
    link = device.link_bytes_per_s or usual
    return Hardware(
        family=FAMILIES.get(device.name, OTHER),
        peak_flops_per_s=device.peak_flops_per_s,
        peak_low_flops_per_s=_low_peak(device, bits),
        memory_bytes_per_s=device.memory_bytes_per_s,
        link_bytes_per_s=link,
        nic_bytes_per_s=_share(words, size) or usual,
        domain=int(match[1]) if match else size,
    )


def _find(gpu: str) -> Device:
    """The device of that name, or of its beginning: `H100-80GB-PCIe` is read as the nearest that the catalog has."""
    names = {known.lower() for device in devices() for known in (device.name, *device.aliases)}
    text = gpu.strip()
    while text.lower() not in names and "-" in text:
        text = text.rpartition("-")[0]
    return find(text if text.lower() in names else gpu)


def _low_peak(device: Device, bits: int) -> float:
    """The peak at that many bits, or of the narrowest wider format that the device has."""
    order: tuple[Precision, ...] = ("float4", "float8")
    wanted = order[0 if bits == 4 else 1 :] if bits < 16 else ()
    peaks = [device.peaks[name] for name in wanted if name in device.peaks]
    return peaks[0] if peaks else float(device.peak_flops_per_s or 0)


def _share(words: str, size: int) -> float | None:
    """One device's bytes/s of the network: `8x HDR`, `4x Omni-Path`, `800 Gb/s per node`, `400 Gb/s per GPU`."""
    for name, rate in ADAPTERS.items():
        if match := re.search(rf"(\d{{1,2}}) ?x {name}", words):
            return int(match[1]) * rate * GIGA / 8 / size
    if match := re.search(r"(\d{1,5}) ?gb/s per (node|gpu|device)", words):
        return int(match[1]) * GIGA / 8 / (size if match[2] == "node" else 1)
    return None

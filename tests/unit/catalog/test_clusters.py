"""Clusters completed from the catalog: devices, nodes, networks; people's own; refusals."""

from __future__ import annotations

from pathlib import Path

import pytest

from fivefold.catalog import clusters
from fivefold.catalog.devices import devices
from fivefold.core.cluster import Cluster
from fivefold.errors import ClusterError


@pytest.mark.parametrize(
    ("text", "nodes", "devices_per_node", "gb_s"),
    [
        ("32xA100-80", 4, 8, 25.0),
        ("32 x A100-80GB", 4, 8, 25.0),
        ("4 nodes x 8 H100, 400 Gb/s", 4, 8, 50.0),
        ("4x8 H100, 800 Gb/s per node", 4, 8, 12.5),
        ("4x8 A100-80GB, 4x200 Gb/s", 4, 8, 12.5),
        ("4x8 H100, 10 GB/s", 4, 8, 10.0),
        ("16,384xH100", 2048, 8, 50.0),
        ("16384 H100, ib-hdr", 2048, 8, 25.0),
        ("256 GB200", 4, 64, 50.0),
        ("72 GB200", 1, 72, 50.0),
        ("2x4 RTX 4090, 25 Gb/s", 2, 4, 3.125),
        ("Selene", 560, 8, 25.0),
        ("4x8 A100-80GB, omni-path-half", 4, 8, 6.25),
    ],
)
def test_resolved(text: str, nodes: int, devices_per_node: int, gb_s: float) -> None:
    (kind,) = clusters.resolve(text).nodes
    assert (kind.count, kind.devices_per_node) == (nodes, devices_per_node)
    assert kind.inter_node_bytes_per_s == gb_s * 1e9


@pytest.mark.parametrize(
    "text", ["4x8 H100, 400 Gb/s", "8 H100", "2x8 H100, ib-ndr + 4x8 A100-80GB, 100.5 Gb/s"]
)
def test_complete_clusters_print_what_was_typed(text: str) -> None:
    assert str(Cluster.parse(text)) == text
    assert str(Cluster.parse(str(clusters.resolve(text)))).startswith(text.split(",")[0])
    assert clusters.complete(clusters.resolve(text)) == clusters.resolve(text)


def test_every_device_makes_a_cluster() -> None:
    for device in devices():
        if device.name == "cpu":
            continue
        cluster = clusters.resolve(f"2x4 {device.name}, 100 Gb/s")
        (kind,) = cluster.nodes
        assert (kind.memory_bytes, kind.peak_flops_per_s) == (device.memory_bytes, device.peaks)
        assert device.half is not None
        assert clusters.peak(kind, device.half) == device.peak_flops_per_s
        assert device.name in clusters.node_types()
        for alias in device.aliases:
            if alias[0].isalpha():
                assert clusters.resolve(f"2x4 {alias}, 100 Gb/s") == cluster


def test_every_named_cluster_and_network_is_sourced() -> None:
    for name in clusters.named():
        assert clusters.resolve(name).devices > 100
    for item in (*clusters.networks().values(), *clusters.node_types().values()):
        assert len(item.source) > 10


def test_what_was_assumed_is_said() -> None:
    assert clusters.assumptions(Cluster.parse("4x8 H100, 400 Gb/s")) == []
    assert clusters.assumptions(Cluster.parse("8 H100")) == []
    said = clusters.assumptions(Cluster.parse("32 H100"))
    assert said == [
        "32 H100 are nodes of 8, as NVIDIA DGX H100 has",
        "the network is that of NVIDIA DGX H100, 400 Gb/s for each device",
    ]


def test_parts_that_are_alike_are_one_kind() -> None:
    assert clusters.resolve("2x8 H100 + 3x8 H100") == clusters.resolve("5x8 H100")
    assert len(clusters.resolve("2x8 H100 + 3x8 H200 + 1x8 H100").nodes) == 3


def test_own_devices_come_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "ours.yaml"
    path.write_text(
        "nodes:\n  - {count: 2, devices_per_node: 8, device: Ours, memory_gib: 64, memory_gb_s: 1600,\n"
        "     link_gb_s: 200, network_gbit_s: 100, peak_tflops: {bfloat16: 300}, price_per_hour: 2.5}\n"
    )
    (kind,) = clusters.resolve(str(path)).nodes
    assert (kind.memory_bytes, kind.inter_node_bytes_per_s) == (64 * 2**30, 12.5e9)
    assert clusters.peak(kind, "bfloat16") == 300e12
    path.write_text("nodes: [{count: 2, devices_per_node: 8, device: H100, memory_gib: 90}]")
    assert clusters.resolve(str(path)).nodes[0].memory_bytes == 90 * 2**30


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("8 H10O", r"unknown device 'H10O' \(did you mean 'H100'\?\)"),
        ("4x8 H100, ib-ndrr", r"unknown network 'ib-ndrr' \(did you mean 'ib-ndr'\?\)"),
        ("13 H100", "13 H100 are not whole nodes of 8 .* nearest: 8 or 16, or write the nodes: 13x1 H100"),
        ("18 H100", "18 H100 are not whole nodes of 8 .* nearest: 16 or 24, or write the nodes: 3x6 H100"),
        ("16 RTX 4090", "no usual network is known between nodes of RTX 4090; say it"),
        ("4x8 H100, 0 Gb/s", "must be more than 0"),
        ("4x8 H100, 400", "cannot read network '400'; write 400 Gb/s"),
        ("32xH100, 800 Gb/s per node", "is per node; write the nodes as well"),
        ("4x8 H100, 4x200 Gb/s per gpu", "adapters are counted per node"),
    ],
)
def test_refused(text: str, message: str) -> None:
    with pytest.raises(ClusterError, match=message) as caught:
        clusters.resolve(text)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("{device: Ours, memory_gib: 64}", "must give memory_gb_s, peak_tflops of its node"),
        ("{device: Ours}", "unknown device 'Ours'"),
        ("{device: H100, memory_gib: lots}", "memory_gib must be a number, got 'lots'"),
        ("{device: H100, memory_gib: .nan}", "memory_bytes"),
        ("{device: H100, memory_gib: 80, memory_bytes: 80}", "are the same figure"),
        ("{device: H100, peak_tflops: {bf61: 3}}", "bf61"),
        ("{device: H100, peak_tflops: {bfloat16: -3}}", "must be a positive number"),
    ],
)
def test_refused_files(tmp_path: Path, row: str, message: str) -> None:
    path = tmp_path / "ours.yaml"
    path.write_text(f"nodes: [{row}]")
    with pytest.raises(ClusterError, match=message) as caught:
        clusters.resolve(str(path))
    assert "\n" not in str(caught.value)


def test_a_format_without_a_peak_is_refused() -> None:
    (kind,) = clusters.resolve("8 V100").nodes
    with pytest.raises(ClusterError, match="V100 has no stated peak for bfloat16; known: float32, float16"):
        clusters.peak(kind, "bfloat16")

"""Clusters from text and files, the device catalog, and every refusal."""

from __future__ import annotations

from pathlib import Path

import pytest

from fivefold.catalog.devices import devices, find
from fivefold.core.cluster import Cluster
from fivefold.errors import ClusterError


@pytest.mark.parametrize(
    ("text", "printed", "total"),
    [
        ("4x8 A100-80GB", "4x8 A100-80GB", 32),
        ("4 x 8 A100-80GB", "4x8 A100-80GB", 32),
        ("8 H100", "8 H100", 8),
        ("1x8 H100", "8 H100", 8),
        ("2x8 H100 + 4x8 A100-80GB", "2x8 H100 + 4x8 A100-80GB", 48),
        ("2x4 RTX 4090", "2x4 RTX 4090", 8),
        ("cpu", "cpu", 1),
        ("CPU", "cpu", 1),
        ("16 cpu", "16 cpu", 16),
    ],
)
def test_text(text: str, printed: str, total: int) -> None:
    cluster = Cluster.parse(text)
    assert str(cluster) == printed
    assert cluster.devices == total
    assert Cluster.parse(str(cluster)) == cluster
    assert Cluster.model_validate(text) == cluster
    assert Cluster.model_validate_json(cluster.model_dump_json()) == cluster


def test_mixed_hardware_is_representable() -> None:
    mixed = Cluster.parse("2x8 H100 + 4x4 L40S")
    assert [(kind.count, kind.devices_per_node, kind.device) for kind in mixed.nodes] == [
        (2, 8, "H100"),
        (4, 4, "L40S"),
    ]
    assert not mixed.homogeneous
    with pytest.raises(ClusterError, match="differ in size: 4 and 8 devices"):
        _ = mixed.devices_per_node
    assert Cluster.parse("2x8 H100 + 3x8 H100").homogeneous
    assert Cluster.parse("2x8 H100 + 3x8 H200").devices_per_node == 8
    assert Cluster.parse("cpu").is_cpu
    assert not mixed.is_cpu


def test_file(tmp_path: Path) -> None:
    path = tmp_path / "ours.yaml"
    path.write_text(
        "nodes:\n  - {count: 2, devices_per_node: 8, device: H100, inter_node_bytes_per_s: 25.0e+9}\n"
    )
    cluster = Cluster.parse(str(path))
    assert str(cluster) == "2x8 H100, 200 Gb/s"
    assert cluster.nodes[0].inter_node_bytes_per_s == 25e9
    assert cluster.nodes[0].memory_bytes is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "cannot read cluster ''; write 4x8 A100-80GB"),
        ("4x8", "cannot read cluster '4x8'"),
        ("4x8x2 H100", "cannot read cluster"),
        ("8 H100 +", "cannot read cluster ''"),
        ("H100", "'H100' has no number of devices; nearest: '8 H100'"),
        ("0x8 H100", "nodes and devices must be at least 1"),
        ("4x0 H100", "nodes and devices must be at least 1"),
        ("8 " + "H" * 101, "at most 100 characters"),
        ("8 H100" * 300, "at most 1000 are read"),
        ("absent.yaml", "cannot read cluster file absent.yaml: No such file"),
        ("9999999x9999999 H100", "99,999,980,000,001 devices; at most 10,000,000"),
        ("9999999 H100 + 2 H100", "10,000,001 devices; at most 10,000,000"),
    ],
)
def test_refused_text(text: str, message: str) -> None:
    with pytest.raises(ClusterError, match=message) as caught:
        Cluster.parse(text)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"nodes: [{device: H100, cuont: 2}]", r"unknown key 'nodes.0.cuont' \(did you mean 'count'\?\)"),
        (b"nodes: [{device: H100, count: 0}]", "nodes.0.count: expected a number above 0"),
        (b"nodes: []", "nodes: expected at least 1 values"),
        (b"nodes: [{count: 1}]", "missing key 'nodes.0.device'"),
        (b"3", "ours.yaml: expected keys and values"),
        (b"nodes: [\n  {", r"is not YAML \(line 2\)"),
        (b"\xff\xfe\xff", "is not UTF-8 text"),
        (b"[" * 60_000, "nests deeper than 10 levels"),
        (b"a: &a [1]\nnodes: *a", "uses YAML aliases"),
        (b"x: !!python/object/apply:os.getcwd []", "is not YAML"),
        (b"#" * 70_000, "at most 64 KiB are read"),
        (b"nodes: [" + b"{device: H100}, " * 101 + b"]", "at most 100 values"),
        (b'nodes: [{device: "a\\nb"}]', "printable characters only"),
    ],
    ids=range(13),
)
def test_refused_files(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "ours.yaml"
    path.write_bytes(content)
    with pytest.raises(ClusterError, match=message) as caught:
        Cluster.parse(str(path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("figure", ["1" + "0" * 400, "1.0e+300", "-1", "0", ".inf", ".nan", "many"])
@pytest.mark.parametrize(
    "key",
    [
        "count", "memory_gib", "memory_bytes", "memory_gb_s", "link_gb_s", "host_bytes_per_s", "network_gbit_s",
        "price_per_hour", "peak_flops_per_s",
    ],
)  # fmt: skip
def test_absurd_figures_are_refused(tmp_path: Path, key: str, figure: str) -> None:
    """Whatever the figure, it is one line that names it; none reaches the arithmetic."""
    path = tmp_path / "ours.yaml"
    path.write_text(
        f"nodes: [{{device: Ours, {key}: {f'{{bfloat16: {figure}}}' if key.startswith('peak') else figure}}}]"
    )
    with pytest.raises(ClusterError, match=r"nodes\.0") as caught:
        Cluster.parse(str(path))
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


def test_memory_need_not_be_whole(tmp_path: Path) -> None:
    path = tmp_path / "ours.yaml"
    path.write_text("nodes: [{device: Ours, memory_gib: 79.15}]")
    assert Cluster.parse(str(path)).nodes[0].memory_bytes == round(79.15 * 2**30)


def test_catalog_figures_by_hand() -> None:
    a100 = find("a100-80gb")
    assert (a100.name, a100.peak_flops_per_s, a100.memory_bytes) == ("A100-80GB", 312e12, 85_899_345_920)
    assert (a100.memory_bytes_per_s, a100.link_bytes_per_s) == (2039e9, 300e9)
    assert find("V100").half == "float16"
    assert find("cpu").peak_flops_per_s is None


def test_catalog_is_complete_and_sourced() -> None:
    names = {device.name for device in devices()}
    assert names >= {
        "V100", "A100-40GB", "A100-80GB", "A800", "H100", "H800", "H20", "H200", "B200", "B300", "GB200", "GB300",
        "L40S", "RTX 3090", "RTX 4090", "MI250X", "MI300X", "MI325X", "MI355X", "Ascend 910B", "cpu",
    }  # fmt: skip
    assert len(names) == len(devices())
    for device in devices():
        assert len(device.source) > 20
        figures = (
            device.peak_flops_per_s,
            device.memory_bytes,
            device.memory_bytes_per_s,
            device.link_bytes_per_s,
        )
        assert all(figure is None for figure in figures) if device.name == "cpu" else all(figures)
        assert str(Cluster.parse(f"2x8 {device.name}")) == f"2x8 {device.name}"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("H10O", r"unknown device 'H10O' \(did you mean 'H100'\?\)"),
        ("A100", r"did you mean 'A100-40GB' or 'A100-80GB'\?"),
        ("", "unknown device ''; known: V100"),
    ],
)
def test_unknown_device(name: str, message: str) -> None:
    with pytest.raises(ClusterError, match=message):
        find(name)

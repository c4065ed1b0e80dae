"""A model spread over ranks written as one checkpoint: bit for bit, in bounded memory, and whole or not at all."""

from __future__ import annotations

import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from fivefold.catalog.models import preset
from fivefold.core.cluster import Cluster
from fivefold.core.execution import Execution
from fivefold.core.layout import Layout
from fivefold.core.model_spec import AttentionSpec, BlockSpec, MLPSpec, ModelSpec
from fivefold.core.plan import Plan
from fivefold.core.sharding import buffers, stored
from fivefold.core.workload import Workload
from fivefold.engine.build import build_chunks, initial_value
from fivefold.engine.engine import Engine
from fivefold.errors import ModelError
from fivefold.nn.hub import HFCheckpoint
from fivefold.nn.hub_names import places
from fivefold.runtime.mesh import Mesh
from fivefold.train.export import export_hf, held_by
from fivefold.units import MIB

SEED, NOISE = 7, 0.3


def model(**changes: Any) -> ModelSpec:
    """Windowed, biased, QK-normed as Qwen3 can be; sizes that 4 ranks do not divide."""
    attention = AttentionSpec(
        heads=8, kv_heads=2, head_dim=6, qk_norm=True, qkv_bias=True, output_bias=True, window=5
    )
    block = BlockSpec(attention=attention, mlp=MLPSpec(ffn=24))
    return ModelSpec(**{"name": "own", "hidden": 32, "vocab": 53, "blocks": (block,) * 3, **changes})


def plan(spec: ModelSpec, layout: Layout, dtype: str = "float32") -> Plan:
    return Plan(
        model=spec,
        cluster=Cluster.parse("cpu"),
        workload=Workload(seq_len=24, global_batch=4),
        layout=layout,
        execution=Execution(dtype=dtype, micro_batch=1),
    )


def built(spec: ModelSpec, mesh: Mesh) -> list[Any]:
    chunks = build_chunks(plan(spec, mesh.layout), mesh, seed=SEED, noise=NOISE)
    found: list[Any] = [pair for _, pairs in chunks.values() for pair in pairs]
    for module, _ in chunks.values():
        named = dict(module.named_buffers())
        found += [(row, nn.Parameter(named[row.name])) for row in buffers(spec) if row.name in named]
    return found


def write(mesh: Mesh, spec: ModelSpec, folder: Path, **options: Any) -> Any:
    """Build this rank's part, spoil its padding, export it."""
    pairs = built(spec, mesh)
    for row, parameter in pairs:
        inner = [slice(0, cut.stop - cut.start) for cut in row.region(mesh.layout, mesh.coordinate)]
        kept = parameter.detach()[tuple(inner)].clone()
        parameter.data.fill_(torch.nan)
        parameter.data[tuple(inner)] = kept
    return export_hf(folder, plan(spec, mesh.layout), pairs, mesh, **options)


def on_one_device(spec: ModelSpec) -> dict[str, torch.Tensor]:
    alone = Layout()
    values = {
        row.name: initial_value(row, alone, alone.coordinate(0), "float32", seed=SEED, noise=NOISE)
        for row in stored(spec)
    }
    named = places(spec.replace(family="qwen3" if spec.family == "llama" else spec.family))
    return {
        place.tensor: value
        for name, of_it in named.items()
        for place, value in zip(
            of_it, values[name] if values[name].ndim == 3 else [values[name]], strict=True
        )
    }


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("text", ["dp2 tp2 pp2", "tp4", "pp3", "tp2 pp3", "dp1"])
def test_the_checkpoint_is_the_model_of_one_device(
    on_mesh: Callable[..., Any], text: str, tied: bool, tmp_path: Path
) -> None:
    spec = model(tied_embeddings=tied)
    written = on_mesh(lambda mesh: write(mesh, spec, tmp_path / "hf", max_shard_bytes=20_000), text)
    assert len({(result.files, result.bytes) for result in written}) == 1
    files = sorted((tmp_path / "hf").glob("*.safetensors"))
    assert [path.name for path in files] == list(written[0].files)
    got = {name: tensor for path in files for name, tensor in load_file(path).items()}
    want = on_one_device(spec)
    assert set(got) == set(want)
    for name, tensor in want.items():
        assert torch.equal(got[name].view(torch.uint8), tensor.view(torch.uint8)), name
    assert sum(len(load_file(path)) for path in files) == len(want)
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]
    HFCheckpoint.open(tmp_path / "hf")


ROUTED = preset("tiny-mla-moe").replace(hidden=16, vocab=29)


@pytest.mark.parametrize(
    "text", ["dp2 ep2", "tp2 etp2 pp2", "dp2 tp2 ep2 etp2", "tp2 ep2 pp2", "dp2 tp2 ep2"]
)
def test_experts_come_from_every_rank_that_has_some(
    on_mesh: Callable[..., Any], text: str, tmp_path: Path
) -> None:
    """Stacked experts, of which ranks hold some or a part of each; selection biases stay wide; each is written once."""
    on_mesh(lambda mesh: write(mesh, ROUTED, tmp_path / "hf", max_shard_bytes=20_000, dtype="bfloat16"), text)
    files = sorted((tmp_path / "hf").glob("*.safetensors"))
    got = {name: tensor for path in files for name, tensor in load_file(path).items()}
    want = on_one_device(ROUTED)
    assert set(got) == set(want)
    for name, tensor in want.items():
        kind = torch.float32 if name.endswith("e_score_correction_bias") else torch.bfloat16
        assert got[name].dtype == kind
        assert torch.equal(got[name], tensor.to(kind)), name
    checkpoint = HFCheckpoint.open(tmp_path / "hf")

    def same(mesh: Mesh) -> bool:
        return all(
            torch.equal(
                checkpoint.read(row, mesh.layout, mesh.coordinate, "float32"),
                parameter.detach().to(checkpoint_dtype(checkpoint, row.name)).float(),
            )
            for row, parameter in built(ROUTED, mesh)
        )

    assert all(on_mesh(same, "dp2 tp2 ep2 etp2" if text == "dp2 ep2" else "dp2 ep2"))


@pytest.mark.parametrize("text", ["dp4 ep2 zero1", "dp2 tp2 ep2 zero3"])
def test_shards_of_experts_are_put_together(on_mesh: Callable[..., Any], text: str, tmp_path: Path) -> None:
    """ZeRO cuts experts over ranks of their own."""

    def export(mesh: Mesh) -> None:
        engine = Engine(plan(ROUTED, mesh.layout), mesh, seed=SEED, noise=NOISE)
        export_hf(tmp_path / "hf", engine.plan, held_by(engine), mesh)

    on_mesh(export, text)
    got, want = load_file(tmp_path / "hf" / "model.safetensors"), on_one_device(ROUTED)
    assert set(got) == set(want)
    assert all(torch.equal(got[name], tensor) for name, tensor in want.items())


def checkpoint_dtype(checkpoint: HFCheckpoint, name: str) -> torch.dtype:
    found = getattr(torch, checkpoint.dtype_of(name))
    assert isinstance(found, torch.dtype)
    return found


def test_what_one_layout_wrote_another_reads(on_mesh: Callable[..., Any], tmp_path: Path) -> None:
    """Every rank gets exactly the values that it would have made itself, its padding zero."""
    spec = model(tied_embeddings=True)
    on_mesh(lambda mesh: write(mesh, spec, tmp_path / "hf"), "dp2 tp2 pp2")
    checkpoint = HFCheckpoint.open(tmp_path / "hf")
    assert checkpoint.spec.replace(name="own", family="llama", notes=()) == spec

    def same(mesh: Mesh) -> bool:
        return all(
            torch.equal(checkpoint.read(row, mesh.layout, mesh.coordinate, "float32"), parameter.detach())
            for row, parameter in built(spec, mesh)
        )

    assert all(on_mesh(same, "tp4 pp2"))


def test_bfloat16_is_the_rounded_float32(on_mesh: Callable[..., Any], tmp_path: Path) -> None:
    spec = model()
    on_mesh(lambda mesh: write(mesh, spec, tmp_path / "hf", dtype="bfloat16"), "tp2")
    got, want = load_file(tmp_path / "hf" / "model.safetensors"), on_one_device(spec)
    assert all(torch.equal(got[name], tensor.bfloat16()) for name, tensor in want.items())


def fault(mesh: Mesh, spec: ModelSpec, folder: Path) -> str:
    try:
        write(mesh, spec, folder)
    except ModelError as error:
        return str(error)
    return "written"


def test_all_ranks_tell_the_same_fault(on_mesh: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "mine").write_text("")
    told = on_mesh(lambda mesh: fault(mesh, model(), tmp_path / "hf"), "dp2 tp2")
    assert set(told) == {f"{tmp_path / 'hf'} exists and is not an empty folder; give a new one"}
    told = on_mesh(
        lambda mesh: fault(mesh, model(norm_eps=0.5, rope_theta=2, vocab=1), tmp_path / "x"), "tp2"
    )
    assert len(set(told)) == 1


@pytest.mark.parametrize("broken", [0, 2])
def test_one_writer_without_room_leaves_nothing(
    on_mesh: Callable[..., Any], broken: int, tmp_path: Path
) -> None:
    """Files of that rank cannot grow: it fails in the middle of what its tp neighbour goes on sending."""

    def limited(mesh: Mesh) -> str:
        if mesh.rank == broken:
            resource.setrlimit(resource.RLIMIT_FSIZE, (9_000, resource.RLIM_INFINITY))
        return fault(mesh, model(), tmp_path / "hf")

    told = on_mesh(limited, "tp2 pp2")
    assert len(set(told)) == 1
    assert told[0].startswith(f"cannot write {tmp_path / 'hf'}: File too large")
    assert not list(tmp_path.iterdir())


def peak_bytes() -> int:
    """Most resident memory since the last reset, as the kernel counts it."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) * 1024


@pytest.mark.parametrize("text", ["tp2", "tp2 pp2"])
def test_memory_is_the_own_part_and_one_tensor(
    on_mesh: Callable[..., Any], text: str, tmp_path: Path
) -> None:
    """Resident memory of each rank while it exports and while it reads, within 1.1 x (its part + one tensor)."""
    block = BlockSpec(attention=AttentionSpec(heads=8, kv_heads=8, head_dim=64), mlp=MLPSpec(ffn=2048))
    spec = ModelSpec(name="wide", hidden=512, vocab=8001, blocks=(block,) * 6)
    largest = 8001 * 512 * 4

    def grown(mesh: Mesh) -> tuple[int, int, int]:
        pairs = built(spec, mesh)
        own = sum(parameter.nbytes for _, parameter in pairs)
        mesh.axis("world").all_reduce(torch.zeros(1))
        before = reset()
        export_hf(tmp_path / text, plan(spec, mesh.layout), pairs, mesh)
        exporting = peak_bytes() - before
        checkpoint = HFCheckpoint.open(tmp_path / text)
        before = reset()
        kept = [checkpoint.read(row, mesh.layout, mesh.coordinate, "float32") for row, _ in pairs]
        return own, exporting, peak_bytes() - before + 0 * len(kept)

    def reset() -> int:
        Path("/proc/self/clear_refs").write_text("5")
        return peak_bytes()

    for own, exporting, reading in on_mesh(grown, text):
        assert own + exporting <= 1.1 * (own + largest)
        assert reading <= 1.1 * own + 1 * MIB

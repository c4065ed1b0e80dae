"""Checkpoints that we write: transformers loads them, and nothing is left where writing fails."""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from fivefold.catalog.models import preset
from fivefold.core.layout import Layout
from fivefold.core.model_spec import AttentionSpec, BlockSpec, Llama3Scaling, MLPSpec, ModelSpec, YarnScaling
from fivefold.core.sharding import parameters
from fivefold.errors import ModelError
from fivefold.nn.decoder import Decoder
from fivefold.nn.hub import HFCheckpoint
from fivefold.nn.hub_write import HFWriter, convert, write_hf
from fivefold.runtime.memory import LiveBytes

transformers = pytest.importorskip("transformers")
from hf_models import FAMILIES, bits, make, read_all, save  # noqa: E402


def load(folder: Path, dtype: torch.dtype) -> torch.nn.Module:
    """By transformers; every warning about a missing, unused or resized weight is a fault."""
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True, dtype="auto"
    )
    assert not any(report.values()), report
    assert model.dtype == dtype
    return model


def same_state(a: torch.nn.Module, b: torch.nn.Module) -> None:
    ours, theirs = a.state_dict(), b.state_dict()
    assert set(ours) == set(theirs)
    for name, tensor in ours.items():
        assert tensor.dtype == theirs[name].dtype
        assert torch.equal(bits(tensor), bits(theirs[name])), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("name", FAMILIES)
def test_theirs_to_ours_to_theirs_to_ours(name: str, tied: bool, dtype: torch.dtype, tmp_path: Path) -> None:
    """Through a different layout each time; padding of the vocabulary (61 on 4 ranks) never leaks out."""
    theirs = make(name, dtype, tie_word_embeddings=tied)
    text = str(dtype).removeprefix("torch.")
    first = HFCheckpoint.open(save(theirs, tmp_path / "theirs", "40KB"))
    whole = read_all(first, Layout(tp=4, pp=2), text)
    values = ((row.name, whole[row.name]) for row in parameters(first.spec))
    written = write_hf(
        tmp_path / "ours", first.spec, values, dtype=text, config=first.config, max_shard_bytes=30_000
    )
    assert len(written.files) > 3
    again = load(tmp_path / "ours", dtype)
    same_state(again, theirs)
    second = HFCheckpoint.open(save(again, tmp_path / "again"))
    assert second.spec.replace(name="") == first.spec.replace(name="")
    for row_name, value in read_all(second, Layout(tp=2, pp=3), text).items():
        if row_name in whole:
            assert torch.equal(bits(value), bits(whole[row_name]))


def block(**changes: Any) -> BlockSpec:
    return BlockSpec(
        attention=AttentionSpec(**{"heads": 4, "kv_heads": 2, "head_dim": 8, **changes}), mlp=MLPSpec(ffn=24)
    )


def spec(*blocks: BlockSpec, **changes: Any) -> ModelSpec:
    sizes = {
        "name": "own",
        "hidden": 32,
        "vocab": 53,
        "blocks": blocks or (block(),) * 3,
        "max_positions": 256,
    }
    return ModelSpec(**{**sizes, **changes})


YARN = YarnScaling(factor=4, original_max_positions=64, beta_fast=4, beta_slow=0.25, truncate=False)
OWN: dict[str, ModelSpec] = {
    "llama": spec(rope_theta=777.0, norm_eps=3e-5),
    "llama, tied, scaled": spec(
        tied_embeddings=True,
        rope_scaling=Llama3Scaling(
            factor=4, low_freq_factor=1, high_freq_factor=4, original_max_positions=64
        ),
    ),
    "mistral by its window": spec(block(window=5), block(window=5)),
    "qwen2 by its biases": spec(block(qkv_bias=True), block(qkv_bias=True, window=4)),
    "qwen3 by its norms": spec(block(qk_norm=True, head_dim=12), rope_scaling=YARN),
    "qwen3, windows that alternate": spec(
        *(block(qk_norm=True, window=3), block(qk_norm=True)) * 2,
        rope_scaling=YARN.replace(attention_factor=0.7),
    ),
    "phi3": spec(block(window=7), family="phi3"),
}


@pytest.mark.parametrize("name", OWN)
def test_a_model_of_our_own_computes_the_same_in_transformers(name: str, tmp_path: Path) -> None:
    """Its config is made from the spec alone. The embedding, as all weights, has its 53 rows."""
    model = Decoder(OWN[name])
    torch.manual_seed(3)
    for row, p in zip(parameters(OWN[name]), model.parameters(), strict=True):
        torch.nn.init.normal_(p, row.init_mean, 0.2)
    named = [(row.name, p.detach()) for row, p in zip(parameters(OWN[name]), model.parameters(), strict=True)]
    write_hf(tmp_path / "hf", OWN[name], named)
    theirs = load(tmp_path / "hf", torch.float32)
    assert theirs.config.model_type == name.split(",")[0].split(" ")[0]
    assert theirs.get_input_embeddings().weight.shape == theirs.lm_head.weight.shape == (53, 32)
    tokens = torch.arange(40).view(2, 20) * 7 % 53
    with torch.no_grad():
        got, want = theirs(input_ids=tokens, use_cache=False).logits, model(tokens, torch.arange(20)[None])
    assert float((got - want).abs().max() / want.abs().max()) < 1e-5


def test_a_model_that_no_family_can_express(tmp_path: Path) -> None:
    """tiny-uneven has norms on heads (Qwen3) and biases in the MLP (Llama)."""
    with pytest.raises(
        ModelError, match=r"tiny-uneven cannot be written .*llama: .*mistral: .*qwen3: bias of layer 0"
    ):
        HFWriter(tmp_path / "x", preset("tiny-uneven"), dtype="float32")
    assert not list(tmp_path.iterdir())


def test_a_config_of_another_model(tmp_path: Path) -> None:
    config = {**make("llama").config.to_dict(), "architectures": ["LlamaForCausalLM"]}
    with pytest.raises(ModelError, match=r"describes another model than own: \w+ is"):
        HFWriter(tmp_path / "x", spec(), dtype="float32", config=config)
    with pytest.raises(ModelError, match=r"cannot be written as 'int8'; can: .*bfloat16"):
        HFWriter(tmp_path / "x", spec(), dtype="int8")


def test_files_of_groups(tmp_path: Path) -> None:
    """No file holds tensors of two groups, none is larger than asked for unless one tensor is; order is the model's."""
    model = spec()
    names = [row.name for row in parameters(model)]
    writer = HFWriter(
        tmp_path / "x", model, dtype="bfloat16", max_shard_bytes=6_000, groups=[names[:10], names[10:]]
    )
    writer.begin()
    for row in reversed(parameters(model)):
        writer.put(row.name, torch.ones(row.shape))
    writer.check_done(1)
    written = writer.commit()
    index = json.loads((tmp_path / "x" / "model.safetensors.index.json").read_text())
    held = {file: set(load_file(tmp_path / "x" / file)) for file in written.files}
    assert {name: file for file, those in held.items() for name in those} == index["weight_map"]
    assert (
        index["metadata"]["total_size"]
        == written.bytes
        == 2 * sum(torch.Size(r.shape).numel() for r in parameters(model))
    )
    for file, those in held.items():
        size = (tmp_path / "x" / file).stat().st_size
        assert size < 6_000 + 200 * (len(those) + 1) or len(those) == 1
    groups = {"model.layers.0", "model.embed_tokens"}
    assert all(
        len({any(name.startswith(g) for g in groups) for name in those}) == 1 for those in held.values()
    )
    assert written.files[0] == f"model-00001-of-{len(written.files):05d}.safetensors"


def values(model: ModelSpec) -> Iterator[tuple[str, Tensor]]:
    for row in parameters(model):
        yield row.name, torch.ones(row.shape)


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_a_target_that_exists_stays_as_it_is(kind: str, tmp_path: Path) -> None:
    target = tmp_path / "x"
    if kind == "file":
        target.write_text("mine")
    else:
        target.mkdir()
        (target / "mine").write_text("mine")
    with pytest.raises(ModelError, match="exists and is not an empty folder"):
        write_hf(target, spec(), values(spec()))
    assert (target if kind == "file" else target / "mine").read_text() == "mine"
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_a_target_that_is_being_written_is_left_alone(tmp_path: Path) -> None:
    """Also by the end of the one that came second."""
    first, second = (HFWriter(tmp_path / "x", spec(), dtype="float32") for _ in range(2))
    first.begin()
    with pytest.raises(ModelError, match="another process is writing"):
        second.begin()
    second.abort()
    assert first.temporary.is_dir()
    first.abort()
    assert list(tmp_path.iterdir()) == []
    second.begin()
    second.abort()


def test_an_empty_folder_and_leftovers_of_a_killed_run(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    (tmp_path / ".x.partial").mkdir()
    (tmp_path / ".x.partial" / "model.safetensors").write_text("half")
    write_hf(tmp_path / "x", spec(), values(spec()))
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["config.json", "model.safetensors", "x"]


def test_values_that_are_missing_or_padded(tmp_path: Path) -> None:
    model = spec()
    some = [(name, value) for name, value in values(model) if name != "norm.weight"]
    with pytest.raises(ModelError, match=r"no values for norm.weight: 1 of \d+"):
        write_hf(tmp_path / "x", model, some)
    padded = [
        (name, torch.ones(56, 32)) if name == "head.weight" else (name, value)
        for name, value in values(model)
    ]
    with pytest.raises(ModelError, match=r"head.weight is \[56, 32\], the model's is \[53, 32\]"):
        write_hf(tmp_path / "x", model, padded)
    assert not list(tmp_path.iterdir())


@contextmanager
def no_file_above(size: int) -> Iterator[None]:
    """The kernel refuses to let files grow beyond it, as it does where a quota or a disk ends."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("size", [0, 100, 5_000, 20_000])
def test_a_disk_that_ends_while_writing(size: int, tmp_path: Path) -> None:
    with (
        no_file_above(size),
        pytest.raises(ModelError, match=r"cannot write .*/x: File too large \(.*KiB\)") as caught,
    ):
        write_hf(tmp_path / "x", spec(), values(spec()))
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_a_disk_without_room_is_refused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**6, 10**6, 1000))
    with pytest.raises(ModelError, match=r"no room for .*: the model takes .* KiB, the disk has 1000 B free"):
        write_hf(tmp_path / "x", spec(), values(spec()))
    assert not list(tmp_path.iterdir())


def test_a_full_disk_at_the_very_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "rename", full)
    with pytest.raises(ModelError, match="No space left on device"):
        write_hf(tmp_path / "x", spec(), values(spec()))
    assert not list(tmp_path.iterdir())


def test_a_parent_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelError, match=r"cannot write .*: (Not a directory|File exists)"):
        write_hf(tmp_path / "file" / "x", spec(), values(spec()))


def test_convert_keeps_each_dtype_and_what_belongs_to_the_model(tmp_path: Path) -> None:
    model = make("qwen3", torch.bfloat16)
    model.model.norm.float()
    source = save(model, tmp_path / "a")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(
        json.dumps({**config, "auto_map": {"AutoModel": "code.Model"}, "eos_token_id": 7})
    )
    (source / "tokenizer.json").write_text('{"version": "1.0"}')
    (source / "code.py").write_text("raise SystemExit")
    convert(source, tmp_path / "b", dtype=None, max_shard_bytes=20_000)
    before, after = load_file(source / "model.safetensors"), {}
    for file in (tmp_path / "b").glob("*.safetensors"):
        after.update(load_file(file))
    assert set(before) == set(after)
    assert {str(t.dtype) for t in after.values()} == {"torch.float32", "torch.bfloat16"}
    for name, tensor in before.items():
        assert after[name].dtype == tensor.dtype
        assert torch.equal(bits(after[name]), bits(tensor))
    written = json.loads((tmp_path / "b" / "config.json").read_text())
    assert written["eos_token_id"] == 7
    assert "auto_map" not in written
    assert (tmp_path / "b" / "tokenizer.json").read_text() == '{"version": "1.0"}'
    assert not (tmp_path / "b" / "code.py").exists()


def test_convert_casts(tmp_path: Path) -> None:
    source = save(make("mistral"), tmp_path / "a")
    convert(source, tmp_path / "b", dtype="bfloat16")
    same_state(load(tmp_path / "b", torch.bfloat16), load(source, torch.float32).bfloat16())


def test_convert_holds_one_parameter_at_a_time(tmp_path: Path) -> None:
    source = save(make("llama", vocab_size=30_001), tmp_path / "a")
    with LiveBytes() as memory:
        convert(source, tmp_path / "b", dtype="bfloat16")
    assert memory.peak_bytes <= 1.1 * 30_001 * 48 * 2 + (4 << 20)

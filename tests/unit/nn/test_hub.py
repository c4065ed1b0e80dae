"""Checkpoints of transformers read by every rank of every layout, bit for bit, and no more than its part."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from fivefold.core.layout import Layout
from fivefold.core.model_spec import BlockSpec, ModelSpec
from fivefold.core.sharding import parameters
from fivefold.errors import ModelError
from fivefold.nn import hub
from fivefold.nn.decoder import Decoder
from fivefold.nn.hub import HFCheckpoint, local_folder
from fivefold.nn.hub_names import hf_name, places
from fivefold.runtime.memory import LiveBytes

pytest.importorskip("transformers")
from hf_models import FAMILIES, bits, make, rank_rows, read_all, save

LAYOUTS = [f"tp{tp} pp{pp}" for tp in (1, 2, 4) for pp in (1, 2, 3)]


def expected(model: torch.nn.Module, row_name: str, checkpoint: HFCheckpoint) -> torch.Tensor:
    """Our parameter in their model, fused tensors cut by the sizes in the config."""
    family, state = checkpoint.spec.family, model.state_dict()
    whole = state[hf_name(row_name, family)]
    if family != "phi3" or not any(f".{part}." in row_name for part in ("q", "k", "v", "gate", "up")):
        return whole
    attention, ffn = checkpoint.spec.blocks[0].attention, checkpoint.spec.blocks[0].mlp.ffn
    q, k = attention.heads * attention.head_dim, attention.kv_heads * attention.head_dim
    cuts = {"q": (0, q), "k": (q, q + k), "v": (q + k, q + 2 * k), "gate": (0, ffn), "up": (ffn, 2 * ffn)}
    start, stop = cuts[row_name.split(".")[-2]]
    return whole[start:stop]


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("name", FAMILIES)
def test_every_rank_reads_its_part_bit_for_bit(name: str, tied: bool, tmp_path: Path) -> None:
    """A vocabulary of 61 and 4 layers over 3 stages divide by nothing; 2 KV heads on 4 ranks are held twice."""
    model = make(name, tie_word_embeddings=tied)
    checkpoint = HFCheckpoint.open(save(model, tmp_path / "hf", shard="40KB"))
    assert len(list((tmp_path / "hf").glob("model-*.safetensors"))) > 3
    for text in LAYOUTS:
        for row_name, whole in read_all(checkpoint, Layout.parse(text), "float32").items():
            source = "embedding.weight" if tied and row_name == "head.weight" else row_name
            assert torch.equal(bits(whole), bits(expected(model, source, checkpoint))), f"{text}: {row_name}"


@pytest.mark.parametrize("kv_heads", [1, 3])
def test_three_ranks(kv_heads: int, tmp_path: Path) -> None:
    model = make("qwen3", num_key_value_heads=kv_heads)
    checkpoint = HFCheckpoint.open(save(model, tmp_path))
    for pp in (1, 2, 3):
        for row_name, whole in read_all(checkpoint, Layout(tp=3, pp=pp), "float32").items():
            assert torch.equal(bits(whole), bits(expected(model, row_name, checkpoint)))


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("wanted", ["bfloat16", "float32", "float64"])
def test_dtypes_are_converted_as_torch_does(stored: torch.dtype, wanted: str, tmp_path: Path) -> None:
    model = make("qwen2", stored)
    checkpoint = HFCheckpoint.open(save(model, tmp_path))
    assert checkpoint.dtype_of("norm.weight") == str(stored).removeprefix("torch.")
    for row_name, whole in read_all(checkpoint, Layout(tp=2), wanted).items():
        want = expected(model, row_name, checkpoint).to(getattr(torch, wanted))
        assert torch.equal(bits(whole), bits(want))


def test_blocks_of_a_conversion_meet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of a few rows, and of less than a row."""
    model = make("llama", torch.bfloat16)
    checkpoint = HFCheckpoint.open(save(model, tmp_path))
    for size in (1, 200, 1000):
        monkeypatch.setattr("fivefold.nn.safetensors_io.BLOCK_BYTES", size)
        for row_name, whole in read_all(checkpoint, Layout(tp=4), "float32").items():
            assert torch.equal(whole, expected(model, row_name, checkpoint).float())


@pytest.mark.parametrize("name", FAMILIES)
def test_our_decoder_computes_what_theirs_does(name: str, tmp_path: Path) -> None:
    """Parameters in the right places: for two of equal shape (q and output, gate and up) only this tells."""
    model = make(name)
    checkpoint = HFCheckpoint.open(save(model, tmp_path))
    ours = Decoder(checkpoint.spec)
    whole = read_all(checkpoint, Layout(), "float32")
    ours.load_state_dict(whole)
    tokens = torch.arange(22).view(2, 11) % 61
    with torch.no_grad():
        got = ours(tokens, torch.arange(11)[None])
        want = model(input_ids=tokens, use_cache=False).logits
    assert float((got - want).abs().max() / want.abs().max()) < 1e-5


BIG = {
    "hidden_size": 256,
    "intermediate_size": 768,
    "vocab_size": 1001,
    "head_dim": 32,
    "num_attention_heads": 8,
}


def read_characters() -> int:
    """Bytes that this process has read through system calls, as the kernel counts them."""
    return int(Path("/proc/self/io").read_text().splitlines()[0].split()[1])


@pytest.mark.skipif(sys.platform != "linux", reason="/proc/self/io is Linux's")
@pytest.mark.parametrize("text", ["tp1", "tp2 pp2", "tp4", "tp4 pp3"])
@pytest.mark.parametrize("shard", ["2MB", "50GB"])
def test_a_rank_reads_its_own_bytes_and_no_more(text: str, shard: str, tmp_path: Path) -> None:
    folder, layout = save(make("llama", **BIG), tmp_path, shard), Layout.parse(text)
    spec = HFCheckpoint.open(folder).spec
    held = Counter[int]()
    rows: dict[int, list[Any]] = {}
    for rank, row in rank_rows(spec, layout):
        cuts = row.region(layout, layout.coordinate(rank))
        held[rank] += 4 * torch.Size([cut.stop - cut.start for cut in cuts]).numel()
        rows.setdefault(rank, []).append(row)
    for rank, own in held.items():
        checkpoint = HFCheckpoint.open(folder)
        headers, before = checkpoint.bytes_read, read_characters()
        for row in rows[rank]:
            checkpoint.read(row, layout, layout.coordinate(rank), "float32")
        really = read_characters() - before
        assert own <= checkpoint.bytes_read - headers <= really <= own + 4096
        assert checkpoint.bytes_read <= 1.05 * own, "with the headers and the index"


def test_memory_is_the_part(tmp_path: Path) -> None:
    """And one block where the dtype changes; never the whole tensor."""
    folder = save(make("llama", torch.bfloat16, **{**BIG, "vocab_size": 20_001}), tmp_path)
    layout = Layout(tp=4)
    for dtype, block in (("bfloat16", 0), ("float32", 4 << 20)):
        checkpoint = HFCheckpoint.open(folder)
        for rank, row in rank_rows(checkpoint.spec, layout):
            with LiveBytes() as memory:
                part = checkpoint.read(row, layout, layout.coordinate(rank), dtype)
            assert memory.peak_bytes <= part.nbytes + block


def test_a_model_that_is_stored_with_its_tied_head(tmp_path: Path) -> None:
    folder = save(make("llama", tie_word_embeddings=True), tmp_path)
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    read_all(HFCheckpoint.open(folder), Layout(tp=2, pp=2), "float32")
    tensors["lm_head.weight"][40, 3] += 1e-3
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"tie_word_embeddings, but lm_head.weight differs"):
        read_all(HFCheckpoint.open(folder), Layout(tp=2), "float32")


def test_old_buffers_are_no_parameters(tmp_path: Path) -> None:
    folder = save(make("llama"), tmp_path)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    HFCheckpoint.open(folder)


def change(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 5}, r"lacks tensor 'model.layers.4.input_layernorm.weight', .* and 6 more"),
        ({"num_hidden_layers": 3}, r"has tensor 'model.layers.3.input_layernorm.weight', .* and 6 more"),
        ({"vocab_size": 64}, r"'\w+(\.\w+)*' is \[61, 48\], by config.json it is \[64, 48\]"),
        ({"intermediate_size": 71}, r"by config.json it is"),
        ({"attention_bias": True}, r"lacks tensor 'model.layers.0.self_attn.k_proj.bias'"),
        ({"quantization_config": {"quant_method": "gptq"}}, r"quantised \('gptq'\)"),
        ({"architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2"}, r"cannot be run yet"),
        ({"hidden_size": "48"}, r"'hidden_size' must be a whole number"),
    ],
)
def test_a_config_of_another_model(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = save(make("llama"), tmp_path)
    change(folder, **changes)
    with pytest.raises(ModelError, match=message) as caught:
        HFCheckpoint.open(folder)
    assert "\n" not in str(caught.value)


def test_an_untied_model_without_a_head(tmp_path: Path) -> None:
    folder = save(make("llama", tie_word_embeddings=True), tmp_path)
    change(folder, tie_word_embeddings=False)
    with pytest.raises(ModelError, match=r"lacks tensor 'lm_head.weight' .*tie_word_embeddings: false"):
        HFCheckpoint.open(folder)


def test_a_parameter_of_another_model(tmp_path: Path) -> None:
    checkpoint = HFCheckpoint.open(save(make("llama"), tmp_path / "a"))
    other = HFCheckpoint.open(save(make("llama", vocab_size=64), tmp_path / "b"))
    layout = Layout()
    with pytest.raises(ModelError, match=r"embedding.weight \[61, 48\], .* \[64, 48\]: it is another model"):
        checkpoint.read(parameters(other.spec)[0], layout, layout.coordinate(0), "float32")


def another(spec: ModelSpec, **attention: Any) -> tuple[BlockSpec, ...]:
    """The same blocks, but for the attention of the last one."""
    last = spec.blocks[-1]
    return (*spec.blocks[:-1], last.replace(attention=last.attention.replace(**attention)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (lambda spec: {"blocks": spec.blocks[:-1]}, "4 layers, would be 3"),
        (lambda spec: {"tied_embeddings": True}, "tied_embeddings is False, would be True"),
        (lambda spec: {"rope_theta": 7.0}, r"rope_theta is 1000\.0, would be 7\.0"),
        (lambda spec: {"rope_scaling": None}, "rope_scaling is .*, would be None"),
        (lambda spec: {"norm_eps": 0.1}, "norm_eps is 1e-06, would be 0.1"),
        (lambda spec: {"blocks": another(spec, heads=6, kv_heads=1, head_dim=16)}, "heads of layer 3 is 12"),
        (lambda spec: {"blocks": another(spec, window=3)}, "window of layer 3 is None, would be 3"),
    ],
)
def test_weights_of_another_model_that_would_fit(changes: Any, message: str, tmp_path: Path) -> None:
    """Every parameter of these models has its name and shape in the file: only the config tells."""
    checkpoint = HFCheckpoint.open(save(make("llama"), tmp_path))
    checkpoint.check_model(checkpoint.spec.replace(name="other", max_positions=7))
    with pytest.raises(
        ModelError, match=f"weights of another model than {checkpoint.spec.name}: there {message}"
    ):
        checkpoint.check_model(checkpoint.spec.replace(**changes(checkpoint.spec)))


def test_families_without_a_table() -> None:
    spec = ModelSpec.from_config({**make("llama").config.to_dict(), "architectures": ["LlamaForCausalLM"]})
    with pytest.raises(ModelError, match=r"family 'other' cannot be read or written; can: llama"):
        places(spec.replace(family="other"))


def test_folders_that_hold_no_safetensors(tmp_path: Path) -> None:
    folder = save(make("llama"), tmp_path / "hf")
    with pytest.raises(ModelError, match="no checkpoint folder"):
        HFCheckpoint.open(tmp_path / "none")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"has neither model.safetensors nor"):
        HFCheckpoint.open(folder)
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    with pytest.raises(
        ModelError, match=r"pytorch_model.bin but no model.safetensors: pickle files can run code"
    ):
        HFCheckpoint.open(folder)
    (folder / "config.json").unlink()
    with pytest.raises(ModelError, match="cannot read model config"):
        HFCheckpoint.open(folder)


def test_hub_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    client = pytest.importorskip("huggingface_hub")
    asked: list[tuple[str, str | None]] = []

    def download(name: str, revision: str | None, allow_patterns: list[str]) -> str:
        assert not [p for p in allow_patterns if p.endswith((".bin", ".pt")) or p == "*"]
        asked.append((name, revision))
        return str(tmp_path)

    monkeypatch.setattr(client, "snapshot_download", download)
    assert local_folder(str(tmp_path)) == tmp_path
    assert not asked
    assert local_folder("owner/model") == local_folder("owner/model@v1.0") == tmp_path
    assert asked == [("owner/model", None), ("owner/model", "v1.0")]
    for text in ("model", "./none/here", "a/b/c", "../x", "", "~nobody-here/x", "a\0b", "a/" + "b" * 5000):
        with pytest.raises(ModelError, match="no checkpoint folder at"):
            local_folder(text)

    def fail(*_: Any, **__: Any) -> str:
        raise ConnectionError("no route\nto the hub")

    monkeypatch.setattr(client, "snapshot_download", fail)
    with pytest.raises(ModelError, match=r"no folder owner/model, and it cannot be downloaded: no route$"):
        local_folder("owner/model")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ModelError, match=r"pip install 'fivefold\[hub\]'"):
        local_folder("owner/model")


def test_names_that_the_decoder_does_not_have() -> None:
    with pytest.raises(KeyError):
        hf_name("layers.0.attention.qkv.x.weight")
    assert hf_name("layers.3.mlp.inputs.up.weight", "phi3") == "model.layers.3.mlp.gate_up_proj.weight"


def index_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "model.safetensors.index.json").read_text())


def test_an_index_and_files_that_contradict_each_other(tmp_path: Path) -> None:
    folder = save(make("llama"), tmp_path, "40KB")
    index, path = index_of(folder), folder / "model.safetensors.index.json"
    name, file = next(iter(index["weight_map"].items()))
    other = next(f for f in index["weight_map"].values() if f != file)
    rest = {key: value for key, value in index["weight_map"].items() if key != name}

    def refused(weight_map: Any, message: str) -> None:
        path.write_text(weight_map if isinstance(weight_map, str) else json.dumps({"weight_map": weight_map}))
        with pytest.raises(ModelError, match=message) as caught:
            HFCheckpoint.open(folder)
        assert "\n" not in str(caught.value)

    refused(rest, rf"{file} has tensor '{name}', but .* does not list it")
    refused({**rest, name: other}, rf"has tensor '{name}', but .* lists it in '{other}'")
    refused({**index["weight_map"], "x": file}, rf"lists tensor 'x' in {file}, which does not have it")
    refused({**index["weight_map"], "x": "none.safetensors"}, "cannot read .*none.safetensors: No such file")
    for place in (
        "../x.safetensors",
        "/etc/x.safetensors",
        "a/b.safetensors",
        "x.bin",
        "x.safetensors\n",
        "",
        3,
        None,
    ):
        refused({**rest, name: place}, "only .safetensors files of the same folder are read")
    for text in (
        "",
        "[]",
        "{}",
        '{"weight_map": []}',
        '{"weight_map": {}}',
        '{"a": 1, "a": 2}',
        "[" * 99_999,
        "\x00",
    ):
        refused(text, r"has no 'weight_map'|is not valid")


def test_a_huge_index_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save(make("llama"), tmp_path, "40KB")
    monkeypatch.setattr(hub, "MOST_INDEX_BYTES", 1000)
    with pytest.raises(ModelError, match=r"index.json has .*; at most 1000 B are read"):
        HFCheckpoint.open(folder)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.bool])
def test_weights_that_are_no_floats(dtype: torch.dtype, tmp_path: Path) -> None:
    folder = save(make("llama"), tmp_path)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] = torch.ones(48).to(dtype)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"'model.norm.weight' is (I8|F8_E4M3|BOOL); weights are F64, F32"):
        HFCheckpoint.open(folder)

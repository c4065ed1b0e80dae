"""Checkpoints of mixtures of experts and latent attention, from and to transformers. There, each expert is a tensor."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from fivefold.core.layout import Layout
from fivefold.core.sharding import ParameterRow, Shard, stored
from fivefold.errors import ModelError
from fivefold.nn.decoder import Decoder
from fivefold.nn.hub import HFCheckpoint
from fivefold.nn.hub_write import convert, write_hf

transformers = pytest.importorskip("transformers")
from hf_models import ROUTED, bits, in_memory, make, read_all, save  # noqa: E402

PER_LAYER = {"mixtral": "block_sparse_moe.experts.{}.w1", "qwen3_moe": "mlp.experts.{}.gate_proj"}


@pytest.mark.parametrize("name", ROUTED)
def test_every_parameter_and_buffer_is_theirs(name: str, tmp_path: Path) -> None:
    """Bit for bit at several layouts, and the decoder computes the same: gate and up have equal shapes."""
    model = make(name, tie_word_embeddings=False)
    checkpoint = HFCheckpoint.open(save(model, tmp_path / "hf", shard="40KB"))
    state = model.state_dict()
    for text in ("dp1", "tp2 pp2", "pp3"):
        whole = read_all(checkpoint, Layout.parse(text), "float32")
        for row in stored(checkpoint.spec):
            assert torch.equal(bits(whole[row.name]), bits(in_memory(state, row, checkpoint.spec))), row.name
    ours = Decoder(checkpoint.spec)
    ours.load_state_dict(whole)
    tokens = torch.arange(22).view(2, 11) % 61
    with torch.no_grad():
        got = ours(tokens, torch.arange(11)[None])
        want = model(input_ids=tokens, use_cache=False).logits
    assert float((got - want).abs().max() / want.abs().max()) < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", ROUTED)
def test_theirs_to_ours_to_theirs(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """With their config, and with one that is made from the model alone."""
    theirs = make(name, dtype)
    text = str(dtype).removeprefix("torch.")
    first = HFCheckpoint.open(save(theirs, tmp_path / "theirs", "40KB"))
    whole = read_all(first, Layout(pp=2), text)
    for folder, config in (("kept", first.config), ("made", None)):
        values = ((row.name, whole[row.name]) for row in stored(first.spec))
        write_hf(tmp_path / folder, first.spec, values, dtype=text, config=config, max_shard_bytes=30_000)
        again, report = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path / folder, output_loading_info=True, dtype=dtype
        )
        assert not any(report.values()), report
        assert type(again) is type(theirs)
        wanted = theirs.state_dict()
        assert set(again.state_dict()) == set(wanted)
        for key, value in again.state_dict().items():
            assert torch.equal(bits(value.to(dtype)), bits(wanted[key].to(dtype))), key
        tokens = torch.arange(22).view(2, 11) % 61
        if dtype == torch.bfloat16:
            continue  # a model that is cast after it was made has its angles cast as well
        with torch.no_grad():
            assert torch.equal(again(input_ids=tokens).logits, theirs(input_ids=tokens).logits)


def test_some_experts_of_some_width(tmp_path: Path) -> None:
    """What an expert-parallel rank holds: a range of experts, and a part of the width of each."""
    model = make("qwen3_moe")
    checkpoint = HFCheckpoint.open(save(model, tmp_path))
    rows = {row.name: row for row in stored(checkpoint.spec)}
    layout, state = Layout(tp=2), model.state_dict()
    for name, dim in (("gate", 1), ("up", 1), ("down", 2)):
        row = rows[f"layers.1.mlp.experts.{name}"]
        whole = in_memory(state, row, checkpoint.spec)
        half = row.shape[dim] // 2
        part = _Region(
            row, (slice(2, 5), *(slice(half, 2 * half) if d == dim else slice(None) for d in (1, 2)))
        )
        before = checkpoint.bytes_read
        got = checkpoint.read(part, layout, {"tp": 1, "pp": 0, "dp": 0, "cp": 0}, "float32")
        assert torch.equal(got, whole[part.cut])
        assert checkpoint.bytes_read - before == got.nbytes


class _Region(ParameterRow):
    """A row whose local part is what a test says."""

    def __init__(self, row: ParameterRow, cut: tuple[slice, ...]) -> None:
        super().__init__(row.name, row.role, row.shape, placement={"tp": Shard(0)})
        object.__setattr__(self, "cut", cut)

    def region(self, *_: object) -> tuple[slice, ...]:  # type: ignore[override]
        return tuple(slice(*one.indices(size)) for one, size in zip(self.cut, self.shape))

    def local_shape(self, *_: object) -> tuple[int, ...]:  # type: ignore[override]
        return tuple(one.stop - one.start for one in self.region())


@pytest.mark.parametrize("name", PER_LAYER)
def test_missing_and_extra_experts_are_told_by_their_numbers(name: str, tmp_path: Path) -> None:
    folder = save(make(name), tmp_path)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    prefix = f"model.layers.1.{PER_LAYER[name]}".rsplit("{}", 1)[0]
    last = {key: value for key, value in tensors.items() if key.startswith(f"{prefix}5.")}
    assert len(last) == 3

    def refused(**changes: object) -> str:
        held = {**tensors, **changes}
        save_file({k: v for k, v in held.items() if v is not None}, file, metadata={"format": "pt"})  # type: ignore[misc]
        with pytest.raises(ModelError) as caught:
            HFCheckpoint.open(folder)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    assert f"lacks expert 5 of layer 1 of the {name} in config.json" in refused(**dict.fromkeys(last))
    more = {key.replace(f"{prefix}5.", f"{prefix}{n}."): v.clone() for key, v in last.items() for n in (6, 7)}
    assert f"has 2 experts, 6 to 7, of layer 1, which the {name} in config.json does not have" in refused(
        **more
    )
    one = next(iter(last))
    assert f"lacks tensor '{one}' of" in refused(**{one: None})


def test_layers_that_predict_further_tokens_are_left_out(tmp_path: Path) -> None:
    """Published DeepSeek-V3 files have one after the last decoder layer; more than the config says are refused."""
    folder = save(make("deepseek_v3", num_mtp_layers=1), tmp_path / "a")
    file = folder / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.3.eh_proj.weight"] = torch.ones(2, 4)
    save_file(tensors, file, metadata={"format": "pt"})
    convert(folder, tmp_path / "b", dtype=None)
    written = load_file(tmp_path / "b" / "model.safetensors")
    assert set(written) == set(tensors) - {"model.layers.3.eh_proj.weight"}
    tensors["model.layers.4.eh_proj.weight"] = torch.ones(2, 4)
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"has tensor 'model.layers.4.eh_proj.weight', which"):
        HFCheckpoint.open(folder)

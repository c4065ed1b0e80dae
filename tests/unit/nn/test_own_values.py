"""The values of a module that is not ours: from itself, or from files where it was made without."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from hf_models import make, save
from safetensors.torch import load_file, save_file
from torch import nn

from fivefold.core.layout import Layout
from fivefold.engine.own import OwnModel
from fivefold.engine.parallelize import parallelize
from fivefold.errors import ModelError
from fivefold.nn.own_values import empty_parameters
from fivefold.strategies.compose import parameter_table, rows_of

LAYOUT = Layout.parse("dp2 tp2 pp2 zero3")


def empty(model: nn.Module) -> nn.Module:
    """The same model without values."""
    with empty_parameters():
        return type(model)(model.config)  # type: ignore[operator]


def test_parameters_are_empty_and_buffers_are_not() -> None:
    model = empty(make("llama", tie_word_embeddings=True))
    assert all(parameter.is_meta for parameter in model.parameters())
    assert {buffer.device.type for buffer in model.buffers()} == {"cpu"}
    assert model.lm_head.weight is model.model.embed_tokens.weight  # type: ignore[union-attr]
    assert not nn.Linear(2, 2).weight.is_meta


@pytest.mark.parametrize("tied", [False, True])
def test_every_rank_reads_what_it_would_have_cut(tied: bool, tmp_path: Path) -> None:
    model = make("llama, biases", num_key_value_heads=2, num_attention_heads=4, tie_word_embeddings=tied)
    folder = save(model, tmp_path / "hf", "20KB")
    whole, files = OwnModel(model), OwnModel(empty(model), weights=folder)
    assert files.rows == whole.rows
    table = parameter_table(whole.spec, LAYOUT, 16, whole.rows)
    read = 0
    for rank in range(LAYOUT.world_size):
        at = LAYOUT.coordinate(rank)
        for rows in rows_of(table, LAYOUT, at["pp"]).values():
            for row in [one.held for one in rows]:
                part = files.values(row, LAYOUT, at, "float64")
                assert part.shape == row.local_shape(LAYOUT)
                assert torch.equal(part, whole.values(row, LAYOUT, at, "float64"))
                region = row.region(LAYOUT, at)
                inside = part[tuple(slice(0, cut.stop - cut.start) for cut in region)]
                own = whole.parts.own_name(row.name)
                assert torch.equal(inside, model.get_parameter(own)[region].double())
                assert part.count_nonzero() == inside.count_nonzero()
                read += inside.numel()
    copies = 8 if tied else 0
    assert read >= sum(p.numel() for p in model.parameters()) + copies


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_experts_are_read_from_tensors_of_their_own(name: str, tmp_path: Path) -> None:
    """As `save_pretrained` writes them: of Mixtral w1, w2, w3 of every expert, and the router under another name."""
    model = make(name)
    folder = save(model, tmp_path / "hf")
    tensors = load_file(folder / "model.safetensors")
    assert not any(key.endswith("gate_up_proj") for key in tensors)
    whole, files = OwnModel(model), OwnModel(empty(model), weights=folder)
    for layout in (Layout.parse("dp2 ep2"), Layout.parse("dp6 ep2 zero3")):
        table = parameter_table(whole.spec, layout, 16, whole.rows)
        for rank in range(layout.world_size):
            at = layout.coordinate(rank)
            for row in [one.held for rows in rows_of(table, layout, at["pp"]).values() for one in rows]:
                assert torch.equal(
                    files.values(row, layout, at, "float32"), whole.values(row, layout, at, "float32")
                ), row.name
    of_last = sorted(key for key in tensors if "layers.1." in key and ".experts.5." in key)
    assert len(of_last) == 3
    extra = {key.replace(".experts.5.", ".experts.6."): tensors[key].clone() for key in of_last}
    save_file({**tensors, **extra}, folder / "model.safetensors")
    with pytest.raises(
        ModelError, match=r"experts\.6\..*, but the module has 6 experts, 0 to 5: it is another model"
    ):
        OwnModel(empty(model), weights=folder)
    for key in of_last:
        del tensors[key]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelError, match=r"has no values for model.layers.1.*experts\.5\."):
        OwnModel(empty(model), weights=folder)


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    model = make("llama")
    with pytest.raises(ModelError, match="no safetensors files in"):
        OwnModel(empty(model), weights=tmp_path)
    with pytest.raises(ModelError, match=r"model.embed_tokens.weight has no values; give a folder"):
        OwnModel(empty(model))
    values = {name: p.detach().clone() for name, p in model.named_parameters()}
    del values["model.norm.weight"]
    save_file(values, tmp_path / "a.safetensors")
    with pytest.raises(ModelError, match=r"has no values for model.norm.weight"):
        OwnModel(empty(model), weights=tmp_path)
    save_file({"model.norm.weight": torch.ones(3)}, tmp_path / "b.safetensors")
    with pytest.raises(
        ModelError, match=r"has model.norm.weight \[3\], the module \[48\]: it is another model"
    ):
        OwnModel(empty(model), weights=tmp_path)
    save_file({"model.norm.weight": torch.ones(48, dtype=torch.int32)}, tmp_path / "b.safetensors")
    with pytest.raises(ModelError, match=r"has model.norm.weight as I32; values are read from F64"):
        OwnModel(empty(model), weights=tmp_path)
    with torch.device("meta"):
        bare = transformers.LlamaForCausalLM(model.config)
    save(model, tmp_path / "hf")
    with pytest.raises(
        ModelError, match=r"the buffer model.rotary_emb.inv_freq has no values; make the module within"
    ):
        OwnModel(bare, weights=tmp_path / "hf")


def test_what_is_too_much_is_named(tmp_path: Path) -> None:
    """A folder of a deeper model fits a shallower one tensor by tensor."""
    model = make("llama")
    folder = save(model, tmp_path / "hf")
    shallower = empty(make("llama", num_hidden_layers=model.config.num_hidden_layers - 1))
    with pytest.raises(ModelError, match=r"has model.layers.\d.\S+ and \d more, which the module has not"):
        OwnModel(shallower, weights=folder)
    tensors = load_file(folder / "model.safetensors")
    computed = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(3)}
    save_file({**tensors, **computed}, folder / "model.safetensors")
    save_file({"else": torch.ones(2)}, folder / "consolidated.safetensors")
    OwnModel(empty(model), weights=folder)
    save_file({"model.norm.weight": tensors["model.norm.weight"]}, folder / "model-2.safetensors")
    with pytest.raises(
        ModelError, match=r"has model.norm.weight in model-2.safetensors and in model.safetensors"
    ):
        OwnModel(empty(model), weights=folder)


@pytest.mark.parametrize("shape", [(3,), (), (2, 2, 2, 2)])
def test_buffers_that_a_module_saves_are_read(shape: tuple[int, ...], tmp_path: Path) -> None:
    """As the selection biases of a router; others keep what they are made with."""
    model = make("llama")
    model.model.layers[0].register_buffer("balance", torch.randn(shape))  # type: ignore[union-attr]
    model.register_buffer("steps", torch.tensor(3))
    save_file(
        {name: value.clone() for name, value in model.state_dict().items()}, tmp_path / "model.safetensors"
    )
    other = empty(model)
    other.model.layers[0].register_buffer("balance", torch.zeros(shape))  # type: ignore[union-attr]
    other.register_buffer("steps", torch.tensor(0))
    frequencies = other.model.rotary_emb.inv_freq  # type: ignore[union-attr]
    parallel = parallelize(other, "dp1", seq_len=8, global_batch=1, weights=tmp_path)
    assert torch.equal(parallel.model.model.layers[0].balance, model.model.layers[0].balance)  # type: ignore[union-attr, arg-type]
    assert torch.equal(parallel.model.model.rotary_emb.inv_freq, frequencies)  # type: ignore[union-attr, arg-type]

"""Roles: how strategies find what they act on."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fivefold.core.model_spec import AttentionSpec, BlockSpec, MLPSpec, ModelSpec
from fivefold.nn.decoder import Decoder
from fivefold.nn.layers import RMSNorm
from fivefold.nn.roles import modules_with_role, replace_module, role_of


@pytest.fixture
def model() -> Decoder:
    """Twelve layers (indices of two digits), query/key norms and every bias."""
    attention = AttentionSpec(heads=4, kv_heads=2, head_dim=6, qkv_bias=True, output_bias=True, qk_norm=True)
    block = BlockSpec(attention=attention, mlp=MLPSpec(ffn=24, bias=True))
    return Decoder(ModelSpec(name="tiny", hidden=16, vocab=31, blocks=(block,) * 12))


def test_every_module_that_holds_parameters_has_a_role_or_a_parent_with_one(model: Decoder) -> None:
    """Whole layers do not count: a parameter needs a role that says how it is cut."""
    for name, module in model.named_modules():
        if not list(module.parameters(recurse=False)):
            continue
        parts = name.split(".")
        roles = [role_of(".".join(parts[: i + 1])) for i in range(len(parts))]
        assert set(roles) - {None, "layer"}, name


def test_each_role_finds_its_modules(model: Decoder) -> None:
    layers = range(12)
    wanted = {
        "embedding": ["embedding"],
        "head": ["head"],
        "loss": ["loss"],
        "layer": [f"layers.{i}" for i in layers],
        "attention_core": [f"layers.{i}.attention.core" for i in layers],
        "column": [f"layers.{i}.{part}" for i in layers for part in ("attention.qkv", "mlp.inputs")],
        "row": [f"layers.{i}.{part}" for i in layers for part in ("attention.output", "mlp.down")],
        "norm": [f"layers.{i}.{part}" for i in layers for part in ("attention_norm", "mlp_norm")] + ["norm"],
        "head_norm": [f"layers.{i}.attention.{part}" for i in layers for part in ("q_norm", "k_norm")],
    }
    for role, names in wanted.items():
        found = dict(modules_with_role(model, role))
        assert list(found) == names, role
        assert all(module is model.get_submodule(name) for name, module in found.items())
    assert not list(modules_with_role(model, "expert"))


def test_every_norm_is_found(model: Decoder) -> None:
    found = [m for role in ("norm", "head_norm") for _, m in modules_with_role(model, role)]
    assert {id(m) for m in found} == {id(m) for m in model.modules() if isinstance(m, RMSNorm)}


@pytest.mark.parametrize(
    "name", ["", "layers", "rope", "layers.3.attention", "layers.3.mlp", "layers.3.mlp.down.x"]
)
def test_no_role(name: str) -> None:
    assert role_of(name) is None


def test_replaced_module_is_the_one_that_runs(model: Decoder) -> None:
    class Zero(nn.Module):
        def forward(self, q: torch.Tensor, *_: object) -> torch.Tensor:
            return torch.zeros_like(q)

    tokens, positions = torch.arange(5)[None], torch.arange(5)[None]
    before = model(tokens, positions)
    for name, _ in modules_with_role(model, "attention_core"):
        replace_module(model, name, Zero())
    assert isinstance(model.get_submodule("layers.11.attention.core"), Zero)
    assert not torch.allclose(model(tokens, positions), before)
    head = nn.Linear(16, 3)
    replace_module(model, "head", head)
    assert model(tokens, positions).shape == (1, 5, 3)


def test_own_table_of_roles(model: Decoder) -> None:
    found = modules_with_role(model, "mine", {"layers.1?.mlp": "mine"})
    assert [name for name, _ in found] == ["layers.10.mlp", "layers.11.mlp"]

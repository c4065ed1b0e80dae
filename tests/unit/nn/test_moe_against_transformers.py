"""Mixtures of experts and latent attention against transformers, in float64: as `test_against_transformers`.

Also the routers' losses. There, the balance loss pools the layers; here it is compared layer by layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fivefold.core.model_spec import ModelSpec, MoESpec
from fivefold.core.router import RouterConfig
from fivefold.core.sharding import ParameterRow, parameters, stored
from fivefold.nn.decoder import Decoder
from fivefold.nn.moe import Router, Routing
from fivefold.nn.router_losses import RouterLosses, load

transformers = pytest.importorskip("transformers")
from hf_models import in_memory  # noqa: E402
from test_against_transformers import (  # noqa: E402
    BATCH,
    COMMON,
    LENGTH,
    PATCHED,
    STOCK,
    NoFloat32,
    data,
    error,
    hash_of,
    loss_of_theirs,
)

QWEN = {"moe_intermediate_size": 24, "num_experts": 8, "num_experts_per_tok": 3}
SHARED = {**QWEN, "shared_expert_intermediate_size": 20}
DEEPSEEK = {
    "moe_intermediate_size": 24, "n_routed_experts": 8, "num_experts_per_tok": 3, "n_shared_experts": 2,
    "first_k_dense_replace": 1, "kv_lora_rank": 12, "q_lora_rank": 14, "qk_nope_head_dim": 8, "qk_rope_head_dim": 6,
    "v_head_dim": 10, "num_key_value_heads": 4,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 4.0,
    "beta_slow": 0.25,
}  # fmt: skip
MSCALES = {**YARN, "mscale": 0.7, "mscale_all_dim": 1.3}

CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("Mixtral", {"num_local_experts": 6, "num_experts_per_tok": 2, "sliding_window": None}),
    "mixtral, one expert, window": ("Mixtral", {"num_local_experts": 5, "num_experts_per_tok": 1, "sliding_window": 6}),
    "qwen2-moe": ("Qwen2Moe", {**SHARED, "mlp_only_layers": [1], "norm_topk_prob": False}),
    "qwen3-moe": ("Qwen3Moe", {**QWEN, "head_dim": 14, "norm_topk_prob": True, "decoder_sparse_step": 2}),
    "deepseek-v2": ("DeepseekV2", {**DEEPSEEK, "routed_scaling_factor": 1.7, "rope_parameters": MSCALES}),
    "deepseek-v2, groups, direct queries": (
        "DeepseekV2",
        {**DEEPSEEK, "q_lora_rank": None, "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2},
    ),
    "deepseek-v3": (
        "DeepseekV3",
        {**DEEPSEEK, "n_group": 4, "topk_group": 2, "rope_parameters": MSCALES, "attention_bias": True},
    ),
    "deepseek-v3, halves, no query rank": (
        "DeepseekV3",
        {**DEEPSEEK, "q_lora_rank": None, "n_group": 2, "topk_group": 1, "rope_interleave": False,
         "norm_topk_prob": False, "rope_parameters": YARN},
    ),
}  # fmt: skip


class Pair:
    """Our decoder and the other library's model, with the same weights and selection biases."""

    def __init__(self, name: str) -> None:
        family, settings = CONFIGS[name]
        settings = {**COMMON, "experts_implementation": "eager", **settings}
        config = getattr(transformers, f"{family}Config")(**settings)
        self.theirs: nn.Module = getattr(transformers, f"{family}ForCausalLM")(config).double().eval()
        self.spec = ModelSpec.from_config(config.to_dict(), name=name)
        self.ours = Decoder(self.spec).double()
        torch.manual_seed(hash_of(name))
        own = {**dict(self.ours.named_parameters()), **dict(self.ours.named_buffers())}
        self.state = {**dict(self.theirs.named_parameters()), **dict(self.theirs.named_buffers())}
        with torch.no_grad():
            for row in stored(self.spec):
                own[row.name].normal_(row.init_mean, 0.4 if len(row.shape) == 1 else 0.2)
                self.part(self.state, row).copy_(own[row.name])

    def part(self, tensors: Mapping[str, Tensor | None], row: ParameterRow) -> Tensor:
        return in_memory(tensors, row, self.spec)

    def gradient_errors(self) -> dict[str, float]:
        rows = parameters(self.spec)
        theirs = {name: p.grad for name, p in self.theirs.named_parameters()}
        wanted = {row.name: self.part(theirs, row) for row in rows}
        got = {name: p.grad for name, p in self.ours.named_parameters()}
        largest: dict[str, Tensor] = {}
        for row in rows:
            here = wanted[row.name].abs().max()
            largest[row.block] = torch.maximum(largest.get(row.block, here), here)
        return {row.name: error(got[row.name], wanted[row.name], largest[row.block]) for row in rows}  # type: ignore[arg-type]

    @property
    def routers(self) -> list[Router]:
        return [module for module in self.ours.modules() if isinstance(module, Router)]


@contextmanager
def made(name: str, *, patched: bool) -> Iterator[Pair]:
    with NoFloat32() if patched else nullcontext():
        yield Pair(name)


@pytest.mark.parametrize(("patched", "bound"), [(False, STOCK), (True, PATCHED)], ids=["stock", "patched"])
@pytest.mark.parametrize("name", CONFIGS)
def test_logits_loss_and_every_gradient(name: str, patched: bool, bound: float) -> None:
    with made(name, patched=patched) as pair:
        tokens, labels, mask = data(pair.spec.vocab)
        logits = pair.ours(tokens, torch.arange(LENGTH)[None])
        loss = pair.ours.loss(logits, labels, mask) / mask.sum()
        loss.backward()
        their_logits = pair.theirs(input_ids=tokens, use_cache=False).logits
        their_loss = loss_of_theirs(their_logits, labels, mask)
        their_loss.backward()
    assert logits.dtype == loss.dtype == torch.float64
    assert error(logits, their_logits) <= bound
    assert error(loss, their_loss) <= bound
    errors = pair.gradient_errors()
    worst = max(errors, key=lambda row: errors[row])
    assert errors[worst] <= bound, f"{worst}: {errors[worst]:.1e}"


@pytest.mark.parametrize("name", ["mixtral", "qwen3-moe"])
@pytest.mark.parametrize("balance", ["sequence", "batch"])
def test_router_losses_of_every_layer(name: str, balance: str) -> None:
    """Theirs counts K x our balance loss; `sequence`: theirs of each sequence alone; z: that of Switch Transformers."""
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func
    from transformers.models.switch_transformers.modeling_switch_transformers import router_z_loss_func

    with made(name, patched=True) as pair:
        tokens, labels, mask = data(pair.spec.vocab)
        moe = next(block.mlp for block in pair.spec.blocks if isinstance(block.mlp, MoESpec))
        config = RouterConfig(balance=balance, balance_coefficient=0.07, z_coefficient=0.03)  # type: ignore[arg-type]
        routings: list[Routing] = []
        for router in pair.routers:
            router.register_forward_hook(lambda _module, _inputs, out: routings.append(out))
        positions = torch.arange(LENGTH)[None]
        pair.ours(tokens, positions)
        for router, routing in zip(pair.routers, routings, strict=True):
            losses = router.losses = RouterLosses(config)
            losses.per_sequence, losses.per_token = 1 / BATCH, 1 / (BATCH * LENGTH)
            losses.load_E = load(routing.counts_E, torch.float64)  # theirs is that of the batch itself
        loss = pair.ours.loss(pair.ours(tokens, positions), labels, mask) / mask.sum()
        loss.backward()
        out = pair.theirs(input_ids=tokens, use_cache=False, output_router_logits=True)
        total = loss_of_theirs(out.logits, labels, mask)
        for router, logits in zip(pair.routers, out.router_logits, strict=True):
            parts = logits.split(LENGTH) if balance == "sequence" else [logits]
            balances = [
                load_balancing_loss_func((part,), moe.experts, moe.top_k) / moe.top_k for part in parts
            ]
            z = router_z_loss_func(logits[None])
            assert error(router.losses.balance, sum(balances) / len(parts)) <= PATCHED  # type: ignore[arg-type,union-attr]
            assert error(router.losses.z, z) <= PATCHED  # type: ignore[arg-type,union-attr]
            total = total + 0.07 * sum(balances) / len(parts) + 0.03 * z
        total.backward()
    errors = pair.gradient_errors()
    worst = max(errors, key=lambda row: errors[row])
    assert errors[worst] <= PATCHED, f"{worst}: {errors[worst]:.1e}"

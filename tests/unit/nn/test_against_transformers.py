"""Logits, loss and every parameter's gradient against the model classes of transformers, in float64.

transformers casts to float32 inside RMSNorm, the rotary embedding, softmax and the loss, whatever the model's dtype.
Stock, it can therefore agree to about 1e-6 only; with every such cast turned into float64, to rounding error.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fivefold.core.model_spec import ModelSpec
from fivefold.core.sharding import parameters
from fivefold.nn.attention import Mask
from fivefold.nn.decoder import Decoder
from fivefold.nn.hub_names import hf_name

transformers = pytest.importorskip("transformers")

BATCH, LENGTH, IGNORED = 2, 19, -100
STOCK, PATCHED = 3e-6, 1e-10

COMMON = {
    "vocab_size": 61,
    "hidden_size": 40,
    "intermediate_size": 56,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "attn_implementation": "eager",
}
LLAMA_3 = {
    "rope_type": "llama3",
    "rope_theta": 1000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
"""Waves of 6 to 400 positions: some shorter than 64/4, some longer than 64/1, some between."""

YARN = {
    "rope_type": "yarn",
    "rope_theta": 500.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 4.0,
    "beta_slow": 0.25,
}
"""With 8 pairs of a head of 16: some frequencies kept, some divided, some between."""

CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"tie_word_embeddings": False}),
    "llama-3 scaling": ("Llama", {"rope_parameters": LLAMA_3, "head_dim": 16, "tie_word_embeddings": True}),
    "llama, yarn": ("Llama", {"rope_parameters": YARN, "head_dim": 16}),
    "mistral, yarn not truncated": (
        "Mistral",
        {"rope_parameters": {**YARN, "truncate": False}, "head_dim": 16, "sliding_window": None},
    ),
    "qwen2, yarn with both mscales": (
        "Qwen2",
        {"rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.3}, "tie_word_embeddings": True},
    ),
    "qwen3, yarn by its defaults, own attention factor": (
        "Qwen3",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 2.5,
                "attention_factor": 0.8,
            },
            "head_dim": 14,
        },
    ),
    "llama, biases": ("Llama", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 1}),
    "mistral": ("Mistral", {"sliding_window": 6, "head_dim": 12}),
    "mistral, wide window": ("Mistral", {"sliding_window": LENGTH, "num_key_value_heads": 4}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2, mixed windows": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1, "rms_norm_eps": 1e-5},
    ),
    "qwen3": ("Qwen3", {"head_dim": 14, "tie_word_embeddings": False}),
    "qwen3, biases": ("Qwen3", {"head_dim": 6, "attention_bias": True, "tie_word_embeddings": True}),
}


class NoFloat32(TorchFunctionMode):
    """Every float32 that a torch function is asked for becomes float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.float:
            return args[0].double()

        def wide(value: Any) -> Any:
            return torch.float64 if value is torch.float32 else value

        return func(*map(wide, args), **{key: wide(value) for key, value in (kwargs or {}).items()})


@dataclass
class Pair:
    """Our decoder and the other library's model, with the same weights."""

    spec: ModelSpec
    ours: Decoder
    theirs: nn.Module


@contextmanager
def made(name: str, *, patched: bool) -> Iterator[Pair]:
    """Both models in float64 with random weights: norms are not 1, biases are not 0."""
    family, settings = CONFIGS[name]
    with NoFloat32() if patched else nullcontext():
        config = getattr(transformers, f"{family}Config")(**{**COMMON, **settings})
        theirs = getattr(transformers, f"{family}ForCausalLM")(config).double().eval()
        spec = ModelSpec.from_config(config.to_dict(), name=name)
        ours = Decoder(spec).double()
        torch.manual_seed(hash_of(name))
        names = dict(theirs.named_parameters())
        with torch.no_grad():
            for row, ours_value in zip(parameters(spec), ours.parameters(), strict=True):
                ours_value.normal_(row.init_mean, 0.4 if len(row.shape) == 1 else 0.2)
                names.pop(hf_name(row.name)).copy_(ours_value)
        assert not names, f"parameters that we lack: {sorted(names)}"
        yield Pair(spec, ours, theirs)


def hash_of(name: str) -> int:
    return sum(name.encode())


def data(vocab: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, labels and mask [B, S]; the tails are masked, each row's at another place."""
    generator = torch.Generator().manual_seed(7)
    tokens = torch.randint(vocab, (BATCH, LENGTH + 1), generator=generator)
    mask = torch.arange(LENGTH) < torch.tensor([[LENGTH - 2], [5]])
    return tokens[:, :-1], tokens[:, 1:], mask


def loss_of_theirs(logits: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    from transformers.loss.loss_utils import ForCausalLMLoss

    shifted = labels.masked_fill(~mask, IGNORED)
    return ForCausalLMLoss(logits, None, logits.shape[-1], shift_labels=shifted)


def error(ours: Tensor, theirs: Tensor, largest: Tensor | None = None) -> float:
    """max|a-b| / max(max|b|, 0.01 x the largest |b| of its block)."""
    ours, theirs = ours.detach(), theirs.detach()
    scale = theirs.abs().max()
    if largest is not None:
        scale = torch.maximum(scale, 0.01 * largest)
    return float((ours - theirs).abs().max() / scale)


def gradient_errors(pair: Pair) -> dict[str, float]:
    rows = parameters(pair.spec)
    theirs = dict(pair.theirs.named_parameters())
    wanted = {row.name: theirs[hf_name(row.name)].grad for row in rows}
    largest: dict[str, Tensor] = {}
    for row in rows:
        here = wanted[row.name].abs().max()
        largest[row.block] = torch.maximum(largest.get(row.block, here), here)
    got = {name: p.grad for name, p in pair.ours.named_parameters()}
    return {row.name: error(got[row.name], wanted[row.name], largest[row.block]) for row in rows}


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
    errors = gradient_errors(pair)
    worst = max(errors, key=lambda row: errors[row])
    assert errors[worst] <= bound, f"{worst}: {errors[worst]:.1e}"


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", ["llama", "mistral", "qwen3"])
def test_padding(name: str, side: str) -> None:
    """With a valid mask and positions that start at the first valid token, in the rows' valid places."""
    tokens, labels, mask = data(COMMON["vocab_size"])  # type: ignore[arg-type]
    pads, place = torch.tensor([[4], [0]]), torch.arange(LENGTH)
    valid = place >= pads if side == "left" else place < LENGTH - pads
    positions = (place - pads).clamp(min=0) if side == "left" else place.expand(BATCH, -1)
    counts = mask & valid
    with made(name, patched=True) as pair:
        logits = pair.ours(tokens, positions, Mask(valid))
        (pair.ours.loss(logits, labels, counts) / counts.sum()).backward()
        their_logits = pair.theirs(
            input_ids=tokens, attention_mask=valid.long(), position_ids=positions, use_cache=False
        ).logits
        loss_of_theirs(their_logits, labels, counts).backward()
    assert error(logits[valid], their_logits[valid]) <= PATCHED
    assert max(gradient_errors(pair).values()) <= PATCHED


def test_a_wrong_gradient_is_noticed() -> None:
    """The measure itself: one norm weight's gradient off by one part in a million."""
    with made("qwen3", patched=True) as pair:
        tokens, labels, mask = data(pair.spec.vocab)
        (pair.ours.loss(pair.ours(tokens, torch.arange(LENGTH)[None]), labels, mask) / mask.sum()).backward()
        loss_of_theirs(pair.theirs(input_ids=tokens, use_cache=False).logits, labels, mask).backward()
    pair.ours.get_parameter("layers.1.attention.q_norm.weight").grad.mul_(1 + 1e-6)  # type: ignore[union-attr]
    errors = gradient_errors(pair)
    assert [name for name, value in errors.items() if value > PATCHED] == ["layers.1.attention.q_norm.weight"]

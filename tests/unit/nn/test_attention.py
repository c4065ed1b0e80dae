"""The attention core and its mask, against softmax written out, one query at a time."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fivefold.core.model_spec import AttentionSpec, BlockSpec, MLPSpec, ModelSpec
from fivefold.nn.attention import AttentionCore, Mask
from fivefold.nn.decoder import Decoder

B, N, K, S, H = 2, 6, 2, 9, 4


def qkv(*, requires_grad: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return tuple(  # type: ignore[return-value]
        torch.randn(B, heads, S, H, dtype=torch.float64, generator=generator).requires_grad_(requires_grad)
        for heads in (N, K, K)
    )


def by_hand(q: Tensor, k: Tensor, v: Tensor, window: int | None, valid: Tensor | None) -> Tensor:
    """Every query on its own: the keys that it may see are picked by a Python condition."""
    out = torch.zeros(B, N, S, H, dtype=torch.float64)
    for b in range(B):
        for n in range(N):
            for i in range(S):
                seen = [
                    j
                    for j in range(i + 1)
                    if (window is None or j > i - window) and (j == i or valid is None or valid[b, j])
                ]
                scores = k[b, n // (N // K), seen] @ q[b, n, i] / H**0.5
                out[b, n, i] = scores.softmax(0) @ v[b, n // (N // K), seen]
    return out


@pytest.mark.parametrize("padding", [None, "left", "right", "holes", "all"])
@pytest.mark.parametrize("window", [None, 1, 3, S - 1, S, 100])
def test_against_one_query_at_a_time(window: int | None, padding: str | None) -> None:
    place = torch.arange(S)
    valid = {
        None: None,
        "left": place >= torch.tensor([[3], [0]]),
        "right": place < torch.tensor([[S], [2]]),
        "holes": torch.rand(B, S, generator=torch.Generator().manual_seed(1)) < 0.5,
        "all": torch.zeros(B, S, dtype=torch.bool),
    }[padding]
    q, k, v = qkv()
    torch.testing.assert_close(
        AttentionCore(window)(q, k, v, None if valid is None else Mask(valid)),
        by_hand(q, k, v, window, valid),
        rtol=1e-12,
        atol=1e-12,
    )


@pytest.mark.parametrize("window", [None, 3])
def test_separate_documents_are_computed_as_if_alone(window: int | None) -> None:
    """Through a decoder: a row of two documents and padding gives each document the logits that it has by itself."""
    attention = AttentionSpec(heads=4, kv_heads=2, head_dim=6, window=window)
    block = BlockSpec(attention=attention, mlp=MLPSpec(ffn=24))
    model = Decoder(ModelSpec(name="tiny", hidden=16, vocab=31, blocks=(block,) * 2)).double()
    tokens = torch.randint(31, (2, S), generator=torch.Generator().manual_seed(0))
    documents = torch.tensor([[0] * 4 + [1] * 3 + [-1] * 2, [5] * S])
    places = torch.arange(S)[None]
    together = model(tokens, places, Mask(documents_BS=documents))
    for row, part in (
        (0, slice(0, 4)),
        (0, slice(4, 7)),
        (0, slice(7, 8)),
        (0, slice(8, 9)),
        (1, slice(0, S)),
    ):
        alone = model(tokens[row : row + 1, part], torch.arange(part.stop - part.start)[None])
        torch.testing.assert_close(together[row : row + 1, part], alone, rtol=1e-12, atol=1e-12)
    assert not torch.allclose(together[0, 4:7], model(tokens, places)[0, 4:7])


@pytest.mark.parametrize("window", [S, S + 1, 10**9])
def test_a_window_of_the_whole_length_is_no_window(window: int) -> None:
    q, k, v = qkv()
    assert torch.equal(AttentionCore(window)(q, k, v, None), AttentionCore(None)(q, k, v, None))


def test_head_counts_come_from_the_tensors() -> None:
    """The core of some heads only gives those heads of the whole: what tensor parallelism relies on."""
    q, k, v = qkv()
    whole, group = AttentionCore(4)(q, k, v, None), N // K
    for i in range(K):
        part = AttentionCore(4)(q[:, i * group : (i + 1) * group], k[:, i : i + 1], v[:, i : i + 1], None)
        torch.testing.assert_close(part, whole[:, i * group : (i + 1) * group], rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 3])
def test_a_row_without_any_valid_token_stays_finite(window: int | None, dtype: torch.dtype) -> None:
    """Through a whole decoder, forward and backward: no NaN reaches the other row or a weight."""
    block = BlockSpec(
        attention=AttentionSpec(heads=4, kv_heads=2, head_dim=6, window=window, qk_norm=True),
        mlp=MLPSpec(ffn=24),
    )
    model = Decoder(ModelSpec(name="tiny", hidden=16, vocab=31, blocks=(block,) * 2)).to(dtype)
    tokens = torch.randint(31, (2, S), generator=torch.Generator().manual_seed(0))
    valid = torch.stack((torch.zeros(S, dtype=torch.bool), torch.ones(S, dtype=torch.bool)))
    logits = model(tokens, torch.arange(S)[None], Mask(valid))
    assert logits.isfinite().all()
    model.loss(logits, tokens, valid).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    alone = model(tokens[1:], torch.arange(S)[None], None)
    tolerance = 1e-5 if dtype is torch.float32 else 3e-2
    torch.testing.assert_close(logits[1:], alone, rtol=tolerance, atol=tolerance)


def test_gradients_with_a_mask() -> None:
    q, k, v = qkv(requires_grad=True)
    valid = torch.arange(S) >= torch.tensor([[3], [0]])
    assert torch.autograd.gradcheck(lambda *x: AttentionCore(4)(*x, Mask(valid)), (q, k, v))

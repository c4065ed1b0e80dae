"""Tensor-parallel modules alone against the plain modules that they replace, cut by hand; their memory and traffic.

Shape letters: B batch, S sequence, D hidden, O outputs, V vocabulary, n = tp.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fivefold.core.events import total_bytes
from fivefold.core.layout import Layout
from fivefold.core.model_spec import AttentionSpec, BlockSpec, MLPSpec, ModelSpec
from fivefold.core.sharding import ParameterRow
from fivefold.nn.decoder import Decoder
from fivefold.nn.layers import IGNORED, Projections, TokenLoss
from fivefold.runtime.device import Device
from fivefold.runtime.ledger import Ledger
from fivefold.runtime.memory import LiveBytes
from fivefold.runtime.mesh import Axis, Mesh
from fivefold.strategies.tensor import apply
from fivefold.strategies.tensor.linear import ColumnParallel, Cut, RowParallel
from fivefold.strategies.tensor.vocabulary import VocabularyEmbedding, VocabularyHead, VocabularyLoss

from .live_memory import settled

B, S, D = 2, 12, 6
LAYOUTS = [f"tp{n}{sp}" for n in (2, 3, 4) for sp in ("", " nosp")]
GARBAGE = 1e3
"""What stands in the padding: it must not be read."""


def random(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def same(got: Tensor | None, expected: Tensor | None) -> None:
    assert got is not None
    assert expected is not None
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


def part(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """This rank's equal part, not contiguous in memory where dim > 0, as a view of the whole is."""
    return x.chunk(axis.degree, dim)[axis.index].detach()


def padded_rows(x: Tensor, axis: Axis) -> tuple[Tensor, int]:
    """This rank's ceil(V/n) rows, garbage below the end of the vocabulary; and how many are real."""
    rows = -(-x.shape[0] // axis.degree)
    real = x.detach()[axis.index * rows : (axis.index + 1) * rows]
    return torch.cat((real, x.new_full((rows - len(real), *x.shape[1:]), GARBAGE))), len(real)


def check_column(axis: Axis, sp: bool) -> None:
    plain = Projections(D, {"a": 12, "b": 24}, bias=True).double()
    for i, p in enumerate(plain.parameters()):
        p.data = random(*p.shape, seed=i)
    local = copy.deepcopy(plain)
    for p in local.parameters():
        p.data = part(p.data, axis, 0)
    column = ColumnParallel(local, Cut(axis, sp))
    assert [name for name, _ in column.named_parameters()] == [name for name, _ in plain.named_parameters()]

    x = random(B, S, D, seed=9).requires_grad_()
    weights = [random(B, S, 12, seed=20), random(B, S, 24, seed=21)]
    expected = plain(x)
    torch.stack([(y * w).sum() for y, w in zip(expected, weights, strict=True)]).sum().backward()
    mine = (part(x, axis, 1) if sp else x.detach().clone()).requires_grad_()
    outputs = column(mine)
    for y, whole in zip(outputs, expected, strict=True):
        same(y, part(whole, axis, -1))
    parts = [(y * part(w, axis, -1)).sum() for y, w in zip(outputs, weights, strict=True)]
    torch.stack(parts).sum().backward()
    assert x.grad is not None
    same(mine.grad, part(x.grad, axis, 1) if sp else x.grad)
    for p, whole_p in zip(column.parameters(), plain.parameters(), strict=True):
        assert whole_p.grad is not None
        same(p.grad, part(whole_p.grad, axis, 0))
    # an output that nobody reads still leaves the other's gradients right
    (only,) = torch.autograd.grad(column(mine)[1].sum(), mine)
    (whole,) = torch.autograd.grad(plain(x)[1].sum(), x)
    same(only, part(whole, axis, 1) if sp else whole)


def check_row(axis: Axis, sp: bool) -> None:
    plain = nn.Linear(12, D, dtype=torch.float64)
    plain.weight.data, plain.bias.data = random(D, 12, seed=1), random(D, seed=2)
    local = copy.deepcopy(plain)
    local.weight.data = part(plain.weight, axis, 1)
    row = RowParallel(local, Cut(axis, sp))

    x, w = random(B, S, 12, seed=3).requires_grad_(), random(B, S, D, seed=4)
    y = plain(x)
    (y * w).sum().backward()
    mine = part(x, axis, 2).requires_grad_()
    out = row(mine)
    same(out, part(y, axis, 1) if sp else y)
    (out * (part(w, axis, 1) if sp else w)).sum().backward()
    assert x.grad is not None
    assert plain.weight.grad is not None
    same(mine.grad, part(x.grad, axis, 2))
    same(row.weight.grad, part(plain.weight.grad, axis, 1))
    bias_grad = row.bias.grad
    same(axis.all_reduce(bias_grad.clone()) if sp else bias_grad, plain.bias.grad)


def check_embedding(axis: Axis, sp: bool, vocab: int) -> None:
    plain = nn.Embedding(vocab, D, dtype=torch.float64)
    plain.weight.data = random(vocab, D, seed=5)
    local = copy.deepcopy(plain)
    local.weight.data, real = padded_rows(plain.weight, axis)
    embedding = VocabularyEmbedding(local, Cut(axis, sp))

    tokens = torch.arange(B * S).view(B, S) * 7 % vocab  # every token of the vocabulary, often
    w = random(B, S, D, seed=6)
    y = plain(tokens)
    (y * w).sum().backward()
    out = embedding(tokens)
    same(out, part(y, axis, 1) if sp else y)
    (out * (part(w, axis, 1) if sp else w)).sum().backward()
    whole, _ = padded_rows(plain.weight.grad, axis)  # type: ignore[arg-type]
    same(embedding.weight.grad[:real], whole[:real])
    assert not embedding.weight.grad[real:].any(), "padding gets no gradient"


def check_head_and_loss(axis: Axis, sp: bool, vocab: int, scale: float) -> None:
    """The two together, so that the padding's logits are what a real step makes of garbage weights."""
    plain = nn.Linear(D, vocab, bias=False, dtype=torch.float64)
    plain.weight.data = random(vocab, D, seed=7) * scale
    local = copy.deepcopy(plain)
    local.weight.data, real = padded_rows(plain.weight, axis)
    head, loss = VocabularyHead(local, Cut(axis, sp)), VocabularyLoss(axis, vocab)

    x = random(B, S, D, seed=8).requires_grad_()
    labels = torch.arange(B * S).view(B, S) * 5 % vocab
    mask = torch.arange(S) < torch.tensor([[S - 3], [0]])  # a tail, and a row that does not count at all
    mask[1, 4] = True
    labels[0, -1] = IGNORED
    labels[0, -2] = vocab + 1000
    expected = TokenLoss()(plain(x), torch.where(mask, labels, 0), mask)
    (expected / 7).backward()
    mine = (part(x, axis, 1) if sp else x.detach().clone()).requires_grad_()
    logits = head(mine)
    assert logits.shape == (B, S, -(-vocab // axis.degree))
    total = loss(logits, labels, mask)
    same(total, expected.detach())
    (total / 7).backward()
    assert x.grad is not None
    same(mine.grad, part(x.grad, axis, 1) if sp else x.grad)
    whole, _ = padded_rows(plain.weight.grad, axis)  # type: ignore[arg-type]
    same(head.weight.grad[:real], whole[:real])
    assert not head.weight.grad[real:].any(), "padding gets no gradient"
    nothing = loss(logits.detach(), labels, torch.zeros_like(mask))
    assert nothing.item() == 0.0


@pytest.mark.parametrize("text", LAYOUTS)
def test_modules_equal_the_plain_ones(on_mesh: Callable[..., Any], text: str) -> None:
    """Vocabularies: 12 divides by all, 11 by none, 5 on 4 ranks leaves nothing but padding on the last."""

    def check(mesh: Mesh) -> None:
        axis, sp = mesh.axis("tp"), mesh.layout.sequence_parallel
        check_column(axis, sp)
        check_row(axis, sp)
        for vocab in (12, 11, 5):
            check_embedding(axis, sp, vocab)
            check_head_and_loss(axis, sp, vocab, scale=1.0)
        check_head_and_loss(axis, sp, 11, scale=300.0)  # exponentials that overflow without a maximum

    on_mesh(check, text)


def test_loss_is_at_least_float32(on_mesh: Callable[..., Any]) -> None:
    def check(mesh: Mesh) -> None:
        axis = mesh.axis("tp")
        labels, mask = torch.zeros(B, S, dtype=torch.long), torch.ones(B, S, dtype=torch.bool)
        for dtype, wide in ((torch.bfloat16, torch.float32), (torch.float32, torch.float32)):
            logits = random(B, S, 8).to(dtype)
            mine = part(logits, axis, 2).requires_grad_()
            total = VocabularyLoss(axis, 8)(mine, labels, mask)
            assert total.dtype == wide
            torch.testing.assert_close(total, TokenLoss()(logits, labels, mask))
            total.backward()
            assert mine.grad is not None
            assert mine.grad.dtype == dtype

    on_mesh(check, "tp2")


def test_the_gathered_input_is_not_kept(on_mesh: Callable[..., Any]) -> None:
    """Under SP, autograd holds S/n tokens of a column's input: seen in what it saves, and in live bytes."""
    outputs, n = 8, 2

    def saved(mesh: Mesh) -> tuple[list[tuple[int, ...]], int]:
        plain = Projections(D, {"a": outputs}, bias=False)
        column = ColumnParallel(plain, Cut(mesh.axis("tp"), mesh.layout.sequence_parallel))
        x = torch.ones(B, S // n if mesh.layout.sequence_parallel else S, D, requires_grad=True)
        shapes: list[tuple[int, ...]] = []

        def note(tensor: Tensor) -> Tensor:
            shapes.append(tuple(tensor.shape))
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            column(x)
        with LiveBytes([x, *column.parameters()]) as memory:
            before = memory.live_bytes
            (y,) = column(x)
            kept = settled(memory) - before
            gathered = memory.peak_bytes - before
            assert y.grad_fn is not None
        assert gathered >= B * S * D * 4 * mesh.layout.sequence_parallel, (
            "the whole input did exist for a moment"
        )
        return shapes, kept

    for text in ("tp2", "tp2 nosp"):
        for shapes, kept in on_mesh(saved, text):
            assert kept == B * S * outputs * 4, "nothing but the output lives on"
            if text == "tp2":
                assert (B, S // n, D) in shapes
                assert (B, S, D) not in shapes


def wide_model() -> ModelSpec:
    """A vocabulary so wide that logits would stand out among all messages."""
    attention = AttentionSpec(heads=4, kv_heads=2, head_dim=4)
    block = BlockSpec(attention=attention, mlp=MLPSpec(ffn=16))
    return ModelSpec(name="wide", hidden=8, vocab=1003, blocks=(block,))


def test_logits_are_never_gathered(on_mesh: Callable[..., Any]) -> None:
    spec = wide_model()

    def step(mesh: Mesh) -> tuple[int, int]:
        model = Decoder(spec)
        apply.apply(model, mesh, spec.vocab)
        rows = -(-spec.vocab // mesh.layout.tp)
        for name, p in model.named_parameters():
            cut = {"embedding.weight": (rows, 8), "head.weight": (rows, 8)}
            n = mesh.layout.tp
            shape = cut.get(name) or (
                (p.shape[0], p.shape[1] // n) if "output" in name or "down" in name
                else (p.shape[0] // n, *p.shape[1:]) if "norm" not in name else tuple(p.shape)
            )  # fmt: skip
            p.data = torch.ones(shape)
        tokens = torch.arange(B * S).view(B, S)
        with Ledger(mesh) as ledger:
            logits = model(tokens, torch.arange(S)[None])
            assert logits.shape == (B, S, rows)
            model.loss(logits, tokens, torch.ones(B, S, dtype=torch.bool)).backward()
        return max(e.bytes for e in ledger.events), total_bytes(ledger.events)

    for largest, _ in on_mesh(step, "tp2"):
        assert largest == B * S * spec.hidden * 4, "the largest message is hidden states"


def test_one_rank_is_left_alone() -> None:
    mesh = Mesh(Layout.parse("dp1"), 0, Device(torch.device("cpu")))
    model = Decoder(wide_model())
    before = {name: (type(module), id(module)) for name, module in model.named_modules()}
    apply.apply(model, mesh, 1003)
    assert {name: (type(module), id(module)) for name, module in model.named_modules()} == before
    gradient = torch.ones(3)
    apply.sum_gradients([(ParameterRow("norm.weight", "norm", (3,)), gradient)], mesh)
    assert torch.equal(gradient, torch.ones(3))


def test_partial_gradients_are_summed_over_their_runs(on_mesh: Callable[..., Any]) -> None:
    """tp4 with 2 KV heads: a norm over all four ranks, k over pairs of neighbours, the rest not at all."""

    def sums(mesh: Mesh) -> tuple[list[float], list[float], list[float], int]:
        rows = [
            ParameterRow("norm", "norm", (2,), sums={"tp": None}),
            ParameterRow("k", "k", (4, 2), sums={"tp": 2}),
            ParameterRow("q", "q", (8,)),
        ]
        value = float(10 ** mesh.coordinate["tp"])
        gradients = [torch.full((2,), value), torch.full((2, 2), value).t(), torch.full((2,), value)]
        with Ledger(mesh) as ledger:
            apply.sum_gradients(list(zip(rows, gradients, strict=True)), mesh)
        norm, k, q = (g.flatten().unique().tolist() for g in gradients)
        return norm, k, q, len(ledger.order)

    for rank, (norm, k, q, collectives) in enumerate(on_mesh(sums, "tp4")):
        assert norm == [1111.0]
        assert k == [11.0 if rank < 2 else 1100.0]
        assert q == [10.0**rank]
        assert collectives == 2

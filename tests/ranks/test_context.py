"""Every method of context parallelism against softmax written out on one device, forward and backward; their traffic.

B batch, N query heads, K KV heads, S sequence, H head size. Rank r holds the tokens that `local_spans` says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fivefold.core.events import Events
from fivefold.core.layout import Layout
from fivefold.core.model_spec import AttentionSpec, BlockSpec, MLPSpec, ModelSpec
from fivefold.core.plan import Plan
from fivefold.data.batches import Batch, Ints, SyntheticDataset
from fivefold.nn.attention import AttentionCore, Mask
from fivefold.runtime.collectives import all_to_all
from fivefold.runtime.launch import run_ranks
from fivefold.runtime.ledger import Ledger
from fivefold.runtime.mesh import Mesh
from fivefold.strategies.context import apply, order, rules
from fivefold.strategies.context.blocks import places
from fivefold.strategies.context.order import local_spans
from fivefold.verify.compare import assemble
from fivefold.verify.observe import Observation, observe
from fivefold.verify.verify import judge, verify
from fivefold.verify.workload import common_plans

from .models import HARD

B, S, N, H = 2, 24, 6, 8
LAYOUTS = [
    "cp2", "cp3", "cp3:gather", "cp3:ulysses", "cp4:ring2xulysses2", "order=cp-tp-dp-pp tp2 cp2",
    *(pytest.param(text, marks=pytest.mark.exhaustive) for text in ("cp4", "cp2:gather", "cp6:ring2xulysses3")),
]  # fmt: skip


def model(kv_heads: int, window: int | None) -> ModelSpec:
    attention = AttentionSpec(heads=N, kv_heads=kv_heads, head_dim=H, window=window)
    return ModelSpec(
        name="tiny", hidden=16, vocab=31, blocks=(BlockSpec(attention=attention, mlp=MLPSpec(ffn=8)),)
    )


def masks() -> dict[str, Mask | None]:
    """Documents that end inside blocks and at their ends, a document of one token, padding; rows that see nothing."""
    documents = torch.zeros(B, S, dtype=torch.int64)
    for start in (5, 6, 12, 17):
        documents[0, start:] += 1
    documents[1, 9:] = 7
    documents[1, 20:] = -1
    valid = torch.rand(B, S, generator=torch.Generator().manual_seed(1)) < 0.5
    valid[1] = False
    return {
        "plain": None,
        "documents": Mask(documents_BS=documents),
        "valid": Mask(valid_BS=valid),
        "both": Mask(valid, documents),
        "padding": Mask(documents_BS=torch.full((B, S), -1)),
    }


@cache
def seen_by_definition(window: int | None, name: str) -> Tensor:
    """[B, S, S]: which keys a token may see, told by Python conditions."""
    mask = masks()[name]

    def sees(b: int, i: int, j: int) -> bool:
        if i == j:
            return True
        if j > i or (window is not None and i - j >= window):
            return False
        if mask is not None and mask.valid_BS is not None and not mask.valid_BS[b, j]:
            return False
        ids = None if mask is None or mask.documents_BS is None else mask.documents_BS[b].tolist()
        return ids is None or (ids[i] == ids[j] != -1)

    return torch.tensor([[[sees(b, i, j) for j in range(S)] for i in range(S)] for b in range(B)])


def expected(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    """Softmax written out."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = (q @ k.transpose(2, 3) / H**0.5).masked_fill(~seen[:, None], -torch.inf)
    return scores.softmax(-1) @ v  # type: ignore[no-any-return]


def inputs(kv_heads: int) -> list[Tensor]:
    """q, k, v and the weight of the output; not contiguous, as heads of a projection are."""
    generator = torch.Generator().manual_seed(kv_heads)
    shapes = [(B, S, heads, H) for heads in (N, kv_heads, kv_heads, N)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).transpose(1, 2) for shape in shapes]


def core_of(mesh: Mesh, window: int | None) -> torch.nn.Module:
    """The attention core that replaces a plain one."""
    layers = torch.nn.ModuleDict({"0": torch.nn.Module()})
    layers["0"].attention = torch.nn.Module()
    layers["0"].attention.core = AttentionCore(window)
    whole = torch.nn.Module()
    whole.layers = layers
    apply.apply(whole, mesh)
    core = whole.get_submodule("layers.0.attention.core")
    assert not isinstance(core, AttentionCore)
    return core


def cases(text: str) -> Iterator[tuple[int, int | None, str]]:
    """KV heads (also fewer than ulysses ranks) x windows x masks."""
    ulysses = Layout.parse(text).cp_ulysses
    for kv_heads in (1, 2, 3, N):
        if rules.legal_ulysses(N, kv_heads, ulysses):
            for window in {1: (None, 7), 2: (7, 1, S - 1)}.get(kv_heads, (None,)):
                for name in masks():
                    yield kv_heads, window, name


def compare(mesh: Mesh, text: str, tile: int) -> float:
    """The largest error of output and gradients over all cases, with tiles of this size."""
    mine = places(local_spans(S, mesh.layout, mesh.coordinate["cp"]), torch.device("cpu"))
    worst, order.TILE = 0.0, tile
    for kv_heads, window, name in cases(text):
        *qkv, weight = inputs(kv_heads)
        mask = masks()[name]
        q, k, v = (x.requires_grad_() for x in qkv)
        out = expected(q, k, v, seen_by_definition(window, name))
        (out * weight).sum().backward()
        local = [x.detach()[:, :, mine].requires_grad_() for x in qkv]
        got = core_of(mesh, window)(*local, mask)
        (got * weight[:, :, mine]).sum().backward()
        pairs = [(got, out[:, :, mine])]
        pairs += [(x.grad, whole.grad[:, :, mine]) for x, whole in zip(local, qkv, strict=True)]  # type: ignore[index]
        for a, b in pairs:
            error = (a - b).abs().max().item()
            assert error == error, (kv_heads, window, name)  # NaN
            worst = max(worst, error)
    return worst


@pytest.mark.parametrize("text", LAYOUTS)
def test_equals_one_device(on_mesh: Callable[..., Any], text: str) -> None:
    """With small tiles, windows and masks cut a block into many parts of all kinds."""
    for _, window, name in cases(text):
        seen_by_definition(window, name)  # once for all ranks
    small = 5 if text in ("cp2", "cp3:gather") else order.TILE
    assert max(on_mesh(compare, text, text, small)) <= 1e-12


@pytest.mark.parametrize("text", ["cp2:ring", "cp3:gather", "cp4:ring2xulysses2", "cp2:ulysses"])
def test_bfloat16_is_as_good_as_one_device(on_mesh: Callable[..., Any], text: str) -> None:
    """Error against float64 on the same rounded inputs, at most twice that of the plain core in bfloat16."""

    def errors(mesh: Mesh) -> tuple[float, float]:
        mine = places(local_spans(S, mesh.layout, mesh.coordinate["cp"]), torch.device("cpu"))
        *qkv, weight = (x.bfloat16() for x in inputs(2))
        mask = masks()["documents"]
        found = []
        for kind, cut, core in (
            (torch.float64, slice(None), AttentionCore(None)),
            (torch.bfloat16, slice(None), AttentionCore(None)),
            (torch.bfloat16, mine, core_of(mesh, None)),
        ):
            local = [x[:, :, cut].to(kind).requires_grad_() for x in qkv]
            out = core(*local, mask)
            assert out.dtype == kind
            (out * weight[:, :, cut].to(kind)).sum().backward()
            here = slice(None) if cut is mine else mine
            found.append([x[:, :, here].double() for x in (out, *(x.grad for x in local))])
        exact, plain, parallel = found
        mine_, plain_ = (max((a - b).abs().max().item() for a, b in zip(x, exact)) for x in (parallel, plain))
        return mine_, plain_

    found = on_mesh(errors, text)
    assert max(mine for mine, _ in found) <= 2 * max(plain for _, plain in found)


@pytest.mark.parametrize(
    ("text", "dtype"),
    [
        ("cp3", "bfloat16"), ("cp2:gather", "bfloat16"), ("cp3:ulysses", "float32"),
        ("cp6:ring3xulysses2", "float64"), ("tp2 cp2", "float64"),
    ],
)  # fmt: skip
def test_traffic_is_what_is_predicted(on_mesh: Callable[..., Any], text: str, dtype: str) -> None:
    spec, kind = model(1, None), getattr(torch, dtype)

    def recorded_on(mesh: Mesh) -> Events:
        tokens = S // mesh.layout.cp
        ((heads, kv_heads),) = rules.local_heads(spec.blocks[:1], mesh.layout)
        q, k, v = (
            torch.ones(B, n, tokens, H, dtype=kind, requires_grad=True) for n in (heads, kv_heads, kv_heads)
        )
        core = core_of(mesh, None)
        with Ledger(mesh) as ledger:
            mesh.phase = "forward"
            out = core(q, k, v, None)
            mesh.phase = "backward"
            out.sum().backward()
        events: Events = ledger.events
        return events

    layout = Layout.parse(text)
    predicted = rules.predict_chunk(
        spec, layout, layers=range(1), tokens=B * S // layout.cp, dtype=dtype, itemsize=kind.itemsize,
        recomputed=[()],
    )  # fmt: skip
    assert predicted
    for rank, recorded in enumerate(on_mesh(recorded_on, text)):
        assert recorded == predicted, rank


def test_what_is_saved_for_backward(on_mesh: Callable[..., Any]) -> None:
    """The ring keeps nothing of other ranks; gathered K and V are kept."""
    heads, kv_heads = N, 2

    def saved(mesh: Mesh) -> int:
        tokens, elements = S // mesh.layout.cp, []
        q, k, v = (
            torch.ones(B, n, tokens, H, dtype=torch.float64, requires_grad=True)
            for n in (heads, kv_heads, kv_heads)
        )

        def note(x: Tensor) -> Tensor:
            elements.append(x.numel())
            return x

        with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
            core_of(mesh, None)(q, k, v, None)
        return sum(elements)

    for text, kv_tokens in (("cp2:ring", S // 2), ("cp2:gather", S)):
        own = B * heads * S // 2 * (2 * H + 1)  # q, the output, its log-sum-exp
        assert on_mesh(saved, text) == [own + 2 * B * kv_heads * kv_tokens * H] * 2


def test_ring_exchange_and_all_to_all(on_mesh: Callable[..., Any]) -> None:
    def check(mesh: Mesh) -> None:
        ring, inner = apply.axes(mesh)
        assert (ring.ranks, inner.ranks) == (
            mesh.layout.group_of("cp", mesh.rank, 2, across=True),
            mesh.layout.group_of("cp", mesh.rank, 2),
        )
        handles = [
            ring.pass_on_start(torch.tensor([float(mesh.rank), i])) for i in range(4)
        ]  # several under way
        before = float(ring.ranks[ring.index - 1])
        assert [h.wait().tolist() for h in handles] == [[before, i] for i in range(4)]
        axis = mesh.axis("cp")
        wholes = [torch.randn(2, 8, 3, generator=torch.Generator().manual_seed(r)) for r in range(4)]
        x = wholes[axis.index].clone().requires_grad_()
        out = all_to_all(x, axis, 1, 2)
        torch.testing.assert_close(out, torch.cat([w.chunk(4, 1)[axis.index] for w in wholes], 2))
        out.backward(out.detach())
        torch.testing.assert_close(x.grad, x.detach())  # there and back

    on_mesh(check, "cp4:ring2xulysses2")


@pytest.mark.parametrize(
    "text",
    [
        "tp2 cp2:gather nosp",
        pytest.param("cp2:ulysses pp2", marks=pytest.mark.exhaustive),
        pytest.param("tp2 cp4:ring2xulysses2", marks=pytest.mark.exhaustive),
        "dp2 tp2 cp2 pp2",
    ],
)
def test_a_training_step_equals_one_device(text: str) -> None:
    """Every quantity and every event, on windows, tied embeddings, fewer KV heads than ranks, unequal masks."""
    verdict = verify(HARD, Layout.parse(text), device="cpu", steps=1, find_axis=False)
    assert verdict.passed, verdict.cause


class Documents(SyntheticDataset):
    """Several documents in a sample, and padding: their ends depend on the sample."""

    def rows(self, numbers: Ints) -> Batch:
        batch = super().rows(numbers)
        place = np.arange(self.seq_len)
        ends = np.stack([3 + numbers % 5, 11 + numbers % 7, 20 + numbers % 4], 1)
        documents = (place[None, None] >= ends[..., None]).sum(1)
        documents[:, -2:] = -1
        return replace(batch, document_ids_BS=documents)


@pytest.mark.parametrize("text", ["cp3 dp2", "cp2:gather pp2"])
def test_separate_documents_through_training(text: str) -> None:
    plan, single = common_plans(HARD, Layout.parse(text), Layout(), "float64")
    dataset = Documents(HARD.vocab, plan.workload.seq_len, 0)

    def run(plan: Plan, separate: bool) -> list[Observation]:
        plan = plan.replace(workload=plan.workload.replace(separate_documents=separate))
        return run_ranks(
            lambda rank: observe(rank, plan, dataset, seed=0, steps=1),
            ranks=plan.layout.world_size,
            device="cpu",
        )

    reference = assemble(run(single, True))
    verdict = judge(plan, run(plan, True), reference, steps=1)
    assert verdict.passed, verdict.cause
    assert not judge(single, run(single, False), reference, steps=1).passed, "documents matter"


def test_one_rank_is_left_alone() -> None:
    from fivefold.nn.decoder import Decoder
    from fivefold.runtime.device import Device

    whole = Decoder(model(2, None))
    before = {name: id(module) for name, module in whole.named_modules()}
    apply.apply(whole, Mesh(Layout.parse("dp1"), 0, Device(torch.device("cpu"))))
    assert {name: id(module) for name, module in whole.named_modules()} == before

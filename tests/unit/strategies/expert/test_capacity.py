"""Who is dropped under a capacity, against a queue for each expert of each sequence, whoever holds the tokens.

B sequences, S tokens, E experts, K choices of a token, C capacity.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from fivefold.catalog.models import preset
from fivefold.core.layout import Layout
from fivefold.core.model_spec import MoESpec
from fivefold.core.router import RouterConfig
from fivefold.nn.moe import NOWHERE, Router, Routing
from fivefold.strategies.compose import shared_tokens
from fivefold.strategies.expert.capacity import Limit, Pieces, chosen

B, S, E, K, C = 3, 24, 5, 2, 4
LAYOUTS = ["dp1", "cp2", "cp3", "cp2:ulysses", "tp2", "tp3 nosp", "cp2 tp2", "cp4:ring2xulysses2 tp3"]


@dataclass
class FakeAxis:
    """One axis of ranks that are computed one after another: gathers take what `run` prepared for all ranks."""

    degree: int
    index: int
    prepared: list[Tensor]

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        assert dim == 0
        return torch.cat(self.prepared)


def choices() -> Tensor:
    """[B, S, K]: different experts for each token, some sequences crowded, some choices nowhere."""
    generator = torch.Generator().manual_seed(3)
    skew = torch.rand(B, S, E, generator=generator) + torch.tensor([0.6, 0.3, 0.0, 0.0, 0.0])
    experts = skew.topk(K).indices
    experts[1, 5:9] = NOWHERE  # padding
    return experts


def queues(experts_BSK: Tensor, capacity: int) -> Tensor:
    """The same, by walking through each sequence."""
    kept = experts_BSK.clone()
    for b in range(B):
        taken = [0] * E
        for s in range(S):
            for k in range(K):
                expert = int(experts_BSK[b, s, k])
                if expert == NOWHERE:
                    continue
                taken[expert] += 1
                if taken[expert] > capacity:
                    kept[b, s, k] = NOWHERE
    return kept


def run(text: str, capacity: int) -> Tensor:
    """All ranks that share the sequences, one after another, and their tokens put together again."""
    layout, experts = Layout.parse(text), choices()
    everyone = shared_tokens(layout, S)
    places = [torch.cat([torch.arange(span.start, span.stop) for span in spans]) for spans in everyone]
    alone = [Pieces([spans], []) for spans in everyone]
    widest = max(pieces.count for pieces in alone)
    counts = [_counts(experts[:, at], pieces, widest) for at, pieces in zip(places, alone)]
    result = torch.full_like(experts, 99)
    for rank, at in enumerate(places):
        axis: Any = FakeAxis(len(everyone), rank, counts)
        limit = Limit(E, capacity, Pieces(everyone, [axis] if len(everyone) > 1 else []))
        mine = experts[:, at].flatten(0, 1)
        empty = torch.empty(0)
        routing = Routing(mine, empty, empty, empty, empty, empty, None)
        result[:, at] = limit(torch.nn.Identity(), (torch.empty(B, len(at), 1),), routing).experts_TK.view(
            B, -1, K
        )
    return result


def _counts(experts_BSK: Tensor, pieces: Pieces, widest: int) -> Tensor:
    """[1, B, P, E] by counting."""
    marks = chosen(experts_BSK, E)
    parts = marks.split([len(span) for span in pieces.all[0]], dim=1)
    counts = torch.zeros(1, B, widest, E, dtype=torch.int32)
    for i, part in enumerate(parts):
        counts[0, :, i] = part.sum(1)
    return counts


@pytest.mark.parametrize("capacity", [1, C, S])
@pytest.mark.parametrize("text", LAYOUTS)
def test_the_first_tokens_of_a_sequence_are_taken(text: str, capacity: int) -> None:
    expected = queues(choices(), capacity)
    assert torch.equal(run(text, capacity), expected)
    dropped = int((expected != choices()).sum())
    assert (dropped > 0) == (capacity < S)


def test_capacity_by_hand() -> None:
    """ceil(1.25 x 2 x 10 / 8) = ceil(3.125) = 4; never more than the tokens that there are."""
    moe = MoESpec(experts=8, top_k=2, ffn=4)
    assert RouterConfig().capacity_of(moe, 10) is None
    assert RouterConfig(capacity_factor=1.25).capacity_of(moe, 10) == 4
    assert RouterConfig(capacity_factor=0.01).capacity_of(moe, 10) == 1
    assert RouterConfig(capacity_factor=100).capacity_of(moe, 10) == 10


def test_what_is_dropped_has_no_part_in_the_output() -> None:
    """The other choice of the same token keeps its weight."""
    spec = preset("tiny-moe").blocks[0].mlp
    assert isinstance(spec, MoESpec)
    torch.manual_seed(1)
    router, x = Router(6, spec).double(), torch.randn(2, 12, 6, dtype=torch.float64)
    before = router(x)
    router.register_forward_hook(Limit(spec.experts, 2, Pieces(shared_tokens(Layout(), 12), [])))
    after = router(x)
    assert torch.equal(before.weights_TK, after.weights_TK)
    assert torch.equal(before.counts_BE, after.counts_BE), "what was chosen is counted, not what was taken"
    stays = after.experts_TK != NOWHERE
    assert 0 < int(stays.sum()) < stays.numel()
    assert torch.equal(after.experts_TK[stays], before.experts_TK[stays])

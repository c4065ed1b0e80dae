"""Mixture of experts on one device: a router chooses experts for every token, they compute, their outputs are summed.

    y = sum over the chosen experts e of  weight_e * down_e(activation(gate_e(x)) * up_e(x))   [+ shared experts]

Routers of Mixtral, Qwen-MoE, DeepSeek-V2 and V3. Expert weights are stacked, so that one grouped product computes all.

Shape letters: B sequences, S tokens of each, T = B*S, D hidden, F width of an expert, E experts, K of them per token,
R = rows that experts compute (T*K without padding).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fivefold.core.model_spec import MLPSpec, MoESpec
from fivefold.errors import ModelError
from fivefold.nn.grouped import grouped_matmul
from fivefold.nn.mlp import MLP, activation_of
from fivefold.nn.router_losses import RouterLosses

NOWHERE = -1
"""Instead of an expert: this choice is not computed (padding, or dropped) and its weight is 0."""


@dataclass(frozen=True)
class Routing:
    """What a router decided for the tokens of a microbatch, and what its losses and statistics are made of."""

    experts_TK: Tensor
    """The chosen experts (int64), or `NOWHERE`."""
    weights_TK: Tensor
    """What each expert's output counts, in at least float32."""
    logits_TE: Tensor
    scores_TE: Tensor
    """Scores of all experts divided by their sum, before any choice."""
    counts_BE: Tensor
    """How often each sequence chose each expert (int64)."""
    tokens_B: Tensor
    """Valid tokens of each sequence (int64)."""
    valid_T: Tensor | None
    """Which tokens are no padding (bool); None: all."""

    @property
    def counts_E(self) -> Tensor:
        """How often each expert was chosen (int64)."""
        return self.counts_BE.sum(0)


class Router(nn.Module):
    """Scores, choice and weights of experts, computed in at least float32.

    Shapes: x_BSD, valid_BS (bool) or None -> `Routing`. Padding is routed nowhere and counted nowhere.
    `losses`: what training adds here, or None. `first_time`: False while a forward is computed again for backward
    (recompute), so that values and counts are kept once; gradients of losses are added either way.
    """

    def __init__(self, hidden: int, spec: MoESpec) -> None:
        super().__init__()
        self.spec = spec
        self.weight = nn.Parameter(torch.empty(spec.experts, hidden).normal_(std=0.02))
        self.bias = nn.Parameter(torch.zeros(spec.experts)) if spec.router_bias else None
        self.selection_bias: Tensor | None
        self.register_buffer("selection_bias", torch.zeros(spec.experts) if spec.selection_bias else None)
        self.losses: RouterLosses | None = None
        self.first_time = True

    def forward(self, x_BSD: Tensor, valid_BS: Tensor | None = None) -> Routing:
        spec, dtype = self.spec, torch.promote_types(x_BSD.dtype, torch.float32)
        bias = None if self.bias is None else self.bias.to(dtype)
        logits_TE = F.linear(x_BSD.flatten(0, 1).to(dtype), self.weight.to(dtype), bias)
        scores_TE = logits_TE.softmax(-1) if spec.scoring == "softmax" else logits_TE.sigmoid()
        experts_TK = self.choose(scores_TE.detach())
        weights_TK = scores_TE.gather(1, experts_TK)
        if spec.norm_topk_prob:
            weights_TK = weights_TK / (weights_TK.sum(-1, keepdim=True) + TINY)
        weights_TK = weights_TK * spec.routed_scaling
        valid_T = None if valid_BS is None else valid_BS.flatten()
        if valid_T is not None:
            experts_TK = experts_TK.masked_fill(~valid_T[:, None], NOWHERE)
            weights_TK = weights_TK.masked_fill(~valid_T[:, None], 0.0)
        if spec.scoring == "sigmoid":
            scores_TE = scores_TE / (scores_TE.sum(-1, keepdim=True) + TINY)
        B, S = x_BSD.shape[:2]
        counts_BE = count(experts_TK.view(B, -1), spec.experts)
        tokens_B = torch.full_like(counts_BE[:, 0], S) if valid_BS is None else valid_BS.sum(1)
        routing = Routing(experts_TK, weights_TK, logits_TE, scores_TE, counts_BE, tokens_B, valid_T)
        if self.losses is None:
            return routing
        return replace(routing, weights_TK=self.losses.attach(weights_TK, routing, keep=self.first_time))

    def choose(self, scores_TE: Tensor) -> Tensor:
        """The K experts of each token, the best first: by score and selection bias, within the best groups.

        Source: DeepSeek-V2, section 2.2.2 (groups); DeepSeek-V3, eq. 16 (bias) and section 2.1.2 (groups).
        """
        spec = self.spec
        if self.selection_bias is not None:
            scores_TE = scores_TE + self.selection_bias
        if spec.topk_groups < spec.groups:
            grouped = scores_TE.unflatten(-1, (spec.groups, -1))
            best = grouped.amax(-1) if spec.group_score == "best" else grouped.topk(2).values.sum(-1)
            open_ = torch.zeros_like(best, dtype=torch.bool)
            open_.scatter_(-1, best.topk(spec.topk_groups).indices, True)
            scores_TE = grouped.masked_fill(~open_[..., None], -torch.inf).flatten(-2)
        return scores_TE.topk(spec.top_k).indices


TINY = 1e-20
"""Added to sums that are divided by, as in DeepSeek-V3: sigmoids can all be 0."""


def count(experts: Tensor, number: int) -> Tensor:
    """How often each of `number` experts is in each row; `NOWHERE` is not counted. Shapes: [.., n] -> [.., number]."""
    places = experts.new_zeros(*experts.shape[:-1], number + 1)
    return places.scatter_add_(-1, experts % (number + 1), torch.ones_like(experts))[..., :number]


def chosen(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The experts [T, K] (int64) that an experts module is called with, among all its arguments.

    Raises: ModelError where none of them is a tensor of whole numbers.
    """
    for x in (*args, *kwargs.values()):
        if isinstance(x, Tensor) and not (x.is_floating_point() or x.dtype == torch.bool):
            return x.long()
    raise ModelError("experts were called without those that were chosen: a tensor [T, K] of torch.int64")


class Experts(nn.Module):
    """The routed experts: stacked gate, up and down projections. How many there are is read from the tensors.

    Shapes: x_TD, experts_TK (int64), weights_TK -> [T, D]. Outputs are weighed and summed in the weights' dtype.
    """

    def __init__(self, hidden: int, spec: MoESpec) -> None:
        super().__init__()
        self.activation = activation_of(spec.activation)
        shape = spec.experts, spec.ffn, hidden
        self.gate = nn.Parameter(torch.empty(shape).normal_(std=0.02))
        self.up = nn.Parameter(torch.empty(shape).normal_(std=0.02))
        self.down = nn.Parameter(torch.empty(spec.experts, hidden, spec.ffn).normal_(std=0.02))

    def forward(self, x_TD: Tensor, experts_TK: Tensor, weights_TK: Tensor) -> Tensor:
        order_R, counts_E = sort_by_expert(experts_TK, self.gate.shape[0])
        rows_RD = self.compute(x_TD[order_R // experts_TK.shape[1]], counts_E)
        return combine(rows_RD, order_R, weights_TK)

    def compute(self, x_RD: Tensor, counts_E: Tensor) -> Tensor:
        """Rows sorted by expert through their experts. Shapes: x [R, D], counts [E] of sum R -> [R, D]."""
        gate_RF = self.activation(grouped_matmul(x_RD, self.gate, counts_E))
        return grouped_matmul(gate_RF * grouped_matmul(x_RD, self.up, counts_E), self.down, counts_E)


def sort_by_expert(experts_TK: Tensor, number: int) -> tuple[Tensor, Tensor]:
    """The choices in the order of their experts, and how many each has; those that go nowhere are left out.

    Shapes: experts [T, K] -> places in T*K [R], counts [E] (both int64). Equal experts keep the order of tokens.
    """
    flat = experts_TK.flatten()
    counts_E = count(flat, number)
    order = (flat % (number + 1)).argsort(stable=True)
    return order[: int(counts_E.sum())], counts_E


def combine(rows_RD: Tensor, order_R: Tensor, weights_TK: Tensor) -> Tensor:
    """The weighted sum of what each token's experts made, in the order of its choices. Shapes: -> [T, D], rows' dtype.

    Rows are put back in their places and summed there: no atomic additions, so the result does not depend on luck.
    """
    T, K = weights_TK.shape
    weighted = rows_RD * weights_TK.flatten()[order_R][:, None]
    return place(weighted, order_R, T * K).view(T, K, -1).sum(1).to(rows_RD.dtype)


def place(rows_RD: Tensor, places_R: Tensor, number: int) -> Tensor:
    """Each row at its own place of `number`, zeros elsewhere. For backward it keeps the places, and no row.

    Shapes: rows [R, D], places [R] (int64, all different) -> [number, D].
    """
    return _Place.apply(rows_RD, places_R, number)  # type: ignore[no-any-return]


class _Place(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, places: Tensor, number: int) -> Tensor:
        ctx.save_for_backward(places)
        return rows.new_zeros(number, rows.shape[1]).index_copy_(0, places, rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (places,) = ctx.saved_tensors
        return grad.index_select(0, places), None, None


class MoE(nn.Module):
    """Router, routed experts, and shared experts that see every token, perhaps behind a gate.

    Shapes: x_BSD, valid_BS (bool) or None -> [B, S, D].
    """

    def __init__(self, hidden: int, spec: MoESpec) -> None:
        super().__init__()
        self.router = Router(hidden, spec)
        self.experts = Experts(hidden, spec)
        shared = MLPSpec(ffn=spec.shared_ffn, activation=spec.activation) if spec.shared_ffn else None
        self.shared = MLP(hidden, shared) if shared else None
        self.shared_gate = nn.Linear(hidden, 1, bias=False) if spec.shared_gate else None

    def forward(self, x_BSD: Tensor, valid_BS: Tensor | None = None) -> Tensor:
        routing = self.router(x_BSD, valid_BS)
        y_BSD = self.experts(x_BSD.flatten(0, 1), routing.experts_TK, routing.weights_TK).view_as(x_BSD)
        return y_BSD if self.shared is None else y_BSD + self.shared_output(x_BSD)  # type: ignore[no-any-return]

    def shared_output(self, x_BSD: Tensor) -> Tensor:
        """What the shared experts add, behind their gate if they have one."""
        assert self.shared is not None
        shared_BSD = self.shared(x_BSD)
        if self.shared_gate is not None:
            shared_BSD = shared_BSD * self.shared_gate(x_BSD).sigmoid()
        return shared_BSD  # type: ignore[no-any-return]

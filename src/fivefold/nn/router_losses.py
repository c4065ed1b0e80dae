"""Losses on routing: attached where routing happens, so that they act on every pipeline stage and at every layout.

With p_i the scores of a token divided by their sum, f_i a measure of the load of expert i, K experts per token of E:

    balance, sequence   mean over the sequences of the global batch of   sum_i f_i P_i,
                        f_i = E / (K T) x (times that a token of the sequence chose i),   P_i = 1/T sum_t p_i(t)
                        over the T valid tokens of a sequence (DeepSeek-V2, arXiv:2405.04434, eq. 23 to 25;
                        DeepSeek-V3, arXiv:2412.19437, eq. 17 to 20)
    balance, batch      mean over the valid tokens of the global batch of   sum_i f_i p_i(t),
                        f_i as above, over all tokens of the step before (1 at first), a constant: what the current
                        batch has is known only when all of it was routed (Switch, arXiv:2101.03961, eq. 4 to 6, / K)
    z                   mean over the valid tokens of the global batch of   log(sum_i exp(logit_i))^2
                        (ST-MoE, arXiv:2202.08906, eq. 5)

Each loss is a sum over tokens with factors that are constants, so ranks and microbatches each add their own tokens'
part: nothing is averaged over ranks. f_i has no gradient, as choosing has none.

Only the gradient enters the step: an identity on the weights of the experts adds it in backward, as Megatron's scaler
of auxiliary losses does. The value is kept beside, for reporting.

Shape letters: B sequences, S their tokens here, T = B*S, E experts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fivefold.core.router import RouterConfig

if TYPE_CHECKING:
    from fivefold.nn.moe import Routing


class RouterLosses:
    """The losses of one router. Whoever runs a step sets the scales before it and reads the sums after it.

    per_sequence  1 / sequences of the global batch: the scale of `sequence` balance
    per_token     1 / valid tokens of the global batch: the scale of the other two
    load_E        for `batch`: `load` of the step before; None: no step yet, the load is even
    gradient_scale  what the gradients of the step are multiplied by: 1, but for a loss scale
    join          adds up [B, E + 1] numbers of ranks that hold other tokens of the same sequences; default: alone
    balance, z    sums of this process since `reset`, scaled, without coefficient: over all ranks, the losses
    """

    def __init__(self, config: RouterConfig) -> None:
        self.config = config
        self.per_sequence: Tensor | float = 1.0
        self.per_token: Tensor | float = 1.0
        self.gradient_scale: Tensor | float = 1.0
        self.load_E: Tensor | None = None
        self.join: Callable[[Tensor], Tensor] = lambda counts: counts
        self.reset()

    def reset(self) -> None:
        """Begin a step."""
        self.balance: Tensor | float = 0.0
        self.z: Tensor | float = 0.0

    def attach(self, weights_TK: Tensor, routing: Routing, *, keep: bool = True) -> Tensor:
        """The same weights, whose backward adds the gradient of the losses. `keep`: add the values to the sums."""
        losses: list[Tensor] = []
        if self.config.balance_coefficient:
            balance = self._balance(routing)
            losses.append(balance * self.config.balance_coefficient)
            self.balance += balance.detach() if keep else 0.0
        if self.config.z_coefficient:
            z = z_loss(routing.logits_TE, routing.valid_T) * self.per_token
            losses.append(z * self.config.z_coefficient)
            self.z += z.detach() if keep else 0.0
        for loss in losses:
            weights_TK = attach_loss(weights_TK, loss, self.gradient_scale)
        return weights_TK

    def _balance(self, routing: Routing) -> Tensor:
        if self.config.balance == "sequence":
            counts_BE, tokens_B = routing.counts_BE, routing.tokens_B
            joined = self.join(torch.cat((counts_BE, tokens_B[:, None]), 1))
            return sequence_balance_loss(routing, joined[:, :-1], joined[:, -1]) * self.per_sequence
        scores_E = _valid_sum(routing.scores_TE, routing.valid_T)
        return (scores_E if self.load_E is None else scores_E * self.load_E).sum() * self.per_token


def sequence_balance_loss(routing: Routing, counts_BE: Tensor, tokens_B: Tensor) -> Tensor:
    """Sum over sequences of sum_i f_i P_i, as far as the tokens here are part of it.

    `counts_BE`, `tokens_B`: of all tokens of these sequences, those on other ranks included.
    """
    B, E = counts_BE.shape
    scores_BE = _valid_sum(routing.scores_TE, routing.valid_T, B)
    tokens_B1 = tokens_B[:, None].clamp(min=1).to(scores_BE.dtype)
    factors_BE = counts_BE.to(scores_BE.dtype) * (E / routing.experts_TK.shape[1]) / tokens_B1.square()
    return (factors_BE * scores_BE).sum()


def z_loss(logits_TE: Tensor, valid_T: Tensor | None) -> Tensor:
    """Sum over valid tokens of the squared log-sum-exp of their logits."""
    z_T = logits_TE.logsumexp(-1).square()
    return (z_T if valid_T is None else z_T.masked_fill(~valid_T, 0.0)).sum()


def load(counts_E: Tensor, dtype: torch.dtype) -> Tensor:
    """f_i of `batch`: E x each expert's share of all choices; 1 is even. Shapes: counts [E], global, -> [E]."""
    share_E = counts_E.to(dtype) / counts_E.sum().clamp(min=1)
    return share_E * counts_E.shape[0]


def updated_bias(bias_E: Tensor, counts_E: Tensor, speed: float) -> Tensor:
    """Selection biases after a step: down by `speed` where an expert had more tokens than the mean, up where fewer.

    Formula: b_i + u sign(mean(c) - c_i), c: tokens of the global batch by expert; exact in integers.
    Source:  Wang et al. 2024, arXiv:2408.15664, algorithm 1; DeepSeek-V3, section 2.1.2.
    """
    direction_E = (counts_E.sum() - counts_E * counts_E.shape[0]).sign()
    return bias_E + speed * direction_E.to(bias_E.dtype)


def _valid_sum(x_TE: Tensor, valid_T: Tensor | None, sequences: int | None = None) -> Tensor:
    """Sum over valid tokens: [E], or [B, E] with a number of sequences."""
    x_TE = x_TE if valid_T is None else x_TE.masked_fill(~valid_T[:, None], 0.0)
    return x_TE.sum(0) if sequences is None else x_TE.unflatten(0, (sequences, -1)).sum(1)


def attach_loss(x: Tensor, loss: Tensor, scale: Tensor | float = 1.0) -> Tensor:
    """`x`, whose backward is also that of `loss` (a scalar) times `scale`, once, whatever the gradient of x."""
    return _AttachLoss.apply(x, loss, scale)  # type: ignore[no-any-return]


class _AttachLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor, scale: Tensor | float) -> Tensor:
        ctx.unit = loss.new_ones(())
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        return grad, ctx.unit * ctx.scale, None

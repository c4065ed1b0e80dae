"""Embedding, head and loss cut by vocabulary. The logits of all tokens are never gathered.

    embedding   each rank looks up the tokens of its rows; partial sums are reduce-scattered over S (SP) or all-reduced
    head        a column-parallel linear: logits [B, S, ceil(V/tp)] on each rank
    loss        three numbers per token cross the axis: the largest logit, the sum of exponentials, the label's logit
                (Shoeybi et al. 2019, section 3): two all-reduces, of B*S and of 2*B*S elements. Backward: none.

A vocabulary that tp does not divide is padded on the last ranks; the padding takes no part in lookup or softmax.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from fivefold.runtime.collectives import all_reduce, reduce_scatter
from fivefold.runtime.mesh import Axis
from fivefold.strategies.tensor.linear import SEQUENCE_DIM, Cut, column_linear


class VocabularyEmbedding(nn.Module):
    """Shapes: tokens_BS -> [B, S/tp, D] (SP) or [B, S, D]. Weight: [ceil(V/tp), D]."""

    def __init__(self, embedding: nn.Module, cut: Cut) -> None:
        super().__init__()
        assert isinstance(embedding, nn.Embedding)
        self.weight = embedding.weight
        self._cut = cut

    def forward(self, tokens_BS: Tensor) -> Tensor:
        return look_up(tokens_BS, self.weight, self._cut)


def look_up(tokens_BS: Tensor, weight: Tensor, cut: Cut, padding_index: int | None = None) -> Tensor:
    """The rows of all ranks' weights, as `VocabularyEmbedding`. The row of `padding_index` gets no gradient."""
    rows, first = weight.shape[0], cut.axis.index * weight.shape[0]
    local = tokens_BS - first
    mine = (local >= 0) & (local < rows)
    if padding_index is not None and not first <= padding_index < first + rows:
        padding_index = None
    index = None if padding_index is None else padding_index - first
    partial = F.embedding(local.clamp(0, rows - 1), weight, padding_idx=index) * mine[..., None]
    if cut.sequence_parallel:
        return reduce_scatter(partial, cut.axis, SEQUENCE_DIM)
    return all_reduce(partial, cut.axis)


class VocabularyHead(nn.Module):
    """Shapes: x [B, S/tp, D] (SP) or [B, S, D] -> this rank's logits [B, S, ceil(V/tp)]."""

    def __init__(self, head: nn.Module, cut: Cut) -> None:
        super().__init__()
        assert isinstance(head, nn.Linear)
        self.weight = head.weight
        self._cut = cut

    def forward(self, x_BSD: Tensor) -> Tensor:
        return column_linear(x_BSD, [self.weight], [None], self._cut)[0]


class VocabularyLoss(nn.Module):
    """Sum of masked token losses from sharded logits; the same scalar on every rank of the axis.

    Shapes: logits [B, S, ceil(V/tp)], labels_BS, mask_BS -> scalar, at least float32.
    """

    def __init__(self, axis: Axis, vocab: int) -> None:
        super().__init__()
        self._axis, self._vocab = axis, vocab

    def forward(self, logits_BSV: Tensor, labels_BS: Tensor, mask_BS: Tensor) -> Tensor:
        return _VocabularyLoss.apply(logits_BSV, labels_BS, mask_BS, self._axis, self._vocab)  # type: ignore[no-any-return]


class _VocabularyLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, mask: Tensor, axis: Axis, vocab: int) -> Tensor:
        columns = logits.shape[-1]
        start = axis.index * columns
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32), copy=True)
        wide[..., max(0, vocab - start) :] = -torch.inf  # padding, on the last ranks only
        # A rank can hold nothing but padding: its maximum is -inf, the maximum over the axis is finite.
        largest = axis.all_reduce(wide.amax(-1), op=dist.ReduceOp.MAX)
        wide -= largest[..., None]
        local = labels - start
        mine = (local >= 0) & (local < columns) & mask
        index = local.clamp(0, columns - 1)[..., None]
        label_logit = torch.where(mine, wide.gather(-1, index)[..., 0], 0.0)
        wide.exp_()
        sums = axis.all_reduce(torch.stack((wide.sum(-1), label_logit)))
        wide /= sums[0][..., None]
        ctx.save_for_backward(wide, index, mine, mask)
        ctx.dtype = logits.dtype
        return torch.where(mask, sums[0].log() - sums[1], 0.0).sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        softmax, index, mine, mask = ctx.saved_tensors
        dlogits = softmax * mask[..., None]
        dlogits.scatter_add_(-1, index, -mine[..., None].to(dlogits.dtype))
        return (dlogits * grad).to(ctx.dtype), None, None, None, None

"""The small modules that every decoder is made of. Plain single-device PyTorch.

Shape letters: B batch, S sequence, D hidden, O output features.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Projections(nn.Module):
    """Several linear maps that read the same input, such as q/k/v or gate/up.

    They stay separate parameters, so that each can be sharded, loaded and saved by its own logical shape;
    they are one module, so that a strategy can prepare their common input once. The linears hold the parameters and
    are not called themselves: whatever replaces this module reads their weights.

    Shapes: x_BSD -> one tensor [B, S, O_i] for each output, in the order given.
    """

    def __init__(self, in_features: int, outputs: dict[str, int], *, bias: bool) -> None:
        super().__init__()
        for name, out_features in outputs.items():
            self.add_module(name, nn.Linear(in_features, out_features, bias=bias))

    def forward(self, x_BSD: Tensor) -> tuple[Tensor, ...]:
        linears = self.children()
        return tuple([F.linear(x_BSD, linear.weight, linear.bias) for linear in linears])  # type: ignore[arg-type]


class LatentProjections(nn.Module):
    """Queries from one input, keys and values from a latent, and a key that is handed through: one step of MLA.

    They are one module, so that a strategy can prepare the three inputs at once; the linears hold the parameters and
    are not called themselves. Without biases.
    Shapes: query_BSQ, latent_BSR, key_BSO -> q [B, S, ..], kv [B, S, ..], key_BSO. Sizes: (inputs, outputs) of each.
    """

    def __init__(self, q: tuple[int, int], kv: tuple[int, int]) -> None:
        super().__init__()
        self.q = nn.Linear(*q, bias=False)
        self.kv = nn.Linear(*kv, bias=False)

    def forward(
        self, query_BSQ: Tensor, latent_BSR: Tensor, key_BSO: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        return F.linear(query_BSQ, self.q.weight), F.linear(latent_BSR, self.kv.weight), key_BSO


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dim (Zhang and Sennrich 2019, eq. 4), computed in at least float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight
        return F.rms_norm(x, weight.shape, weight, self.eps)


class TokenLoss(nn.Module):
    """Sum of the cross entropies of the tokens whose mask is set; the caller divides by the global token count.

    Shapes: logits_BSV, labels_BS (int64), mask_BS (bool) -> scalar, at least float32.
    """

    def forward(self, logits_BSV: Tensor, labels_BS: Tensor, mask_BS: Tensor) -> Tensor:
        dtype = torch.promote_types(logits_BSV.dtype, torch.float32)
        labels_BS = torch.where(mask_BS, labels_BS, IGNORED)
        return F.cross_entropy(
            logits_BSV.flatten(0, 1).to(dtype), labels_BS.flatten(), ignore_index=IGNORED, reduction="sum"
        )


IGNORED = -100
"""Label of a token that takes no part in the loss."""

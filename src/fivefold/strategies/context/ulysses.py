"""Ulysses: from some tokens of all heads to all tokens of some heads and back (Jacobs et al. 2023, arXiv:2309.14509).

    forward   all-to-all of q, k, v in one message, b*S/n*(N + 2*K')*H*x bytes; attention; all-to-all of its output,
              b*S/n*N*H*x bytes
    backward  the same two messages, the other way round

With fewer KV heads than ranks each is repeated (K' = U instead of K), and its gradients are summed.

Shape letters: B batch, N query heads, K KV heads, S tokens of this rank, H head size, U ulysses ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fivefold.nn.attention import Mask
from fivefold.runtime.collectives import all_to_all
from fivefold.runtime.mesh import Axis

HEADS, TOKENS = 1, 2
"""Dims of q, k and v."""


class UlyssesCore(nn.Module):
    """Runs another attention core on N/U heads of the tokens of all U ranks.

    Shapes: q_BNSH, k_BKSH, v_BKSH -> [B, N, S, H]; the core inside sees U*S tokens.
    """

    def __init__(self, core: nn.Module, axis: Axis) -> None:
        super().__init__()
        self.core, self.axis = core, axis

    def forward(self, q_BNSH: Tensor, k_BKSH: Tensor, v_BKSH: Tensor, mask: Mask | None) -> Tensor:
        ranks, kv_heads = self.axis.degree, k_BKSH.shape[HEADS]
        if kv_heads < ranks:
            k_BKSH, v_BKSH = (x.repeat_interleave(ranks // kv_heads, HEADS) for x in (k_BKSH, v_BKSH))
        of_ranks = [x.unflatten(HEADS, (ranks, -1)) for x in (q_BNSH, k_BKSH, v_BKSH)]
        heads = [x.shape[HEADS + 1] for x in of_ranks]
        message = torch.cat(of_ranks, HEADS + 1).flatten(HEADS, HEADS + 1)
        q, k, v = all_to_all(message, self.axis, HEADS, TOKENS).split(heads, HEADS)
        return all_to_all(self.core(q, k, v, mask), self.axis, TOKENS, HEADS)

"""Ulysses: from some tokens of all heads to all tokens of some heads and back (Jacobs et al. 2023, arXiv:2309.14509).

    forward   all-to-all of q, k, v in one message, b*S/n*(N*H + K'*(H+V))*x bytes; attention; all-to-all of its output,
              b*S/n*N*V*x bytes
    backward  the same two messages, the other way round

With fewer KV heads than ranks each is repeated (K' = U instead of K), and its gradients are summed.

Shape letters: B batch, N query heads, K KV heads, S tokens of this rank, H head size, V that of values (mostly the
same), U ulysses ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fivefold.nn.attention import Mask
from fivefold.runtime.collectives import all_to_all
from fivefold.runtime.mesh import Axis

HEADS, TOKENS = 1, 2
"""Dims of q, k and v. In a message tokens come first: it is made of rows [B, S, U, columns of a rank's heads]."""


class UlyssesCore(nn.Module):
    """Runs another attention core on N/U heads of the tokens of all U ranks.

    Shapes: q_BNSH, k_BKSH, v_BKSV -> [B, N, S, V]; the core inside sees U*S tokens.
    """

    def __init__(self, core: nn.Module, axis: Axis) -> None:
        super().__init__()
        self.core, self.axis = core, axis

    def forward(self, q_BNSH: Tensor, k_BKSH: Tensor, v_BKSH: Tensor, mask: Mask | None) -> Tensor:
        ranks, kv_heads = self.axis.degree, k_BKSH.shape[HEADS]
        if kv_heads < ranks:
            k_BKSH, v_BKSH = (x.repeat_interleave(ranks // kv_heads, HEADS) for x in (k_BKSH, v_BKSH))
        inputs = q_BNSH, k_BKSH, v_BKSH
        rows = [x.transpose(HEADS, TOKENS).unflatten(2, (ranks, -1)).flatten(3) for x in inputs]
        there = all_to_all(torch.cat(rows, 3), self.axis, 2, 1)[:, :, 0].split([x.shape[3] for x in rows], 2)
        q, k, v = (y.unflatten(2, (-1, x.shape[3])).transpose(HEADS, TOKENS) for x, y in zip(inputs, there))
        out = self.core(q, k, v, mask).transpose(HEADS, TOKENS)
        back = all_to_all(out.flatten(2)[:, :, None], self.axis, 1, 2)
        return back.flatten(2).unflatten(2, (-1, out.shape[3])).transpose(HEADS, TOKENS)  # type: ignore[no-any-return]

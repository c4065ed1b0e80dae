"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1), plain single-device PyTorch.

    latent, key = down.kv(x)                          one latent [kv_rank] and one rotated key per token, for all heads
    query       = norm(down.q(x)), or x itself        compressed queries (V2, V3), or not (V2-Lite)
    q, (k, v)   = up.q(query), up.kv(norm(latent))    per head; q and k have a part without position (nope)
    scores      = (q_nope . k_nope + rotate(q_rope) . rotate(key)) x scale

Keys and values are expanded from the latent, as in training and prefill. There are as many of them as queries, and
values may be narrower than keys.

Shape letters: B batch, S sequence, D hidden, N heads (read from the tensors: a strategy may hand over some only),
R rank of a latent, H size of a query or key head, O of its rotated part.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fivefold.core.model_spec import MLASpec, ModelSpec, YarnScaling
from fivefold.nn.attention import AttentionCore, Mask
from fivefold.nn.layers import LatentProjections, Projections, RMSNorm
from fivefold.nn.rope import rotate


class LatentAttention(nn.Module):
    """Shapes: x_BSD -> [B, S, D]. `rope` holds the angles of the rotated part, [.., O]."""

    def __init__(self, spec: ModelSpec, attention: MLASpec) -> None:
        super().__init__()
        self.spec = attention
        N, eps, bias = attention.heads, NORM_EPS, attention.bias
        latents = {"kv": attention.kv_rank + attention.rope_dim}
        latents = latents if attention.q_rank is None else {"q": attention.q_rank, **latents}
        self.down = Projections(spec.hidden, latents, bias=bias)
        self.query_norm = None if attention.q_rank is None else RMSNorm(attention.q_rank, eps)
        self.latent_norm = RMSNorm(attention.kv_rank, eps)
        self.up = LatentProjections(
            (attention.q_rank or spec.hidden, N * attention.key_dim),
            (attention.kv_rank, N * (attention.nope_dim + attention.value_dim)),
        )
        scaling = spec.rope_scaling
        self.scale = scaling.softmax_factor if isinstance(scaling, YarnScaling) else 1.0
        self.core = AttentionCore(None)
        self.output = nn.Linear(N * attention.value_dim, spec.hidden, bias=bias)

    def forward(self, x_BSD: Tensor, rope: tuple[Tensor, Tensor], mask: Mask | None) -> Tensor:
        spec = self.spec
        *compressed, latent_key = self.down(x_BSD)
        query = x_BSD if self.query_norm is None else self.query_norm(compressed[0])
        latent, key = latent_key.split([spec.kv_rank, spec.rope_dim], -1)
        q, kv, key = self.up(query, self.latent_norm(latent), key)
        q_BSNH = q.unflatten(-1, (-1, spec.key_dim))
        k_nope, v_BSNH = kv.unflatten(-1, (q_BSNH.shape[2], -1)).split([spec.nope_dim, spec.value_dim], -1)
        q_nope, q_rope = q_BSNH.split([spec.nope_dim, spec.rope_dim], -1)
        q_BSNH = torch.cat((q_nope, self._rotate(q_rope, rope)), -1)
        q_BSNH = q_BSNH if self.scale == 1.0 else q_BSNH * self.scale
        rotated = self._rotate(key[:, :, None], rope).expand(*k_nope.shape[:-1], -1)
        k_BSNH = torch.cat((k_nope, rotated), -1)
        out_BNSH = self.core(*(x.transpose(1, 2) for x in (q_BSNH, k_BSNH, v_BSNH)), mask)
        return self.output(out_BNSH.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]

    def _rotate(self, x_BSNO: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        """Dims 2i and 2i+1 rotate together where weights are stored so; the result has them at i and O/2 + i.

        Queries and keys are put in the same order, so scores do not change.
        """
        if self.spec.rope_interleaved:
            x_BSNO = x_BSNO.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
        return rotate(x_BSNO, *rope)


NORM_EPS = 1e-6
"""Of the norms on latents, whatever that of the layers is: the models' definitions leave it at its default."""

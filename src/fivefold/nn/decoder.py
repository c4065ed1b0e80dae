"""One decoder for Llama 2/3, Mistral, Qwen2, Qwen3, DeepSeek and mixtures of experts. It knows nothing of ranks.

A pipeline stage is the same class with some parts set to None: what remains decides what it reads and returns.
"""

from __future__ import annotations

from torch import Tensor, nn

from fivefold.core.model_spec import (
    AttentionSpec,
    BlockSpec,
    MLASpec,
    ModelSpec,
    MoESpec,
    require_plain_decoder,
)
from fivefold.nn.attention import Attention, Mask
from fivefold.nn.latent_attention import LatentAttention
from fivefold.nn.layers import RMSNorm, TokenLoss
from fivefold.nn.mlp import MLP
from fivefold.nn.moe import MoE
from fivefold.nn.rope import Rope


class DecoderLayer(nn.Module):
    """Pre-norm residual layer: x + attention(norm(x)), then x + mlp(norm(x)). Shapes: x_BSD -> [B, S, D].

    `valid_BS`: which of these tokens are no padding, for a mixture of experts; None: all.
    """

    def __init__(self, spec: ModelSpec, block: BlockSpec) -> None:
        super().__init__()
        attention = block.attention
        assert isinstance(attention, AttentionSpec | MLASpec)
        self.attention_norm = RMSNorm(spec.hidden, spec.norm_eps)
        self.attention = (
            Attention(spec.hidden, attention, spec.norm_eps)
            if isinstance(attention, AttentionSpec)
            else LatentAttention(spec, attention)
        )
        self.mlp_norm = RMSNorm(spec.hidden, spec.norm_eps)
        self.routed = isinstance(block.mlp, MoESpec)
        self.mlp = (
            MoE(spec.hidden, block.mlp) if isinstance(block.mlp, MoESpec) else MLP(spec.hidden, block.mlp)
        )

    def forward(
        self, x_BSD: Tensor, rope: tuple[Tensor, Tensor], mask: Mask | None, valid_BS: Tensor | None = None
    ) -> Tensor:
        return self.feed(self.attend(x_BSD, rope, mask), valid_BS)

    def attend(self, x_BSD: Tensor, rope: tuple[Tensor, Tensor], mask: Mask | None) -> Tensor:
        return x_BSD + self.attention(self.attention_norm(x_BSD), rope, mask)  # type: ignore[no-any-return]

    def feed(self, x_BSD: Tensor, valid_BS: Tensor | None) -> Tensor:
        y_BSD = self.mlp_norm(x_BSD)
        return x_BSD + (self.mlp(y_BSD, valid_BS) if self.routed else self.mlp(y_BSD))  # type: ignore[no-any-return]


class Decoder(nn.Module):
    """Embedding, layers, final norm, head. Layers keep their global index as name, whatever part is present.

    Shapes: tokens_BS (int64) if it holds the embedding, else hidden_BSD; positions [B or 1, S]; a mask or None;
            valid_BS (bool) or None, see `DecoderLayer` -> logits_BSV if it holds the head, else hidden_BSD.
    Raises: ModelError for a model that it does not compute exactly.
    """

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        require_plain_decoder(spec)
        self.spec = spec
        self.rope = Rope(spec)
        self.embedding: nn.Module | None = nn.Embedding(spec.vocab, spec.hidden)
        self.layers = nn.ModuleDict(
            {str(i): DecoderLayer(spec, block) for i, block in enumerate(spec.blocks)}
        )
        self.norm: nn.Module | None = RMSNorm(spec.hidden, spec.norm_eps)
        self.head: nn.Module | None = nn.Linear(spec.hidden, spec.vocab, bias=False)
        if spec.tied_embeddings:
            self.head.weight = self.embedding.weight
        self.loss = TokenLoss()

    def forward(
        self, x: Tensor, positions: Tensor, mask: Mask | None = None, valid_BS: Tensor | None = None
    ) -> Tensor:
        hidden_BSD = x if self.embedding is None else self.embedding(x)
        rope = self.rope(positions, hidden_BSD.dtype)
        for layer in self.layers.values():
            hidden_BSD = layer(hidden_BSD, rope, mask, valid_BS)
        if self.norm is not None:
            hidden_BSD = self.norm(hidden_BSD)
        return hidden_BSD if self.head is None else self.head(hidden_BSD)

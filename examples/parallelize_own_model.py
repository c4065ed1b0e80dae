"""Train a model that Fivefold has never seen, under any layout, and see that it stays the same model.

    python examples/parallelize_own_model.py "dp2 tp2 pp2"                    starts the ranks itself, on this machine
    torchrun --nproc-per-node 8 examples/parallelize_own_model.py "dp2 tp2 pp2"

`TinyGPT` below is plain PyTorch and knows nothing of Fivefold: layer norms, biases, learned positions, GELU, grouped
heads. What Fivefold needs to know of it are five lines of `ROLES`, and three habits that the comments name.
"""

from __future__ import annotations

import os
import sys

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fivefold

VOCAB, WIDTH, HEADS, KV_HEADS, LAYERS, LONGEST = 256, 64, 4, 2, 4, 128
SEQ_LEN, GLOBAL_BATCH, STEPS = 32, 8, 20


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head_dim = WIDTH // HEADS
        self.query = nn.Linear(WIDTH, WIDTH)
        self.key = nn.Linear(WIDTH, KV_HEADS * self.head_dim)
        self.value = nn.Linear(WIDTH, KV_HEADS * self.head_dim)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        # 1: heads are counted by the shapes (-1), as a rank may have some of them only.
        heads = [
            linear(x).unflatten(-1, (-1, self.head_dim)) for linear in (self.query, self.key, self.value)
        ]
        q, k, v = (y.transpose(1, 2) for y in heads)
        # 2: the core is PyTorch's function, so that context parallelism finds it.
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.narrow(F.gelu(self.wide(x)))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.attention = nn.LayerNorm(WIDTH), Attention()
        self.norm_2, self.feed_forward = nn.LayerNorm(WIDTH), FeedForward()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_1(x))
        return x + self.feed_forward(self.norm_2(x))


class TinyGPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCAB, WIDTH), nn.Embedding(LONGEST, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.last_norm, self.to_logits = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
        self.to_logits.weight = self.tokens.weight
        nn.init.normal_(self.tokens.weight, std=0.02)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        # 3: the places of the tokens are an argument, as a rank may have some tokens of a sequence only.
        x = self.tokens(tokens) + self.places(positions)
        for block in self.blocks:
            x = block(x)
        return self.to_logits(self.last_norm(x))


ROLES = {
    "tokens": "embedding", "places": "positions", "last_norm": "norm", "to_logits": "head",
    "blocks.*": "layer", "blocks.*.norm_?": "norm", "blocks.*.attention": "attention", "blocks.*.feed_forward": "mlp",
    "blocks.*.attention.query": "q", "blocks.*.attention.key": "k", "blocks.*.attention.value": "v",
    "blocks.*.attention.out": "attention_output",
    "blocks.*.feed_forward.wide": "up", "blocks.*.feed_forward.narrow": "down",
}  # fmt: skip


def make_model() -> TinyGPT:
    """The same on every rank."""
    torch.manual_seed(0)
    return TinyGPT()


def train(layout: str) -> list[float]:
    """The losses of some steps; every rank of the job runs this."""
    model = make_model()
    mine = model.blocks[0]
    parallel = fivefold.parallelize(
        model, layout, seq_len=SEQ_LEN, global_batch=GLOBAL_BATCH, micro_batch=2, roles=ROLES
    )
    assert parallel.engine.plan.layout.pp > 1 or model.blocks[0] is mine
    generator = torch.Generator().manual_seed(1)
    steps = torch.randint(10, (GLOBAL_BATCH, 1), generator=generator)
    batch = (torch.arange(SEQ_LEN) * (1 + steps)) % VOCAB  # each sequence counts in steps of its own
    return [parallel.step(batch[parallel.rows], lr=3e-3).loss for _ in range(STEPS)]


def main() -> None:
    layout = sys.argv[1] if len(sys.argv) > 1 else "dp2 tp2"
    if "RANK" in os.environ:  # under torchrun
        torch.distributed.init_process_group()
        losses = train(layout)
        if torch.distributed.get_rank() == 0:
            print(f"{layout}: loss {losses[0]:.4f} -> {losses[-1]:.4f}")
        torch.distributed.destroy_process_group()
        return
    verdict = fivefold.verify_model(make_model(), layout, roles=ROLES, dtype="float64")
    print(
        f"{layout} against one device in float64: largest error {verdict.max_rel_err:.1e}, passed {verdict.passed}"
    )
    for tried in dict.fromkeys(("dp1", layout)):
        ranks = fivefold.Layout.parse(tried).world_size
        losses = fivefold.run_ranks(lambda _, tried=tried: train(tried), ranks=ranks)[0]
        print(f"{tried}: loss {losses[0]:.4f} -> {losses[-1]:.4f}")


if __name__ == "__main__":
    main()

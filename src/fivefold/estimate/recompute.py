"""What a layer keeps, and what it needs for a moment, where parts of it are computed again in backward.

The words are those of `core.recompute`, and two more (core, ops) that runs of other frameworks have.

    none                     everything is kept
    full                     of each layer only its input
    attention, mlp, moe      of that part, its norm included, only its input
    core                     of unfused attention no scores (Korthikanti et al. 2022, section 5); flash keeps none
    ops                      every second matrix product and what is not one are computed again (torchtitan, "op")
    .../k                    the same in every k-th layer only

Joined by +: `attention+mlp`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Self

from fivefold.core.model_spec import AttentionSpec, BlockSpec, MLPSpec, ModelSpec, MoESpec
from fivefold.errors import ConfigError, nearest
from fivefold.estimate import saved
from fivefold.estimate.saved import Kernels, Saved, Share

WORDS = ("none", "full", "attention", "mlp", "moe", "core", "ops")


@dataclass(frozen=True)
class Recompute:
    """`parse` and `str` are inverse."""

    words: tuple[str, ...] = ("none",)
    every: int = 1

    @classmethod
    def parse(cls, text: str) -> Self:
        """Raises: ConfigError naming the word that is not known."""
        what, _, number = text.strip().partition("/")
        words = tuple(what.split("+"))
        for word in words:
            if word not in WORDS:
                known = ", ".join(WORDS)
                raise ConfigError(
                    f"recompute {text[:40]!r}: unknown part {word[:40]!r}{nearest(word, WORDS)}; known: {known}"
                )
        if number and not (number.isdecimal() and int(number)):
            raise ConfigError(f"recompute {text[:40]!r}: after the / stands a whole number of at least 1")
        return cls(words, int(number or 1))

    def __str__(self) -> str:
        return "+".join(self.words) + (f"/{self.every}" if self.every > 1 else "")

    def takes(self, layer: int) -> bool:
        """Whether this layer computes anything again."""
        return self.words != ("none",) and layer % self.every == 0


def feed_forward_words(spec: ModelSpec) -> tuple[str, ...]:
    """What the feed-forward blocks of a model are called: `moe`, `mlp`, or both."""
    routed = {isinstance(block.mlp, MoESpec) for block in spec.blocks}
    return ("moe",) * (True in routed) + ("mlp",) * (False in routed)


@dataclass(frozen=True)
class Kept:
    """Bytes of one layer and microbatch on one rank."""

    kept: Any
    """From forward to backward."""
    moment: Any
    """More than that while its own backward runs: what is computed again, and the gradients of its largest part."""


def layer_kept(block: BlockSpec, hidden: int, share: Share, kernels: Kernels, words: tuple[str, ...]) -> Kept:
    """What one layer keeps under these parts of recompute.

    Formula: kept as `saved.layer`, less what is computed again, plus the input of each such region; the moment is
             what is computed again and, as large as the larger part of the layer, the gradients of its activations.
    """
    if "core" in words:
        kernels = replace(kernels, attention="flash")
    whole = saved.layer(block, hidden, share, kernels)
    gradients = larger(whole.attention, whole.mlp)
    full = whole.attention + whole.mlp
    if "full" in words:
        kept = whole.input
    elif "ops" in words:
        kept = _half_of_products(block, hidden, share, kernels, whole)
    else:
        routed = not isinstance(block.mlp, MLPSpec)
        again = ("attention" in words), ("moe" if routed else "mlp") in words
        kept = whole.input if again[0] else whole.attention
        kept = kept + (whole.input if again[1] else whole.mlp)
    return Kept(kept, full - kept + gradients)


def _half_of_products(block: BlockSpec, hidden: int, share: Share, k: Kernels, whole: Saved) -> Any:
    """Of q, k, v, output, gate, up, down the first, third, ...: q, v, gate, down; and the attention core's output."""
    a, m = block.attention, block.mlp
    if not isinstance(a, AttentionSpec) or not isinstance(m, MLPSpec):
        return whole.input
    rows = share.tokens * (a.heads + a.kv_heads) / share.tp * a.head_dim + share.tokens * m.ffn / share.tp
    core = saved.attention_core(share, a.heads / share.tp, a.head_dim, k)
    return 2 * whole.input + rows * k.element_bytes + core


def larger(a: Any, b: Any) -> Any:
    """The larger of two numbers, or of each pair of two arrays."""
    return a + (b - a) * (b > a)

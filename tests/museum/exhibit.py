"""What a planted fault is: how it is switched on, where it must be caught, and what the cause must say.

A fault is a function of pytest's `monkeypatch` that is called before ranks are forked. It acts only where a layout has
the axis concerned, as in the systems that shipped it; its docstring is its story.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from fivefold.catalog.models import preset
from fivefold.core.model_spec import AttentionSpec, BlockSpec, MLPSpec, ModelSpec
from fivefold.core.router import RouterConfig

from ..ranks.models import HARD, PLAIN

Patch = pytest.MonkeyPatch
Plant = Callable[[Patch], None]

__all__ = [
    "HARD", "LATENT", "MIXED", "MIXED_16", "ONE_KV_HEAD", "PLAIN", "SMALL", "Fault", "Patch", "Plant", "exhibit",
]  # fmt: skip


def model(name: str, *, layers: int = 2, kv_heads: int = 4, window: int | None = None) -> ModelSpec:
    attention = AttentionSpec(heads=4, kv_heads=kv_heads, head_dim=4, window=window)
    block = BlockSpec(attention=attention, mlp=MLPSpec(ffn=12))
    return ModelSpec(name=name, hidden=16, vocab=30, blocks=(block,) * layers)


SMALL = model("small")
"""Two layers, nothing special: as little to compute as can be."""
ONE_KV_HEAD = model("one-kv-head", kv_heads=1)
LONG = model("long", layers=1, window=64)
"""Its window makes verify take sequences of 96 tokens."""


def first_layers(name: str) -> ModelSpec:
    """Two layers of a preset."""
    whole = preset(name)
    return whole.replace(name=f"{name}, two layers", blocks=whole.blocks[:2])


MIXED, MIXED_16 = first_layers("tiny-moe"), first_layers("tiny-qwen-moe")
"""8 experts of which a token has 2, and 16 of which it has 3; by softmax."""
LATENT = first_layers("tiny-mla-moe")
"""A dense layer; then 16 experts, 4 of a token, chosen by biased sigmoids in groups, and a shared one."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One exhibit."""

    plant: Plant
    seen_in: str
    """Project and number of its public report; empty for a relative of such a fault."""
    layout: str
    elsewhere: str
    """Another combination of axes, in which it must be caught too."""
    words: tuple[str, ...]
    """What the cause must say at `layout`: axis, first module, ratio or event."""
    loss_sees: bool
    """Whether the loss of the first step differs by more than 1e-5: all that a loss-only check looks at."""
    spec: ModelSpec
    documents: bool
    overflow: bool
    """It acts on a loss scale: one step overflows, and the layout compared with has no scale."""
    router: RouterConfig | None
    """What routers of experts are asked for; None: a balance loss by sequence, a z-loss, moving biases."""
    recompute: str
    """What the layout computes again in backward."""
    rebalance: bool
    """The layout places experts anew after every step, with copies of the busiest."""
    late: bool
    """It acts from the second step on: the first is right in everything."""
    quick: bool
    """Runs in `make test`; the others in `make test-all`."""

    @property
    def name(self) -> str:
        return self.plant.__name__.replace("_", " ")

    @property
    def story(self) -> str:
        """The first line of the docstring."""
        return (self.plant.__doc__ or "").strip().splitlines()[0]


def exhibit(
    layout: str,
    elsewhere: str,
    *words: str,
    seen_in: str = "",
    loss_sees: bool = False,
    spec: ModelSpec = SMALL,
    documents: bool = False,
    overflow: bool = False,
    router: RouterConfig | None = None,
    recompute: str = "none",
    rebalance: bool = False,
    late: bool = False,
    quick: bool = False,
) -> Callable[[Plant], Fault]:
    """Make a fault of a function that plants it."""

    def made(plant: Plant) -> Fault:
        return Fault(
            plant=plant, seen_in=seen_in, layout=layout, elsewhere=elsewhere, words=words, loss_sees=loss_sees,
            spec=spec, documents=documents, overflow=overflow, router=router, recompute=recompute, late=late,
            rebalance=rebalance, quick=quick,
        )  # fmt: skip

    return made

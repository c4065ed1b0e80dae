"""Which activations are not kept for backward, but computed again in it.

    none                 every activation that backward reads is kept
    full                 of each layer only its input
    attention  mlp  moe  of that part of each layer, its norm included, only the input; joined by +: attention+mlp
    .../k                the same in layers 0, k, 2k, ... only: full/2

`mlp` is the feed-forward block of a dense layer, `moe` that of a routed one. Layers count over the whole model, so
that what is computed again does not depend on the layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, NoReturn, Self, get_args

from pydantic import AfterValidator

from fivefold.core.model_spec import BlockSpec, ModelSpec
from fivefold.errors import ConfigError, nearest

Part = Literal["attention", "mlp", "moe"]
PARTS: tuple[Part, ...] = get_args(Part)

Region = Literal["layer", "attention", "mlp", "moe"]
"""What is computed again at one go: a layer, or a part of it."""

Regions = tuple[Region, ...]
"""Those of one layer."""

LONGEST_TEXT = 40


@dataclass(frozen=True)
class Recompute:
    """The regions of every `every`-th layer that are computed again. `parse` and `str` are inverse."""

    regions: Regions = ()
    """`layer` alone, or parts in the order of a layer; empty: none."""
    every: int = 1

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read the text form. Raises: ConfigError, one line that names what is not known and what is."""
        what, slash, number = text.strip().partition("/")
        words = what.split("+")
        if slash and not (number.isascii() and number.isdigit() and len(number) < 9 and int(number)):
            _refuse(text, "after the / stands a whole number of at least 1, such as full/2")
        if slash and words == ["none"]:
            _refuse(text, "none is of no layer: leave the / out")
        for i, word in enumerate(words):
            if word in ("none", "full") and len(words) > 1:
                _refuse(text, f"{word} stands alone")
            if word not in (*PARTS, "none", "full"):
                _refuse(
                    text, f"unknown part {word[:LONGEST_TEXT]!r}{nearest(word, (*PARTS, 'none', 'full'))}"
                )
            if word in words[:i]:
                _refuse(text, f"{word} is given twice")
        regions: Regions = ("layer",) if words == ["full"] else tuple(part for part in PARTS if part in words)
        return cls(regions, int(number or 1))

    def __str__(self) -> str:
        what = "full" if self.regions == ("layer",) else "+".join(self.regions) or "none"
        return what if self.every == 1 else f"{what}/{self.every}"

    def of(self, layer: int, block: BlockSpec) -> Regions:
        """The regions of one layer, by its index in the model, that are computed again."""
        if layer % self.every:
            return ()
        has = ("layer", "attention", "moe" if block.mlp.kind == "moe" else "mlp")
        return tuple(region for region in self.regions if region in has)

    def of_layers(self, spec: ModelSpec, layers: Sequence[int]) -> list[Regions]:
        """`of` each of these layers."""
        return [self.of(layer, spec.blocks[layer]) for layer in layers]


def _refuse(text: str, why: str) -> NoReturn:
    forms = f"none, full, or some of {', '.join(PARTS)} joined by +; with /k for every k-th layer"
    raise ConfigError(f"recompute {text[:LONGEST_TEXT]!r}: {why}; write {forms}")


def _canonical(text: str) -> str:
    return str(Recompute.parse(text))


RecomputeText = Annotated[str, AfterValidator(_canonical)]
"""The text form, in the form in which it is printed."""


def check(recompute: Recompute, spec: ModelSpec) -> None:
    """Raises: ConfigError for a part that no layer has of those that are named, or for more layers than there are."""
    if recompute.every > spec.layers:
        raise ConfigError(
            f"recompute={recompute} takes one layer of {recompute.every}, but {spec.name} has {spec.layers}; "
            f"nearest: {Recompute(recompute.regions, spec.layers)}"
        )
    found = {region for layer in recompute.of_layers(spec, range(spec.layers)) for region in layer}
    for region in recompute.regions:
        if region not in found:
            rest = Recompute(tuple(one for one in recompute.regions if one in found), recompute.every)
            raise ConfigError(
                f"recompute={recompute}: no layer of {spec.name} that it takes has {region}; "
                f"nearest: {rest if rest.regions else _other(region, recompute.every)}"
            )


def _other(region: Region, every: int) -> Recompute:
    return Recompute(("moe",) if region == "mlp" else ("mlp",), every)

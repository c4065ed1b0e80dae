"""Variants of a model: numeric fields of its spec at several values, and every combination of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any, TypeVar

from pydantic import ValidationError

from fivefold.core.model_spec import BlockSpec, MLPSpec, ModelSpec, MoESpec
from fivefold.core.value import Value, describe
from fivefold.errors import ConfigError, ModelError, nearest

MOST_VARIANTS = 200
MOST_LAYERS = 1000

OF_MODEL = ("hidden", "vocab")
OF_ATTENTION = (
    "heads",
    "kv_heads",
    "head_dim",
    "window",
    "q_rank",
    "kv_rank",
    "nope_dim",
    "rope_dim",
    "value_dim",
)
OF_EXPERTS = {"experts": "experts", "top_k": "top_k", "expert_ffn": "ffn", "shared_ffn": "shared_ffn"}
"""Name of a field that can vary -> the field of `MoESpec`."""
FIELDS = (*OF_MODEL, "layers", *OF_ATTENTION, "ffn", *OF_EXPERTS)
"""Fields that can vary; `ffn` is the width of dense MLPs."""

Values = dict[str, int]
V = TypeVar("V", bound=Value)


@dataclass(frozen=True)
class Variant:
    """One combination: its spec, or why there is none."""

    values: Values
    spec: ModelSpec | None
    refusal: str | None = None

    @property
    def text(self) -> str:
        return " ".join(f"{name}={value}" for name, value in self.values.items())


def read(texts: tuple[str, ...]) -> dict[str, list[int]]:
    """`experts=8,16` and the like, several in one text or each in its own.

    Raises: ConfigError naming the field or the value that is none, or the number of combinations that is too large.
    """
    found: dict[str, list[int]] = {}
    for token in (token for text in texts for token in text.split()):
        name, equals, listed = token.partition("=")
        if not equals or not listed:
            raise ConfigError(f"--vary {token[:60]!r}: expected a field and its values, such as experts=8,16")
        if name not in FIELDS:
            raise ConfigError(
                f"--vary: no field {name[:40]!r}{nearest(name, FIELDS)}; what can vary: {', '.join(FIELDS)}"
            )
        if name in found:
            raise ConfigError(f"--vary: {name} is given twice")
        values = [value.strip() for value in listed.split(",")]
        wrong = [value for value in values if not value.isdecimal() or len(value) > 9]
        if wrong:
            raise ConfigError(f"--vary {name}: {wrong[0][:40]!r} is not a whole number of at most 9 digits")
        found[name] = list(dict.fromkeys(map(int, values)))
    number = 1
    for several in found.values():
        number *= len(several)
    if number > MOST_VARIANTS:
        raise ConfigError(f"--vary: {number} combinations, at most {MOST_VARIANTS}; leave some out")
    return found


def variants(spec: ModelSpec, varied: dict[str, list[int]]) -> Iterator[Variant]:
    """Every combination in order, the last field fastest; of those that are no model, the reason in one line."""
    for values in product(*varied.values()):
        chosen = dict(zip(varied, values))
        try:
            yield Variant(chosen, vary(spec, chosen))
        except ModelError as error:
            yield Variant(chosen, None, str(error))


def vary(spec: ModelSpec, values: Values) -> ModelSpec:
    """The model with these fields changed, in every block that has them.

    Fewer layers are the first ones; of more, the last ones repeat in their period.
    Raises: ModelError where no block has a field, or the numbers are no model.
    """
    made = spec
    if "layers" in values:
        made = _changed(made, blocks=_stretched(spec, values["layers"]))
    in_blocks = {name: value for name, value in values.items() if name not in (*OF_MODEL, "layers")}
    for name in in_blocks:
        if not any(_has(block, name) for block in made.kinds_of_blocks):
            raise ModelError(f"{spec.name} has no {name}: none of its layers has such a part")
    if in_blocks:
        known = {block: _block(block, in_blocks) for block in made.kinds_of_blocks}
        made = _changed(made, blocks=tuple(known[block] for block in made.blocks))
    of_model = {name: values[name] for name in OF_MODEL if name in values}
    text = " ".join(f"{name}={value}" for name, value in values.items())
    return _changed(made, **of_model, name=f"{spec.name} {text}")


def _has(block: BlockSpec, name: str) -> bool:
    if name == "ffn":
        return isinstance(block.mlp, MLPSpec)
    if name in OF_EXPERTS:
        return isinstance(block.mlp, MoESpec)
    return getattr(block.attention, name, None) is not None


def _block(block: BlockSpec, values: Values) -> BlockSpec:
    """All changes of a part at one go: one alone may be no model where all together are."""
    here = {name: value for name, value in values.items() if _has(block, name)}
    attention = {name: value for name, value in here.items() if name in OF_ATTENTION}
    mlp = {OF_EXPERTS.get(name, name): value for name, value in here.items() if name not in OF_ATTENTION}
    return _changed(block, attention=_changed(block.attention, **attention), mlp=_changed(block.mlp, **mlp))


def _changed(value: V, **changes: Any) -> V:
    if not changes:
        return value
    try:
        return value.replace(**changes)
    except ValidationError as error:
        raise ModelError(describe(error, type(value))) from None


def _stretched(spec: ModelSpec, layers: int) -> tuple[BlockSpec, ...]:
    blocks = spec.blocks
    if not 1 <= layers <= MOST_LAYERS:
        raise ModelError(f"{layers} layers: from 1 to {MOST_LAYERS} can be planned for")
    if layers <= len(blocks):
        return blocks[:layers]
    period = next(p for p in range(1, len(blocks) + 1) if _repeats(blocks, p))
    tail = blocks[len(blocks) - period :]
    return (*blocks, *(tail[i % period] for i in range(layers - len(blocks))))


def _repeats(blocks: tuple[BlockSpec, ...], period: int) -> bool:
    """Whether the last half of the layers, at least two periods of it where there are so many, repeats so."""
    first = min(len(blocks) // 2, max(0, len(blocks) - 2 * period))
    return all(blocks[i] == blocks[i - period] for i in range(first + period, len(blocks)))

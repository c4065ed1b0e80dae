"""How often experts were chosen: from a file that somebody else may have written, or from the record of a run."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fivefold.core.regular_file import read_text
from fivefold.errors import DataError
from fivefold.units import MIB

RESULT = "experts"
"""Where the record of a run has it: `{ep, steps, layers: [{layer, chosen, ..}]}`."""

MOST_BYTES = 64 * MIB
MOST_EXPERTS = 4096
MOST_LAYERS = 1024


def read_counts(path: Path) -> list[list[float]]:
    """By layer: how often each expert was chosen. A single list is one layer.

    Raises: DataError, one line, for a file that is no JSON list of such numbers.
    """
    try:
        value = json.loads(read_text(path, MOST_BYTES, "counts of experts", DataError))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is no JSON: {str(error).splitlines()[0]}") from None
    layers = value if isinstance(value, list) and value and isinstance(value[0], list) else [value]
    if len(layers) > MOST_LAYERS:
        raise DataError(f"{path} has {len(layers)} layers; at most {MOST_LAYERS}")
    return [_layer(str(path), i, layer) for i, layer in enumerate(layers)]


@dataclass(frozen=True)
class RunCounts:
    """What the record of a run has of its experts."""

    ep: int
    """Ranks that shared them."""
    layers: dict[int, list[float]]
    """By layer of the model: how often each expert was chosen, over all recorded steps."""


def counts_of_run(results: Mapping[str, Any], *, where: str) -> RunCounts:
    """From the results of a run. `where`: what a message calls it.

    Raises: DataError for a run that counted none, or whose record is not as we write it.
    """
    found = results.get(RESULT)
    if found is None:
        raise DataError(
            f"{where} has no counts of experts: name a run of `fivefold train` whose model has experts, or a file"
        )
    try:
        return RunCounts(
            int(found["ep"]),
            {int(row["layer"]): _layer(where, row["layer"], row["chosen"]) for row in found["layers"]},
        )
    except (KeyError, TypeError, ValueError):
        raise DataError(f"{where}: its counts of experts are damaged") from None


def _layer(path: str, i: int, layer: Any) -> list[float]:
    if not isinstance(layer, list) or not 2 <= len(layer) <= MOST_EXPERTS:
        what = f"{len(layer)} numbers" if isinstance(layer, list) else f"a {type(layer).__name__}"
        raise DataError(
            f"{path}: layer {i} is {what}; it must be a list of 2 to {MOST_EXPERTS} numbers, one an expert"
        )
    for expert, count in enumerate(layer):
        number = isinstance(count, int | float) and not isinstance(count, bool)
        if not number or not math.isfinite(count) or not 0 <= count <= 1e18:
            raise DataError(
                f"{path}: layer {i}, expert {expert} was chosen {str(count)[:40]!r} times; "
                f"it must be a number from 0 to 1e18"
            )
    return [float(count) for count in layer]

"""Reads how often experts were chosen from a file that somebody else may have written."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from fivefold.errors import DataError
from fivefold.units import MIB

MOST_BYTES = 64 * MIB
MOST_EXPERTS = 4096
MOST_LAYERS = 1024


def read_counts(path: Path) -> list[list[float]]:
    """By layer: how often each expert was chosen. A single list is one layer.

    Raises: DataError, one line, for a file that is no JSON list of such numbers.
    """
    if not path.is_file():
        raise DataError(f"{path} is no file")
    if path.stat().st_size > MOST_BYTES:
        raise DataError(
            f"{path} has {path.stat().st_size} bytes; counts of experts have at most {MOST_BYTES}"
        )
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is no JSON: {str(error).splitlines()[0]}") from None
    layers = value if isinstance(value, list) and value and isinstance(value[0], list) else [value]
    if len(layers) > MOST_LAYERS:
        raise DataError(f"{path} has {len(layers)} layers; at most {MOST_LAYERS}")
    return [_layer(path, i, layer) for i, layer in enumerate(layers)]


def _layer(path: Path, i: int, layer: Any) -> list[float]:
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

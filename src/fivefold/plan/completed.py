"""What a row of a runs table leaves out of its model, from what it says: its name, or its number of parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fivefold.catalog.sizes import sizes_of
from fivefold.units import GIGA

SIZES = ("layers", "hidden", "heads")


def completed(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """The row with the sizes that follow; the same row where it says its sizes, or nothing follows.

    Sizes of a model that the catalog knows by name fill what is missing. A dense model that says all but its layers has
    as many as its parameters make: (parameters - embeddings) over those of a layer.
    """
    missing = [name for name in SIZES if not values.get(name)]
    if not missing:
        return values
    known = sizes_of(str(values.get("model_name") or ""))
    if known is not None:
        return {**known, **values}
    if missing == ["layers"] and values.get("params_total_b") and not values.get("experts"):
        return {**values, "layers": _layers(values)}
    return values


def _layers(values: Mapping[str, Any]) -> int:
    """Layers of a dense model: attention has D H (2 N + 2 K) weights, the MLP two or three maps."""
    hidden, heads = values["hidden"], values["heads"]
    head_dim = values.get("head_dim") or hidden / heads
    attention = hidden * head_dim * 2 * (heads + (values.get("kv_heads") or heads))
    maps = 3 if values.get("gated_mlp") else 2
    layer = attention + maps * hidden * (values.get("ffn_hidden") or 4 * hidden)
    tables = 1 if values.get("tied_embeddings") else 2
    rest: float = values["params_total_b"] * GIGA - tables * (values.get("vocab") or 0) * hidden
    return max(1, round(float(rest / layer)))

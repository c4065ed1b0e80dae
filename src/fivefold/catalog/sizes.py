"""Sizes of a model by the name that a table of runs gives, in the columns of a runs table."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from fivefold.catalog import models
from fivefold.catalog.files import read
from fivefold.core.model_spec import AttentionSpec, MLPSpec

ABOUT = ("source", "names")
"""Entries of `sizes.yaml` that are no columns."""


def sizes_of(name: str) -> Mapping[str, Any] | None:
    """Columns of the model of that name: of a hybrid model in `sizes.yaml`, or of a preset whose layers are all alike.

    None where the name is not known. `NVIDIA Nemotron V3 Super 120B` and `nemotron-3-super` are the same.
    """
    plain = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    for entry in read("sizes.yaml").values():
        if any(plain.startswith(begin) for begin in entry["names"]):
            return {column: value for column, value in entry.items() if column not in ABOUT}
    preset = next((known for known in models.names() if re.sub(r"[^a-z0-9]+", "-", known) == plain), None)
    return _of_preset(preset) if preset else None


def _of_preset(name: str) -> Mapping[str, Any] | None:
    spec = models.preset(name)
    attention, feed = spec.blocks[0].attention, spec.blocks[0].mlp
    alike = len(spec.kinds_of_blocks) == 1
    if not alike or not isinstance(attention, AttentionSpec) or not isinstance(feed, MLPSpec):
        return None
    return {
        "layers": spec.layers, "hidden": spec.hidden, "heads": attention.heads, "kv_heads": attention.kv_heads,
        "head_dim": attention.head_dim, "ffn_hidden": feed.ffn, "gated_mlp": feed.gated, "vocab": spec.vocab,
        "tied_embeddings": spec.tied_embeddings,
    }  # fmt: skip

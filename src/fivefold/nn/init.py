"""Initial values that depend only on (seed, parameter name, global index), never on the layout.

The global tensor is covered by square tiles, and each tile has a random generator of its own. A shard makes the tiles
that it touches, one at a time, and keeps its part: no rank ever holds more than its shard and one tile.
Values are drawn in float32 on the CPU and cast, so that every dtype and device starts from the same numbers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

TILE = 128
"""Rows and columns of a tile: 64 KiB of float32."""


def make_shard(
    name: str,
    region: Sequence[slice],
    *,
    seed: int,
    std: float,
    mean: float = 0.0,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Normal values of the region `[start, stop)` per dim of the parameter `name` (one to three dims).

    Three dims are stacked matrices: each is made under its own name, whatever others are stacked with it.
    Memory: the shard and one tile.
    """
    if len(region) == 3:
        matrices = [
            make_shard(f"{name}.{i}", region[1:], seed=seed, std=std, mean=mean, dtype=dtype)
            for i in range(region[0].start, region[0].stop)
        ]
        empty = (0, *(part.stop - part.start for part in region[1:]))
        return torch.stack(matrices) if matrices else torch.empty(empty, dtype=dtype)
    if len(region) == 1:
        return make_shard(name, [slice(0, 1), *region], seed=seed, std=std, mean=mean, dtype=dtype)[0]
    rows, columns = region
    shard = torch.empty(rows.stop - rows.start, columns.stop - columns.start, dtype=dtype)
    generator, tile = torch.Generator(), torch.empty(TILE, TILE)
    for i in range(rows.start // TILE, -(-rows.stop // TILE)):
        for j in range(columns.start // TILE, -(-columns.stop // TILE)):
            generator.manual_seed(_tile_seed(seed, name, i, j))
            tile.normal_(mean, std, generator=generator)
            top, bottom = max(rows.start, i * TILE), min(rows.stop, (i + 1) * TILE)
            left, right = max(columns.start, j * TILE), min(columns.stop, (j + 1) * TILE)
            shard[top - rows.start : bottom - rows.start, left - columns.start : right - columns.start] = (
                tile[top - i * TILE : bottom - i * TILE, left - j * TILE : right - j * TILE]
            )
    return shard


def _tile_seed(seed: int, name: str, i: int, j: int) -> int:
    digest = hashlib.blake2b(f"{seed}/{name}/{i}/{j}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1

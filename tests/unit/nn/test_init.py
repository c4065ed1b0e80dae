"""Initial values are a function of (seed, name, global index): whoever makes them, in whatever pieces."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from fivefold.nn.init import TILE, make_shard
from fivefold.runtime.memory import LiveBytes

ROWS, COLUMNS = 2 * TILE + 37, 3 * TILE - 5


def shard(
    *bounds: tuple[int, int], name: str = "layers.0.mlp.down.weight", seed: int = 3, **more: object
) -> Tensor:
    region = [slice(start, stop) for start, stop in bounds]
    return make_shard(name, region, seed=seed, **{"std": 0.02, **more})  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def whole() -> Tensor:
    return shard((0, ROWS), (0, COLUMNS))


CUTS: Sequence[tuple[int, int]] = (
    (0, 1), (0, TILE), (1, TILE), (TILE, 2 * TILE), (TILE - 1, TILE + 1), (5, 2 * TILE + 3), (TILE, TILE),
    (7, 7), (200, 257), (0, 293),
)  # fmt: skip
"""Inside a tile, on its edges, across one and two edges, empty, everything."""
PINNED = [[-1.0538713, 0.9680478, -0.5895078], [-1.2630305, 0.3703324, 0.7534949]]


@pytest.mark.parametrize(("rows", "columns"), list(itertools.product(CUTS, CUTS)))
def test_any_shard_is_the_slice_of_the_whole(
    whole: Tensor, rows: tuple[int, int], columns: tuple[int, int]
) -> None:
    part = shard(rows, columns)
    assert part.shape == (rows[1] - rows[0], columns[1] - columns[0])
    assert torch.equal(part, whole[slice(*rows), slice(*columns)])


@pytest.mark.parametrize("parts", [2, 3, 7, 8])
@pytest.mark.parametrize("dim", [0, 1])
def test_shards_of_all_ranks_make_the_whole(whole: Tensor, parts: int, dim: int) -> None:
    size = whole.shape[dim]
    block = -(-size // parts)
    edges = [(min(i * block, size), min((i + 1) * block, size)) for i in range(parts)]
    other = (0, whole.shape[1 - dim])
    pieces = [shard(edge, other) if dim == 0 else shard(other, edge) for edge in edges]
    assert torch.equal(torch.cat(pieces, dim), whole)


def test_vectors() -> None:
    whole = shard((0, 1000), name="norm.weight", mean=1.0, std=0.1)
    assert whole.shape == (1000,)
    for start, stop in CUTS:
        assert torch.equal(shard((start, stop), name="norm.weight", mean=1.0, std=0.1), whole[start:stop])


def test_the_size_of_the_parameter_does_not_matter(whole: Tensor) -> None:
    """A vocabulary padded by some other layout starts from the same values."""
    assert torch.equal(shard((0, 2 * ROWS), (0, 2 * COLUMNS))[:ROWS, :COLUMNS], whole)


def test_numbers_stay_what_they_are() -> None:
    """Pinned: a run recorded by one version of this code starts from the same weights in the next."""
    got = make_shard("embedding.weight", [slice(130, 132), slice(0, 3)], seed=0, std=1.0)
    torch.testing.assert_close(got, torch.tensor(PINNED), rtol=0, atol=1e-5)


def test_other_names_seeds_and_places_give_other_values(whole: Tensor) -> None:
    square = ((0, TILE), (0, TILE))
    others = [
        shard(*square, name="layers.1.mlp.down.weight"),
        shard(*square, name="layers.0.mlp.down.bias"),
        shard(*square, seed=4),
        shard(*square, seed=-3),
        *[whole[i : i + TILE, j : j + TILE] for i in (0, TILE) for j in (0, TILE)],
    ]
    for a, b in itertools.combinations([t.flatten() for t in others], 2):
        correlation = torch.corrcoef(torch.stack((a, b)))[0, 1]
        assert abs(float(correlation)) < 5 / TILE  # standard deviation of it: 1/TILE


@pytest.mark.parametrize(("mean", "std"), [(0.0, 0.02), (1.0, 0.1)])
def test_distribution(mean: float, std: float) -> None:
    values = (shard((0, 1024), (0, 1024), mean=mean, std=std).double() - mean) / std
    n = values.numel()
    assert abs(float(values.mean())) < 5 / n**0.5
    assert abs(float(values.var()) - 1) < 5 * (2 / n) ** 0.5
    assert abs(float(values.pow(3).mean())) < 5 * (15 / n) ** 0.5
    assert abs(float(values.pow(4).mean()) - 3) < 5 * (96 / n) ** 0.5
    for rows in values.mean(0), values.mean(1):
        assert float(rows.abs().max()) < 6 / 1024**0.5


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes_are_casts_of_the_same_numbers(whole: Tensor, dtype: torch.dtype) -> None:
    assert torch.equal(shard((0, ROWS), (0, COLUMNS), dtype=dtype), whole.to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_eighth_of_a_parameter_peaks_below_twice_its_bytes(dtype: torch.dtype) -> None:
    """[4096, 4096] cut by columns into eighths: the shard, and a tile at a time."""
    with LiveBytes() as memory:
        part = shard((0, 4096), (3 * 512, 4 * 512), dtype=dtype)
    assert part.nbytes == 4096 * 512 * dtype.itemsize
    assert part.nbytes <= memory.peak_bytes < 2 * part.nbytes
    assert memory.peak_bytes <= part.nbytes + 2 * TILE * TILE * 4


def test_it_leaves_the_global_generator_alone() -> None:
    torch.manual_seed(0)
    state = torch.get_rng_state()
    shard((0, 10), (0, 10))
    assert torch.equal(torch.get_rng_state(), state)

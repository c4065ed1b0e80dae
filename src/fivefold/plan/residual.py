"""The local correction: what a measured run says of runs like it, beyond the coefficients. A Gaussian process.

The logarithm of measured over predicted time is taken as a sum of three parts: one that all runs of a framework on a
device family share, one that runs of like models share, and one that runs of like models and layouts share; and noise:

    k(a, b) = [same framework and family] (stack^2 + model^2 r(d_model) + local^2 r(d_all)) + [a is b] noise^2
    r(d) = (1 + d) exp(-d)

Source: Rasmussen and Williams 2006, "Gaussian Processes for Machine Learning", equation 4.17 (Matern, 3/2).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from fivefold.estimate.jobs import Column, Jobs

    Matrix = NDArray[Any]

MODEL = {
    "hidden": 1.0, "layers": 2.0, "head": 0.7, "ffn": 0.7, "experts": 1.5, "moe_ffn": 1.5, "top_k": 1.5, "vocab": 4.0,
    "latent": 1.0,
}  # fmt: skip
"""Size of a model -> octaves of it that count as a distance of one."""
LAYOUT = {
    "tp": 1.5, "pp": 2.0, "dp": 4.0, "cp": 1.5, "ep": 2.0, "etp": 1.5, "sharded": 1.0, "chunks": 2.0, "bubble": 1.5,
    "micro_batch": 2.0, "microbatches": 3.0, "seq_len": 1.5, "tokens": 1.5, "bits": 0.5, "scaling": 1.0,
    "recompute": 0.7, "core": 1.0, "peak": 0.3, "memory": 0.3, "network": 1.0, "odd_head": 0.3, "slow_softmax": 0.7,
    "frozen": 0.5, "sequence_parallel": 1.0, "release": 0.5,
}  # fmt: skip
"""The same of how a job is cut and run; of `release` years, of the rest whether or how much."""


@dataclass(frozen=True)
class Scales:
    """Standard deviations of the parts, in logarithms: 0.05 is about 5 %."""

    stack: float = 0.06
    model: float = 0.06
    local: float = 0.08
    noise: float = 0.02

    @property
    def variance(self) -> float:
        """Of all parts without the noise."""
        return self.stack**2 + self.model**2 + self.local**2


@dataclass(frozen=True)
class Places:
    """Where jobs stand: the key that they must share, and coordinates in which distances are taken."""

    stack: NDArray[np.str_]
    model: Matrix
    layout: Matrix

    def __len__(self) -> int:
        return len(self.stack)


def places(jobs: Jobs) -> Places:
    """Coordinates of every job; of the kind of layer that it has most of, where there are several."""
    import numpy as np

    from fivefold.estimate.compute import slow_softmax

    def octaves(x: Column) -> Column:
        return np.log2(np.maximum(x, 2.0**-30))

    most = np.stack([block.count for block in jobs.blocks]).argmax(axis=0)

    def of_block(values: list[Any]) -> Column:
        found: Column = np.choose(most, values).astype(np.float64)
        return found

    def size(name: str) -> Column:
        return of_block([getattr(block, name) for block in jobs.blocks])

    values = {
        "hidden": octaves(jobs.hidden), "layers": octaves(jobs.layers), "head": octaves(size("qk_dim")),
        "ffn": octaves((size("ffn") * (size("gated") + 1) + 1) / jobs.hidden),
        "experts": octaves(size("experts") + 1), "moe_ffn": octaves(size("moe_ffn") / jobs.hidden + 1),
        "top_k": octaves(size("top_k") + 1), "vocab": octaves(jobs.vocab), "latent": 1.0 * (size("kv_rank") > 0),
        **{
            name: octaves(getattr(jobs, name))
            for name in ("tp", "pp", "dp", "cp", "ep", "etp", "chunks", "micro_batch", "microbatches", "seq_len",
                         "tokens", "bits")
        },
        "sharded": np.where(jobs.zero == 3, 1.0, np.where(jobs.zero == 0, 0.3, 0.0)), "bubble": jobs.bubble,
        "scaling": jobs.scaling, "recompute": jobs.recompute, "core": 1.0 * jobs.recompute_attention,
        "peak": octaves(jobs.peak_low_flops_per_s), "memory": octaves(jobs.memory_bytes_per_s),
        "network": octaves(jobs.nic_bytes_per_s), "odd_head": 1.0 * (size("qk_dim") % 8 > 0),
        "slow_softmax": of_block([slow_softmax(block, jobs) for block in jobs.blocks]),
        "frozen": 1.0 * jobs.frozen, "sequence_parallel": 1.0 * jobs.sequence_parallel, "release": jobs.release,
    }  # fmt: skip
    return Places(
        np.char.add(np.char.add(jobs.stack, "\n"), jobs.hardware),
        np.stack([values[name] / unit for name, unit in MODEL.items()], axis=1),
        np.stack([values[name] / unit for name, unit in LAYOUT.items()], axis=1),
    )


def nearness(a: Places, b: Places) -> tuple[Matrix, Matrix]:
    """[a, b] r of the distance of models, and of models and layouts; 0 where framework or family differ."""
    same = a.stack[:, None] == b.stack[None, :]
    model = _squares(a.model, b.model)
    return same * _matern(model), same * _matern(model + _squares(a.layout, b.layout))


def covariance(a: Places, b: Places, scales: Scales) -> Matrix:
    """[a, b] covariance of the correction, without noise."""
    model, every = nearness(a, b)
    same = a.stack[:, None] == b.stack[None, :]
    total: Matrix = same * scales.stack**2 + scales.model**2 * model + scales.local**2 * every
    return total


def _squares(a: Matrix, b: Matrix) -> Matrix:
    import numpy as np

    return np.maximum((a * a).sum(1)[:, None] + (b * b).sum(1)[None, :] - 2 * a @ b.T, 0.0)


def _matern(squares: Matrix) -> Matrix:
    import numpy as np

    distance = np.sqrt(squares)
    near: Matrix = (1 + distance) * np.exp(-distance)
    return near

"""The local correction: what a measured run says of runs like it, beyond the coefficients. A Gaussian process.

A cluster is a framework on a device family and a network. The logarithm of measured over predicted time is taken as a
sum of parts: one that all runs of a cluster share, one that runs of like models share, one that runs with like kernels
share (their shapes follow from the model, tp, micro-batch and sequence), one that runs of like layouts share besides,
and coefficients that differ from what other clusters have; and noise:

    k(a, b) = [same cluster] (stack^2 + model^2 r(d_model) + kernels^2 r(d_kernels) + layout^2 r(d_all)
                              + what coefficients that are the cluster's own change at a, times that at b)
              + [a is b] noise^2
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
KERNELS = {
    "tp": 0.7, "cp": 1.0, "etp": 1.0, "ep": 2.0, "micro_batch": 0.7, "seq_len": 1.0, "bits": 0.5, "scaling": 1.0,
    "peak": 0.3, "memory": 0.3, "odd_head": 0.3, "slow_softmax": 0.7, "frozen": 0.5, "recompute": 0.7, "core": 1.0,
}  # fmt: skip
"""The same of what shapes and kinds of kernels follow from, beside the model; of some, whether or how much."""
LAYOUT = {
    "pp": 3.0, "dp": 6.0, "sharded": 1.0, "chunks": 2.0, "bubble": 1.5, "microbatches": 6.0, "network": 1.0,
    "sequence_parallel": 1.0, "release": 0.5,
}  # fmt: skip
"""The same of how kernels are strung together; of `release` years."""


@dataclass(frozen=True)
class Scales:
    """Standard deviations of the parts, in logarithms: 0.05 is about 5 %."""

    stack: float = 0.02
    model: float = 0.02
    kernels: float = 0.3
    layout: float = 0.03
    noise: float = 0.01

    @property
    def variance(self) -> float:
        """Of all parts without the noise."""
        return self.stack**2 + self.model**2 + self.kernels**2 + self.layout**2


@dataclass(frozen=True)
class Places:
    """Where jobs stand: the cluster that they must share, and coordinates in which distances are taken."""

    cluster: NDArray[np.str_]
    model: Matrix
    kernels: Matrix
    layout: Matrix

    def __len__(self) -> int:
        return len(self.cluster)

    def take(self, rows: Any) -> Places:
        return Places(self.cluster[rows], self.model[rows], self.kernels[rows], self.layout[rows])


DEGREES_AND_SIZES = (
    "tp", "pp", "dp", "cp", "ep", "etp", "chunks", "micro_batch", "microbatches", "seq_len", "bits",
)  # fmt: skip


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
            for name in DEGREES_AND_SIZES
        },
        "sharded": np.where(jobs.zero == 3, 1.0, np.where(jobs.zero == 0, 0.3, 0.0)), "bubble": jobs.bubble,
        "scaling": jobs.scaling, "recompute": jobs.recompute, "core": 1.0 * jobs.recompute_attention,
        "peak": octaves(jobs.peak_low_flops_per_s), "memory": octaves(jobs.memory_bytes_per_s),
        "network": octaves(jobs.nic_bytes_per_s), "odd_head": 1.0 * (size("qk_dim") % 8 > 0),
        "slow_softmax": of_block([slow_softmax(block, jobs) for block in jobs.blocks]),
        "frozen": 1.0 * jobs.frozen, "sequence_parallel": 1.0 * jobs.sequence_parallel, "release": jobs.release,
    }  # fmt: skip
    network = network_octaves(jobs.nic_bytes_per_s)
    return Places(
        np.char.add(np.char.add(np.char.add(jobs.stack, "\n"), jobs.hardware), network.astype(str)),
        *(
            np.stack([values[name] / unit for name, unit in units.items()], axis=1)
            for units in (MODEL, KERNELS, LAYOUT)
        ),
    )


def network_octaves(nic_bytes_per_s: Column) -> Column:
    """The network of a cluster: rates that differ by less than a tenth of an octave are the same."""
    import numpy as np

    found: Column = np.log2(np.maximum(nic_bytes_per_s, 2.0**-30)).round(1)
    return found


def covariance(a: Places, b: Places, scales: Scales, own: tuple[Matrix, Matrix]) -> Matrix:
    """[a, b] covariance of the correction, without noise.

    `own`: [a, names] and [b, names], change of the logarithm with coefficients that are a cluster's own.
    """
    same = a.cluster[:, None] == b.cluster[None, :]
    model = _squares(a.model, b.model)
    kernels = model + _squares(a.kernels, b.kernels)
    layout = kernels + _squares(a.layout, b.layout)
    total: Matrix = same * (
        scales.stack**2
        + scales.model**2 * _matern(model)
        + scales.kernels**2 * _matern(kernels)
        + scales.layout**2 * _matern(layout)
        + own[0] @ own[1].T
    )
    return total


def nearness(a: Places, b: Places) -> Matrix:
    """[a, b] how alike the models are, 0 to 1; 0 where the cluster differs."""
    near: Matrix = (a.cluster[:, None] == b.cluster[None, :]) * _matern(_squares(a.model, b.model))
    return near


def _squares(a: Matrix, b: Matrix) -> Matrix:
    import numpy as np

    squares: Matrix = np.maximum((a * a).sum(1)[:, None] + (b * b).sum(1)[None, :] - 2 * a @ b.T, 0.0)
    return squares


def _matern(squares: Matrix) -> Matrix:
    import numpy as np

    distance = np.sqrt(squares)
    near: Matrix = (1 + distance) * np.exp(-distance)
    return near

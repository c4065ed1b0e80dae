"""How a step is computed on each rank, beside how the job is cut."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from fivefold.core.experts import ExpertsConfig
from fivefold.core.layout import Layout
from fivefold.core.loss_scale import LossScaleConfig
from fivefold.core.optimizer import OptimizerConfig
from fivefold.core.recompute import Recompute, RecomputeText
from fivefold.core.router import RouterConfig
from fivefold.core.value import Value
from fivefold.core.workload import Workload
from fivefold.errors import WorkloadError

DType = Literal["float32", "float64", "bfloat16", "float16"]
ITEMSIZE_BYTES: dict[DType, int] = {"float32": 4, "float64": 8, "bfloat16": 2, "float16": 2}
LARGEST_NUMBER: dict[DType, float] = {
    "float32": 3.4028234663852886e38, "float64": 1.7976931348623157e308,
    "bfloat16": 3.3895313892515355e38, "float16": 65504.0,
}  # fmt: skip
"""Beyond, a number of this format is infinite."""

MOST_MICROBATCHES = 10_000
"""In a step of one data rank. A pipeline lists every action of every microbatch, and real jobs have some hundreds."""

MOST_MIB = 1e6
"""Of a size in MiB: 1 TiB, more than a device or a text corpus in memory has."""


class Execution(Value):
    """Microbatch, number format, recompute and optimizer."""

    micro_batch: int = Field(default=1, gt=0)
    """Sequences that one rank computes at a time."""
    dtype: DType = "float32"
    """Parameters and compute. 16 bits keep float32 master weights beside them, which the optimizer updates."""
    recompute: RecomputeText = "none"
    """Activations that are computed again in backward rather than kept: `none`, `attention+mlp`, `full`, `full/2`."""
    optimizer: OptimizerConfig = OptimizerConfig()
    router: RouterConfig = RouterConfig()
    """Losses and balancing of a mixture of experts; nothing in other models."""
    experts: ExpertsConfig = ExpertsConfig()
    """When experts are placed anew on the ranks that share them, and how many copies they have."""
    loss_scale: LossScaleConfig | None = None
    """Of the gradients; float16 always has one (`scaling`), other formats need none."""
    bucket_mib: float = Field(default=25.0, gt=0, le=MOST_MIB)
    """Gradients are reduced over data ranks in buckets of about so many MiB."""
    zero3_gather: Literal["microbatch", "step"] = "microbatch"
    """ZeRO-3: gather parameters for each forward and backward, or once a step and keep them until its end."""
    actions: tuple[str, ...] | None = None
    """The computations of a `custom` pipeline schedule, a line for each pipeline rank: `0F0, 0F1, 0B0, 0B1`."""

    @property
    def recomputed(self) -> Recompute:
        return Recompute.parse(self.recompute)

    @property
    def itemsize_bytes(self) -> int:
        return ITEMSIZE_BYTES[self.dtype]

    @property
    def grad_dtype(self) -> DType:
        """Gradients are accumulated, reduced and applied in it: at least float32 (Micikevicius et al. 2018, 3.1)."""
        return "float32" if self.itemsize_bytes == 2 else self.dtype

    @property
    def scaling(self) -> LossScaleConfig | None:
        """The loss scale in use, if there is one."""
        return self.loss_scale or (LossScaleConfig() if self.dtype == "float16" else None)

    @property
    def grad_itemsize_bytes(self) -> int:
        return ITEMSIZE_BYTES[self.grad_dtype]


def microbatches(workload: Workload, layout: Layout, execution: Execution) -> int:
    """Microbatches of one data-parallel replica in one step.

    Formula: global_batch / (dp * micro_batch). Context-parallel ranks share the same sequences.
    Raises:  WorkloadError with the nearest legal global batches where that is not whole, and where it is so many
             microbatches that a step would never end.
    """
    at_a_time = layout.dp * execution.micro_batch
    count, rest = divmod(workload.global_batch, at_a_time)
    if rest:
        legal = [n * at_a_time for n in (count, count + 1) if n]
        raise WorkloadError(
            f"global batch {workload.global_batch} is not a multiple of dp{layout.dp} x micro-batch "
            f"{execution.micro_batch} = {at_a_time}; nearest global batch: {' or '.join(map(str, legal))}"
        )
    if count > MOST_MICROBATCHES:
        raise WorkloadError(
            f"global batch {workload.global_batch} / (dp{layout.dp} x micro-batch {execution.micro_batch}) = {count} "
            f"microbatches in a step, at most {MOST_MICROBATCHES} are supported; nearest micro-batch: "
            f"{-(-count // MOST_MICROBATCHES) * execution.micro_batch} or more, or a smaller global batch"
        )
    return count

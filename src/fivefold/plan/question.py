"""What is asked of the planner: a model, a cluster, a step of training, and how it is computed."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from fivefold.core.cluster import Cluster, NodeKind
from fivefold.core.layout import Layout
from fivefold.core.model_spec import ModelSpec
from fivefold.errors import ClusterError, ConfigError, LayoutError
from fivefold.estimate.memory import USABLE, Job, Numerics, numerics
from fivefold.estimate.recompute import Recompute
from fivefold.estimate.stacks import DEFAULT, Stack, stack
from fivefold.plan import legality

Precision = Literal["bfloat16", "float16", "float32", "float8"]


MOST_LAYERS = 512
"""Four times as many as any known model has; the search takes longer with every way to cut them."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """Raises: ClusterError for a cluster whose nodes differ."""

    spec: ModelSpec
    cluster: Cluster
    """Complete (`catalog.clusters.complete`)."""
    seq_len: int
    global_batch: int
    """Sequences in a step."""
    precision: Precision = "bfloat16"
    grad_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Format in which gradients are kept and summed."""
    optimizer: Literal["adamw", "sgd"] = "adamw"
    framework: str = DEFAULT
    """A stack of `estimate/stacks.yaml`."""
    imbalance: float = 1.0
    offload: bool = False
    """Whether the optimizer's states are in host memory."""

    def __post_init__(self) -> None:
        if not self.cluster.homogeneous:
            raise ClusterError(
                f"nodes of {self.cluster} differ; plan for those of one kind: a layout takes its devices to be alike"
            )
        if self.node.memory_bytes is None:
            raise ClusterError(
                f"{self.cluster} has no stated memory; plan for devices of the catalog or a cluster file"
            )
        if self.spec.layers > MOST_LAYERS:
            raise ConfigError(
                f"{self.spec.name} has {self.spec.layers:,} layers; models of at most {MOST_LAYERS} are planned for"
            )
        if not 1 <= self.imbalance <= 1000:
            raise ConfigError(
                f"imbalance {self.imbalance} is the fullest expert rank over the mean: at least 1"
            )

    @property
    def node(self) -> NodeKind:
        return self.cluster.nodes[0]

    @property
    def devices(self) -> int:
        return self.cluster.devices

    @property
    def domain(self) -> int:
        """Devices that reach each other through the device link."""
        return self.node.devices_per_node

    @property
    def several_nodes(self) -> bool:
        """Whether anything is sent beyond the device link."""
        return self.devices > self.domain

    @property
    def capacity_bytes(self) -> float:
        """What a program can get of one device's memory."""
        assert self.node.memory_bytes is not None
        return self.node.memory_bytes * USABLE

    @cached_property
    def stack(self) -> Stack:
        return stack(self.framework)

    @cached_property
    def numerics(self) -> Numerics:
        precision = "bfloat16" if self.precision == "float8" else self.precision
        return numerics(precision, self.grad_dtype, self.optimizer, self.stack)

    def check(self, layout: Layout, micro_batch: int) -> None:
        """Raises: LayoutError or WorkloadError for a layout that cannot be formed, or leaves devices over."""
        if layout.schedule == "custom":
            raise LayoutError(
                f"{layout}: a list of actions of your own has no estimate; take 1f1b, gpipe, bfs, zbh1, zbv, dualpipev"
            )
        self.check_devices(layout, micro_batch)
        legality.check(
            self.spec, layout, seq_len=self.seq_len, global_batch=self.global_batch, micro_batch=micro_batch
        )

    def check_devices(self, layout: Layout, micro_batch: int) -> None:
        """Raises: LayoutError for a layout that leaves devices over or needs more, with the nearest that does not."""
        legality.check_devices(
            layout, self.devices, str(self.cluster), lambda one: self.why_not(one, micro_batch) is None
        )

    def why_not(self, layout: Layout, micro_batch: int) -> str | None:
        """The rule that forbids a layout, in one line; None where it can be formed, on however many devices."""
        return legality.why_not(
            self.spec, layout, seq_len=self.seq_len, global_batch=self.global_batch, micro_batch=micro_batch
        )

    def memory_job(self, layout: Layout, micro_batch: int, recompute: Recompute) -> Job:
        """What memory follows from, for one layout."""
        return Job(
            spec=self.spec, layout=layout, seq_len=self.seq_len, micro_batch=micro_batch,
            microbatches=max(1, self.global_batch // (layout.dp * micro_batch)), recompute=recompute,
            numerics=self.numerics, stack=self.stack, imbalance=self.imbalance, offload=self.offload,
        )  # fmt: skip

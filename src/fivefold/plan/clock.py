"""Step time of the points of a lattice, and of single choices: the same functions (`estimate.step`) on other arrays."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fivefold.core.cluster import Precision
from fivefold.core.layout import Layout
from fivefold.core.model_spec import AttentionSpec, BlockSpec, GatedDeltaSpec, MLASpec, MLPSpec
from fivefold.errors import ClusterError
from fivefold.estimate.memory import kinds_of
from fivefold.estimate.recompute import Recompute
from fivefold.estimate.stacks import DEFAULT
from fivefold.plan.lattice import Group, Lattice, group_layout, recomputed_share
from fivefold.plan.legality import SPLIT_BACKWARD
from fivefold.plan.question import Question
from fivefold.plan.run_devices import FAMILIES, OTHER
from fivefold.strategies.pipeline.placement import stage_layers

if TYPE_CHECKING:
    from fivefold.estimate.coefficients import Coefficients
    from fivefold.estimate.jobs import Blocks, Jobs
    from fivefold.estimate.staged import Pipeline
    from fivefold.estimate.step import Layer, StepTimes
    from fivefold.plan.calibration import Calibration
    from fivefold.plan.taught import Taught

BITS = {"bfloat16": 16, "float16": 16, "float32": 32, "float8": 8}

SOFTWARE = {
    "standard": "megatron-2025", "megatron-core": "megatron-2025", "megatron-bridge": "megatron-2026b",
    "megatron-classic": "megatron-classic", "megatron-deepspeed": "megatron-classic", "fsdp": "fsdp-2026",
    "deepspeed": "deepspeed", "fivefold": "other",
}  # fmt: skip
"""Stack of memory -> software era of time."""
NOW = 2026.0
"""When the software of a question was released, unless measured runs say."""


def loaded(path: Path | None) -> Calibration | None:
    """The calibration in a file, if there is one. Raises: RecordError."""
    if path is None:
        return None
    from fivefold.plan.calibration import load

    return load(path)


@dataclass(frozen=True)
class Choice:
    """One answer: a layout, the sequences that a rank computes at a time, and what it computes again."""

    layout: Layout
    micro_batch: int
    recompute: Recompute


@dataclass(frozen=True)
class Clock:
    """Prices the layouts of one question."""

    question: Question
    calibration: Calibration | None = None
    """None: the coefficients that Fivefold comes with."""

    @property
    def coefficients(self) -> Coefficients:
        from fivefold.estimate.coefficients import shipped

        return self.calibration.coefficients if self.calibration else shipped()

    @cached_property
    def taught(self) -> Taught | None:
        """What measured runs of the same devices and framework are called; None: the calibration has none."""
        if self.calibration is None:
            return None
        from fivefold.plan.taught import taught

        q = self.question
        return taught(self.calibration, self._hardware, q.framework, self._nic if q.several_nodes else None)

    def calibrated(self) -> list[str]:
        """What the calibration knows of the question's cluster, in words."""
        if self.calibration is None:
            return []
        q = self.question
        if self.taught is None:
            framework = f" with {q.framework}" if q.framework != DEFAULT else ""
            return [
                f"the calibration has no run on {q.node.device}{framework}: its common coefficients hold at best"
            ]
        return [self.taught.sentence(q.node.device)]

    @property
    def _hardware(self) -> str:
        return FAMILIES.get(self.question.node.device, OTHER)

    @property
    def _nic(self) -> float:
        """Bytes/s between nodes of each device; where there is one node only, of its own links."""
        node = self.question.node
        return node.inter_node_bytes_per_s or node.intra_node_bytes_per_s or node.memory_bytes_per_s or 1.0

    def grid(self, lattice: Lattice, group: Group, option: Recompute, zero: Any) -> Any:
        """Seconds of a step at every point of a group; means nothing where a point is not legal.

        `zero`: the stages along the last axis, all of them or one: without ZeRO-3 fewer numbers are made.
        """
        from fivefold.estimate.step import OVERLAP, total_seconds

        base, c, layers = self._layers(lattice, option)
        data: dict[str, Any] = {
            "pp": self._number(group.pp),
            "dp": lattice.dp(group),
            "microbatches": lattice.microbatches(group),
            "chunks": self._number(group.chunks if group.schedule == "1f1b" else 1),
            "zero": zero,
            "bubble": self._bubble(base, layers, group.schedule),
            "overlap": self._number(OVERLAP.get(group.schedule, 0.0)),
            "placed": self._placed(group),
        }
        return total_seconds(layers, replace(base, **data), c)

    def _bubble(self, base: Jobs, layers: list[Layer], schedule: str) -> Any:
        """Share of the 1F1B bubble that a schedule leaves, with the means of all layers."""
        from fivefold.estimate.step import BUBBLE, split_bubble

        if schedule not in SPLIT_BACKWARD:
            return self._number(BUBBLE[schedule])
        F, B, W = (
            sum(block.count * part(layer) for block, layer in zip(base.blocks, layers))
            for part in (
                lambda one: one.forward,
                lambda one: one.backward,
                lambda one: one.backward * one.weights,
            )
        )
        return split_bubble(schedule, F, B - W, W)

    def _placed(self, group: Group) -> Any:
        """Layers of the first rank, the most of any between, and those of the last."""
        layout = group_layout(group)
        stages = stage_layers(self.question.spec, layout, self.question.seq_len)
        counts = [sum(len(stages[i]) for i in layout.virtual_stages_of(rank)) for rank in range(group.pp)]
        middle = max(counts[1:-1], default=0)
        return tuple(map(self._number, (counts[0], middle, counts[-1])))

    def times(self, choices: Sequence[Choice]) -> StepTimes:
        """The step of each choice, by term."""
        jobs = self.jobs(choices)
        return self.seconds(jobs, choices, self.coefficients.of(jobs))

    def seconds(self, jobs: Jobs, choices: Sequence[Choice], c: dict[str, Any]) -> StepTimes:
        """The step of each choice, by term, on devices and with coefficients that are given as columns."""
        from fivefold.estimate.staged import staged_times

        return staged_times(jobs, c, [self._pipeline(choice.layout) for choice in choices])

    def _pipeline(self, layout: Layout) -> Pipeline | None:
        """Which layers its stages hold; None where there is one stage."""
        from fivefold.estimate.staged import Pipeline

        if layout.pp == 1:
            return None
        key = layout.pp, layout.schedule, layout.chunks, layout.placement
        if key not in self._pipelines:
            kinds = kinds_of(self.question.spec)
            stages = stage_layers(self.question.spec, layout, self.question.seq_len)
            self._pipelines[key] = Pipeline(
                layout.schedule,
                layout.chunks,
                tuple(
                    tuple(sum(kinds.of_layer[i] == kind for i in stage) for kind in range(len(kinds.blocks)))
                    for stage in stages
                ),
                tuple(layout.virtual_stages_of(rank) for rank in range(layout.pp)),
            )
        return self._pipelines[key]

    @cached_property
    def _pipelines(self) -> dict[Any, Pipeline]:
        return {}

    def interval(self, choices: Sequence[Choice], times: StepTimes | None = None) -> tuple[Any, Any, Any]:
        """Seconds of a step: what is expected, the 10th and the 90th percentile; corrected where runs are near.

        `times`: those of the choices, where they are known.
        """
        jobs = self.jobs(choices)
        times = times or self.seconds(jobs, choices, self.coefficients.of(jobs))
        closed, low, high = self._closed(jobs)
        ratio = times.total / closed[0]
        return closed[1] * ratio, low * ratio, high * ratio

    def _closed(self, jobs: Jobs) -> tuple[tuple[Any, Any], Any, Any]:
        """In closed form: (seconds of the coefficients, corrected where runs are near), and the percentiles."""
        import numpy as np

        from fivefold.plan.uncorrected import TENTH, log_times, predict_uncorrected

        if self.calibration is None or self.calibration.fit is None:
            log, sigma = predict_uncorrected(jobs, self.coefficients)
            plain = log
        else:
            from fivefold.plan import fit

            log, sigma = fit.predict(jobs, self.calibration.fit)
            plain = log_times(jobs, self.coefficients)
        return (np.exp(plain), np.exp(log)), np.exp(log - TENTH * sigma), np.exp(log + TENTH * sigma)

    def timed(self, choices: Sequence[Choice]) -> list[tuple[float, Choice]]:
        """Each choice with its seconds by its timeline and the calibration."""
        return list(zip(self.interval(choices)[0].tolist(), choices)) if choices else []

    def jobs(self, choices: Sequence[Choice]) -> Jobs:
        """The choices as rows of jobs."""
        import numpy as np

        from fivefold.estimate.step import BUBBLE, OVERLAP

        q = self.question
        layouts = [choice.layout for choice in choices]

        def column(values: Iterable[Any]) -> Any:
            return np.array(list(values), dtype=np.float64)

        degrees = {
            name: column(getattr(layout, name) for layout in layouts)
            for name in ("dp", "tp", "pp", "cp", "ep", "etp", "zero")
        }
        shares = {
            option: recomputed_share(q.spec, option, q.seq_len)
            for option in {choice.recompute for choice in choices}
        }
        micro_batch = column(choice.micro_batch for choice in choices)
        jobs = self._jobs(
            **degrees,
            micro_batch=micro_batch,
            microbatches=q.global_batch / (degrees["dp"] * micro_batch),
            chunks=column(layout.chunks if layout.schedule == "1f1b" else 1 for layout in layouts),
            bubble=column(BUBBLE[SCHEDULE.get(layout.schedule, layout.schedule)] for layout in layouts),
            overlap=column(OVERLAP.get(layout.schedule, 0.0) for layout in layouts),
            sequence_parallel=np.array([layout.sequence_parallel for layout in layouts]),
            recompute=column(shares[choice.recompute] for choice in choices),
        )
        return _spread(jobs, len(choices))

    def _layers(self, lattice: Lattice, option: Recompute) -> tuple[Jobs, dict[str, Any], list[Layer]]:
        """Layers do not depend on the group: made once for each recompute."""
        from fivefold.estimate.step import layers_of

        known = self._made
        if option not in known:
            a, one = lattice.axes, self._number(1)
            jobs = self._jobs(
                tp=a["tp"], cp=a["cp"], ep=a["ep"], etp=a["etp"], micro_batch=a["micro_batch"], pp=one, dp=one,
                microbatches=one, chunks=one, zero=one, bubble=one, overlap=one,
                sequence_parallel=(lattice.sp > 0) & (a["tp"] > 1),
                recompute=self._number(recomputed_share(self.question.spec, option, self.question.seq_len)),
            )  # fmt: skip
            c = self.coefficients.of(jobs)
            known[option] = jobs, c, layers_of(jobs, c)
        return known[option]

    @cached_property
    def _made(self) -> dict[Recompute, tuple[Jobs, dict[str, Any], list[Layer]]]:
        return {}

    def _number(self, value: float) -> Any:
        import numpy as np

        return np.array([float(value)])

    def _jobs(self, **columns: Any) -> Jobs:
        import numpy as np

        from fivefold.estimate.jobs import Jobs

        q, number = self.question, self._number
        node = q.node
        peaks = node.peak_flops_per_s or {}
        half = next((peaks[name] for name in ("bfloat16", "float16") if name in peaks), None)
        if half is None or node.memory_bytes_per_s is None:
            raise ClusterError(
                f"{q.cluster} has no stated peak or bandwidth, so no step time follows; measure it"
            )
        low: Precision = {8: "float8", 16: "bfloat16", 32: "float32"}[BITS[q.precision]]  # type: ignore[assignment]
        taught = self.taught
        # on one node no network is used: that of the runs is as good
        nic = taught.nic_bytes_per_s if taught and not q.several_nodes else self._nic
        model = {
            "blocks": tuple(self._blocks(block) for block in dict.fromkeys(q.spec.blocks)),
            "hidden": number(q.spec.hidden), "vocab": number(q.spec.vocab), "tied": np.array([q.spec.tied_embeddings]),
            "frozen": np.array([False]), "seq_len": number(q.seq_len),
        }  # fmt: skip
        execution = {
            "bits": number(BITS[q.precision]), "scaling": number(1), "offload": np.array([q.offload]),
            "grad_bytes": number(4 if q.grad_dtype == "float32" else 2), "recompute_attention": np.array([False]),
            "fused_attention": np.array([q.stack.attention != "unfused"]), "one_copy": np.array([True]),
            "software": np.array([taught.software if taught else SOFTWARE[q.framework]]),
            "release": number(taught.release if taught else NOW),
            "stack": np.array([taught.stack if taught else q.framework]),
        }  # fmt: skip
        device = {
            "peak_flops_per_s": number(half), "peak_low_flops_per_s": number(peaks.get(low, half)),
            "memory_bytes_per_s": number(node.memory_bytes_per_s),
            "link_bytes_per_s": number(node.intra_node_bytes_per_s or nic), "nic_bytes_per_s": number(nic),
            "domain": number(q.domain), "hardware": np.array([self._hardware]),
        }  # fmt: skip
        return Jobs(**model, **execution, **device, **columns)

    def _blocks(self, block: BlockSpec) -> Blocks:
        from fivefold.estimate.jobs import Blocks

        q = self.question
        sizes = {**_attention_sizes(block, q.seq_len), **_feed_sizes(block)}
        count = sum(other == block for other in q.spec.blocks)
        return Blocks(count=self._number(count), **{name: self._number(size) for name, size in sizes.items()})


SCHEDULE = {"zbh1": "zb1p"}
"""Names of schedules in `step.BUBBLE` that differ from a layout's."""


def _attention_sizes(block: BlockSpec, seq_len: int) -> dict[str, float]:
    a = block.attention
    if isinstance(a, AttentionSpec):
        window = min(seq_len, a.window or seq_len, a.chunk or seq_len)
        return {
            "heads": a.heads, "kv_heads": a.kv_heads, "qk_dim": a.head_dim, "v_dim": a.head_dim, "q_rank": 0,
            "kv_rank": 0, "rope_dim": 0, "state": 0, "window": window,
        }  # fmt: skip
    if isinstance(a, MLASpec):
        return {
            "heads": a.heads, "kv_heads": a.heads, "qk_dim": a.nope_dim + a.rope_dim, "v_dim": a.value_dim,
            "q_rank": a.q_rank or 0, "kv_rank": a.kv_rank, "rope_dim": a.rope_dim, "state": 0,
            "window": seq_len,
        }  # fmt: skip
    assert isinstance(a, GatedDeltaSpec)
    # As attention to as many keys as a chunk has: its cost does not grow with the sequence.
    return {
        "heads": a.value_heads, "kv_heads": a.key_heads, "qk_dim": a.key_dim, "v_dim": a.value_dim, "q_rank": 0,
        "kv_rank": 0, "rope_dim": 0, "state": 0, "window": min(seq_len, 3 * a.key_dim),
    }  # fmt: skip


def _feed_sizes(block: BlockSpec) -> dict[str, float]:
    m = block.mlp
    gated = 2 if m.gated else 1
    if isinstance(m, MLPSpec):
        return {"ffn": m.ffn, "gated": gated, "experts": 0, "top_k": 0, "moe_ffn": 0, "latent": 0}
    return {
        "ffn": m.shared_ffn, "gated": gated, "experts": m.experts, "top_k": m.top_k, "moe_ffn": m.ffn, "latent": 0,
    }  # fmt: skip


def _spread(jobs: Jobs, n: int) -> Jobs:
    """Every column with n entries."""
    import numpy as np

    def wide(value: Any) -> Any:
        return np.broadcast_to(value, (n,)) if len(value) != n else value

    return replace(
        jobs,
        blocks=tuple(
            replace(b, **{f.name: wide(getattr(b, f.name)) for f in fields(b)}) for b in jobs.blocks
        ),
        **{f.name: wide(getattr(jobs, f.name)) for f in fields(jobs) if f.name not in ("blocks", "placed")},
    )

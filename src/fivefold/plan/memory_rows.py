"""Rows of a runs table as jobs whose memory can be estimated. Nothing that was measured takes part in a job.

What a row leaves out is taken as its framework does it: float32 gradients in Megatron and in DeepSpeed's bfloat16
optimizer, 16-bit ones in its float16 optimizer; sequence parallelism with tp in every framework since 2024.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from itertools import accumulate, pairwise
from typing import Any

from fivefold.catalog.clusters import resolve
from fivefold.core.layout import Layout
from fivefold.core.model_spec import AttentionSpec, BlockSpec, MLASpec, MLPSpec, ModelSpec, MoESpec
from fivefold.errors import ConfigError, UserError
from fivefold.estimate import stacks
from fivefold.estimate.memory import USABLE, Job, Measure, MemoryEstimate, estimate, numerics
from fivefold.estimate.recompute import Recompute
from fivefold.plan.completed import completed
from fivefold.strategies.pipeline.placement import even_counts
from fivefold.units import GIB

Row = Mapping[str, Any]

VOCABULARY = 50_304
"""Where a row does not say: that of GPT-2, padded to a multiple of 128."""

NEEDED = ("layers", "hidden", "heads", "seq_len", "num_gpus")

_SCHEDULES = (("zb-v", "zbv"), ("zbv", "zbv"), ("dualpipe", "dualpipev"), ("zb", "zbh1"), ("gpipe", "gpipe"))


def job_of_row(row: Row) -> Job | str:
    """The job of a row, or in one line why it has none."""
    row = completed(row)
    if row.get("phase") is not None or row.get("kind") == "inference":
        return "an inference run"
    if "lora" in str(row.get("task") or "").lower():
        return "a run that trains adapters only"
    if row.get("mamba_layers"):
        return "a model with state-space layers, whose memory is not estimated"
    missing = [name for name in NEEDED if not row.get(name)]
    if not row.get("micro_batch") and not (row.get("global_batch") and row.get("num_microbatches")):
        missing.append("micro_batch")
    if missing:
        return f"does not say {', '.join(missing)}"
    try:
        return _job(row)
    except UserError as error:
        return str(error)


def predicted_gib(row: Row) -> float | str:
    """Peak memory of a row in GiB, in the measure that its own peak was taken in; or why there is none."""
    job = job_of_row(row)
    if isinstance(job, str):
        return job
    try:
        return peak_gib(row, estimate(job))
    except UserError as error:
        return str(error)


def measured_gib(row: Row) -> float | None:
    """What was measured: a peak, or states and activations; None where nothing was, or the run ran out of memory."""
    if row.get("oom"):
        return None
    if row.get("peak_mem_gib"):
        return float(row["peak_mem_gib"])
    states, activations = row.get("mem_static_gib"), row.get("mem_act_gib")
    return float(states + activations) if states and activations else None


def fits(row: Row) -> str | None:
    """Whether a row with a label (`oom`) fits its device: yes, no, or unsure. None: no label, or nothing follows.

    A run that ran out of memory and yet lists its peak says nothing: that is not what it would have needed.
    """
    if row.get("oom") is None or (row["oom"] and row.get("peak_mem_gib")):
        return None
    job = job_of_row(row)
    if isinstance(job, str):
        return None
    try:
        capacity = resolve(f"8 {row.get('gpu')}").nodes[0].memory_bytes or 0
        return estimate(job).fits(capacity * USABLE)
    except UserError:
        return None


def peak_gib(row: Row, memory: MemoryEstimate) -> float:
    """Of the last rank where the row says so, else of the fullest."""
    measure = measure_of(row)
    ranks = memory.ranks[-1:] if "last" in str(row.get("peak_mem_rank") or "").lower() else memory.ranks
    return float(max(rank.total(measure) for rank in ranks)) / GIB


def measure_of(row: Row) -> Measure:
    """What `peak_mem_kind` names: bytes in use, bytes that the allocator holds, or all of the device's."""
    kind = str(row.get("peak_mem_kind") or "").lower()
    return (
        "reserved" if "reserved" in kind else "device" if "smi" in kind or "device" in kind else "allocated"
    )


def recompute_of(text: str, framework: str) -> Recompute:
    """The recompute that a row's words name: our own, or the words of Megatron or of torchtitan."""
    words = text.lower()
    with contextlib.suppress(ConfigError):
        return Recompute.parse(words)
    if words.startswith("full"):
        return Recompute(("full",))
    if not words.startswith("selective"):
        return Recompute()
    if "titan" in framework.lower():
        return Recompute(("ops",))
    named = words.partition(":")[2]
    parts = [ours for theirs, ours in (("core_attn", "core"), ("mlp", "mlp")) if theirs in named]
    whole_moe = "moe" in named.replace("[", " ").replace(",", " ").split()
    parts += ["moe"] if whole_moe else []
    return Recompute(tuple(parts) or ("core",) if not named or parts else ("none",))


def spread(layers: int, stages: int) -> tuple[range, ...]:
    """Layers of each virtual stage: alike where they divide; else embedding and head count as a layer where that does.

    Source: Megatron-Core's `account_for_embedding_in_pipeline_split`; BLOOM, arXiv:2211.05100, section 3.2; Qi et al.
            2023, arXiv:2401.10241, section 5.1.
    """
    counts = even_counts(layers, stages)
    if layers % stages and (layers + 2) % stages == 0:
        each = (layers + 2) // stages
        counts = [each - (stage == 0) - (stage == stages - 1) for stage in range(stages)]
    return tuple(range(a, b) for a, b in pairwise([0, *accumulate(counts)]))


def _job(row: Row) -> Job:
    framework = str(row.get("framework") or "")
    stack = stacks.of_framework(framework, str(row.get("framework_version") or ""))
    backend = str(row.get("attention_backend") or "").lower()
    if backend:
        stack = stack.replace(attention="unfused" if "unfused" in backend or "local" in backend else "flash")
    if any(word in framework.lower() for word in ("liger", "trl")):  # their losses never hold all logits
        stack = stack.replace(logit_bytes=0)
    layout = _layout(row, modern=stack.name not in ("megatron-classic", "megatron-deepspeed"))
    precision = "float16" if str(row.get("precision") or "").lower().startswith("fp16 ") else "bfloat16"
    recompute = recompute_of(str(row.get("recompute") or "none"), framework)
    micro_batch = int(row["micro_batch"])
    count = (
        row.get("num_microbatches")
        or (row.get("global_batch") or layout.dp) // (layout.dp * micro_batch)
        or 1
    )
    return Job(
        spec=spec_of_row(row),
        layout=layout,
        seq_len=int(row["seq_len"]),
        micro_batch=micro_batch,
        microbatches=int(count),
        recompute=recompute,
        numerics=numerics(precision, _grad_dtype(row, stack, precision), "adamw", stack),
        stack=stack,
        offload="optimizer" in str(row.get("offload") or ""),
        offload_activations="offload" in str(row.get("recompute") or "").lower(),
        in_flight=2.0 if "2p" in str(row.get("pp_schedule") or "").lower() else 1.0,
        stages=spread(int(row["layers"]), layout.stages),
    )


def _grad_dtype(row: Row, stack: stacks.Stack, precision: str) -> str:
    said = f"{row.get('grad_accum_dtype') or ''} {row.get('precision') or ''}".lower()
    if "fp32" in said:
        return "float32"
    if row.get("grad_accum_dtype"):
        return "bfloat16"
    if stack.name == "megatron-deepspeed":
        return "bfloat16" if precision == "float16" else "float32"
    return "float32" if stack.name in ("megatron-core", "megatron-classic") else "bfloat16"


def _layout(row: Row, *, modern: bool) -> Layout:
    tp, pp, cp = int(row.get("tp") or 1), int(row.get("pp") or 1), int(row.get("cp") or 1)
    dp = int(row["num_gpus"]) // (tp * pp * cp)
    words = str(row.get("pp_schedule") or "").lower()
    schedule: Any = next((ours for theirs, ours in _SCHEDULES if words.startswith(theirs)), "1f1b")
    chunks = int(row.get("vpp") or 1) if schedule == "1f1b" and pp > 1 else None
    sp = row.get("sequence_parallel")
    options: dict[str, Any] = {"schedule": schedule} if pp > 1 else {}
    if chunks:
        options["chunks"] = chunks
    ep = int(row.get("ep") or 1)
    etp = int(row.get("etp") or (tp if row.get("experts") and dp * cp % ep == 0 else 1))
    return Layout(
        dp=dp, tp=tp, pp=pp, cp=cp, ep=ep, etp=etp if row.get("experts") else 1,
        zero=3 if row.get("fsdp") else int(row.get("zero_stage") or 0),
        sp=bool(sp) if sp is not None else modern, **options,
    )  # fmt: skip


def spec_of_row(row: Row) -> ModelSpec:
    """The model of a row."""
    hidden, heads = int(row["hidden"]), int(row["heads"])
    gated = bool(row.get("gated_mlp"))
    attention: AttentionSpec | MLASpec
    if row.get("mla_kv_lora_rank"):
        attention = MLASpec(
            heads=heads, q_rank=row.get("mla_q_lora_rank") or None, kv_rank=row["mla_kv_lora_rank"],
            nope_dim=row.get("mla_qk_nope_dim") or 128, rope_dim=row.get("mla_qk_rope_dim") or 64,
            value_dim=row.get("mla_v_dim") or 128,
        )  # fmt: skip
    else:
        attention = AttentionSpec(
            heads=heads,
            kv_heads=row.get("kv_heads") or heads,
            head_dim=row.get("head_dim") or hidden // heads,
        )
    ffn = row.get("ffn_hidden") or 4 * hidden
    dense = BlockSpec(attention=attention, mlp=MLPSpec(ffn=ffn, gated=gated))
    blocks = [dense] * int(row["layers"])
    if row.get("experts"):
        width = row.get("moe_ffn_hidden") or ffn
        shared = row.get("shared_expert_ffn_hidden") or (row.get("shared_experts") or 0) * width
        routed = BlockSpec(
            attention=attention,
            mlp=MoESpec(
                experts=row["experts"], top_k=row.get("top_k") or 1, ffn=width, shared_ffn=shared, gated=gated
            ),
        )
        first = int(row.get("dense_layers") or 0)
        blocks = [dense] * first + [routed] * (len(blocks) - first)
    return ModelSpec(
        name=str(row.get("model_name") or "a row"), hidden=hidden, vocab=int(row.get("vocab") or VOCABULARY),
        blocks=tuple(blocks), tied_embeddings=bool(row.get("tied_embeddings")), norm="rms" if gated else "layer",
    )  # fmt: skip

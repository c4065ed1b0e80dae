"""Rows of a runs table as jobs that can be priced, and what was measured of them as seconds of a step."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fivefold.errors import ClusterError
from fivefold.estimate.software import FIRST_YEAR, era, release_year
from fivefold.estimate.step import BUBBLE, OVERLAP
from fivefold.plan.completed import completed
from fivefold.plan.run_devices import hardware
from fivefold.plan.runs_table import Row
from fivefold.units import TERA

if TYPE_CHECKING:
    from fivefold.estimate.jobs import Column, Jobs

VOCABULARY = 51_200
"""Where a table does not say: that of GPT-2, padded as Megatron-LM does."""


@dataclass(frozen=True)
class Priced:
    """Rows that can be priced, their jobs, and those that cannot with the reason."""

    rows: list[Row]
    jobs: Jobs
    measured_s: Column
    """NaN where no time was measured."""
    skipped: list[tuple[Row, str]]


def price(rows: list[Row]) -> Priced:
    """Make jobs of all rows that say enough. Nothing that was measured takes part in a job."""
    import numpy as np

    from fivefold.estimate.jobs import Blocks, Jobs, columns

    kept: list[Row] = []
    jobs: list[dict[str, Any]] = []
    blocks: list[tuple[dict[str, Any], ...]] = []
    measured: list[float] = []
    skipped: list[tuple[Row, str]] = []
    for given in rows:
        row = Row(given.line, completed(given.values))
        reason = _unpriceable(row)
        if reason is None:
            try:
                job = _job(row)
                parts = _blocks(row)
            except _Unpriced as error:
                reason = str(error)
        if reason is not None:
            skipped.append((given, reason))
            continue
        kept.append(given)
        jobs.append(job)
        blocks.append(parts)
        measured.append(_measured_s(row, job))
    kinds = [list(kind) for kind in zip(*blocks)]
    made = tuple(
        columns(kind, Blocks)
        for number, kind in enumerate(kinds)
        if number == 0 or any(b["count"] for b in kind)
    )
    return Priced(kept, columns(jobs, Jobs, blocks=made), np.array(measured, dtype=float), skipped)


class _Unpriced(Exception):
    """Why a row cannot be priced."""


NEEDED = ("layers", "hidden", "heads", "seq_len", "gpu", "num_gpus")


def _unpriceable(row: Row) -> str | None:
    if row.phase is not None or row.kind == "inference":
        return "an inference run: it has no training step"
    missing = [name for name in NEEDED if row.values.get(name) is None]
    if missing:
        return f"does not say {', '.join(missing)}"
    return None


def _blocks(row: Row) -> tuple[dict[str, Any], ...]:
    """Dense and routed layers of the model, and the attention and state-space layers of a hybrid one."""
    heads = row.heads
    head_dim = row.head_dim or row.hidden / heads
    mla = row.mla_kv_lora_rank or 0
    gated = 2.0 if row.gated_mlp else 1.0
    attention = {
        "heads": heads,
        "kv_heads": row.kv_heads or heads,
        "qk_dim": (row.mla_qk_nope_dim or 128) + (row.mla_qk_rope_dim or 64) if mla else head_dim,
        "v_dim": (row.mla_v_dim or 128) if mla else head_dim,
        "q_rank": row.mla_q_lora_rank or 0 if mla else 0,
        "kv_rank": mla,
        "rope_dim": (row.mla_qk_rope_dim or 64) if mla else 0,
        "state": 0,
        "window": row.seq_len,
        "gated": gated,
    }
    routed = row.experts or 0
    first = min(row.dense_layers or 0, row.layers) if routed else row.layers
    none = {"experts": 0, "top_k": 0, "moe_ffn": 0, "latent": 0}
    ffn = row.ffn_hidden or 4 * row.hidden
    dense = {**attention, **none, "count": first, "ffn": ffn}
    shared = row.shared_expert_ffn_hidden
    if shared is None:
        shared = (row.shared_experts or 0) * (row.moe_ffn_hidden or 0)
    alone = (row.attention_layers or 0, row.mamba_layers or 0)
    if sum(alone) > row.layers - first:
        raise _Unpriced(
            f"{row.layers} layers cannot hold {alone[0]} of attention and {alone[1]} state-space ones"
        )
    bare = (
        {**attention, "heads": 0, "kv_heads": 0, "qk_dim": 0, "v_dim": 0, "window": 1}
        if any(alone)
        else attention
    )
    moe = {
        **bare, "count": row.layers - first - sum(alone), "ffn": shared, "experts": routed,
        "top_k": row.top_k or min(routed, 1), "moe_ffn": row.moe_ffn_hidden or (ffn if routed else 0),
        "latent": row.moe_latent or 0,
    }  # fmt: skip
    nothing = {**none, "ffn": 0}
    return (
        dense,
        moe,
        {**attention, **nothing, "count": alone[0]},
        {**attention, **nothing, **_state_space(row), "count": alone[1]},
    )


def _state_space(row: Row) -> dict[str, Any]:
    """Mamba-2 as attention whose maps have the same sizes: [D -> 2 I + 2 G N + H] and [I -> D], I = H P.

    Its core is that of a chunk of 128 tokens: 2 T H P (C/2 + 2 N) FLOPs are those of C/4 + N keys.
    Source: Dao and Gu 2024, arXiv:2405.21060, section 6 (matrices within chunks, states between them).
    """
    heads, size, state = row.mamba_heads or 0, row.mamba_head_dim or 64, row.mamba_state or 128
    rest = heads * size + 2 * (row.mamba_groups or 1) * state + heads
    return {
        "heads": heads, "kv_heads": rest / (2 * size), "qk_dim": size, "v_dim": size, "kv_rank": 0, "q_rank": 0,
        "rope_dim": 0, "state": state, "window": min(row.seq_len, 32 + state),
    }  # fmt: skip


def bits(precision: str) -> int:
    """Bits of the operands of linear maps: `MXFP8` -> 8, `NVFP4` -> 4, else 16."""
    text = precision.lower()
    return 4 if "fp4" in text else 8 if "fp8" in text or "float8" in text else 16


def scaling(precision: str) -> float:
    """How finely 8-bit operands are scaled: 0 a tensor at a time, 1 blocks of it, 2 rows."""
    text = precision.lower()
    return 2.0 if "row" in text else 1.0 if any(word in text for word in ("mx", "block", "finer")) else 0.0


SCHEDULES = (
    ("zb-2p", "zb2p"), ("zb2p", "zb2p"), ("zbb", "zb2p"), ("zb-1p", "zb1p"), ("zbh1", "zb1p"),
    ("zb-v", "zbv"), ("zbv", "zbv"),
    ("dualpipe", "dualpipev"), ("v-half", "vhalf"), ("v-min", "vmin"), ("gpipe", "gpipe"), ("bfs", "bfs"),
)  # fmt: skip


def schedule_of(text: str) -> str:
    """The schedule that a table's text names; 1F1B unless it is another."""
    return next((name for part, name in SCHEDULES if part in text.lower()), "1f1b")


def recompute_of(text: str, layers: int) -> tuple[float, bool]:
    """(share of layers computed again in full, whether the attention core is)."""
    words = text.lower()
    if words.startswith("full"):
        if every := re.fullmatch(r"full/([1-9]\d{0,3})", words):  # our own word for every k-th layer
            return len(range(0, layers, int(every[1]))) / layers, False
        match = re.search(r"full\D*?(\d+) layers", words)
        return (min(1.0, int(match[1]) / layers) if match else 1.0), False
    if words.startswith("selective"):
        named = words.partition(":")[2]
        return 0.0, "core_attn" in named or "attention core" in words or not named
    if "attention" in words.split("+"):
        return 0.0, True
    return 0.0, False


def _job(row: Row) -> dict[str, Any]:
    tp, pp, cp = row.tp or 1, row.pp or 1, row.cp or 1
    if row.num_gpus % (tp * pp * cp):
        raise _Unpriced(f"{row.num_gpus} GPUs are no multiple of tp{tp} x pp{pp} x cp{cp}")
    dp = row.num_gpus // (tp * pp * cp)
    precision = row.precision or ""
    operand = bits(precision)
    try:
        device = hardware(row.gpu, operand, row.interconnect or "", row.gpus_per_node)
    except ClusterError as error:
        raise _Unpriced(str(error)) from None
    year = release_year(row.framework or "", row.framework_version or "") or FIRST_YEAR.get(
        device.family, 2025.0
    )
    software = era(row.framework or "", year)
    megatron = software.startswith("megatron")
    ep = row.ep or 1
    etp = row.etp or (tp if row.experts and megatron and (dp * cp) % ep == 0 else 1)
    if (dp * cp * tp) % (ep * etp):
        raise _Unpriced(f"ep{ep} x etp{etp} does not divide dp{dp} x cp{cp} x tp{tp}")
    micro_batch, count = _batches(row, dp)
    schedule = schedule_of(row.pp_schedule or "")
    again, attention_again = recompute_of(row.recompute or "none", row.layers)
    zero = row.zero_stage
    if zero is None:
        zero = 3 if row.fsdp else 1 if megatron and software != "megatron-classic" else 0
    grads = row.grad_accum_dtype or (
        "bf16" if software in ("fsdp", "deepspeed", "deepspeed-2021") else "fp32"
    )
    backend = (row.attention_backend or "").lower()
    return {
        "hidden": row.hidden, "vocab": row.vocab or VOCABULARY, "tied": bool(row.tied_embeddings),
        "frozen": "lora" in (row.task or "").lower(),
        "seq_len": row.seq_len, "micro_batch": micro_batch, "microbatches": count,
        "tp": tp, "pp": pp, "dp": dp, "cp": cp, "ep": ep, "etp": etp,
        "chunks": _chunks(row) if schedule == "1f1b" else 1,
        "zero": zero,
        "sequence_parallel": tp > 1 and _sequence_parallel(row, software),
        "bubble": BUBBLE[schedule], "overlap": OVERLAP.get(schedule, 0.0),
        "bits": operand, "scaling": scaling(precision),
        "grad_bytes": 4 if "32" in grads else 2,
        "recompute": again, "recompute_attention": attention_again,
        "fused_attention": "unfused" not in backend if backend else software != "megatron-classic",
        "one_copy": software not in ("megatron-classic", "megatron-core", "fsdp", "deepspeed", "deepspeed-2021"),
        "release": year,
        "offload": "optimizer" in (row.offload or ""),
        "peak_flops_per_s": device.peak_flops_per_s, "peak_low_flops_per_s": device.peak_low_flops_per_s,
        "memory_bytes_per_s": device.memory_bytes_per_s, "link_bytes_per_s": device.link_bytes_per_s,
        "nic_bytes_per_s": device.nic_bytes_per_s, "domain": device.domain,
        "hardware": device.family, "software": software, "stack": row.framework or "",
    }  # fmt: skip


def _sequence_parallel(row: Row, software: str) -> bool:
    """As the row says; where it does not, on in every stack but the oldest."""
    return software != "megatron-classic" if row.sequence_parallel is None else bool(row.sequence_parallel)


def _chunks(row: Row) -> int:
    """Virtual stages of a rank; two where the schedule is called interleaved and nothing says how many."""
    return row.vpp or (2 if "interleaved" in (row.pp_schedule or "").lower() else 1)


def _batches(row: Row, dp: int) -> tuple[float, float]:
    """(micro-batch, microbatches). What is missing follows from the rest; a micro-batch that nothing gives is 1."""
    if row.micro_batch and row.num_microbatches:
        return row.micro_batch, row.num_microbatches
    if row.global_batch is None:
        if row.num_microbatches is None:
            raise _Unpriced("does not say global_batch or num_microbatches")
        return row.micro_batch or 1, row.num_microbatches
    if row.num_microbatches:
        return max(1.0, row.global_batch / (dp * row.num_microbatches)), row.num_microbatches
    micro_batch = row.micro_batch or 1
    return micro_batch, max(1.0, row.global_batch / (dp * micro_batch))


def _measured_s(row: Row, job: dict[str, Any]) -> float:
    """Seconds of a step as measured, from whichever column says it most directly. NaN: none does."""
    sequences = job["micro_batch"] * job["microbatches"] * job["dp"]
    tokens = sequences * row.seq_len
    if row.iter_time_s:
        return float(row.iter_time_s)
    if row.tokens_per_s_per_gpu:
        return float(tokens / (row.tokens_per_s_per_gpu * row.num_gpus))
    if row.samples_per_s_per_gpu:
        return float(sequences / (row.samples_per_s_per_gpu * row.num_gpus))
    flops = tokens / row.num_gpus * counted_flops(row, hardware="hardware" in (row.tflops_kind or ""))
    if row.tflops_per_gpu:
        return float(flops / (row.tflops_per_gpu * TERA))
    if row.mfu:
        return float(flops / (row.mfu * job["peak_flops_per_s"]))
    return float("nan")


def counted_flops(row: Row, *, hardware: bool) -> float:
    """FLOPs per token as the row's source counts them: attention full, causal or not at all; recompute if `hardware`.

    Source: Narayanan et al. 2021, arXiv:2104.04473, appendix A (full); Megatron-Core from 0.12 counts half (causal).
    """
    convention = (row.flops_convention or "full").lower()
    share = 0.0 if convention.startswith("none") else 0.5 if convention.startswith("causal") else 1.0
    layers = 0.0
    for block in _blocks(row):
        D, N = row.hidden, block["heads"]
        if block["kv_rank"]:
            nope = block["qk_dim"] - block["rope_dim"]
            q = N * block["qk_dim"]
            weights = (D * block["q_rank"] + block["q_rank"] * q) if block["q_rank"] else D * q
            weights += D * (block["kv_rank"] + block["rope_dim"])
            weights += block["kv_rank"] * N * (nope + block["v_dim"]) + N * block["v_dim"] * D
        else:
            weights = D * block["qk_dim"] * (2 * N + 2 * block["kv_heads"])
        routed = block["latent"] or D
        weights += (block["gated"] + 1) * (D * block["ffn"] + routed * block["top_k"] * block["moe_ffn"])
        weights += 2 * D * block["latent"]
        weights += D * block["experts"]
        core = share * block["window"] * N * (block["qk_dim"] + block["v_dim"])
        layers += block["count"] * 2 * (weights + core)
    again = 1 + (recompute_of(row.recompute or "none", row.layers)[0] / 3 if hardware else 0)
    return float(3 * (layers * again + 2 * row.hidden * (row.vocab or VOCABULARY)))

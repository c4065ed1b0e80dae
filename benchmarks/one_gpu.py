"""What one accelerator does: models of 1B (active) in bfloat16, and whether the numbers are those of the CPU.

    python benchmarks/one_gpu.py [--device cuda] [--compile] [--steps 12] [--peak-tflops 989.5] [--out FILE.json]

1  A tiny model in float32: the losses of three steps against the same steps on the CPU (1e-4: kernels differ in order).
2  The block kernel of ring attention at world size 1: forward and gradients in bfloat16 against float64 on the CPU.
3  A Llama of 1.2 billion parameters (hidden 2048, 16 layers, GQA 32/8, ffn 8192, vocabulary 128,256), sequence 4096:
   tokens/s, MFU and peak memory, with `--compile` each layer through torch.compile.
4  Experts of Qwen3-30B-A3B's layer (hidden 2048, 128 of width 768, 8 a token): forward and backward of their grouped
   product in bfloat16 against a loop over experts, seconds of both and the error of each against float32.
5  A mixture of 3.7 billion parameters of which 1.2 are active (16 experts of width 2048, 4 a token): as 3.

MFU: model FLOPs of forward and backward (causal, no recompute) over `--peak-tflops`, the dense bfloat16 peak of
the device (`src/fivefold/catalog/devices.yaml` lists some). Without an accelerator `--device cpu --small --length 128`
tries the script itself.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from fivefold.catalog.models import preset
from fivefold.core.cluster import Cluster
from fivefold.core.execution import DType, Execution
from fivefold.core.layout import Layout
from fivefold.core.model_counts import parameter_counts, training_flops
from fivefold.core.model_spec import AttentionSpec, BlockSpec, MLPSpec, ModelSpec, MoESpec
from fivefold.core.plan import Plan
from fivefold.core.workload import Workload
from fivefold.data.batches import SyntheticDataset
from fivefold.engine.engine import Engine
from fivefold.engine.feed import feed
from fivefold.nn.grouped import grouped_matmul
from fivefold.records.machine import versions
from fivefold.runtime.device import Device, device_kind, select_device
from fivefold.runtime.mesh import Mesh
from fivefold.strategies.context.blocks import Gradients, Merged, View
from fivefold.strategies.context.order import parts

ATTENTION = AttentionSpec(heads=32, kv_heads=8, head_dim=64)
LLAMA_1B = ModelSpec(
    name="llama-1b",
    hidden=2048,
    vocab=128_256,
    tied_embeddings=True,
    max_positions=8192,
    blocks=(BlockSpec(attention=ATTENTION, mlp=MLPSpec(ffn=8192)),) * 16,
)
MOE_1B = LLAMA_1B.replace(
    name="moe-1b-active",
    blocks=(BlockSpec(attention=ATTENTION, mlp=MoESpec(experts=16, top_k=4, ffn=2048)),) * 16,
)
QWEN3_30B = {"tokens": 8192, "experts": 128, "top_k": 8, "hidden": 2048, "ffn": 768}
SMALL_EXPERTS = {"tokens": 64, "experts": 8, "top_k": 2, "hidden": 64, "ffn": 32}
WARM_UP = 4


def plan_of(spec: ModelSpec, dtype: DType, *, rows: int, length: int) -> Plan:
    return Plan(
        model=spec,
        cluster=Cluster.parse("cpu"),
        workload=Workload(seq_len=length, global_batch=rows),
        layout=Layout(),
        execution=Execution(micro_batch=rows, dtype=dtype),
    )


def losses(device: Device, steps: int = 3) -> list[float]:
    """Of a tiny model in float32, without reduced-precision products."""
    torch.set_float32_matmul_precision("highest")
    spec = preset("tiny-llama")
    plan, data = plan_of(spec, "float32", rows=4, length=128), SyntheticDataset(spec.vocab, 128, seed=0)
    mesh = Mesh(plan.layout, 0, device)
    engine = Engine(plan, mesh, seed=0)
    return [engine.step(feed(data, plan, mesh, step), 1e-3).loss for step in range(steps)]


def attention(device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    """Output and gradients of causal attention by the blocks of ring attention, GQA 8/2, 256 tokens, head size 64."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 8, 256, 64), (2, 2, 256, 64), (2, 2, 256, 64), (2, 8, 256, 64))
    made = [torch.randn(shape, generator=generator).to(torch.bfloat16) for shape in shapes]
    q, k, v, grad = (x.to(device=device, dtype=dtype) for x in made)
    spans = (range(256),)
    here, view = parts(spans, spans, None, False), View(None, None, spans, spans, device)
    merged = Merged(q, v.shape[-1])
    merged.add(k, v, here, view)
    out = merged.out.to(dtype)
    dq = torch.zeros_like(merged.out)
    dkv = torch.zeros(2, *k.shape, dtype=dq.dtype, device=device)
    Gradients(q, out, merged.lse, grad, dq).add(k, v, (dkv[0], dkv[1]), here, view)
    return [x.double().cpu() for x in (out, dq, dkv[0], dkv[1])]


def attention_errors(device: Device) -> dict[str, float]:
    """Largest relative error against float64 on the CPU."""
    found, exact = attention(device.device, torch.bfloat16), attention(torch.device("cpu"), torch.float64)
    pairs = zip(("out", "dq", "dk", "dv"), found, exact, strict=True)
    return {name: float((a - b).abs().max() / b.abs().max()) for name, a, b in pairs}


def experts(device: Device, sizes: dict[str, int], steps: int) -> dict[str, float]:
    """One expert matrix over routed rows, forward and both gradients: grouped, and a product for each expert.

    Errors: the largest over output and gradients of max |a - b| / max |b| against the loop in float32.
    """
    generator = torch.Generator().manual_seed(0)
    chosen = torch.rand(sizes["tokens"], sizes["experts"], generator=generator).topk(sizes["top_k"]).indices
    counts = chosen.flatten().bincount(minlength=sizes["experts"]).to(device.device)
    shapes = (
        (int(counts.sum()), sizes["hidden"]),
        (sizes["experts"], sizes["ffn"], sizes["hidden"]),
        (int(counts.sum()), sizes["ffn"]),
    )
    x, weight, grad = (
        torch.randn(shape, generator=generator).to(device.device, torch.bfloat16) for shape in shapes
    )
    rows = counts.tolist()

    def loop(x: Tensor, weight: Tensor, _: Tensor) -> Tensor:
        return torch.cat([part @ one.t() for part, one in zip(x.split(rows), weight)])

    def run(product: Callable[..., Tensor], dtype: torch.dtype) -> list[Tensor]:
        leaves = [one.to(dtype).requires_grad_() for one in (x, weight)]
        out = product(*leaves, counts)
        return [out.detach(), *torch.autograd.grad(out, leaves, grad.to(dtype))]

    found: dict[str, float] = {}
    exact = run(loop, torch.float32)
    for name, product in (("grouped", grouped_matmul), ("loop", loop)):
        taken = []
        for _ in range(WARM_UP + steps):
            device.synchronize()
            started = time.perf_counter()
            got = run(product, torch.bfloat16)
            device.synchronize()
            taken.append(time.perf_counter() - started)
        found[f"{name}_s"] = median(taken[WARM_UP:])
        found[f"{name}_error"] = max(
            float((a.float() - b).abs().max() / b.abs().max()) for a, b in zip(got, exact, strict=True)
        )
    return found


def speed(
    device: Device, spec: ModelSpec, *, rows: int, length: int, steps: int, compiled: bool
) -> dict[str, float]:
    """Median of the steps after the warm-up."""
    plan, data = (
        plan_of(spec, "bfloat16", rows=rows, length=length),
        SyntheticDataset(spec.vocab, length, seed=0),
    )
    mesh = Mesh(plan.layout, 0, device)
    engine = Engine(plan, mesh, seed=0)
    if compiled:
        for chunk in engine.chunks.values():
            for layer in chunk.get_submodule("layers").children():
                layer.compile()
    device.reset_peak_memory()
    results = [engine.step(feed(data, plan, mesh, step), 3e-4) for step in range(WARM_UP + steps)]
    step_s = median(result.step_s for result in results[WARM_UP:])
    tokens = rows * length
    return {
        "tokens_per_s": tokens / step_s,
        "flops_per_s": training_flops(spec, length) * tokens / step_s,
        "peak_memory_bytes": float(device.peak_memory_bytes() or 0),
        "first_loss": results[0].loss,
        "last_loss": results[-1].loss,
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="auto")
    parser.add_argument("--compile", action="store_true", help="also with each layer through torch.compile")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--rows", type=int, default=4, help="samples in a step")
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--peak-tflops", type=float, help="dense bfloat16 peak of the device")
    parser.add_argument("--small", action="store_true", help="the tiny model in place of the large one")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    device = select_device(device_kind(options.device), 0, 1)
    device.activate()
    cpu, here = losses(Device(torch.device("cpu"))), losses(device)
    errors = attention_errors(device)
    result: dict[str, Any] = {
        "date": datetime.now(UTC).date().isoformat(),
        "device": torch.cuda.get_device_name() if device.kind == "cuda" else device.kind,
        "versions": versions(),
        "loss_error": max(abs(a - b) / b for a, b in zip(here, cpu, strict=True)),
        "bfloat16_errors": errors,
    }
    result["experts"] = experts(device, SMALL_EXPERTS if options.small else QWEN3_30B, options.steps)
    errors["experts"] = result["experts"]["grouped_error"]
    presets = [preset(name) for name in ("tiny-llama", "tiny-moe")] if options.small else [LLAMA_1B, MOE_1B]
    for spec, compiled in ((presets[0], False), (presets[0], True), (presets[1], False)):
        if compiled and not options.compile:
            continue
        row = speed(
            device, spec, rows=options.rows, length=options.length, steps=options.steps, compiled=compiled
        )
        if options.peak_tflops:
            row["mfu"] = row["flops_per_s"] / (options.peak_tflops * 1e12)
        counts = parameter_counts(spec)
        row |= {key: counts[key] for key in ("total_parameters", "active_parameters")}
        result[f"{spec.name}, {'compiled' if compiled else 'eager'}"] = row
    print(json.dumps(result, indent=1))
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0 if result["loss_error"] <= 1e-4 and max(errors.values()) <= 0.02 else 1


if __name__ == "__main__":
    sys.exit(main())

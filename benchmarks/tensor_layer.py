"""CPU time of one decoder layer on one of two tensor-parallel ranks, ours against torch's `parallelize_module`.

    python benchmarks/tensor_layer.py --pairs 200 --save benchmarks/results

Forward and backward through the layers of one model, strictly in turn in the same two processes of one thread over one
gloo group, from the same weights and input; output and every gradient must agree, or nothing is reported. CPU-seconds
of both processes, threads that communicate included, per layer and rank. Both are made anew for each round.

nosp   torch: `ColwiseParallel` and `RowwiseParallel`, as they come, or with the common input of q/k/v and of gate/up
       made a DTensor once (`PrepareModuleInput`), which sums their input gradients before one all-reduce, as we do
sp     torch: as its tutorial has it: `SequenceParallel` norms, `PrepareModuleInput` from shards of the sequence,
       `RowwiseParallel(output_layouts=Shard(1))`; ours includes the sum of the norms' gradients over the ranks

torch's layer is ours with its linear maps called as modules, which is what `parallelize_module` hooks: same norm,
rotation and attention on local heads. Attention on local tensors is the faster of its two ways.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from fivefold.core.layout import Layout
from fivefold.core.sharding import ParameterRow
from fivefold.engine.build import build_chunks
from fivefold.nn.attention import AttentionCore
from fivefold.nn.layers import RMSNorm
from fivefold.nn.rope import Rope, rotate
from fivefold.records.machine import machine_facts, versions
from fivefold.runtime.launch import Rank, run_ranks
from fivefold.runtime.mesh import Mesh
from fivefold.strategies.pipeline.apply import keep_stage
from fivefold.strategies.tensor.apply import sum_gradients
from single_rank import CASES, Case, plan_of, ratio_with_bound

RANKS, ROUNDS, WARM_UP = 2, 6, 5
SEQUENCE_DIM = 1
LARGE = Case(1024, 2, 16, 4, 2816, 1, 128, 0.0, 0.0)
SIZES = (*(case for case in CASES if case.hidden < 512), LARGE)
TARGETS = {"nosp": {64: 0.5, 256: 0.7, 1024: 0.85}, "sp": {64: 0.6, 256: 0.85, 1024: 0.85}}
VARIANTS = {"nosp": ("as it comes", "input prepared once"), "sp": ("tutorial",)}
TOLERANCE = 1e-5

Pass = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""(local input, gradient of the local output) -> (local output, gradient of the local input)."""
Gradients = Callable[[], dict[str, Tensor]]
"""The gradients of the whole parameters, by our names, of the last pass."""


class PlainAttention(nn.Module):
    """Our attention with linear maps that are called as modules."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.head_dim = case.hidden // case.heads
        queries, keys = case.hidden, case.kv_heads * self.head_dim
        self.q, self.k, self.v = (nn.Linear(case.hidden, size, bias=False) for size in (queries, keys, keys))
        self.core = AttentionCore(None)
        self.output = nn.Linear(queries, case.hidden, bias=False)

    def forward(self, x_BSD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = [
            y.view(*y.shape[:-1], -1, self.head_dim) for y in (self.q(x_BSD), self.k(x_BSD), self.v(x_BSD))
        ]
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        out_BNSH = self.core(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), None)
        out_BSD: Tensor = self.output(out_BNSH.transpose(1, 2).flatten(2))
        return out_BSD


class PlainMLP(nn.Module):
    def __init__(self, case: Case) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(case.hidden, case.ffn, bias=False) for _ in range(2))
        self.down = nn.Linear(case.ffn, case.hidden, bias=False)

    def forward(self, x_BSD: Tensor) -> Tensor:
        out_BSD: Tensor = self.down(nn.functional.silu(self.gate(x_BSD)) * self.up(x_BSD))
        return out_BSD


class PlainLayer(nn.Module):
    """Shapes: x_BSD -> [B, S, D], x, norms and sums on a shard of S under SP."""

    def __init__(self, case: Case, eps: float) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = RMSNorm(case.hidden, eps), RMSNorm(case.hidden, eps)
        self.attention, self.mlp = PlainAttention(case), PlainMLP(case)

    def forward(self, x_BSD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x_BSD = x_BSD + self.attention(self.attention_norm(x_BSD), cos, sin)
        out_BSD: Tensor = x_BSD + self.mlp(self.mlp_norm(x_BSD))
        return out_BSD


def tensor_plan(variant: str) -> dict[str, ParallelStyle]:
    """`parallelize_module`'s plan of one layer."""
    columns = ("attention.q", "attention.k", "attention.v", "mlp.gate", "mlp.up")
    plan: dict[str, ParallelStyle] = {name: ColwiseParallel() for name in columns}
    rows = ("attention.output", "mlp.down")
    if variant != "tutorial":
        plan |= {name: RowwiseParallel() for name in rows}
        if variant == "input prepared once":
            plan |= prepared(Replicate())
        return plan
    plan |= {name: RowwiseParallel(output_layouts=Shard(SEQUENCE_DIM)) for name in rows}
    return (
        plan
        | prepared(Shard(SEQUENCE_DIM))
        | {name: SequenceParallel(use_local_output=True) for name in ("attention_norm", "mlp_norm")}
    )


def prepared(layout: Any) -> dict[str, ParallelStyle]:
    """The input of both blocks as a replicated DTensor, from what it is."""
    return {
        "attention": PrepareModuleInput(
            input_layouts=(layout, None, None), desired_input_layouts=(Replicate(), None, None)
        ),
        "mlp": PrepareModuleInput(input_layouts=(layout,), desired_input_layouts=(Replicate(),)),
    }


def rope_of(case: Case) -> tuple[Tensor, Tensor]:
    cos, sin = Rope(plan_of(case).model)(torch.arange(case.seq_len)[None], torch.float32)
    return cos, sin


def whole_weights(case: Case, rank: Rank) -> dict[str, Tensor]:
    """The weights that ours starts from, by our names."""
    plan = plan_of(case)
    mesh = Mesh(plan.layout, 0, rank.device)
    _, pairs = build_chunks(plan, mesh, seed=0)[0]
    return {row.name: p.detach() for row, p in pairs}


def ours(case: Case, mode: str, rank: Rank) -> tuple[Pass, Gradients]:
    layout = Layout.parse("tp2" if mode == "sp" else "tp2 nosp")
    plan = plan_of(case).replace(layout=layout)
    mesh = Mesh(layout, rank.rank, rank.device)
    module, pairs = build_chunks(plan, mesh, seed=0)[0]
    keep_stage(module, range(case.layers), first=False, last=False)
    held = [(row, p) for row, p in pairs if row.name.startswith("layers.")]
    layers = list(module.get_submodule("layers").children())
    rope = rope_of(case)

    def take(x_BSD: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
        out = x_BSD.requires_grad_()
        for layer in layers:
            out = layer(out, rope, None)
        torch.autograd.backward(out, grad)
        sum_gradients([(row, p.grad) for row, p in held if p.grad is not None], mesh)
        assert x_BSD.grad is not None
        return out.detach(), x_BSD.grad

    def gradients() -> dict[str, Tensor]:
        return {row.name: joined(row, p) for row, p in held}

    def joined(row: ParameterRow, p: nn.Parameter) -> Tensor:
        assert p.grad is not None
        grad, p.grad = p.grad, None
        dim = next((i for i, size in enumerate(row.shape) if size != grad.shape[i]), None)
        return grad if dim is None else mesh.axis("tp").all_gather(grad, dim)

    return take, gradients


def torchs(case: Case, mode: str, variant: str, rank: Rank) -> tuple[Pass, Gradients]:
    model = nn.ModuleDict(
        {str(i): PlainLayer(case, plan_of(case).model.norm_eps) for i in range(case.layers)}
    )
    names = {our_name(name): name for name, _ in model.named_parameters()}
    weights = whole_weights(case, rank)
    model.load_state_dict({name: weights[our] for our, name in names.items()})
    mesh = init_device_mesh("cpu", (RANKS,))
    for layer in model.values():
        parallelize_module(layer, mesh, tensor_plan(variant))
    cos, sin = rope_of(case)

    def take(x_BSD: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
        out = x_BSD.requires_grad_()
        for layer in model.values():
            out = layer(out, cos, sin)
        torch.autograd.backward(out, grad)
        assert x_BSD.grad is not None
        return out.detach(), x_BSD.grad

    def gradients() -> dict[str, Tensor]:
        found = {}
        for our, name in names.items():
            p = model.get_parameter(name)
            assert p.grad is not None
            found[our] = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
            p.grad = None
        return found

    return take, gradients


def our_name(name: str) -> str:
    """Our name of a parameter of torch's model: q, k, v, gate and up have a parent of their own."""
    layer, block, part, *rest = name.split(".")
    parent = {"q": "qkv", "k": "qkv", "v": "qkv", "gate": "inputs", "up": "inputs"}.get(part)
    return ".".join(["layers", layer, block, *([parent] if parent else []), part, *rest])


def agree(what: str, mine: Tensor, other: Tensor) -> None:
    error = float((mine - other).abs().max() / other.abs().max())
    if not error <= TOLERANCE:
        raise AssertionError(f"{what} differs by {error:.1e} of its largest element")


def measure_round(
    rank: Rank, case: Case, mode: str, variant: str, number: int, pairs: int
) -> list[list[float]]:
    """CPU-seconds of this rank for `pairs` passes of ours and of torch's in turn, both made anew."""
    first = number % 2  # who is made first
    makers = [lambda: ours(case, mode, rank), lambda: torchs(case, mode, variant, rank)]
    made = {i: makers[i]() for i in (first, 1 - first)}
    generator = torch.Generator().manual_seed(number)
    shape = (2, case.micro_batch, case.seq_len, case.hidden)
    x, grad = torch.randn(shape, generator=generator)
    if mode == "sp":
        x, grad = (t.chunk(RANKS, SEQUENCE_DIM)[rank.rank].contiguous() for t in (x, grad))
    seconds: list[list[float]] = [[], []]
    gc.collect()
    gc.freeze()
    for turn in range(pairs + WARM_UP):
        results = []
        for i in (0, 1):
            take, gradients = made[i]
            mine = x.clone()
            dist.barrier()  # neither pays for ranks that the other left at different moments
            started = time.process_time()
            out, dx = take(mine, grad)
            seconds[i].append(time.process_time() - started)
            results.append({"output": out, "input gradient": dx} | gradients())
        if turn < WARM_UP:
            for name, tensor in results[0].items():
                agree(f"hidden {case.hidden} {mode}: {name}", tensor, results[1][name])
    return [of_one[WARM_UP:] for of_one in seconds]


def compare(case: Case, mode: str, variant: str, pairs: int) -> dict[str, Any]:
    """One row of the result."""
    rounds = []
    for number in range(ROUNDS):
        found = run_ranks(
            measure_round, case, mode, variant, number, -(-pairs // ROUNDS), ranks=RANKS, device="cpu"
        )
        rounds.append(np.array(found).sum(0))
    mine, other = np.array(rounds).transpose(1, 0, 2)
    ratio, bound = ratio_with_bound(mine, other)
    per_layer = 1e6 / (RANKS * case.layers)
    target = TARGETS[mode][case.hidden]
    return {
        "hidden": case.hidden,
        "mode": mode,
        "against": f"DTensor, {variant}",
        "ratio": round(ratio, 4),
        "upper_bound": round(bound, 4),
        "target": target,
        "passed": bound <= target,
        "pairs": mine.size,
        "cpu_us_per_layer": round(per_layer * float(mine.mean()), 1),
        "other_cpu_us_per_layer": round(per_layer * float(other.mean()), 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=200, help="pairs of passes for each comparison")
    parser.add_argument("--hidden", type=int, action="append", help="only this size (may be repeated)")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument("--save", type=Path, metavar="DIR", help="also write DIR/tensor_layer-DATE.json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    cases = [case for case in SIZES if not options.hidden or case.hidden in options.hidden]
    rows = []
    for mode, variants in VARIANTS.items():
        for case in cases:
            for variant in variants:
                rows.append(compare(case, mode, variant, options.pairs))
                print(
                    "hidden {hidden:4d} {mode:4s} against {against:28s} {ratio:.3f}, upper bound {upper_bound:.3f} "
                    "(target {target:.2f})  {cpu_us_per_layer:.0f} and {other_cpu_us_per_layer:.0f} us".format(
                        **rows[-1]
                    ),
                    file=sys.stderr,
                )
    result = {
        "date": date.today().isoformat(),
        "machine": {key: machine_facts()[key] for key in ("cpu", "cores")},
        "versions": versions(),
        "ranks": RANKS,
        "tolerance": TOLERANCE,
        "cases": [
            {key: value for key, value in asdict(case).items() if not key.startswith("target")}
            for case in cases
        ],
        "rows": rows,
        "passed": all(row["passed"] for row in rows),
    }
    if options.json:
        print(json.dumps(result))
    if options.save:
        path = options.save / f"tensor_layer-{result['date']}.json"
        path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    sys.exit(0 if result["passed"] else 1)


if __name__ == "__main__":
    main()

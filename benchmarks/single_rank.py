"""CPU-seconds per token of one rank of our trainer, against a hand-written loop and against transformers.

    python benchmarks/single_rank.py --pairs 120

Each pair of contestants trains the same model from the same weights on the same data, in one process on one thread,
one step each in turn: so whatever else the machine does falls on both alike. Where a model lies in memory alone moves
its speed by a percent or two: so both are made anew for each round of pairs. They must agree on every loss, or
nothing is reported.

ratio        total CPU-seconds of ours / total CPU-seconds of the other, over all pairs of steps
upper bound  95th percentile of that ratio over bootstrap resamples of the rounds and of the pairs in each
             (Efron 1979; two stages, Davison and Hinkley 1997, section 3.8)
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import date
from importlib import metadata
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import numpy as np
import torch
from torch import Tensor, nn

from fivefold.core.cluster import Cluster
from fivefold.core.execution import Execution
from fivefold.core.layout import Layout
from fivefold.core.model_spec import AttentionSpec, BlockSpec, MLPSpec, ModelSpec, MoESpec
from fivefold.core.optimizer import OptimizerConfig
from fivefold.core.plan import Plan
from fivefold.core.workload import Workload
from fivefold.engine.engine import Engine
from fivefold.records.machine import machine_facts, versions
from fivefold.runtime.device import Device
from fivefold.runtime.mesh import Mesh
from fivefold.strategies.pipeline.apply import Microbatch
from plain_loop import LAYER_PARTS, Shape, Weights, make_step

LR = 1e-4
VOCAB = 512
MICROBATCHES = 2
LOSS_TOLERANCE = 1e-4
ROUNDS, WARM_UP = 12, 3


@dataclass(frozen=True)
class Case:
    """One model and batch: sizes chosen so that a step takes 20-300 ms, and a byte-like vocabulary."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    ffn: int
    micro_batch: int
    seq_len: int
    target_plain: float
    target_transformers: float
    experts: int = 0
    """Of each layer, two of them for each token; 0: a dense model."""

    @property
    def tokens(self) -> int:
        return self.micro_batch * MICROBATCHES * self.seq_len


CASES = (
    Case(64, 4, 4, 2, 176, 4, 128, 1.03, 1.0),
    Case(256, 4, 8, 4, 688, 2, 128, 1.03, 1.0),
    Case(768, 2, 12, 4, 2048, 1, 128, 1.03, 1.03),
)

Step = Callable[[int], float]
"""Train on batch i; the mean loss before the update."""


@dataclass(frozen=True)
class Batches:
    """The batches of a run: tokens and labels [steps, microbatches, B, S], labels -100 where masked."""

    tokens: Tensor
    labels: Tensor

    @classmethod
    def make(cls, case: Case, steps: int, *, seed: int) -> Batches:
        """Random tokens; the last quarter of every other row is masked, and the last label of each row."""
        generator = torch.Generator().manual_seed(seed)
        shape = (steps, MICROBATCHES, case.micro_batch, case.seq_len)
        tokens = torch.randint(VOCAB, shape, generator=generator)
        labels = tokens.roll(-1, dims=-1)
        labels[..., -1] = -100
        labels[:, :, ::2, -case.seq_len // 4 :] = -100
        return cls(tokens, labels)


def plan_of(case: Case) -> Plan:
    block = BlockSpec(
        attention=AttentionSpec(heads=case.heads, kv_heads=case.kv_heads, head_dim=case.hidden // case.heads),
        mlp=MoESpec(experts=case.experts, top_k=2, ffn=case.ffn) if case.experts else MLPSpec(ffn=case.ffn),
    )
    spec = ModelSpec(
        name=f"hidden {case.hidden}", hidden=case.hidden, vocab=VOCAB, blocks=(block,) * case.layers
    )
    return Plan(
        model=spec,
        cluster=Cluster.parse("cpu"),
        workload=Workload(seq_len=case.seq_len, global_batch=case.micro_batch * MICROBATCHES),
        layout=Layout.parse("dp1"),
        execution=Execution(micro_batch=case.micro_batch, optimizer=OptimizerConfig(lr=LR)),
    )


def make_engine(case: Case) -> Engine:
    plan = plan_of(case)
    return Engine(plan, Mesh(plan.layout, 0, Device(torch.device("cpu"))), seed=0)


def initial_weights(case: Case) -> Weights:
    """The weights that our trainer starts from, by our names."""
    return {row.name: p.detach() for row, p in make_engine(case).parameters[0]}


def ours(case: Case, batches: Batches, _: Weights) -> Step:
    """Our trainer on one rank. Its weights depend on the seed alone."""
    engine = make_engine(case)
    positions = torch.arange(case.seq_len)[None]
    mask = batches.labels != -100

    def step(i: int) -> float:
        def load(j: int) -> Microbatch:
            return Microbatch(batches.tokens[i, j], batches.labels[i, j], mask[i, j], positions)

        return engine.step(load, LR).loss

    return step


def plain(case: Case, batches: Batches, weights: Weights) -> Step:
    """The hand-written loop, from a copy of our weights."""
    ours_of = dict(
        zip(LAYER_PARTS, ("attention_norm", "attention.qkv.q", "attention.qkv.k", "attention.qkv.v"))
    ) | {"o": "attention.output", "mlp_norm": "mlp_norm", "gate": "mlp.inputs.gate", "up": "mlp.inputs.up"}
    ours_of["down"] = "mlp.down"
    names = {name: f"{name}.weight" for name in ("embedding", "norm", "head")}
    for i, part in itertools.product(range(case.layers), LAYER_PARTS):
        names[f"{i}.{part}"] = f"layers.{i}.{ours_of[part]}.weight"
    w = {name: weights[our].clone().requires_grad_() for name, our in names.items()}
    spec, optimizer = plan_of(case).model, plan_of(case).execution.optimizer
    assert optimizer.clip_norm is not None
    take = make_step(
        w,
        Shape(
            layers=case.layers, hidden=case.hidden, heads=case.heads, kv_heads=case.kv_heads,
            seq_len=case.seq_len, norm_eps=spec.norm_eps, rope_theta=spec.rope_theta, lr=LR,
            betas=optimizer.betas, eps=optimizer.eps, weight_decay=optimizer.weight_decay,
            clip_norm=optimizer.clip_norm,
        ),
    )  # fmt: skip
    return lambda i: take(list(zip(batches.tokens[i], batches.labels[i])))[0]


def stock(case: Case, batches: Batches, weights: Weights) -> Step:
    """transformers' Llama in the loop that its users write, from a copy of our weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from fivefold.nn.hub_names import hf_name

    spec, optimizer = plan_of(case).model, plan_of(case).execution.optimizer
    assert optimizer.clip_norm is not None
    config = LlamaConfig(  # type: ignore[call-arg]
        vocab_size=VOCAB, hidden_size=case.hidden, intermediate_size=case.ffn,
        num_hidden_layers=case.layers, num_attention_heads=case.heads, num_key_value_heads=case.kv_heads,
        rms_norm_eps=spec.norm_eps, rope_theta=spec.rope_theta, use_cache=False,
        attn_implementation="sdpa", tie_word_embeddings=False,
    )  # fmt: skip
    model: nn.Module = LlamaForCausalLM(config).train()
    model.load_state_dict({hf_name(name): value for name, value in weights.items()})
    parameters = list(model.parameters())
    adamw = torch.optim.AdamW(
        [
            {"params": [p for p in parameters if p.ndim > 1], "weight_decay": optimizer.weight_decay},
            {"params": [p for p in parameters if p.ndim == 1], "weight_decay": 0.0},
        ],
        lr=LR, betas=optimizer.betas, eps=optimizer.eps, fused=True,
    )  # fmt: skip
    # transformers shifts labels itself: label s is token s, not the token after it.
    labels = torch.nn.functional.pad(batches.labels[..., :-1], (1, 0), value=-100)
    clip_norm = optimizer.clip_norm

    def step(i: int) -> float:
        valid = torch.stack([(row != -100).sum() for row in labels[i]]).sum()
        total = torch.zeros(())
        for tokens_BS, labels_BS in zip(batches.tokens[i], labels[i]):
            loss = model(input_ids=tokens_BS, labels=labels_BS, num_items_in_batch=valid).loss
            loss.backward()
            total += loss.detach()
        float(torch.nn.utils.clip_grad_norm_(parameters, clip_norm))
        adamw.step()
        adamw.zero_grad(set_to_none=True)
        return float(total)

    return step


def measure(case: Case, opponent: str, pairs: int) -> tuple[np.ndarray, np.ndarray]:
    """CPU-seconds of every step of ours and of the opponent, [ROUNDS, pairs / ROUNDS], warm-up left out."""
    rounds = [measure_round(case, opponent, number, -(-pairs // ROUNDS)) for number in range(ROUNDS)]
    mine, other = np.array(rounds).transpose(1, 0, 2)
    return mine, other


def measure_round(case: Case, opponent: str, number: int, pairs: int) -> tuple[list[float], list[float]]:
    """CPU-seconds of `pairs` steps of ours and of the opponent in turn, both made anew."""
    batches = Batches.make(case, pairs + WARM_UP, seed=number)
    weights = initial_weights(case)
    makers = [ours, OPPONENTS[opponent]]
    first = number % 2  # who is made first
    made = {i: makers[i](case, batches, weights) for i in (first, 1 - first)}
    seconds: tuple[list[float], list[float]] = ([], [])
    gc.collect()
    gc.freeze()  # what was imported is not garbage; a full scan of it would fall on whoever is running
    for step in range(pairs + WARM_UP):
        losses = []
        for i in (0, 1):  # strictly in turn: neither ever finds the caches as it left them
            started = time.process_time()
            losses.append(made[i](step))
            seconds[i].append(time.process_time() - started)
        if abs(losses[0] - losses[1]) > LOSS_TOLERANCE:
            sys.exit(f"hidden {case.hidden}, step {step}: our loss is {losses[0]}, {opponent}'s {losses[1]}")
    gc.unfreeze()
    return seconds[0][WARM_UP:], seconds[1][WARM_UP:]


def ratio_with_bound(mine: np.ndarray, other: np.ndarray, resamples: int = 10_000) -> tuple[float, float]:
    """Ratio of totals of [rounds, pairs], and the 95th percentile of it over resampled rounds and pairs in them."""
    rounds, pairs = mine.shape
    random = np.random.default_rng(0)
    chosen = random.integers(rounds, size=(resamples, rounds, 1))
    within = random.integers(pairs, size=(resamples, rounds, pairs))
    ratios = mine[chosen, within].sum((1, 2)) / other[chosen, within].sum((1, 2))
    return float(mine.sum() / other.sum()), float(np.quantile(ratios, 0.95))


OPPONENTS = {"plain": plain, "transformers": stock}


def compare(case: Case, opponent: str, pairs: int) -> dict[str, Any]:
    """One row of the result."""
    mine, other = measure(case, opponent, pairs)
    ratio, bound = ratio_with_bound(mine, other)
    target = case.target_plain if opponent == "plain" else case.target_transformers
    return {
        "hidden": case.hidden,
        "against": opponent,
        "ratio": round(ratio, 4),
        "upper_bound": round(bound, 4),
        "target": target,
        "passed": bound <= target,
        "pairs": mine.size,
        "cpu_us_per_token": round(1e6 * float(mine.mean()) / case.tokens, 2),
        "other_cpu_us_per_token": round(1e6 * float(other.mean()) / case.tokens, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=120, help="pairs of steps for each comparison")
    parser.add_argument("--hidden", type=int, action="append", help="only this size (may be repeated)")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument("--save", type=Path, metavar="DIR", help="also write DIR/single_rank-DATE.json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for case in CASES:
        if options.hidden and case.hidden not in options.hidden:
            continue
        for opponent in OPPONENTS:
            row = compare(case, opponent, options.pairs)
            rows.append(row)
            print(
                "hidden {hidden:4d}  against {against:12s}  {ratio:.3f}, upper bound {upper_bound:.3f} "
                "(target {target:.2f})  {cpu_us_per_token:.1f} and {other_cpu_us_per_token:.1f} us/token".format(
                    **row
                ),
                file=sys.stderr,
            )
    result = {
        "date": date.today().isoformat(),
        "machine": {key: machine_facts()[key] for key in ("cpu", "cores")},
        "versions": versions() | {"transformers": metadata.version("transformers")},
        "cases": [asdict(case) for case in CASES if not options.hidden or case.hidden in options.hidden],
        "rows": rows,
        "passed": all(row["passed"] for row in rows),
    }
    if options.json:
        print(json.dumps(result))
    if options.save:
        path = options.save / f"single_rank-{result['date']}.json"
        path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    sys.exit(0 if result["passed"] else 1)


if __name__ == "__main__":
    main()

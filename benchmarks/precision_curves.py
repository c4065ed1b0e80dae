"""Loss curves of bfloat16 and float32 under several layouts, on the built-in corpus.

    python benchmarks/precision_curves.py [--steps 200] [--model tiny-llama] [--layouts 'dp1,dp2 tp2 pp2'] [--out FILE]

bfloat16: the largest difference between layouts, and the largest between two seeds under one layout, both of losses
smoothed over 10 steps: rounding differs from layout to layout, and must matter less than a seed does.
float32: the first 20 steps under every layout must agree to 1e-5.
Exit code 1 if either is missed.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path

from fivefold.core.layout import Layout
from fivefold.runtime.launch import Rank, run_ranks
from fivefold.train.config import TrainConfig, load_config
from fivefold.train.run import prepare
from fivefold.train.trainer import Trainer

FLOAT32_STEPS, FLOAT32_BOUND, WINDOW = 20, 1e-5, 10


@dataclass(frozen=True)
class Curve:
    """Losses of one run."""

    dtype: str
    layout: str
    seed: int
    losses: list[float]


def run(config: TrainConfig, stop_after: int) -> list[float]:
    """The losses of the first steps, on ranks of this machine."""
    plan, data = prepare(config, "cpu")

    def on_rank(rank: Rank) -> list[float]:
        trainer = Trainer(plan, rank, data.train, steps=config.steps, seed=config.seed)
        return [trainer.step(step).loss for step in range(stop_after)]

    ranks: list[list[float]] = run_ranks(on_rank, ranks=plan.layout.world_size, device="cpu")
    return ranks[0]


def smoothed(losses: list[float]) -> list[float]:
    """Means over consecutive windows; what is left at the end is a window too."""
    parts = [losses[i : i + WINDOW] for i in range(0, len(losses), WINDOW)]
    return [sum(part) / len(part) for part in parts]


def spread(a: list[float], b: list[float]) -> float:
    return max(abs(x - y) for x, y in zip(a, b, strict=True))


def curves(model: str, layouts: list[str], steps: int) -> list[Curve]:
    """bfloat16 under every layout and, under the first, with a second seed; float32 under every layout."""
    wanted = [("bfloat16", layout, 0, steps) for layout in layouts] + [("bfloat16", layouts[0], 1, steps)]
    wanted += [("float32", layout, 0, min(steps, FLOAT32_STEPS)) for layout in layouts]
    found = []
    for dtype, layout, seed, stop_after in wanted:
        settings = [f"model={model}", f"dtype={dtype}", f"layout={layout}", f"seed={seed}", f"steps={steps}"]
        config = load_config(None, [*settings, "global_batch=8", "micro_batch=2", "optimizer.lr=2e-3"])
        found.append(Curve(dtype, layout, seed, run(config, stop_after)))
        print(f"{dtype} {layout} seed {seed}: {found[-1].losses[-1]:.4f} after {stop_after}", file=sys.stderr)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--model", default="tiny-llama")
    parser.add_argument("--layouts", default="dp1,dp2 tp2 pp2")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    layouts = [str(Layout.parse(text)) for text in arguments.layouts.split(",")]
    found = curves(arguments.model, layouts, arguments.steps)
    narrow = {(c.layout, c.seed): smoothed(c.losses) for c in found if c.dtype == "bfloat16"}
    wide = {c.layout: c.losses for c in found if c.dtype == "float32"}
    first = narrow[layouts[0], 0]
    seeds = spread(first, narrow[layouts[0], 1])
    by_layout = {layout: spread(first, narrow[layout, 0]) for layout in layouts[1:]}
    float32 = {layout: spread(wide[layouts[0]], wide[layout]) for layout in layouts[1:]}
    print(f"largest difference to {layouts[0]} in loss, over {arguments.steps} steps")
    print(f"bfloat16, another seed         {seeds:.2e}")
    for layout in layouts[1:]:
        print(f"bfloat16, {layout:20} {by_layout[layout]:.2e}")
        print(f"float32, {layout:21} {float32[layout]:.2e} in the first {len(wide[layout])} steps")
    if arguments.out:
        rows = [vars(curve) for curve in found]
        arguments.out.write_text(json.dumps(rows) + "\n")
    passed = all(d <= seeds for d in by_layout.values()) and all(d <= FLOAT32_BOUND for d in float32.values())
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())

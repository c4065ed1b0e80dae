"""`fivefold plan`: the best layouts of a model on a cluster."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fivefold.cli import asked, process, searched

if TYPE_CHECKING:
    from fivefold.plan.question import Question
    from fivefold.plan.search import Answer


@click.command()
@click.option("--fix", "text", default="", help="Parts of the layout that are given: 'tp8 zero1', 'pp4:zbv'.")
@click.option("--micro-batch", type=click.IntRange(1, 10**6), help="Fix the sequences at a time.")
@click.option("--recompute", help="Fix what is computed again: none, full, attention, mlp, moe, joined by +.")
@click.option(
    "--objective", type=click.Choice(["time", "cost", "devices", "sequence", "micro-batch"]), default="time",
    show_default=True,
    help="Shortest step, least device time per token, fewest devices, longest sequence, largest micro-batch.",
)  # fmt: skip
@click.option(
    "--vary",
    multiple=True,
    metavar="FIELD=N,N ...",
    help="Sweep the model: its best plan at each value, such as experts=8,16 hidden=4096,5120.",
)
@click.argument("more", nargs=-1, metavar="[FIELD=N,N ...]")
@click.option("--top", type=click.IntRange(1, 256), default=10, show_default=True, help="Plans to show.")
@click.option(
    "--calibration", type=click.Path(path_type=Path), help="A file that `fivefold calibrate` wrote."
)
@asked.options
def command(
    text: str,
    micro_batch: int | None,
    recompute: str | None,
    objective: Any,
    vary: tuple[str, ...],
    more: tuple[str, ...],
    top: int,
    calibration: Path | None,
    as_json: bool,
    **options: Any,
) -> int:
    """Search all layouts of a model on a cluster: what fits, and what is fastest.

    Where nothing fits, says by how much and the nearest things that do (exit code 2). What the parts of a layout mean:
    README, Layouts.

    \b
      fivefold plan --model llama-3.1-70b --cluster "64 H100"
      fivefold plan --model deepseek-v3 --cluster "16384 H100" --fix tp8
      fivefold plan --model mixtral-8x7b --cluster "64 H100" --vary experts=8,16 hidden=4096,5120
    """
    import time

    from fivefold.cli.output import print_json
    from fivefold.errors import ConfigError
    from fivefold.plan.clock import loaded

    start = time.perf_counter()
    process.collect_rarely()
    question = searched.question(**options)
    fixed, known = searched.fixed(text, micro_batch, recompute), loaded(calibration)
    if more and not vary:
        raise ConfigError(f"unexpected {more[0][:60]!r}; what a model is varied by stands after --vary")
    if vary:
        from fivefold.cli.plan_variants import sweep

        return sweep(question, fixed, (*vary, *more), objective, known, as_json)
    clock, answer = searched.best(question, fixed, objective, known, top=top)
    facts = _facts(clock.question, answer, elapsed_s=time.perf_counter() - start)
    facts["reasons"] = [*searched.assumed(clock.question, options), *clock.calibrated()]
    if not answer.found:
        return searched.refuse(clock.question, fixed, answer, facts, as_json)
    if as_json:
        print_json(facts)
    else:
        from fivefold.plan.explain.explanation import short

        _print(facts, short(clock.question, clock, answer.found[0]))
    return 0


def _facts(question: Question, answer: Answer, *, elapsed_s: float) -> dict[str, Any]:
    from fivefold.plan.result import plan_facts

    return {
        "model": question.spec.name,
        "cluster": str(question.cluster),
        "seq_len": question.seq_len,
        "global_batch": question.global_batch,
        "plans": [plan_facts(question, one) for one in answer.found],
        "legal": answer.legal,
        "evaluated": answer.evaluated,
        "fitting": answer.fitting,
        "elapsed_s": elapsed_s,
    }


def _print(facts: dict[str, Any], why: dict[str, Any]) -> None:
    """`why`: the short explanation of the first plan."""
    from fivefold.cli.explain_tables import reasoned
    from fivefold.cli.tables import make_console, say, span, table_of_layouts
    from fivefold.units import format_count, format_seconds

    console = make_console()
    say(
        console,
        f"{facts['model']} on {facts['cluster']}: global batch {facts['global_batch']} x {facts['seq_len']} tokens; "
        "tokens/s and memory of a device, mb: micro-batch",
    )
    names = ["layout", "mb", "recompute", "step", "10-90 %", "tokens/s", "MFU", "memory"]
    cells = [
        [
            one["layout"], str(one["micro_batch"]), one["recompute"], format_seconds(one["step_time_s"]),
            span(one["step_time_p10_s"], one["step_time_p90_s"]),
            format_count(one["tokens_per_s_per_gpu"]).strip(), f"{one['mfu']:.0%}" if one["mfu"] else "-",
            f"{one['peak_memory_bytes'] / one['capacity_bytes']:.0%}",
        ]
        for one in facts["plans"]
    ]  # fmt: skip
    console.print(table_of_layouts(console, names, cells, spare=("tokens/s",)))
    best = facts["plans"][0]
    shares = {
        term: s / best["step_time_s"] for term, s in best["time"].items() if s > 0.001 * best["step_time_s"]
    }
    told = ", ".join(
        f"{term} {share:.1%}" for term, share in sorted(shares.items(), key=lambda pair: -pair[1])
    )
    reasoned(console, why)
    price = best.get("price_per_million_tokens")
    prices = [] if price is None else [f"price of the first: {price:.3g} per million tokens"]
    for line in (f"time of the first: {told}", *prices, *best["reasons"], *facts["reasons"]):
        say(console, line)
    say(
        console,
        f"{facts['fitting']:,} of {facts['legal']:,} legal points fit; {facts['evaluated']:,} looked at in "
        f"{format_seconds(facts['elapsed_s'])}; `fivefold explain` says more of the first",
    )

"""`fivefold estimate`: what one layout needs and how fast it is, without running it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from fivefold.cli import asked, process, searched


@click.command()
@click.option("--layout", "-l", "text", required=True, help="Such as 'dp2 tp8 pp2 zero1'; one device is dp1.")
@click.option(
    "--micro-batch", type=click.IntRange(1, 10**6), default=1, show_default=True, help="Sequences at a time."
)
@click.option(
    "--recompute", default="none", show_default=True,
    help="Parts computed again in backward: none, full, attention, mlp, moe, joined by +; full/2: every second layer.",
)  # fmt: skip
@click.option(
    "--calibration", type=click.Path(path_type=Path), help="A file that `fivefold calibrate` wrote."
)
@asked.options
def command(
    text: str, micro_batch: int, recompute: str, calibration: Path | None, as_json: bool, **options: Any
) -> int:
    """Estimate memory by rank and term of one layout, whether it fits, and the step time.

    Works for any model that can be read, also one that cannot be run here. To compare layouts, `fivefold explain` tells
    what every step away would change. Exit code 1 if the layout surely does not fit.

    \b
      fivefold estimate --model llama-2-70b --cluster 32xA100-80 --layout "tp8 pp4"
      fivefold estimate --model deepseek-v3 --cluster "2048 H800" --layout "dp128 pp16 ep64 zero1"
    """
    from dataclasses import replace

    from fivefold.cli.output import print_json
    from fivefold.core.layout import Layout
    from fivefold.estimate.recompute import Recompute
    from fivefold.plan.clock import Choice, Clock, loaded
    from fivefold.plan.result import nearest_that_fits, plan_facts, recompute_choices, recompute_facts
    from fivefold.plan.search import evaluate

    layout, again = Layout.parse(text), Recompute.parse(recompute)
    process.collect_rarely()
    question = searched.question(**options)
    if not options["global_batch"]:
        question.check_devices(layout, micro_batch)
        at_once = layout.dp * micro_batch
        rounds = max(-(-question.global_batch // at_once), 4 * layout.pp)
        question = replace(question, global_batch=rounds * at_once)
    question.check(layout, micro_batch)
    clock = Clock(question, loaded(calibration))
    choices = recompute_choices(question.spec, again)
    each = evaluate(question, clock, [Choice(layout, micro_batch, one) for one in choices])
    found = each[choices.index(again)]
    facts = plan_facts(question, found) | {"recompute_choices": recompute_facts(each)}
    reasons = facts["reasons"]
    if found.memory.fits(question.capacity_bytes) != "yes":
        nearest = nearest_that_fits(question, layout, micro_batch, again)
        reasons.append(
            f"nearest that fits: {nearest[0]}" if nearest else "no ZeRO stage or recompute makes it fit"
        )
    reasons += [*searched.assumed(question, options), *clock.calibrated()]
    facts |= {
        "model": question.spec.name,
        "cluster": str(question.cluster),
        "seq_len": question.seq_len,
        "global_batch": question.global_batch,
    }
    if as_json:
        print_json(facts)
    else:
        _print(facts)
    return 1 if facts["fits"] == "no" else 0


def _print(facts: dict[str, Any]) -> None:
    from fivefold.cli.tables import make_console, make_table, say, span
    from fivefold.units import format_bytes, format_seconds

    console = make_console()
    say(
        console,
        f"{facts['model']} as {facts['layout']} on {facts['cluster']}: micro-batch {facts['micro_batch']}, "
        f"global batch {facts['global_batch']} x {facts['seq_len']} tokens, recompute {facts['recompute']}",
    )
    table = make_table("memory", f"rank {facts['peak_rank']}", "of the device")
    total, capacity = facts["peak_memory_bytes"], facts["capacity_bytes"]
    for term, n in facts["memory"].items():
        if n:
            table.add_row(term, format_bytes(n), f"{n / capacity:.1%}")
    table.add_row("in all", format_bytes(total), f"{total / capacity:.1%}")
    console.print(table)
    shares = {
        term: s / facts["step_time_s"]
        for term, s in facts["time"].items()
        if s > 0.001 * facts["step_time_s"]
    }
    told = ", ".join(
        f"{term} {share:.1%}" for term, share in sorted(shares.items(), key=lambda pair: -pair[1])
    )
    mfu = f", MFU {facts['mfu']:.0%}" if facts["mfu"] else ""
    say(
        console,
        f"step: {format_seconds(facts['step_time_s'])} ({span(facts['step_time_p10_s'], facts['step_time_p90_s'])}), "
        f"{facts['tokens_per_s_per_gpu']:,.0f} tokens/s on each device{mfu}; {told}",
    )
    table = make_table("recompute", "activations", "in all", "step")
    for one in facts["recompute_choices"]:
        kept, whole = format_bytes(one["activations_bytes"]), format_bytes(one["peak_memory_bytes"])
        table.add_row(one["recompute"], kept, whole, format_seconds(one["step_time_s"]))
    console.print(table)
    if len(facts["rank_memory_bytes"]) > 1:
        listed = "  ".join(format_bytes(n) for n in facts["rank_memory_bytes"])
        say(console, f"pipeline ranks: {listed}")
    for reason in facts["reasons"]:
        say(console, reason)

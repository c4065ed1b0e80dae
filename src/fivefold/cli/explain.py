"""`fivefold explain`: why a layout, and not another."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fivefold.cli import asked, process, searched

if TYPE_CHECKING:
    from fivefold.plan.clock import Choice, Clock
    from fivefold.plan.question import Question
    from fivefold.plan.search import Answer, Found


@click.command()
@click.option("--layout", "-l", "text", help="Such as 'dp2 tp8 pp2 zero1'. Default: the best that is found.")
@click.option("--fix", default="", help="Parts of the best layout that are given: 'tp8 zero1', 'pp4:zbv'.")
@click.option("--micro-batch", type=click.IntRange(1, 10**6), help="Sequences at a time. With --layout: 1.")
@click.option(
    "--recompute",
    help="What is computed again: none, full, attention, mlp, moe, joined by +. With --layout: none.",
)
@click.option(
    "--calibration", type=click.Path(path_type=Path), help="A file that `fivefold calibrate` wrote."
)
@click.option("--html", type=click.Path(path_type=Path, dir_okay=False), help="Write a page with the plots.")
@asked.options
def command(
    text: str | None, fix: str, micro_batch: int | None, recompute: str | None, calibration: Path | None,
    html: Path | None, as_json: bool, **options: Any,
) -> int:  # fmt: skip
    """Explain a layout in the order an expert reasons, by numbers of the estimate.

    What does not fit on one device, which axes stay in the fast domain, what the sequence forces, what is left; then
    what binds, where the time and the memory go, what every step away would change, which layouts cannot be told
    apart, and the runs that would settle it. Exit code 1 if the layout surely does not fit.

    \b
      fivefold explain --model llama-3.1-70b --cluster "64 H100"
      fivefold explain --model llama-2-70b --cluster 32xA100-80 --layout "tp8 pp4" --html why.html
    """
    from fivefold.cli.output import print_json
    from fivefold.plan.clock import Clock, loaded

    process.collect_rarely()
    question = searched.question(**options)
    clock = Clock(question, loaded(calibration))
    found, answer = _found(question, clock, text, fix, micro_batch, recompute)
    if found is None:
        fixed = searched.fixed(fix, micro_batch, recompute)
        return searched.refuse(question, fixed, answer, _asked(question), as_json)
    assumed = [*searched.assumed(question, options), *clock.calibrated()]
    facts = _facts(question, clock, found, answer) | {"assumed": assumed}
    if html is not None:
        from fivefold.report.explain_page import write_page

        write_page(facts, html)
    if as_json:
        print_json(facts)
    else:
        from fivefold.cli.explain_tables import show

        show(facts)
    return 1 if facts["plan"]["fits"] == "no" else 0


def _found(
    question: Question, clock: Clock, text: str | None, fix: str, micro_batch: int | None, recompute: str | None
) -> tuple[Found | None, Answer]:  # fmt: skip
    """The layout that is asked about, or the best one; None where nothing fits."""
    from fivefold.errors import ConfigError
    from fivefold.plan.explain.explanation import CANDIDATES
    from fivefold.plan.search import evaluate, search

    if text is None:
        answer = search(question, clock, searched.fixed(fix, micro_batch, recompute), top=CANDIDATES)
        return (answer.found[0] if answer.found else None), answer
    if fix:
        raise ConfigError("--fix is for the best layout and --layout gives one; leave one of them out")
    choice = _given(question, text, micro_batch, recompute)
    return evaluate(question, clock, [choice])[0], search(question, clock, top=CANDIDATES)


def _given(question: Question, text: str, micro_batch: int | None, recompute: str | None) -> Choice:
    from fivefold.core.layout import Layout
    from fivefold.estimate.recompute import Recompute
    from fivefold.plan.clock import Choice

    layout, size = Layout.parse(text), micro_batch or 1
    question.check(layout, size)
    return Choice(layout, size, Recompute.parse(recompute or "none"))


def _asked(question: Question) -> dict[str, Any]:
    return {
        "model": question.spec.name,
        "cluster": str(question.cluster),
        "devices": question.devices,
        "seq_len": question.seq_len,
        "global_batch": question.global_batch,
    }


def _facts(question: Question, clock: Clock, found: Found, answer: Answer) -> dict[str, Any]:
    from fivefold.plan.explain.explanation import explain
    from fivefold.plan.result import nearest_that_fits, plan_facts

    plan = plan_facts(question, found)
    if plan["fits"] != "yes":
        choice = found.choice
        nearest = nearest_that_fits(question, choice.layout, choice.micro_batch, choice.recompute)
        plan["reasons"].append(
            f"nearest that fits: {nearest[0]}" if nearest else "no ZeRO stage or recompute makes it fit"
        )
    return {**_asked(question), "plan": plan, **explain(question, clock, found, answer)}

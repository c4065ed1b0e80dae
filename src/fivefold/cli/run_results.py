"""Results of a run as tables: settings, numbers by rank or stage, experts, and the precision report."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fivefold.cli.tables import brief, clean, fits, make_table, say

if TYPE_CHECKING:
    from rich.console import Console

    from fivefold.report.run_results import ExpertsReport

MOST_SHOWN = 12
"""Entries of a long list that are shown; --json has all of them."""


def print_result(console: Console, name: str, value: dict[str, Any] | list[Any]) -> None:
    """A result under its name: a report, the settings that are no defaults, rows, or numbers in order."""
    if not value:
        return
    console.print(clean(name), style="bold")
    if name == "precision" and isinstance(value, dict) and "layers" in value:
        return _print_precision(console, value)
    if name == "experts" and isinstance(value, dict) and "layers" in value:
        from fivefold.report.run_results import experts_of

        found = experts_of({name: value}, where="the record")
        assert found is not None
        return _print_experts(console, found)
    if name == "config" and isinstance(value, dict):
        value = _changed(value)
    if isinstance(value, list) and all(isinstance(row, dict) for row in value):
        return _print_rows(console, value)
    pairs = list(_flat(value)) if isinstance(value, dict) else [(str(i), x) for i, x in enumerate(value)]
    shown = make_table("", "", header=False)
    for key, entry in pairs:
        shown.add_row(clean(key), clean(brief(_unit(name, key), entry)))
    console.print(shown)


def _changed(config: dict[str, Any]) -> dict[str, Any]:
    """The settings of a training run that are not their defaults, by dotted key."""
    from fivefold.train.config import TrainConfig

    defaults = dict(_flat(TrainConfig(model="-").model_dump(mode="json")))
    return {key: entry for key, entry in _flat(config) if key not in defaults or defaults[key] != entry}


def _flat(value: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """`{a: {b: 1}}` as `a.b`, 1."""
    for key, entry in value.items():
        if isinstance(entry, dict) and entry:
            yield from _flat(entry, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", entry


def _print_rows(console: Console, rows: Sequence[dict[str, Any]]) -> None:
    """A table with a column for each key; where that is too wide, a line for each row."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    made = make_table(*map(clean, names))
    for row in rows[:MOST_SHOWN]:
        made.add_row(*(clean(brief(name, row[name])) if name in row else "" for name in names))
    if fits(console, made):
        console.print(made)
    else:
        for row in rows[:MOST_SHOWN]:
            line = ", ".join(f"{name} {brief(name, entry)}" for name, entry in row.items())
            console.print(clean(line))
    if len(rows) > MOST_SHOWN:
        console.print(clean(f"and {len(rows) - MOST_SHOWN} more; --json has all of them"))


def _print_experts(console: Console, experts: ExpertsReport) -> None:
    """A row for each routed layer: how unevenly its experts were chosen, in all steps and in the last."""
    from fivefold.strategies.expert.placement import imbalance

    ranks = [f"of {experts.ep}\nranks"] if experts.ep > 1 else []
    made = make_table(
        "layer", "imbalance,\nall steps", "last\nstep", *ranks, "busiest\nexpert",
        "chosen by\n(tokens)", "never\nchosen", "dropped", "entropy", tight=True,
    )  # fmt: skip
    for layer in experts.layers[:MOST_SHOWN]:
        number = len(layer.chosen)
        made.add_row(
            str(layer.layer), f"{layer.imbalance:.2f}", f"{imbalance(layer.last):.2f}",
            *([f"{layer.rank_imbalance:.2f}"] if ranks else []), f"{layer.busiest} of {number}",
            f"{layer.busiest_frac:.1%}",
            str(layer.never), f"{layer.dropped_frac:.1%}", f"{layer.entropy / max(math.log(number), 1e-9):.1%}",
        )  # fmt: skip
    console.print(made)
    most = max(layer.most_uneven for layer in experts.layers)
    say(
        console,
        f"{experts.steps} steps; imbalance: the busiest over the mean; 1 is even, {most:.3g} is all tokens "
        f"to the same experts. Entropy: of a token's scores, 100% where all experts are alike",
    )
    if len(experts.layers) > MOST_SHOWN:
        console.print(clean(f"and {len(experts.layers) - MOST_SHOWN} more layers; --json has all of them"))


def _print_precision(console: Console, report: Mapping[str, Any]) -> None:
    """Overflows and the scale over time in two lines, then a row for each layer."""
    steps, scales = report["overflow_steps"], report["scales"]
    if scales:
        console.print(clean(f"overflows: {_some([f'step {step}' for step in steps]) or 'none'}"))
        changes = [f"{brief('', scale)} from step {step}" for step, scale in scales]
        console.print(clean(f"loss scale: {_some(changes)}"))
    looks = report["layers"]
    if not looks:
        return
    first, last = looks[0], looks[-1]
    heads = [f"gradient\nnorm,\nstep {look['step']}" for look in (first, last)[: len(looks)]]
    made = make_table(
        "layer", *heads, f"largest output\nin {len(looks)} looks", f"of {report['dtype']}'s\nlargest", "of",
        tight=True,
    )  # fmt: skip
    for block in last["grad_norm"]:
        norms = [look["grad_norm"].get(block) for look in (first, last)[: len(looks)]]
        step, (value, module) = max(
            ((look["step"], look["largest"][block]) for look in looks if block in look["largest"]),
            key=lambda found: _size(found[1][0]), default=(0, (None, "")),
        )  # fmt: skip
        made.add_row(
            clean(block), *("" if norm is None else clean(brief("", norm)) for norm in norms),
            clean("" if value is None else f"{brief('', value)}, step {step}"),
            clean("" if value is None else f"{_size(value) / report['largest_number']:.1%}"),
            clean(module.removeprefix(f"{block}.")),
        )  # fmt: skip
    console.print(made)


def _size(value: Any) -> float:
    """Of a largest output: a NaN, which a record may have as text, is above all."""
    number = float(value)
    return float("inf") if number != number else number


def _some(items: Sequence[str]) -> str:
    """The first and the last of a long list."""
    if len(items) > MOST_SHOWN:
        half = MOST_SHOWN // 2
        items = [*items[:half], f"... {len(items) - 2 * half} more ...", *items[-half:]]
    return ", ".join(items)


def _unit(name: str, key: str) -> str:
    """The name whose end tells the unit: that of the entry, or of the whole list."""
    return "x_s" if name.endswith("_seconds") else key.rpartition(".")[2]

"""What `--json` prints: one object on standard output that every JSON reader takes."""

from __future__ import annotations

import json
import math
from typing import Any

import click

from fivefold.core.json_text import strict


class FiniteRange(click.FloatRange):
    """A range of numbers that NaN is not in: it compares as neither too small nor too large."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value!r} is not a finite number", param, ctx)
        return number


def print_json(value: dict[str, Any]) -> None:
    """Print `value`. JSON has no NaN and no infinity: they become the texts nan, inf and -inf, which float() reads."""
    click.echo(json.dumps(strict(value), indent=2, allow_nan=False))

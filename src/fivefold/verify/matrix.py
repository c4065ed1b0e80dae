"""A walk over the legal layouts of a model: every shape, every pair of options, each compared with one device.

spec = preset("tiny-llama")
for verdict in walk(spec, chosen_cases(spec, max_ranks=8), dtype="float64"):
    assert verdict.passed, verdict.cause
"""

from __future__ import annotations

import hashlib
import json
import math
import time
import zlib
from collections.abc import Hashable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from fivefold.core.file_lock import hold
from fivefold.core.json_text import strict
from fivefold.core.layout import Layout
from fivefold.core.model_spec import ModelSpec
from fivefold.core.plan import Plan
from fivefold.errors import ConfigError, LayoutError, RankFailure
from fivefold.strategies.legal import (
    Case,
    covering,
    legal_layouts,
    legal_options,
    recompute_options,
    shapes,
    why_not,
    with_recompute,
)
from fivefold.units import MIB
from fivefold.verify.verify import STEPS, Reference, Verdict, judge
from fivefold.verify.workload import BOUNDS, ROUTERS, common_plans

DType = Literal["float64", "float32"]
RESULTS_LIMIT_BYTES = 256 * MIB


def chosen_cases(
    spec: ModelSpec, max_ranks: int, *, least_ranks: int = 2, dtype: DType = "float64"
) -> list[Case]:
    """Few legal layouts of 2..max_ranks ranks with every shape and every pair of options, fewest ranks first."""
    found: list[Layout] = []
    for ranks in range(least_ranks, max_ranks + 1):
        found += legal_layouts(spec, ranks, lambda layout: _plan(spec, layout, dtype))
    return with_recompute(covering(found), recompute_options(spec))


def skipped_shapes(
    spec: ModelSpec, max_ranks: int, *, least_ranks: int = 2, dtype: DType = "float64"
) -> list[tuple[Layout, str]]:
    """Shapes of which no layout is legal, with the rule that forbids the plainest."""
    found = []
    for shape in (shape for ranks in range(least_ranks, max_ranks + 1) for shape in shapes(ranks)):
        legal = legal_options(spec, shape, lambda layout: _plan(spec, layout, dtype))
        if next(legal, None) is None:
            dp, tp, pp, cp = shape
            plain = Layout(dp=dp, tp=tp, pp=pp, cp=cp)
            rule = why_not(plain, lambda layout: _plan(spec, layout, dtype))
            found.append((plain, rule or "every option of it is refused"))
    return found


def walk(
    spec: ModelSpec,
    cases: Sequence[Case],
    *,
    dtype: DType = "float64",
    steps: int = STEPS,
    seed: int = 0,
    device: str = "auto",
    budget_s: float = math.inf,
    results: Path | None = None,
) -> Iterator[Verdict]:
    """A verdict for each case, in order, until the budget is spent; a rank that breaks fails its layout only.

    `results`: a file that gets each verdict as it comes. Those that it holds already are not taken again, so the same
    walk goes on where it was stopped; a layout of which a rank broke is not kept, and so tried again.
    Raises: ConfigError for a results file of another walk, or that another one is writing; UserError for a layout that
            cannot be run.
    """
    book = _Results(results, _header(spec, dtype, steps, seed)) if results is not None else None
    references: dict[Hashable, Reference] = {}
    deadline = time.monotonic() + budget_s
    for case in cases:
        known = book.verdicts.get(str(case)) if book is not None else None
        if known is not None:
            yield known
            continue
        if time.monotonic() >= deadline:
            continue  # what the file holds is told all the same
        verdict, ended = _judge(_plans(spec, case, dtype), references, steps, seed, device)
        if book is not None and ended:
            book.add(verdict)
        yield verdict


def _judge(
    plans: tuple[Plan, Plan],
    references: dict[Hashable, Reference],
    steps: int,
    seed: int,
    device: str,
) -> tuple[Verdict, bool]:
    """The verdict, and whether all ranks came to their end."""
    plan, single = plans
    key = (single.workload.seq_len, single.workload.global_batch, single.execution.router)
    if key not in references:
        references[key] = Reference(single, steps=steps, seed=seed, device=device)
    try:
        return references[key].judge(plan), True
    except RankFailure as failure:
        nothing = judge(plan, [], references[key].wholes, against=single.layout, steps=steps)
        return nothing.replace(cause=str(failure), event_differences=(), events_match=False), False


def _plans(spec: ModelSpec, case: Case, dtype: DType) -> tuple[Plan, Plan]:
    router = ROUTERS[zlib.crc32(str(case).encode()) % len(ROUTERS)]
    return common_plans(spec, case.layout, Layout(), dtype, recompute=case.recompute, router=router)


def _plan(spec: ModelSpec, layout: Layout, dtype: DType) -> Plan:
    return _plans(spec, Case(layout), dtype)[0]


def _header(spec: ModelSpec, dtype: DType, steps: int, seed: int) -> dict[str, Any]:
    return {
        "model": spec.model_dump(mode="json"),
        "dtype": dtype,
        "steps": steps,
        "seed": seed,
        "code": _code_hash(),
        "bound": BOUNDS[dtype],
    }


def _code_hash() -> str:
    """Of every source file of this package: a verdict is of the code that it was made with."""
    digest = hashlib.sha256()
    root = Path(__file__).parents[1]
    for path in sorted(root.rglob("*.py")):
        digest.update(f"{path.relative_to(root)} {path.stat().st_size} ".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


class _Results:
    """A file of verdicts: what was asked for on the first line, then one verdict a line."""

    def __init__(self, path: Path, header: dict[str, Any]) -> None:
        self.path = path
        self.verdicts: dict[str, Verdict] = {}
        if path.exists() and not path.is_file():
            raise ConfigError(f"results {path}: not a regular file")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self.file = path.open("ab")
        except OSError as error:
            raise ConfigError(f"cannot write results to {path}: {error.strerror}") from None
        if not hold(self.file.fileno()):
            self.file.close()
            raise ConfigError(f"another walk is writing {path}; wait for it, or name another file")
        try:
            whole = self._read(header)
        except ConfigError:
            self.file.close()
            raise
        self.file.truncate(whole)  # a line that was cut short when a walk was killed
        if not whole:
            self._write(header)

    def add(self, verdict: Verdict) -> None:
        self.verdicts[str(verdict.case)] = verdict
        self._write(strict(verdict.model_dump(mode="json")))

    def _write(self, value: dict[str, Any]) -> None:
        self.file.write(json.dumps(value, allow_nan=False).encode() + b"\n")
        self.file.flush()

    def _read(self, header: dict[str, Any]) -> int:
        """Take over what the file holds; returns the bytes of its whole lines."""
        try:
            if self.path.stat().st_size > RESULTS_LIMIT_BYTES:
                raise ConfigError(f"{self.path} is no file of results: it is larger than 256 MiB")
            lines = self.path.read_bytes().splitlines(keepends=True)
        except OSError as error:
            raise ConfigError(f"cannot read results {self.path}: {error.strerror}") from None
        whole = [line for line in lines if line.endswith(b"\n")]
        start = json.dumps(header, allow_nan=False).encode()
        try:
            if lines and not whole and not start.startswith(lines[0]):
                raise ValueError("a file of something else, which is not to be overwritten")
            found = [json.loads(line) for line in whole]
            if found and found[0] != json.loads(json.dumps(header)):
                raise ConfigError(
                    f"{self.path} holds the results of another walk (model, dtype, steps, seed or code differ); "
                    "name another file"
                )
            verdicts = [Verdict.model_validate(one) for one in found[1:]]
            self.verdicts = {str(verdict.case): verdict for verdict in verdicts}
        except (ValueError, KeyError, TypeError, RecursionError, LayoutError):
            raise ConfigError(f"{self.path} is no file of results of this command") from None
        return sum(map(len, whole))

"""Why two layouts differ: the first module, a clean ratio and what it counts, events that should not be, the axis."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from fivefold.core.layout import Layout
from fivefold.verify.communication import rank_names
from fivefold.verify.compare import Errors, Key, Whole
from fivefold.verify.observe import COUNT, INPUTS

CLEAN_RATIO = 100.0
"""A ratio is clean when what is left at it is below this many times the bound: all else is then explained."""


@dataclass(frozen=True)
class Cause:
    """What is known about a difference."""

    first_module: str | None
    ratio: float | None
    text: str
    quantity: str | None = None
    """Of which the first tensor differs."""


def find_cause(
    errors: Errors,
    bound: float,
    counts: dict[str, int],
    event_lines: list[str],
    not_judged: tuple[str, ...] = (),
) -> Cause:
    """Name the first module that differs and the ratio if it is a clean one.

    `counts`: what a ratio may be (microbatches, dp, ...). Order: missing tensors; then step by step what was read,
    forward, backward, update; then events, which are told beside numbers that differ as well.
    """
    if errors.missing:
        names = ", ".join(f"{name} ({quantity})" for quantity, name in errors.missing[:3])
        more = f" and {len(errors.missing) - 3} more" if len(errors.missing) > 3 else ""
        return Cause(_module_of(errors.missing[0][1]), None, f"no rank holds all of {names}{more}")
    bad = [
        key
        for key, error in errors.by_tensor.items()
        if key[0] in _STAGES and key[0] not in not_judged and not error <= bound
    ]
    if bad:
        when = min(map(_when, bad))
        first = _of_one_quantity([key for key in bad if _when(key) == when])
        cause = _describe(first, errors, bound, counts)
        more = f" and {len(event_lines) - 1} more" if len(event_lines) > 1 else ""
        also = f"; nor is the communication as predicted: {event_lines[0]}{more}" if event_lines else ""
        return replace(cause, text=cause.text + also)
    if event_lines:
        return Cause(
            None, None, f"the numbers agree, the communication does not: {'; '.join(event_lines[:3])}"
        )
    return Cause(None, None, "no single tensor stands out")


def name_axis(layout: Layout, still_fails: Callable[[Layout], bool]) -> str:
    """Set each axis to 1 in turn; the axes without which the difference is gone are the guilty ones.

    Then the options that act on the guilty axes, each in turn at its plainest.
    """
    axes = [axis for axis in ("tp", "cp", "pp", "dp", "ep") if layout.degree(axis) > 1]
    guilty = [axis for axis in axes if not still_fails(layout.without(axis))]  # type: ignore[arg-type]
    if "ep" in guilty:  # with fewer ranks there may be no ep either: that is not the fault of their axis
        guilty = [axis for axis in guilty if axis == "ep" or layout.without(axis).ep > 1]  # type: ignore[arg-type]
    if not guilty and len(axes) == 1:
        return f"not axis {axes[0]}: with {axes[0]} = 1 the difference stays, so look at the layout compared with"
    if not guilty:
        return f"the difference stays whichever of {', '.join(axes)} is set to 1"
    if len(guilty) == 1:
        text = f"axis {guilty[0]}: with {guilty[0]} = 1 the difference is gone"
    else:
        text = f"axes {' and '.join(guilty)} together: with either at 1 the difference is gone"
    spared = [name for name, plainer in _plainer(layout, guilty) if not still_fails(plainer)]
    return text + (f", and so it is with {' or '.join(spared)}" if spared else "")


def _plainer(layout: Layout, axes: Collection[str]) -> Iterator[tuple[str, Layout]]:
    """The layout with one option of these axes at its plainest, and what that option is then."""
    alone = layout.ep * layout.etp == 1 or layout.etp == layout.tp  # else experts need sequence parallelism
    if "tp" in axes and layout.sp and alone:
        yield "nosp", layout.replace(sp=False)
    if "cp" in axes and layout.cp_method != "gather":
        yield "gather", layout.replace(cp_method="gather")
    if "pp" in axes and (layout.schedule, layout.chunks) != ("1f1b", 1):
        placement = "even" if isinstance(layout.placement, tuple) else layout.placement
        yield "1f1b", layout.replace(schedule="1f1b", placement=placement)
    if layout.etp > 1 and (layout.sp or layout.tp == 1):
        yield "etp1", layout.replace(etp=1)
    if layout.zero_group is not None:
        yield f"zero{layout.zero} without groups", layout.replace(zero_group=None)
    if layout.zero:
        yield "zero0", layout.replace(zero=0, zero_group=None)


def _of_one_quantity(bad: list[Key]) -> list[Key]:
    """Of what comes into being together, the first quantity: a layer's choice of experts comes before its output."""
    quantity, _ = min(bad, key=lambda key: (*_STAGES[key[0]][1](key[1])[:2], key[0] == "activations"))
    return [key for key in bad if key[0] == quantity]


def _describe(bad: list[Key], errors: Errors, bound: float, counts: dict[str, int]) -> Cause:
    """`bad`: the tensors of one quantity that differ in one step."""
    quantity, (what, order) = bad[0][0], _STAGES[bad[0][0]]
    _, name = min(bad, key=lambda key: order(key[1]))
    total = sum(_when(key) == _when(bad[0]) for key in errors.by_tensor if key[0] == quantity)
    ratio = common_ratio(bad, errors, bound)
    extent = f"all {total}" if len(bad) == total and total > 1 else f"{len(bad)} of {total}"
    worst = max(errors.by_tensor[key] for key in bad)
    step = f" in step {_step_of(name)}" if " step " in name else ""
    where = _where(bad, errors, bound)
    first: str | None = None
    if quantity in ("loss", "grad_norm", "loss_scale"):
        runs = " and ".join(sorted((run for _, run in bad), key=order))
        text = f"{what} differs by {worst:.2g} in {runs}{where}"
    elif quantity == "inputs":
        read = " and ".join(name for name in INPUTS if any(key[1].startswith(name) for key in bad))
        return Cause(None, None, f"the ranks read other {read}{step} (worst {worst:.2g}{where})", quantity)
    else:
        first = _module_of(name)
        kind = next((label for kind, label in _KINDS.items() if f" {kind} " in f"{name} "), what)
        told = _told(bad) if quantity == "routing" else ""
        text = f"{kind} of {first}{told}{step} is the first to differ ({extent} differ, worst {worst:.2g}{where})"
    if quantity == "loss_scale":
        counts = {}  # halving is no count of ranks
    if ratio is not None and (
        first is not None or not counts or count_names(ratio, counts, CLEAN_RATIO * bound)
    ):
        text += f"; {what}: {times(ratio, counts, CLEAN_RATIO * bound)}"  # two numbers always have some ratio
    return Cause(first, ratio, text, quantity)


def experts_in_norm(
    seen: Mapping[Key, Whole],
    reference: Mapping[Key, Whole],
    experts: Sequence[str],
    bound: float,
    counts: dict[str, int],
) -> str:
    """How often a wrong norm of the first step counts the squares of these parameters, if that explains it.

    Formula: norm^2 - right norm^2 = (times - 1) x the squares of their gradients.
    """
    right = [reference.get(("gradients", f"{name} step 1")) for name in experts]
    squares = sum(float((whole.values**2).sum()) for whole in right if whole is not None)
    of_run = "grad_norm", "sgd step 1"
    if not squares or of_run not in seen or of_run not in reference:
        return ""
    norm, right_norm = float(seen[of_run].values), float(reference[of_run].values)
    counted = 1 + (norm**2 - right_norm**2) / squares
    tolerance = CLEAN_RATIO * bound * right_norm**2 / squares
    if abs(counted) <= tolerance:
        counted = 0.0
    if tolerance > 0.01 or not (counted == 0.0 or count_names(counted, counts, tolerance)):
        return ""
    return f"; in it the squares of experts count {times(counted, counts, tolerance)}"


def _told(bad: list[Key]) -> str:
    """` (balance, z)`: which of the numbers of a router."""
    return f" ({', '.join(dict.fromkeys(name.split(' ')[1] for _, name in bad))})"


def _where(bad: list[Key], errors: Errors, bound: float) -> str:
    """`, on rank 1 only` where other ranks that have a part of the same tensors are right."""
    of_ranks = [(rank, error) for key in bad for rank, error in errors.by_rank.get(key, {}).items()]
    wrong = {rank for rank, error in of_ranks if not error <= bound}
    return "" if wrong == {rank for rank, _ in of_ranks} else f", on {rank_names(sorted(wrong))} only"


def common_ratio(bad: list[Key], errors: Errors, bound: float) -> float | None:
    """The ratio that explains every differing tensor, if there is one and it is not 1."""
    shares = [errors.shares[key] for key in bad if key in errors.shares]
    if not shares or any(not left <= CLEAN_RATIO * bound for _, left in shares):
        return None
    ratio = median(r for r, _ in shares)
    if any(not math.isclose(r, ratio, rel_tol=CLEAN_RATIO * bound) for r, _ in shares):
        return None
    return None if math.isclose(ratio, 1.0, rel_tol=CLEAN_RATIO * bound) else ratio


def times(ratio: float, counts: dict[str, int], tolerance: float) -> str:
    """`exactly 3.000x, which is the number of microbatches`; as many decimals as the ratio needs."""
    names = count_names(ratio, counts, tolerance)
    close = 1e-3 if names else max(tolerance, 1e-8)
    texts = (f"{ratio:.{decimals}f}" for decimals in range(3, 17))
    text = next((text for text in texts if math.isclose(float(text), ratio, rel_tol=close)), f"{ratio:.8g}")
    return f"exactly {text}x{', which is ' + ' or '.join(names) if names else ''}"


def count_names(ratio: float, counts: dict[str, int], tolerance: float) -> list[str]:
    """The counts, and their reciprocals, that a ratio is."""
    many = {name: n for name, n in counts.items() if n > 1}
    names = [name for name, n in many.items() if math.isclose(ratio, n, rel_tol=tolerance)]
    return names + [
        f"1 / {name}" for name, n in many.items() if math.isclose(ratio, 1 / n, rel_tol=tolerance)
    ]


def _module_of(name: str) -> str:
    """`layers.0.mlp.up` of `layers.0.mlp.up.weight exp_avg step 2`."""
    return re.sub(r"\.(weight|bias)$", "", name.split(" ")[0])


def _step_of(name: str) -> int:
    found = re.search(r"step (\d+)$", name)
    return int(found[1]) if found else 1


def _when(key: Key) -> tuple[int, int]:
    """When a tensor comes into being: its step, and its place in the step."""
    quantity = "activations" if key[0] == "routed_experts" else key[0]  # layer by layer, both
    return _step_of(key[1]), list(_STAGES).index(quantity)


def _forward(name: str) -> tuple[int, int, str]:
    layer = re.match(r"layers\.(\d+)", name)
    if layer:
        return 1, int(layer[1]), name
    return (0 if name.startswith("embedding") else 2), 0, name


def _backward(name: str) -> tuple[int, int, str]:
    part, layer, rest = _forward(name)
    if part == 1:  # inside a layer from its end; experts before their router, as in the alphabet
        inside = rest.split(".")[2:3]
        rest = f"{_BACKWARD.index(inside[0]) if inside and inside[0] in _BACKWARD else 0} {rest}"
    return -part, -layer, rest


_BACKWARD = ("mlp", "mlp_norm", "attention", "attention_norm")
"""The parts of a layer in the order in which they get gradients."""


_STAGES: dict[str, tuple[str, Callable[[str], tuple[int, int, str]]]] = {
    "initial": ("the initial value", _forward),
    "loss_scale": ("the loss scale", _forward),
    "inputs": ("what the ranks read", _forward),
    "activations": ("the output", _forward),
    "routed_experts": ("the choice of experts", _forward),
    "logits": ("the logits", _forward),
    "gradients": ("the gradient", _backward),
    "loss": ("the loss", _forward),
    "grad_norm": ("the gradient norm", _forward),
    "weights_sgd": ("the weight after an SGD step", _backward),
    "moments": ("the moment", _backward),
    "weights_adamw": ("the weight after an AdamW step", _backward),
    "routing": ("what is told", _forward),
    "buffers": ("the buffer", _forward),
}
"""In the order of cause and effect within a step: what differs first is named."""

_KINDS = {"exp_avg": "the first moment", "exp_avg_sq": "the second moment", COUNT: "the count of updates"}

"""When nothing fits: by how much, and the nearest questions of which something does."""

from __future__ import annotations

from dataclasses import replace
from math import lcm

from fivefold.core.cluster import Cluster
from fivefold.core.layout import Layout
from fivefold.core.model_counts import parameter_counts
from fivefold.errors import LayoutError, UserError
from fivefold.estimate.memory import BAND
from fivefold.plan.lattice import Fixed, Lattice
from fivefold.plan.question import Question
from fivefold.plan.search import Answer
from fivefold.units import GIB, GIGA, format_bytes, format_count

MOST_NODES = 65_536
SHORTEST = 128
NEED_OTHERS = ("ep", "etp", "zero", "sp", "chunks", "schedule")
"""Parts of a layout whose rules depend on parts that may not be fixed."""


def fits(question: Question, fixed: Fixed) -> bool:
    """Whether any legal layout fits surely."""
    lattice = Lattice(question, fixed)
    limit = lattice.limit(question.capacity_bytes / (1 + BAND))
    for group in lattice.groups():
        legal = lattice.legal(group)
        if legal.any() and any(bool((legal & (needed <= limit)).any()) for needed in lattice.needed(group)):
            return True
    return False


def refusal(question: Question, fixed: Fixed, answer: Answer) -> tuple[str, list[str]]:
    """Why there is no plan, in one line, and the nearest things that fit."""
    nearest = nearest_things(question, fixed)
    nothing = "" if answer.least is None else "; nothing near it fits either"
    hint = f"; nearest: {'; '.join(nearest)}" if nearest else nothing
    return why_nothing(question, fixed, answer) + hint, nearest


def why_nothing(question: Question, fixed: Fixed, answer: Answer) -> str:
    """By how much the question has no answer."""
    spec = question.spec
    if answer.least is None:
        rule = _forbidden(question, fixed)
        if rule is not None:
            return rule
        return (
            f"no layout of {spec.name} on {question.cluster} is legal with global batch {question.global_batch} and "
            f"{question.seq_len} tokens{' and what was fixed' if fixed != Fixed() else ''}"
        )
    parameters = parameter_counts(spec)["total_parameters"]
    states = parameters * question.numerics.states
    memory = (question.node.memory_bytes or 0) * question.devices
    have = question.capacity_bytes
    if states > memory:
        return (
            f"{spec.name} does not fit on {question.cluster}: weights, gradients and {question.optimizer} take "
            f"{question.numerics.states:g} bytes x {format_count(parameters)} parameters = {states / GIGA:,.0f} GB "
            f"({states / GIB:,.0f} GiB), the devices have {memory / GIB:,.0f} GiB in all"
        )
    least = answer.least
    over = answer.least_bytes * (1 + BAND) - have
    return (
        f"{spec.name} does not fit on {question.cluster}: even {least.layout}, micro-batch {least.micro_batch}, "
        f"recompute {least.recompute} needs {format_bytes(answer.least_bytes)} of {format_bytes(have)}, "
        f"with {BAND:.0%} to spare {format_bytes(over)} too much"
    )


def _forbidden(question: Question, fixed: Fixed) -> str | None:
    """The rule that forbids what was fixed, whatever the rest; None where no rule forbids it by itself."""
    alone = {name: value for name, value in fixed.layout.items() if name not in NEED_OTHERS}
    ranks = lcm(question.devices, fixed.layout.get("ep", 1) * fixed.layout.get("etp", 1))
    try:
        experts = Layout(
            dp=ranks, **{name: fixed.layout[name] for name in ("ep", "etp") if name in fixed.layout}
        )
        layout = Layout(**alone)
    except LayoutError as error:
        return str(error)
    rule = question.why_not(layout, fixed.micro_batch or 1)
    rule = rule or replace(question, global_batch=ranks).why_not(experts, 1)
    if rule is None and question.devices % layout.world_size:
        rule = f"{layout} takes {layout.world_size} devices, and {question.devices} are no multiple of them"
    return rule


def nearest_things(question: Question, fixed: Fixed) -> list[str]:
    """Changes that make something fit, one at a time."""
    found = []
    devices = fewest_devices(question, fixed)
    if devices is not None:
        found.append(f"{devices.devices} {devices.nodes[0].device} ({devices})")
    if not question.offload and fits(replace(question, offload=True), fixed):
        found.append("the optimizer's states in host memory (--offload)")
    if question.optimizer != "sgd" and fits(replace(question, optimizer="sgd"), fixed):
        found.append("an optimizer without states (--optimizer sgd)")
    length = question.seq_len // 2
    while length >= SHORTEST and not fits(replace(question, seq_len=length), fixed):
        length //= 2
    if length >= SHORTEST:
        found.append(f"sequences of {length} tokens")
    return found


def with_nodes(question: Question, count: int) -> Question | None:
    """The same question on so many nodes; None where their network is not known."""
    from fivefold.catalog.clusters import complete

    kind = question.node.replace(count=count)
    try:
        return replace(question, cluster=complete(Cluster(nodes=(kind,))))
    except UserError:
        return None


def fewest_devices(question: Question, fixed: Fixed) -> Cluster | None:
    """The fewest whole nodes on which something fits; more than there are where need be. None: not even MOST_NODES.

    Only layouts that the batch allows count, so a number of nodes may fit where a slightly larger one does not: the
    numbers tried are powers of two, and then those between that are multiples of ever smaller ones.
    """
    count = 1
    while count <= MOST_NODES:
        other = with_nodes(question, count)
        if other is None:
            return None
        if fits(other, fixed):
            break
        count *= 2
    else:
        return None
    step = count // 4
    best = count
    while step:
        other = with_nodes(question, best - step)
        if other is not None and best - step > count // 2 and fits(other, fixed):
            best -= step
        step //= 2
    found = with_nodes(question, best)
    return found.cluster if found else None

"""The options that `estimate` and `plan` share, and the question that they make."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from fivefold.cli.output import FiniteRange

if TYPE_CHECKING:
    from fivefold.plan.question import Question

Command = TypeVar("Command", bound=Callable[..., Any])

SEQUENCE = 4096
"""Tokens in a sequence unless told otherwise, or what the model can take if that is less."""

OPTIONS = (
    click.option("--model", "-m", required=True, help="A preset such as llama-3.1-70b, or a path to a config.json."),
    click.option(
        "--cluster", "-c", required=True,
        help="Such as 32xA100-80GB, '4 nodes x 8 H100, 400 Gb/s', a name such as selene, or a YAML file.",
    ),
    click.option(
        "--seq-len", type=click.IntRange(1, 2**27),
        help="Tokens in a sequence. Default: 4096, or what the model takes.",
    ),
    click.option(
        "--global-batch", type=click.IntRange(1, 10**6),
        help="Sequences in a step. Default: 4 million tokens of them.",
    ),
    click.option(
        "--precision", type=click.Choice(["bfloat16", "float16", "float32", "float8"]), default="bfloat16",
        show_default=True, help="Of products; weights are updated in float32.",
    ),
    click.option(
        "--grad-dtype", type=click.Choice(["bfloat16", "float32"]), default="bfloat16", show_default=True,
        help="In which gradients are kept and summed.",
    ),
    click.option(
        "--optimizer", type=click.Choice(["adamw", "sgd"]), default="adamw", show_default=True,
        help="Whose states are kept beside the weights.",
    ),
    click.option(
        "--framework", default="standard", show_default=True,
        help="The software that runs it: standard, megatron-core, fsdp, torchtitan, fivefold, ...",
    ),
    click.option(
        "--imbalance", type=FiniteRange(1, 1000), default=1.0, show_default=True,
        help="Tokens of the fullest expert rank over the mean.",
    ),
    click.option("--offload", is_flag=True, help="Keep the optimizer's states in the host's memory."),
    click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else."),
)  # fmt: skip


def options(command: Command) -> Command:
    """Add all of them to a command."""
    for option in reversed(OPTIONS):
        command = option(command)
    return command


def question(
    *, model: str, cluster: str, seq_len: int | None, global_batch: int, precision: Any, grad_dtype: Any,
    optimizer: Any, framework: str, imbalance: float, offload: bool,
) -> Question:  # fmt: skip
    """What the options ask. Raises: a UserError naming the option that cannot be understood."""
    from fivefold.catalog.clusters import resolve as resolve_cluster
    from fivefold.catalog.models import resolve
    from fivefold.estimate.stacks import as_named
    from fivefold.plan.question import Question

    spec = resolve(model)
    return Question(
        spec=spec, cluster=resolve_cluster(cluster), seq_len=seq_len or min(SEQUENCE, spec.max_positions),
        global_batch=global_batch, precision=precision, grad_dtype=grad_dtype, optimizer=optimizer,
        framework=as_named(framework).name, imbalance=imbalance, offload=offload,
    )  # fmt: skip


def said(cluster: str) -> list[str]:
    """What was assumed of the cluster beyond what was typed."""
    from fivefold.catalog.clusters import assumptions, named
    from fivefold.core.cluster import Cluster

    return assumptions(Cluster.parse(named().get(cluster.strip().lower(), cluster)))

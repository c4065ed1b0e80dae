"""What a training job computes in one step, whatever the layout."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from fivefold.core.value import Value
from fivefold.errors import WorkloadError

MOST_TOKENS = 2**27
"""Tokens in a sequence: thirteen times the longest context of any published model."""

MOST_SEQUENCES = 10**6
"""Sequences in a step: far beyond the largest batches in use, and few enough to be numbered one by one."""


class Workload(Value):
    """One step of training: `global_batch` sequences of `seq_len` tokens over all ranks and microbatches.

    Raises: WorkloadError for numbers that only a slip of the hand makes.
    """

    seq_len: int = Field(gt=0)
    global_batch: int = Field(gt=0)
    """Sequences."""
    separate_documents: bool = False
    """Whether a token attends only to tokens of its own document, where documents share a sequence."""

    @model_validator(mode="after")
    def _not_endless(self) -> Self:
        for what, count, most in (
            ("tokens in a sequence", self.seq_len, MOST_TOKENS),
            ("sequences in a step", self.global_batch, MOST_SEQUENCES),
        ):
            if count > most:
                raise WorkloadError(f"{count} {what} are more than any job has; at most {most} are supported")
        return self

    @property
    def tokens(self) -> int:
        """Token positions in one step, padding included."""
        return self.seq_len * self.global_batch

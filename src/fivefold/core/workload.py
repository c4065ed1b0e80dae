"""What a training job computes in one step, whatever the layout."""

from __future__ import annotations

from pydantic import Field

from fivefold.core.value import Value


class Workload(Value):
    """One step of training: `global_batch` sequences of `seq_len` tokens over all ranks and microbatches."""

    seq_len: int = Field(gt=0)
    global_batch: int = Field(gt=0)
    """Sequences."""

    @property
    def tokens(self) -> int:
        """Token positions in one step, padding included."""
        return self.seq_len * self.global_batch

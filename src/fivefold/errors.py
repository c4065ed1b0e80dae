"""Every mistake a user can make, one class each; a message has the numbers and the nearest thing that works.

FivefoldError                exit code 1
├── UserError                exit code 2: something that was asked for cannot be done as asked
│   ├── ConfigError          a config file or `key=value` that does not hold
│   ├── LayoutError          a layout that cannot be formed, or that the model, cluster or workload forbids
│   ├── ModelError           a model config that cannot be read or is not supported
│   ├── ClusterError         a cluster text or file that cannot be read
│   ├── WorkloadError        a batch or sequence length that does not divide
│   ├── DataError            a corpus that is empty or cannot be read
│   ├── LaunchError          ranks that cannot be started (port in use, too few devices)
│   ├── RecordError          a record store that cannot be read or written
│   └── CheckpointError      a checkpoint that is damaged, incomplete, or of another job
└── RankFailure              a rank died while running; the first cause comes first
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class FivefoldError(Exception):
    """Root of all errors that Fivefold raises on purpose."""

    exit_code = 1
    told: bool | None = None
    """In a launched job: whether another rank tells of it (True), or this one does (False); None: not agreed on."""


class UserError(FivefoldError):
    """Something that was asked for cannot be done as asked; the message says what would work."""

    exit_code = 2


class ConfigError(UserError):
    """A config file or a `key=value` override that does not hold."""


class LayoutError(UserError):
    """A layout that cannot be formed, or that the model, the cluster or the workload forbids."""


class ModelError(UserError):
    """A model config that cannot be read, or that is not supported (the field is named)."""


class ClusterError(UserError):
    """A cluster text or file that cannot be read."""


class WorkloadError(UserError):
    """A batch, microbatch or sequence length that does not divide as the layout needs."""


class DataError(UserError):
    """A corpus that is empty, too short, or cannot be read."""


class LaunchError(UserError):
    """Ranks that cannot be started: port in use, fewer devices than ranks."""


class RecordError(UserError):
    """A record store that cannot be read or written."""


class CheckpointError(UserError):
    """A checkpoint that is damaged, incomplete, or of another model or job (what differs is named)."""


class RankFailure(FivefoldError):
    """A rank died while running. `rank` and `cause` name the first failure; the others followed from it."""

    def __init__(self, rank: int, cause: str, details: str = "") -> None:
        super().__init__(f"rank {rank} failed first: {cause}")
        self.rank, self.cause, self.details = rank, cause, details

    def __reduce__(self) -> tuple[type[RankFailure], tuple[int, str, str]]:
        return type(self), (self.rank, self.cause, self.details)


def nearest(word: str, known: Iterable[str]) -> str:
    """` (did you mean 'x'?)` for the closest known word, or an empty text."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f" (did you mean {close[0]!r}?)" if close else ""


def nearest_numbers(wanted: int, legal: Iterable[int]) -> str:
    """The legal values on both sides of `wanted`, as text: `4 or 8`."""
    values = sorted(set(legal))
    below = [v for v in values if v < wanted][-1:]
    above = [v for v in values if v > wanted][:1]
    return " or ".join(str(v) for v in below + above) or "none"

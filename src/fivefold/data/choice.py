"""What a config says of data: read by the command line, so nothing heavy is imported here."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from fivefold.core.optimizer import Name
from fivefold.core.value import Value


class DataSource(Value):
    """One source of a mixture."""

    path: Name
    """As `data` of a training config: `builtin`, text, or a prepared folder."""
    weight: Annotated[float, Field(gt=0, le=1e9)] = 1.0
    """Share of the samples, relative to the other sources."""

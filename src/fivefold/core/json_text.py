"""Numbers that JSON does not have, as texts that `float` reads."""

from __future__ import annotations

import math
from typing import Any


def strict(value: Any) -> Any:
    """The same value with the texts nan, inf and -inf in place of such numbers; tuples become lists."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: strict(item) for key, item in value.items()}
    return [strict(item) for item in value] if isinstance(value, list | tuple) else value

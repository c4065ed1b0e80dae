"""The value that travels through the whole loop: planned, run, verified, diagnosed and recorded."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, Literal, NoReturn, Self

from pydantic import Field, JsonValue

from fivefold.core.cluster import Cluster
from fivefold.core.execution import Execution
from fivefold.core.layout import Layout
from fivefold.core.model_spec import ModelSpec
from fivefold.core.regular_file import read_text, write_whole
from fivefold.core.value import Value
from fivefold.core.workload import Workload
from fivefold.errors import ConfigError
from fivefold.units import MIB

SCHEMA_VERSION: Literal[1] = 1
_MAX_FILE_BYTES = 16 * MIB


class Plan(Value):
    """A model, a cluster, a workload, how it is cut and computed; what is expected of it, and why."""

    schema_version: Literal[1] = SCHEMA_VERSION
    model: ModelSpec
    cluster: Cluster
    workload: Workload
    layout: Layout
    execution: Execution = Execution()
    predictions: dict[str, JsonValue] = Field(default_factory=dict)
    """Expected figures by name; the unit is the suffix of the name."""
    reasons: tuple[str, ...] = ()
    """Why this plan, one sentence each."""

    @property
    def hash(self) -> str:
        """12 hex digits that name what is run, whatever was predicted of it."""
        content = self.model_dump(mode="json", exclude={"predictions", "reasons"})
        text = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def to_json(self) -> str:
        """The file form: JSON with the hash. Raises ConfigError for a prediction that is not finite."""
        try:
            return json.dumps({**self.model_dump(mode="json"), "hash": self.hash}, indent=2, allow_nan=False)
        except ValueError:
            raise ConfigError("a plan holds finite numbers only; a prediction is NaN or infinite") from None

    @classmethod
    def from_json(cls, text: str, *, where: str = "plan") -> Self:
        """Read the file form. Raises ConfigError naming the key at fault, or a hash that differs."""
        data = _decode(text, where)
        version = data.get("schema_version", SCHEMA_VERSION)
        if version != SCHEMA_VERSION:
            raise ConfigError(
                f"{where}: schema version {version!r} is not supported; this version reads {SCHEMA_VERSION}"
            )
        written = data.pop("hash", None)
        plan = cls.read(data, where=where)
        if written not in (None, plan.hash):
            raise ConfigError(
                f"{where}: the file says hash {written!r}, its content gives {plan.hash!r}: it was edited; "
                "remove the hash line to use it as it is"
            )
        return plan

    def save(self, path: Path) -> None:
        """Write the file form, whole or not at all. Raises ConfigError where the disk refuses."""
        text = self.to_json() + "\n"
        try:
            write_whole({path: text})
        except OSError as error:
            raise ConfigError(f"cannot write plan {path}: {error.strerror}") from None

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a plan file. Raises ConfigError."""
        return cls.from_json(read_text(path, _MAX_FILE_BYTES, "plan", ConfigError), where=str(path))


def _decode(text: str, where: str) -> dict[str, Any]:
    def not_finite(constant: str) -> NoReturn:
        raise ConfigError(f"{where}: a plan holds finite numbers only, got {constant}")

    try:
        data = json.loads(text, parse_constant=not_finite)
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"{where}: not JSON (line {error.lineno}, column {error.colno}: {error.msg})"
        ) from None
    except (RecursionError, ValueError):
        raise ConfigError(f"{where}: not a plan: nested too deeply, or a number too long") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{where}: a plan is a JSON object, got a {type(data).__name__}")
    return data

"""The base of every value that travels in a Plan: frozen, keyword-only, validated where it is made."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from fivefold.errors import ConfigError, nearest


class Value(BaseModel):
    """A frozen, validated value. Unknown fields are refused with the nearest known one."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=False, allow_inf_nan=False)

    @classmethod
    def read(cls, data: Any, *, where: str) -> Self:
        """Validate untrusted data; a fault becomes one line that names the place, the value and the nearest key."""
        try:
            return cls.model_validate(data)
        except ValidationError as error:
            raise ConfigError(f"{where}: {describe(error, cls)}") from None

    def replace(self, **changes: Any) -> Self:
        """A copy with some fields changed, validated again."""
        values = {name: getattr(self, name) for name in type(self).model_fields}
        return type(self)(**{**values, **changes})


EXPECTED = {
    "int_parsing": "a whole number",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "int_parsing_size": "a smaller whole number",
    "float_parsing": "a number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_parsing": "true or false",
    "bool_type": "true or false",
    "string_type": "text",
    "string_too_short": "text that is not empty",
    "string_pattern_mismatch": "text of the form {pattern}",
    "literal_error": "{expected}",
    "list_type": "a list",
    "tuple_type": "a list",
    "greater_than": "a number above {gt}",
    "greater_than_equal": "a number of at least {ge}",
    "less_than": "a number below {lt}",
    "less_than_equal": "a number of at most {le}",
    "too_long": "at most {max_length} values",
    "too_short": "at least {min_length} values",
    "missing": "a value",
    "model_type": "keys and values",
    "model_attributes_type": "keys and values",
    "dict_type": "keys and values",
}
"""Kind of a pydantic error -> what would have been right, in our words."""

LONGEST_INPUT = 80
"""Characters of a bad input that a message repeats."""


def describe(error: ValidationError, cls: type[BaseModel]) -> str:
    """The first fault of a pydantic error as one line a person can act on."""
    fault = error.errors(include_url=False)[0]
    path = ".".join(str(part) for part in fault["loc"])
    if fault["type"] == "extra_forbidden":
        return f"unknown key {path!r}{nearest(str(fault['loc'][-1]), _known_keys(cls, fault['loc'][:-1]))}"
    if fault["type"] == "missing":
        return f"missing key {path!r}"
    message = fault["msg"].removeprefix("Value error, ")
    if fault["type"] in EXPECTED:
        message = f"expected {EXPECTED[fault['type']].format(**_readable(fault.get('ctx', {})))}"
    got = repr(fault["input"])
    got = got if len(got) <= LONGEST_INPUT else f"{got[:LONGEST_INPUT]} ..."
    return f"{path}: {message} (got {got})" if path else message


def _readable(context: Mapping[str, Any]) -> dict[str, Any]:
    """Whole numbers as such: pydantic gives the bound 1000000 of a float as 1000000.0."""
    return {key: f"{value:g}" if isinstance(value, float) else value for key, value in context.items()}


def _known_keys(cls: type[BaseModel], path: tuple[int | str, ...]) -> list[str]:
    model: Any = cls
    for part in path:
        field = model.model_fields.get(part) if hasattr(model, "model_fields") else None
        if field is None:
            continue
        model = next(_models(field.annotation), model)
    return list(model.model_fields)


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    """The classes with fields in a type, however deep: `A`, `A | None`, `tuple[A, ...]`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in getattr(annotation, "__args__", ()):
        yield from _models(part)

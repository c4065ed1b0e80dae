"""The text of a training config: a YAML file of bounded size, read without aliases, doubled keys or Python objects."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import yaml

from fivefold.core.regular_file import read_text
from fivefold.errors import ConfigError
from fivefold.units import KIB

CONFIG_LIMIT_BYTES = 64 * KIB
"""A training config is a page of text; anything larger is the wrong file."""

LONGEST_INTEGER = 100
"""Digits of an integer that is read; what keys take is far below."""


def read_file(path: Path) -> dict[str, Any]:
    """The keys and values of a file; one that is empty has none. Raises: ConfigError."""
    try:
        text = read_text(path, CONFIG_LIMIT_BYTES, "training config", ConfigError)
    except ConfigError as error:
        hint = (
            "" if os.path.lexists(path) else "; give a YAML file, or settings alone, such as model=tiny-llama"
        )
        raise ConfigError(f"{error}{hint}") from None
    try:
        data = parse(text)
    except (yaml.YAMLError, ValueError, OverflowError, RecursionError) as error:
        raise ConfigError(
            one_line(f"{path}: not a YAML file of keys and values: {_complaint(error)}")
        ) from None
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: expected keys and values, got a {type(data).__name__}")
    if wrong := [key for key in data if not isinstance(key, str)]:
        raise ConfigError(one_line(f"{path}: keys are text, got {wrong[0]!r}"))
    return data


class _Loader(yaml.SafeLoader):
    """YAML's safe subset without aliases (they can blow up a small file) and without keys given twice."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            raise yaml.MarkedYAMLError(
                problem="aliases (*name) are not supported", problem_mark=self.peek_event().start_mark
            )
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        mapping = super().construct_mapping(node, deep=True)
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for place, key in enumerate(keys):
            if key in keys[:place]:
                raise yaml.MarkedYAMLError(
                    problem=f"key {key!r} is given twice", problem_mark=node.value[place][0].start_mark
                )
        return mapping

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        """Raises: OverflowError for an integer of so many digits that Python would not even print it."""
        if len(node.value) > LONGEST_INTEGER:
            raise OverflowError(f"an integer of {len(node.value)} digits")
        return int(super().construct_yaml_int(node))


_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_yaml_int)


def parse(text: str) -> Any:
    """What a YAML text says. Raises: yaml.YAMLError, ValueError, OverflowError or RecursionError."""
    return yaml.load(text, Loader=_Loader)  # a SafeLoader: no Python objects are made


def _complaint(error: Exception) -> str:
    """YAML's complaint as `line 3: ...` rather than as a paragraph."""
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None)
    if isinstance(error, RecursionError):
        return "nested too deeply"
    if mark is None or problem is None:
        return " ".join(str(error).split())
    return f"line {mark.line + 1}: {problem}"


def one_line(message: str, limit: int = 600) -> str:
    """A message as one line of at most `limit` letters, whatever the value inside was."""
    line = " ".join(message.split())
    return line if len(line) <= limit else f"{line[:limit]} ..."

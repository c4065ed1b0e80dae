"""The small files beside the weights of a Hugging Face checkpoint: tokenizer, generation settings, licence.

Read whole, by name, from folders that are not trusted: no other file is looked at, so neither code nor pickles are ever
carried along, and a tokenizer that names code of its own loses that name.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from fivefold.core.regular_file import read_regular
from fivefold.errors import ModelError
from fivefold.units import MIB, format_bytes

TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
TOKENIZER_FILES = (
    TOKENIZER, TOKENIZER_CONFIG, "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt",
    "tokenizer.model", "chat_template.jinja", "chat_template.json", "generation_config.json",
)  # fmt: skip
"""What tokens mean, generation settings (which name tokens) included."""
COMPANIONS = (*TOKENIZER_FILES, "LICENSE", "LICENSE.txt", "LICENSE.md", "NOTICE")
MOST_COMPANION_BYTES = 128 * MIB
"""Of one file; the largest tokenizer.json in use have some 35 MiB."""


def read_companions(folder: Path, names: Iterable[str] = COMPANIONS) -> dict[str, bytes]:
    """The contents of those of the named files that the folder has.

    `auto_map` is taken out of tokenizer_config.json: it names code files, which are not carried over.
    Raises: ModelError for a file that cannot be read, is no regular file, or is larger than 128 MiB.
    """
    found: dict[str, bytes] = {}
    for name in names:
        content = read_small(folder / name, MOST_COMPANION_BYTES)
        if content is not None:
            found[name] = _without_code(content) if name == TOKENIZER_CONFIG else content
    return found


def read_small(path: Path, limit_bytes: int) -> bytes | None:
    """A whole file of bounded size; None where there is none. Raises: ModelError."""
    try:
        content = read_regular(path, limit_bytes + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}") from None
    if len(content) > limit_bytes:
        size, most = format_bytes(path.stat().st_size), format_bytes(limit_bytes)
        raise ModelError(
            f"{path} has {size}, at most {most} are read: remove it, or put the right file there"
        )
    return content


def _without_code(content: bytes) -> bytes:
    """The same bytes, unless they name code."""
    try:
        config = json.loads(content)
    except (ValueError, RecursionError):
        return content  # whoever loads it says so
    if not isinstance(config, dict) or "auto_map" not in config:
        return content
    return json.dumps({k: v for k, v in config.items() if k != "auto_map"}, indent=2).encode()

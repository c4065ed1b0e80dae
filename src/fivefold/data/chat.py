"""Instruction and chat records: how one becomes a document, and which of its tokens count in the loss.

A record is a JSON object with `messages: [{"role": ..., "content": ...}, ...]`, or with `prompt` and `completion`.
Loss is on answers only; what counts is between the brackets:

    messages     bos <|im_start|>user\\n CONTENT <|im_end|>\\n <|im_start|>assistant\\n [CONTENT <|im_end|>]\\n eos
    prompt       bos PROMPT [COMPLETION eos]

`<|im_start|>` and `<|im_end|>` are the markers of ChatML: one token each where the tokenizer has them, their letters
otherwise. Text inside CONTENT never becomes a marker, whatever it says. Every part is tokenised by itself, so that an
answer's tokens do not depend on what stands before. A template that a tokenizer carries is not used.
"""

from __future__ import annotations

import hashlib
import re
from typing import Any, NamedTuple

START, END = "<|im_start|>", "<|im_end|>"
ANSWER_ROLE = "assistant"
ROLE = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,31}")


class Part(NamedTuple):
    """A stretch of a document that is tokenised by itself."""

    text: str
    marker: bool = False
    """`<|im_start|>` or `<|im_end|>`."""
    counts: bool = False
    """Its tokens count as labels."""


class Conversation(NamedTuple):
    """The parts of one document, and whether its eos counts as a label."""

    parts: tuple[Part, ...]
    eos_counts: bool

    def digest(self) -> bytes:
        """16 bytes that depend on the text and on what counts, not on how the record was written."""
        hasher = hashlib.sha256(b"chat")
        for part in self.parts:
            text = part.text.encode()
            hasher.update(len(text).to_bytes(8, "little") + bytes((part.marker, part.counts)) + text)
        return hasher.digest()[:16]

    def size(self) -> int:
        return sum(len(part.text) for part in self.parts)


def is_chat(record: object) -> bool:
    """Whether a JSON object looks like chat: `messages`, or `prompt` and `completion`."""
    return isinstance(record, dict) and ("messages" in record or {"prompt", "completion"} <= record.keys())


def conversation(record: dict[str, Any]) -> Conversation:
    """The parts of a record. Raises ValueError, saying what is wrong with it."""
    if "messages" in record:
        return _from_messages(record["messages"])
    if "prompt" in record and "completion" in record:
        prompt, completion = (_text(record[key], key) for key in ("prompt", "completion"))
        if not completion:
            raise ValueError("its completion is empty, so it has no answer to learn")
        return Conversation((Part(prompt), Part(completion, counts=True)), eos_counts=True)
    keys = ", ".join(map(str, record)) or "none"
    raise ValueError(f"it has neither 'messages' nor 'prompt' and 'completion' (its keys: {keys[:200]})")


def _from_messages(messages: object) -> Conversation:
    if not isinstance(messages, list) or not messages:
        raise ValueError("its messages are no list of {role, content}")
    parts: list[Part] = []
    for message in messages:
        if not isinstance(message, dict) or not {"role", "content"} <= message.keys():
            raise ValueError("one of its messages has no role or no content")
        role, content = message["role"], _text(message["content"], "content")
        if not isinstance(role, str) or not ROLE.fullmatch(role):
            raise ValueError(f"{str(role)[:40]!r} is no role; a role is a word such as user or assistant")
        answer = role == ANSWER_ROLE
        parts += [
            Part(START, marker=True),
            Part(f"{role}\n"),
            Part(content, counts=answer),
            Part(END, marker=True, counts=answer),
            Part("\n"),
        ]
    if not any(part.counts and not part.marker and part.text for part in parts):
        raise ValueError(f"it has no {ANSWER_ROLE} message with text, so there is no answer to learn")
    return Conversation(tuple(parts), eos_counts=False)


def _text(value: object, key: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"its {key} is a {type(value).__name__}, not text")
    value.encode()  # a lone surrogate is a UnicodeEncodeError, which is a ValueError
    return value

"""Run ids: 13 characters that sort by time: 9 of time, 4 of chance."""

from __future__ import annotations

import os
import time

ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"
"""Crockford's base 32: in ASCII order, and without i, l, o, u, which are misread."""

TIME_CHARACTERS, CHANCE_CHARACTERS = 9, 4


def new_id(now_s: float | None = None) -> str:
    """An id for the time `now_s` (seconds since 1970; default: now).

    The first 9 characters count milliseconds (until the year 3084), so ids sort by time as plain text. The
    other 4 hold 20 random bits; whoever inserts an id draws again in the rare case that it is taken.
    """
    milliseconds = int((time.time() if now_s is None else now_s) * 1000)
    chance = int.from_bytes(os.urandom(4))  # not `random`: forked processes would draw the same
    return _base32(milliseconds, TIME_CHARACTERS) + _base32(chance, CHANCE_CHARACTERS)


def _base32(number: int, width: int) -> str:
    """The lowest `width` digits of `number`."""
    digits = [ALPHABET[(number >> (5 * place)) & 31] for place in reversed(range(width))]
    return "".join(digits)

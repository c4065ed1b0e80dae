"""Bytes as tokens: no vocabulary file, no download, any text, and `decode(encode(x)) == x`."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from fivefold.errors import DataError

Tokens = npt.NDArray[np.uint16]


class ByteTokenizer:
    """One token per byte (0-255), and three more: beginning of a document, end of a document, padding."""

    bos = 256
    eos = 257
    pad = 258
    vocab = 259

    def encode(self, text: str | bytes) -> Tokens:
        """The tokens of `text` (UTF-8 where it is a str), one per byte; no bos or eos is added.

        Shapes: [number of bytes], uint16.
        Raises: DataError where the text holds a lone surrogate, which UTF-8 cannot write.
        """
        if isinstance(text, str):
            try:
                text = text.encode("utf-8")
            except UnicodeEncodeError as error:
                raise DataError(f"text cannot be written as UTF-8: {error.reason} at {error.start}") from None
        return np.frombuffer(text, dtype=np.uint8).astype(np.uint16)

    def decode(self, tokens: npt.ArrayLike) -> str:
        """The text of `tokens` [n] without bos, eos and pad; a letter that was cut becomes U+FFFD.

        Raises: DataError where a token is outside 0..258.
        """
        values = np.asarray(tokens, dtype=np.int64).reshape(-1)
        wrong = values[(values < 0) | (values >= self.vocab)]
        if wrong.size:
            raise DataError(f"token {wrong[0]} is outside the byte vocabulary 0..{self.vocab - 1}")
        return values[values < 256].astype(np.uint8).tobytes().decode("utf-8", errors="replace")

    def check_vocab(self, vocab: int, *, model: str) -> None:
        """Raises DataError where a model has too few embeddings for every token."""
        if vocab < self.vocab:
            raise DataError(
                f"model {model!r} has a vocabulary of {vocab}; byte tokens need at least {self.vocab} "
                f"(256 bytes, bos, eos, pad)"
            )

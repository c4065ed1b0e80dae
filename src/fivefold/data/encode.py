"""Documents as tokens: bytes, or any `tokenizer.json` of the tokenizers library (the `data` extra).

A document is [bos] text eos. Text never becomes a special token, whatever it says: `<|endoftext|>` inside a document is
tokenised letter by letter, and cannot end it.
"""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fivefold.core.regular_file import read_limited
from fivefold.data.chat import END, START
from fivefold.data.documents import Document
from fivefold.data.manifest import TOKENIZER_COPY, TokenizerInfo
from fivefold.data.tokenizer import ByteTokenizer
from fivefold.errors import DataError, nearest
from fivefold.units import MIB

BYTE = "byte"
TOKENIZER_LIMIT_BYTES = 128 * MIB
CONFIG_LIMIT_BYTES = MIB
EOS_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "<end_of_turn>", "[SEP]")
BOS_NAMES = ("<|begin_of_text|>", "<s>", "<bos>", "<|startoftext|>", "[CLS]")
PAD_NAMES = ("<pad>", "<|pad|>", "[PAD]", "<|finetune_right_pad_id|>")

Array = npt.NDArray[Any]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Encoded:
    """Documents as one array of tokens."""

    tokens: Array
    """[tokens] of the tokenizer's dtype."""
    lengths: npt.NDArray[np.int64]
    """[documents], bos and eos included; a document without any token of its own has none at all."""
    counts: Bools | None
    """[tokens]: whether a token counts as a label; None: all do."""


class Encoder(ABC):
    """A tokenizer and its special tokens."""

    info: TokenizerInfo
    source: bytes | None
    """tokenizer.json, to be kept beside the tokens."""

    @abstractmethod
    def texts(self, texts: Sequence[str]) -> list[Array]:
        """Tokens of each text, without special ones."""

    @abstractmethod
    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens; what special tokens become is the tokenizer's choice."""

    def special(self, text: str) -> int | None:
        """The number of a special token of this name."""
        return None

    def encode(self, documents: Sequence[Document]) -> Encoded:
        """All plain, or all chat."""
        if documents and documents[0].chat is not None:
            return self._conversations(documents)
        bodies = self.texts([document.text for document in documents])
        return self._framed(bodies)

    def _framed(self, bodies: list[Array]) -> Encoded:
        """Put bos before and eos after each body."""
        info = self.info
        extra = 1 + (info.bos is not None)
        lengths = np.array([len(body) + extra if len(body) else 0 for body in bodies], dtype=np.int64)
        tokens = np.empty(int(lengths.sum()), dtype=info.dtype)
        place = 0
        for body in bodies:
            if not len(body):
                continue
            if info.bos is not None:
                tokens[place] = info.bos
                place += 1
            tokens[place : place + len(body)] = body
            tokens[place + len(body)] = info.eos
            place += len(body) + 1
        return Encoded(tokens, lengths, None)

    def _conversations(self, documents: Sequence[Document]) -> Encoded:
        chats = [document.chat for document in documents if document.chat is not None]
        markers = {name: self._marker(name) for name in (START, END)}
        plain = self.texts([part.text for chat in chats for part in chat.parts if not part.marker])
        plain.reverse()  # popped in order
        dtype, info = self.info.dtype, self.info
        tokens: list[Array] = []
        counts: list[Bools] = []
        lengths: list[int] = []
        for chat in chats:
            pieces = [] if info.bos is None else [(np.array([info.bos], dtype=dtype), False)]
            for part in chat.parts:
                pieces.append((markers[part.text] if part.marker else plain.pop(), part.counts))
            pieces.append((np.array([info.eos], dtype=dtype), chat.eos_counts))
            tokens += [piece for piece, _ in pieces]
            counts += [np.full(len(piece), answer) for piece, answer in pieces]
            lengths.append(sum(len(piece) for piece, _ in pieces))
        return Encoded(
            np.concatenate(tokens).astype(dtype), np.array(lengths, dtype=np.int64), np.concatenate(counts)
        )

    def _marker(self, name: str) -> Array:
        number = self.special(name)
        return self.texts([name])[0] if number is None else np.array([number], dtype=self.info.dtype)


class ByteEncoder(Encoder):
    """One token per byte."""

    def __init__(self) -> None:
        byte = ByteTokenizer
        self.source = None
        self.info = TokenizerInfo(
            kind="byte",
            sha256=hashlib.sha256(b"bytes 0-255, bos 256, eos 257, pad 258").hexdigest(),
            vocab=byte.vocab,
            bos=byte.bos,
            eos=byte.eos,
            pad=byte.pad,
        )

    def texts(self, texts: Sequence[str]) -> list[Array]:
        return [np.frombuffer(text.encode(), dtype=np.uint8).astype(self.info.dtype) for text in texts]

    def encode(self, documents: Sequence[Document]) -> Encoded:
        if documents and documents[0].chat is not None:
            return self._conversations(documents)
        # All documents at once, with two bytes between any two where eos and bos go.
        joined = b"\0\0".join([document.raw for document in documents])
        lengths = np.array([len(document.raw) + 2 for document in documents], dtype=np.int64)
        ends = np.cumsum(lengths)
        tokens = np.empty(len(joined) + 2, dtype=self.info.dtype)
        tokens[1:-1] = np.frombuffer(joined, dtype=np.uint8)
        tokens[ends - lengths] = ByteTokenizer.bos
        tokens[ends - 1] = ByteTokenizer.eos
        return Encoded(tokens, lengths, None)

    def decode(self, tokens: Sequence[int]) -> str:
        return ByteTokenizer().decode(tokens)


class FileEncoder(Encoder):
    """A tokenizer.json. bos, eos and pad are found in tokenizer_config.json beside it, or by their usual names."""

    def __init__(self, path: Path, bos: str | None = None, eos: str | None = None) -> None:
        file = path / TOKENIZER_COPY if path.is_dir() else path
        self.source = read_limited(file, TOKENIZER_LIMIT_BYTES, "tokenizer.json", DataError)
        self.tokenizer = _load(file, self.source)
        self.tokenizer.no_padding()
        self.tokenizer.no_truncation()
        self.tokenizer.encode_special_tokens = True
        self.vocabulary: dict[str, int] = self.tokenizer.get_vocab(with_added_tokens=True)
        if not self.vocabulary:
            raise DataError(f"{file} has an empty vocabulary")
        self.added: dict[int, str] = {
            number: str(token.content) for number, token in self.tokenizer.get_added_tokens_decoder().items()
        }
        config = _beside(file)
        end = self._find(file, "eos", eos, config, EOS_NAMES)
        begin = self._find(file, "bos", bos, config, BOS_NAMES)
        if bos is None and (begin == end or config.get("add_bos_token") is False):
            begin = None  # one token for both (GPT-2) separates documents once
        pad = self._find(file, "pad", None, config, PAD_NAMES)
        if end is None:
            raise DataError(f"{file} names no token that ends a document; name it with --eos-token")
        self.info = TokenizerInfo(
            kind="file",
            sha256=hashlib.sha256(self.source).hexdigest(),
            vocab=max(self.vocabulary.values()) + 1,
            bos=begin,
            eos=end,
            pad=end if pad is None else pad,
        )

    def texts(self, texts: Sequence[str]) -> list[Array]:
        try:
            found = self.tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        except Exception as error:
            raise DataError(f"the tokenizer cannot encode a text: {str(error)[:200]}") from None
        return [np.array(encoding.ids, dtype=self.info.dtype) for encoding in found]

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self.tokenizer.decode([int(t) for t in tokens], skip_special_tokens=False))

    def special(self, text: str) -> int | None:
        return next((number for number, name in self.added.items() if name == text), None)

    def _find(
        self, file: Path, what: str, asked: str | None, config: dict[str, Any], names: Sequence[str]
    ) -> int | None:
        """The number of a special token: as asked, as the config says, or by a usual name."""
        if asked is not None:
            if asked not in self.vocabulary:
                hint = nearest(asked, self.added.values())
                raise DataError(f"{file} has no token {asked!r} to use as {what}{hint}")
            return self.vocabulary[asked]
        known = config.get(f"{what}_token")
        name = known.get("content") if isinstance(known, dict) else known
        if isinstance(name, str) and name in self.vocabulary:
            return self.vocabulary[name]
        if f"{what}_token" in config and known is None:
            return None  # the model was trained without one
        return next((self.vocabulary[n] for n in names if n in self.vocabulary), None)


def load_encoder(tokenizer: str, bos: str | None = None, eos: str | None = None) -> Encoder:
    """`byte`, a tokenizer.json, or a folder that holds one.

    Raises: DataError, one line: the file cannot be read, is too large or no tokenizer, or has no such token.
    """
    if tokenizer == BYTE:
        if bos is not None or eos is not None:
            raise DataError(
                "byte tokens have a bos and an eos of their own; leave out --bos-token, --eos-token"
            )
        return ByteEncoder()
    path = Path(tokenizer).expanduser()
    if path.suffix.lower() in (".pkl", ".pickle", ".bin", ".pt", ".model"):
        raise DataError(
            f"{path}: {path.suffix} tokenizers are not supported; give {BYTE!r} or a tokenizer.json"
        )
    if not path.exists():
        raise DataError(f"tokenizer {tokenizer} does not exist; give {BYTE!r} or a tokenizer.json")
    return FileEncoder(path, bos, eos)


def _load(file: Path, raw: bytes) -> Any:
    try:
        from tokenizers import Tokenizer
    except ModuleNotFoundError:
        raise DataError(
            f"{file}: reading a tokenizer needs tokenizers; install it with: pip install 'fivefold[data]'"
        ) from None
    try:
        data = json.loads(raw)
        if not isinstance(data, dict) or not isinstance(data.get("model"), dict):
            raise ValueError("it has no 'model'")
        return Tokenizer.from_str(raw.decode())
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:  # the library can panic on files that it did not write
        reason = " ".join(str(error).split())[:200]
        raise DataError(f"{file} is no tokenizer.json of the tokenizers library: {reason}") from None


def _beside(file: Path) -> dict[str, Any]:
    """tokenizer_config.json in the same folder, if there is one."""
    path = file.with_name("tokenizer_config.json")
    if not path.is_file():
        return {}
    try:
        config = json.loads(read_limited(path, CONFIG_LIMIT_BYTES, "tokenizer_config.json", DataError))
    except (ValueError, RecursionError):
        raise DataError(f"{path} is not JSON") from None
    return config if isinstance(config, dict) else {}

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fivefold.data.tokenizer import ByteTokenizer
from fivefold.errors import DataError

BYTE = ByteTokenizer()


@given(st.text())
def test_decode_undoes_encode(text: str) -> None:
    assert BYTE.decode(BYTE.encode(text)) == text


@given(st.binary())
def test_each_byte_is_its_own_token(raw: bytes) -> None:
    tokens = BYTE.encode(raw)
    assert tokens.dtype == np.uint16
    assert tokens.tolist() == list(raw)


def test_known_tokens() -> None:
    assert BYTE.encode("Aé").tolist() == [65, 0xC3, 0xA9]
    assert (BYTE.bos, BYTE.eos, BYTE.pad, BYTE.vocab) == (256, 257, 258, 259)


def test_decode_drops_special_tokens_and_marks_cut_letters() -> None:
    assert BYTE.decode([256, 104, 105, 257, 258, 258]) == "hi"
    assert BYTE.decode([104, 0xC3]) == "h\ufffd"


@pytest.mark.parametrize("token", [259, -1, 70000])
def test_decode_refuses_foreign_tokens(token: int) -> None:
    with pytest.raises(DataError, match=f"token {token} is outside the byte vocabulary 0..258"):
        BYTE.decode([1, token])


def test_encode_refuses_lone_surrogates() -> None:
    with pytest.raises(DataError, match="UTF-8"):
        BYTE.encode("\ud800")


def test_a_small_vocabulary_is_refused_with_the_numbers() -> None:
    BYTE.check_vocab(259, model="m")
    with pytest.raises(DataError, match="model 'm' has a vocabulary of 258; byte tokens need at least 259"):
        BYTE.check_vocab(258, model="m")

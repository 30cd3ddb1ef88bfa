"""Tokenizers: text survives the round trip, and a fingerprint stands for what decides the ids."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from looped.data.tokenizers import ByteTokenizer, fingerprint_of, get_tokenizer, token_dtype
from looped.errors import UserError


@given(st.text())
def test_bytes_round_trip_any_text(text):
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode(text)
    assert ids.tolist() == list(text.encode())
    assert tokenizer.decode(np.concatenate([[tokenizer.bos], ids])) == text


def test_decode_survives_a_cut_character():
    ids = ByteTokenizer().encode("φ")
    assert ByteTokenizer().decode(ids[:1]) == "\N{REPLACEMENT CHARACTER}"


@pytest.mark.parametrize(
    ("vocab_size", "dtype"), [(257, np.uint16), (65536, np.uint16), (65537, np.uint32), (128256, np.uint32)]
)
def test_token_dtype_holds_every_id(vocab_size, dtype):
    assert token_dtype(vocab_size) == dtype
    assert np.iinfo(token_dtype(vocab_size)).max >= vocab_size - 1


def test_fingerprint_ignores_key_order_and_nothing_else():
    assert fingerprint_of({"a": 1, "b": 2}) == fingerprint_of({"b": 2, "a": 1})
    assert fingerprint_of({"a": 1, "b": 2}) != fingerprint_of({"a": 1, "b": 3})


def test_unknown_tokenizer_names_the_nearest():
    with pytest.raises(UserError, match=r"tokenizer 'byte' is unknown\. Did you mean 'bytes'\?"):
        get_tokenizer("byte")

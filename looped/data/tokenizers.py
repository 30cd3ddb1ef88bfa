"""Tokenizers: text to ids and back, each with a fingerprint that data sets and records carry."""

from __future__ import annotations

import hashlib
import json
from typing import Protocol

import numpy as np

from looped.errors import UserError, nearest


class Tokenizer(Protocol):
    """What packing and generation need of a tokenizer."""

    name: str
    vocab_size: int
    bos: int

    @property
    def fingerprint(self) -> str:
        """SHA-256 (64 hex digits) of everything that decides which ids a text gets."""
        ...

    def encode(self, text: str) -> np.ndarray:
        """Returns the ids of `text` [n], without BOS, in `token_dtype(vocab_size)`."""
        ...

    def decode(self, ids: np.ndarray) -> str:
        """Returns the text of `ids` [n], leaving BOS out."""
        ...


class ByteTokenizer:
    """UTF-8 bytes as ids 0 to 255, and BOS = 256."""

    name = "bytes"
    vocab_size = 257
    bos = 256

    @property
    def fingerprint(self) -> str:
        return fingerprint_of({"kind": "utf-8 bytes", "vocab_size": self.vocab_size, "bos": self.bos})

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode(), np.uint8).astype(np.uint16)

    def decode(self, ids: np.ndarray) -> str:
        ids = np.asarray(ids)
        return ids[ids < 256].astype(np.uint8).tobytes().decode(errors="replace")


TOKENIZERS = {"bytes": ByteTokenizer}


def get_tokenizer(name: str) -> Tokenizer:
    """Returns the tokenizer called `name`; `UserError` names the nearest ones."""
    if name not in TOKENIZERS:
        raise UserError(f"tokenizer {name!r} is unknown.{nearest(name, TOKENIZERS)}")
    return TOKENIZERS[name]()


def token_dtype(vocab_size: int) -> np.dtype:
    """The narrowest unsigned type of at least 16 bits that holds every id."""
    return np.dtype(np.uint16 if vocab_size <= 2**16 else np.uint32)


def fingerprint_of(description: dict) -> str:
    """SHA-256 of a JSON description, independent of the order of its keys."""
    return hashlib.sha256(json.dumps(description, sort_keys=True).encode()).hexdigest()

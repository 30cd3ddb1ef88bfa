"""Tokenizers: text to ids and back, each with a fingerprint that data sets and records carry.

`bytes` needs nothing.  A `tokenizer.json` (of the library tokenizers) or a SentencePiece model, by path or by
its name on the Hugging Face hub, needs the extra: `pip install 'looped[text]'`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
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


def get_tokenizer(name: str, added_tokens: Sequence[str] = (), bos_token: str | None = None) -> Tokenizer:
    """Returns the tokenizer called `name`: `bytes`, a path, or a name on the hub.

    A path is that of a `tokenizer.json` or a SentencePiece `.model`, or of a folder with one.  `added_tokens` get the
    ids behind its own and never come from text; `bos_token` names its beginning of sequence where that is not one of
    the usual.  `UserError` for a name that is none of these, or what cannot be read.
    """
    if name in TOKENIZERS:
        if added_tokens or bos_token:
            raise UserError(f"tokenizer {name!r} takes neither added tokens nor another BOS; leave them out.")
        return TOKENIZERS[name]()
    from looped.data import subword

    file = subword.find(name)
    if file is None:
        raise UserError(
            f"tokenizer {name!r} is unknown.{nearest(name, TOKENIZERS)} Or the path of a tokenizer.json or a"
            " SentencePiece .model, or a name on the Hugging Face hub (owner/name)."
        )
    return subword.load(name, file.name, file.read_bytes(), tuple(added_tokens), bos_token)


def encode_all(tokenizer: Tokenizer, texts: Sequence[str]) -> list[np.ndarray]:
    """Returns the ids of each text [n].  `UserError` for an id outside the vocabulary, so outside the rows' type."""
    batched = getattr(tokenizer, "encode_batch", None)
    encoded = batched(texts) if batched else [tokenizer.encode(text) for text in texts]
    for ids in encoded:
        if len(ids) and int(ids.max()) >= tokenizer.vocab_size:
            raise UserError(
                f"tokenizer {tokenizer.name!r} gave the id {int(ids.max())} and says that it has {tokenizer.vocab_size}"
                f" ids, which are stored as {token_dtype(tokenizer.vocab_size)}: mend its vocabulary or use another."
            )
    return encoded


def token_dtype(vocab_size: int) -> np.dtype:
    """The narrowest unsigned type of at least 16 bits that holds every id; `UserError` where 32 bits do not."""
    if vocab_size > 2**32:
        raise UserError(f"vocab_size is {vocab_size}; ids are stored in at most 32 bits, so at most {2**32}.")
    return np.dtype(np.uint16 if vocab_size <= 2**16 else np.uint32)


def fingerprint_of(description: dict) -> str:
    """SHA-256 of a JSON description, independent of the order of its keys."""
    return hashlib.sha256(json.dumps(description, sort_keys=True).encode()).hexdigest()

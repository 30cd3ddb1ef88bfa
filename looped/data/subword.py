"""Subword tokenizers: a `tokenizer.json` by the library tokenizers, a SentencePiece model by sentencepiece."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from etils import epath

from looped.data.tokenizers import Tokenizer, fingerprint_of, token_dtype
from looped.errors import UserError, first_line

JSON_FILE, SENTENCEPIECE_FILE = FILES = "tokenizer.json", "tokenizer.model"
INSTALL = "pip install 'looped[text]'"
USUAL_BOS = ("<s>", "<bos>", "<|begin_of_text|>", "<|bos|>", "<|endoftext|>", "[BOS]", "[CLS]")
"""Names under which vocabularies have their beginning of sequence; the first that is there is taken."""


def find(name: str) -> epath.Path | None:
    """Returns the file of the tokenizer called `name`, fetched from the hub where it is no path; None if neither."""
    path = epath.Path(name).expanduser()
    if path.is_dir():
        files = [path / file for file in FILES if (path / file).exists()]
        if not files:
            raise UserError(
                f"tokenizer {name!r}: the folder has neither {JSON_FILE} nor {SENTENCEPIECE_FILE}; name the file."
            )
        return files[0]
    if path.exists():
        return path
    if not re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", name) or name.endswith((".json", ".model")):
        return None
    return _fetch(name)


def _fetch(name: str) -> epath.Path:
    try:
        import huggingface_hub
    except ImportError:
        raise UserError(
            f"tokenizer {name!r} is a name on the Hugging Face hub: {INSTALL}, or give a path."
        ) from None
    reasons = []
    for file in FILES:
        try:
            return epath.Path(huggingface_hub.hf_hub_download(name, file))
        except Exception as error:  # the hub's client raises many kinds
            reasons.append(error)
    raise UserError(
        f"tokenizer {name!r} cannot be had from the hub ({first_line(reasons[0])});"
        " check the name and the network, or give the path of a tokenizer.json or .model."
    )


def load(
    name: str,
    file_name: str,
    content: bytes,
    added_tokens: tuple[str, ...] = (),
    bos_token: str | None = None,
) -> Tokenizer:
    """Returns the tokenizer that a file's `content` describes; `UserError` where it describes none."""
    kind = JsonTokenizer if file_name.endswith(".json") else SentencePieceTokenizer
    try:
        return kind(name, content, added_tokens, bos_token)
    except ImportError as error:
        raise UserError(f"tokenizer {name!r} needs the library {error.name}: {INSTALL}.") from None
    except UserError:
        raise
    except Exception as error:  # both libraries raise bare exceptions
        raise UserError(
            f"tokenizer {name!r}: {file_name} cannot be read ({error}); is it {kind.what}, and whole?"
        ) from None


class _Subword:
    """What both kinds share.  It is pickled as its file's content, so that workers build their own."""

    what: str
    file: str

    def __init__(
        self, name: str, content: bytes, added_tokens: tuple[str, ...] = (), bos_token: str | None = None
    ):
        self.name = name
        self.content = content
        self.added_tokens = added_tokens
        self.bos_token = bos_token
        self._engine, self.vocab_size, self.bos = self._build()
        self._dtype = token_dtype(self.vocab_size)
        self.fingerprint = self._fingerprint()

    def __reduce__(self):
        return type(self), (self.name, self.content, self.added_tokens, self.bos_token)

    def _build(self) -> tuple[Any, int, int]:
        """Returns the library's tokenizer, the number of ids and BOS."""
        raise NotImplementedError

    def _model(self) -> bytes:
        """Returns what decides the ids, in one form however the file is laid out."""
        return self.content

    def _fingerprint(self) -> str:
        digest = hashlib.sha256(self._model()).hexdigest()
        return fingerprint_of(
            {"kind": self.file, "model": digest, "added": list(self.added_tokens), "bos": self.bos}
        )

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Returns the ids of each text [n], without BOS."""
        raise NotImplementedError

    def encode(self, text: str) -> np.ndarray:
        return self.encode_batch([text])[0]

    def _array(self, ids: Sequence[int]) -> np.ndarray:
        """As the rows' type where that holds them; otherwise wider, for the check that follows."""
        array = np.array(ids, np.int64)
        return array.astype(self._dtype) if not len(array) or array.max() < self.vocab_size else array

    def _choose_bos(self, ids: dict[str, int], own: int | None) -> int:
        """Returns the id of `bos_token`, or the model's own, or a usual one."""
        if self.bos_token is not None:
            if self.bos_token not in ids:
                raise UserError(
                    f"tokenizer {self.name!r} has no token {self.bos_token!r} for BOS; name one that it has, or add it."
                )
            return ids[self.bos_token]
        if own is not None:
            return own
        for token in USUAL_BOS:
            if token in ids:
                return ids[token]
        raise UserError(
            f"tokenizer {self.name!r} has no beginning of sequence under a usual name; name its token"
            " (--bos-token) or add one (--add-token '<bos>')."
        )

    def _refuse_known(self, known) -> None:
        for token in self.added_tokens:
            if token in known:
                raise UserError(f"tokenizer {self.name!r} has the token {token!r} already; leave it out.")
        if len(set(self.added_tokens)) < len(self.added_tokens):
            raise UserError(f"added tokens are {list(self.added_tokens)}; give each once.")


class JsonTokenizer(_Subword):
    """A `tokenizer.json`.  Its special tokens never come from text: `<s>` in a document is three characters."""

    what = "a tokenizer.json"
    file = JSON_FILE

    def _build(self) -> tuple[Any, int, int]:
        import tokenizers

        engine = tokenizers.Tokenizer.from_str(self.content.decode())
        engine.no_truncation()
        engine.no_padding()
        engine.encode_special_tokens = True
        self._refuse_known(engine.get_vocab())
        engine.add_special_tokens(list(self.added_tokens))
        ids = engine.get_vocab(with_added_tokens=True)
        return engine, max(ids.values()) + 1, self._choose_bos(ids, None)

    def _model(self) -> bytes:
        return json.dumps(json.loads(self.content), sort_keys=True).encode()

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        encoded = self._engine.encode_batch_fast(list(texts), add_special_tokens=False)
        return [self._array(encoding.ids) for encoding in encoded]

    def decode(self, ids: np.ndarray) -> str:
        return self._engine.decode([int(i) for i in ids if i != self.bos], skip_special_tokens=True)


class SentencePieceTokenizer(_Subword):
    """A SentencePiece model, such as Llama 2's `tokenizer.model` (32,000 pieces; one more if a token is added)."""

    what = "a SentencePiece model"
    file = SENTENCEPIECE_FILE

    def _build(self) -> tuple[Any, int, int]:
        import sentencepiece

        if not self.content:
            raise ValueError("it is empty")
        engine = sentencepiece.SentencePieceProcessor(model_proto=self.content)
        own = {engine.id_to_piece(i): i for i in range(engine.get_piece_size())}
        self._refuse_known(own)
        ids = own | {token: len(own) + i for i, token in enumerate(self.added_tokens)}
        bos = engine.bos_id()
        return engine, len(ids), self._choose_bos(ids, bos if bos >= 0 else None)

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [self._array(ids) for ids in self._engine.encode(list(texts), out_type=int, num_threads=1)]

    def decode(self, ids: np.ndarray) -> str:
        pieces = self.vocab_size - len(self.added_tokens)
        return self._engine.decode([int(i) for i in ids if i != self.bos and i < pieces])

"""What a prepared data set says about itself: `metadata.json` in its folder, TFDS's own place for it."""

from __future__ import annotations

import dataclasses

from looped.data.packing import LongDocuments, PackingStatistics
from looped.data.tokenizers import fingerprint_of

FORMAT_VERSION = 1


@dataclasses.dataclass(frozen=True)
class TokenizerMetadata:
    name: str
    fingerprint: str
    vocab_size: int
    bos: int


@dataclasses.dataclass(frozen=True)
class SplitMetadata:
    """One split: the bytes and SHA-256 of its text, the SHA-256 of its rows, and where each token went."""

    text_bytes: int
    text_hash: str
    rows_hash: str
    statistics: PackingStatistics


@dataclasses.dataclass(frozen=True)
class PackMetadata:
    """A prepared data set.  `key` is its plan's, `source` the description that its source gave then."""

    key: str
    source_name: str
    source: dict[str, object]
    sequence_length: int
    buffer_size: int
    long_documents: LongDocuments
    tokenizer: TokenizerMetadata
    train: SplitMetadata
    validation: SplitMetadata
    format_version: int = FORMAT_VERSION

    @property
    def corpus_hash(self) -> str:
        """SHA-256 of the text of both splits: independent of tokenizer and sequence length."""
        return fingerprint_of({"train": self.train.text_hash, "validation": self.validation.text_hash})

    @property
    def hash(self) -> str:
        """SHA-256 of the rows of both splits and of the tokenizer: what is trained and evaluated on."""
        rows = {"train": self.train.rows_hash, "validation": self.validation.rows_hash}
        return fingerprint_of(rows | {"tokenizer": self.tokenizer.fingerprint})

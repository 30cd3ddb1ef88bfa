"""What a prepared data set says about itself: `metadata.json` in its folder, TFDS's own place for it."""

from __future__ import annotations

import dataclasses

from etils import epath

from looped.data.corpus import Split
from looped.data.packing import LongDocuments, PackingStatistics
from looped.data.subword import FILES
from looped.data.tokenizers import fingerprint_of
from looped.errors import UserError
from looped.jsonable import from_json, read_json

FORMAT_VERSION = 1
METADATA_FILE = "metadata.json"
STATE_FILE = "unfinished.npz"
"""What packing goes on from; a data set is finished when this is no longer beside it."""


@dataclasses.dataclass(frozen=True)
class TokenizerMetadata:
    name: str
    fingerprint: str
    vocab_size: int
    bos: int


@dataclasses.dataclass(frozen=True)
class TokenizerFile:
    """The tokenizer's file, kept beside the rows, and what was said of it."""

    name: str
    added_tokens: tuple[str, ...] = ()
    bos_token: str | None = None

    def __post_init__(self):
        if self.name not in FILES:  # it is joined to the folder's path
            raise UserError(f"tokenizer_file.name is {self.name!r}; it is {' or '.join(FILES)}.")


@dataclasses.dataclass(frozen=True)
class SplitMetadata:
    """One split: the bytes and SHA-256 of its text, the SHA-256 of its rows, and where each token went.

    `text_hash` is over each document behind its length (8 bytes, little-endian).  For sources that are read from any
    place on it is a chain, so that packing can go on: h ← SHA-256(h ‖ length ‖ document) from an empty h.
    `row_fill` is the part of the rows that holds tokens, `cropped_share` the part of the documents' tokens cropped,
    `shard_hashes` the SHA-256 of each shard's file.
    """

    text_bytes: int
    text_hash: str
    rows_hash: str
    statistics: PackingStatistics
    row_fill: float | None = None
    cropped_share: float | None = None
    shard_hashes: tuple[str, ...] = ()


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
    tokenizer_file: TokenizerFile | None = None
    format_version: int = FORMAT_VERSION

    def split(self, name: Split) -> SplitMetadata:
        return self.train if name == "train" else self.validation

    @property
    def corpus_hash(self) -> str:
        """SHA-256 of the text of both splits: independent of tokenizer and sequence length."""
        return fingerprint_of({"train": self.train.text_hash, "validation": self.validation.text_hash})

    @property
    def hash(self) -> str:
        """SHA-256 of the rows of both splits and of the tokenizer: what is trained and evaluated on."""
        rows = {"train": self.train.rows_hash, "validation": self.validation.rows_hash}
        return fingerprint_of(rows | {"tokenizer": self.tokenizer.fingerprint})


def read_metadata(directory: epath.Path) -> PackMetadata:
    """Returns the metadata of a prepared data set; `UserError` where there is none, or it is not finished."""
    path = directory / METADATA_FILE
    if (directory / STATE_FILE).exists():
        raise UserError(f"{directory}: packing is not finished; run the same `looped data pack` again.")
    try:
        data = read_json(path, "name another data set, or delete it to make it again", required=False)
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(
            f"{directory}: no prepared data (it has no {METADATA_FILE}); name another, or delete it and retry."
        ) from None
    version = data.get("format_version") if isinstance(data, dict) else None
    if version != FORMAT_VERSION:
        raise UserError(
            f"{path}: format {version!r}, this version reads {FORMAT_VERSION}; delete it to make it again."
        )
    return from_json(PackMetadata, data, f"{path}: ")

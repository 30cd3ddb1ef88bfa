"""The published packed data, read as it is: Parquet shards of rows and a `meta_{split}.json` for each split.

A shard has a column `tokens` of lists, each a row of T + 1 ids (2,049 in the published data, vocabulary 32,001).  Order
means something there: batches take the rows in the order of the shards' names and of the rows in them.
"""

from __future__ import annotations

import collections
import hashlib
import json
import re
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
from etils import epath

from looped.data import subword
from looped.data.corpus import SPLITS, Split
from looped.data.files import File, open_file
from looped.data.metadata import PackMetadata, SplitMetadata, TokenizerFile, TokenizerMetadata
from looped.data.packing import PackingStatistics
from looped.data.tokenizers import fingerprint_of, token_dtype
from looped.errors import UserError
from looped.jsonable import read_json

VOCABULARY = 32_001
"""Ids of the published data's tokenizer (Llama 2's and one added), where its metadata name no number."""
COLUMN = "tokens"
_NAMES: dict[Split, tuple[str, ...]] = {
    "train": ("train",),
    "validation": ("validation", "val", "valid", "test"),
}
_GROUPS = 4
_GROUP_TOKENS = 2**29
"""Most that a row group may say to hold: a few bytes of a file can stand for any number of tokens."""
_VOCABULARY_KEYS = ("vocab_size", "vocabulary_size", "n_vocab", "vocab")


def is_published(directory: epath.Path) -> bool:
    """Whether a folder holds packed Parquet shards."""
    return any((directory / f"meta_{name}.json").exists() for names in _NAMES.values() for name in names)


class PublishedData:
    """Such a folder, opened: what its two splits hold, and their rows."""

    def __init__(self, directory: epath.Path):
        self.directory = directory
        self.rows: dict[Split, ParquetRows] = {
            split: ParquetRows(*_split_files(directory, split)) for split in SPLITS
        }
        lengths = {split: rows.row_length for split, rows in self.rows.items()}
        if lengths["train"] != lengths["validation"]:
            raise UserError(
                f"{directory}: rows of {lengths['train']} tokens for training and {lengths['validation']} for"
                " validation; fetch one data set whole."
            )

    def metadata(self) -> PackMetadata:
        """As of data packed here, as far as the files say.  The hash of a split's rows is that of its shards' footers:
        sizes, counts and statistics, so not every changed byte changes it."""
        train, validation = self.rows["train"], self.rows["validation"]
        bos = int(train.take([0])[0, 0])
        file = next((name for name in subword.FILES if (self.directory / name).exists()), None)
        fingerprint = fingerprint_of({"kind": "published", "vocab_size": train.vocab_size, "bos": bos})
        return PackMetadata(
            key="published",
            source_name="published",
            source={"source": "published", "meta": {split: rows.meta for split, rows in self.rows.items()}},
            sequence_length=train.row_length - 1,
            buffer_size=0,
            long_documents="crop",
            tokenizer=TokenizerMetadata("published", fingerprint, train.vocab_size, bos),
            train=_describe(train),
            validation=_describe(validation),
            tokenizer_file=TokenizerFile(file) if file else None,
        )


def _describe(rows: ParquetRows) -> SplitMetadata:
    return SplitMetadata(0, "", rows.footers_hash, PackingStatistics(rows=len(rows)))


def _split_files(directory: epath.Path, split: Split) -> tuple[list[File], dict[str, Any]]:
    """Returns the shards of a split, in order, and its metadata; `UserError` for what is missing."""
    for name in _NAMES[split]:
        path = directory / f"meta_{name}.json"
        if path.exists():
            break
    else:
        raise UserError(f"{directory}: no meta_{_NAMES[split][0]}.json; fetch the data set whole.")
    meta = read_json(path, "fetch it again")
    if not isinstance(meta, dict):
        raise UserError(f"{path}: not JSON metadata (no object); fetch it again.")
    shards = [
        p for p in directory.glob("*.parquet") if re.match(rf"(.*[_-])?{name}([_.-]|\.parquet)", p.name)
    ]
    folder = directory / name
    if folder.is_dir():
        shards += list(folder.glob("*.parquet"))
    if not shards:
        raise UserError(
            f"{directory}: no Parquet shards of {name!r} beside {path.name}; fetch the data set whole."
        )
    return [File(str(shard), shard.stat().length) for shard in sorted(shards, key=str)], meta


class ParquetRows:
    """Rows [T + 1] of a split by index, in the order of the shards and the rows in them.

    A row group is decoded as one and a few of them kept, which suits reading in order.  `UserError` names the shard
    that is damaged, as far as this shows: Parquet has checksums of its pages only where the writer made them.
    """

    def __init__(self, shards: Sequence[File], meta: dict[str, Any]):
        self.meta = meta
        self.vocab_size = next(
            (int(meta[key]) for key in _VOCABULARY_KEYS if isinstance(meta.get(key), int)), VOCABULARY
        )
        self._shards, self._groups, ends = list(shards), [], []
        digest, total = hashlib.sha256(), 0
        for i, shard in enumerate(self._shards):
            for group, rows in enumerate(self._row_groups(shard, digest)):
                if not rows:
                    continue
                total += rows
                self._groups.append((i, group))
                ends.append(total)
        if not total:
            raise UserError(f"{shards[0].path}: the split is empty; fetch the data set whole.")
        self._ends = np.array(ends)
        self.footers_hash = digest.hexdigest()
        self._cache: collections.OrderedDict[int, np.ndarray] = collections.OrderedDict()
        self._lock = threading.Lock()
        self.dtype = token_dtype(self.vocab_size)
        self.row_length = 0
        self.row_length = self._decode(0).shape[1]

    def __len__(self) -> int:
        return int(self._ends[-1])

    def _row_groups(self, shard: File, digest) -> list[int]:
        import pyarrow.parquet as pq

        try:
            with open_file(shard) as stream, pq.ParquetFile(stream) as parquet:
                if COLUMN not in parquet.schema_arrow.names:
                    names = ", ".join(map(repr, parquet.schema_arrow.names))
                    raise UserError(
                        f"{shard.path}: no column {COLUMN!r} but {names}; is this the packed data?"
                    )
                self._check_sizes(shard, parquet.metadata)
                digest.update(
                    json.dumps([shard.name, shard.size, parquet.metadata.to_dict()], default=str).encode()
                )
                return [parquet.metadata.row_group(g).num_rows for g in range(parquet.num_row_groups)]
        except UserError:
            raise
        except Exception as error:  # of the storage or Arrow
            raise self._error(shard, error) from None

    def _check_sizes(self, shard: File, metadata: Any) -> None:
        for group in map(metadata.row_group, range(metadata.num_row_groups)):
            for column in map(group.column, range(group.num_columns)):
                if column.path_in_schema.partition(".")[0] == COLUMN and column.num_values > _GROUP_TOKENS:
                    raise self._error(
                        shard,
                        f"a row group of {column.num_values:,} tokens, at most {_GROUP_TOKENS:,} are read",
                    )

    def _error(self, shard: File, reason: object) -> UserError:
        return UserError(f"{shard.path}: the shard cannot be read ({reason}); fetch it again.")

    def take(self, indices: Sequence[int]) -> np.ndarray:
        """Returns rows [len(indices), T + 1]."""
        wanted = np.asarray(indices, np.int64)
        groups = np.searchsorted(self._ends, wanted, side="right")
        rows = np.empty((len(wanted), self.row_length), self.dtype)
        with self._lock:
            for group in np.unique(groups):
                start = self._ends[group - 1] if group else 0
                rows[groups == group] = self._decoded(int(group))[wanted[groups == group] - start]
        return rows

    def _decoded(self, group: int) -> np.ndarray:
        if group in self._cache:
            self._cache.move_to_end(group)
            return self._cache[group]
        self._cache[group] = self._decode(group)
        if len(self._cache) > _GROUPS:
            self._cache.popitem(last=False)
        return self._cache[group]

    def _decode(self, group: int) -> np.ndarray:
        """Returns the rows [n, T + 1] of a row group."""
        import pyarrow.parquet as pq

        index, within = self._groups[group]
        shard = self._shards[index]
        try:
            with (
                open_file(shard) as stream,
                pq.ParquetFile(stream, page_checksum_verification=True) as parquet,
            ):
                column = parquet.read_row_group(within, columns=[COLUMN]).column(0).combine_chunks()
                lists = column if hasattr(column, "flatten") else column.chunk(0)
                lengths = np.asarray(lists.value_lengths().to_numpy(zero_copy_only=False))
                tokens = lists.flatten().to_numpy(zero_copy_only=False)
        except Exception as error:
            raise self._error(shard, error) from None
        if not len(tokens) or lists.null_count:
            raise self._error(shard, "rows without tokens")
        length = self.row_length or int(lengths[0])
        if not (lengths == length).all():
            raise self._error(
                shard, f"a row of {lengths[lengths != length][0]} tokens among rows of {length}"
            )
        if not np.issubdtype(tokens.dtype, np.integer) or tokens.min() < 0 or tokens.max() >= self.vocab_size:
            raise self._error(shard, f"ids outside 0 to {self.vocab_size - 1}")
        return tokens.astype(self.dtype).reshape(len(lengths), length)

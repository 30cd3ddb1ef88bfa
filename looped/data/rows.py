"""Random access to the rows of one split of a prepared data set, fast enough to read in the training loop."""

from __future__ import annotations

import bisect
import hashlib
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
from etils import epath

from looped.errors import UserError

IN_MEMORY_BYTES = 2**29
"""A split whose rows take no more than this is read once and kept (15 MB of bytes take 30 MB as uint16)."""
_CHUNK = 4096


def frame_of(record: bytes, tokens: np.ndarray) -> tuple[bytes, bytes]:
    """Returns what stands before and after the `tokens` in a `record` of them: the same in all records of a size."""
    before, found, after = record.rpartition(tokens.tobytes())
    if not found:
        raise ValueError("the tokens of a record are not stored as plain bytes")
    return before, after


class RowSource:
    """Rows [T + 1] of a split by index; a random-access source for Grain, with batched reads.

    `records` is TFDS's or array_record's data source, giving raw records.  Rows have one size, so records differ in the
    tokens' bytes alone: their place is found in the first record, then many records decode as one array.  (TFDS's own
    decoding took 68 µs a row of 129 tokens, so 2 ms a batch of 32.)

    `shards` are the files and their numbers of rows; `name` is what an error calls the whole.  With `rows_hash`, rows
    that fit into memory are read at once and compared with it.
    """

    def __init__(
        self,
        records: Any,
        features: Any,
        name: str,
        shards: Sequence[tuple[epath.PathLike, int]],
        rows_hash: str | None = None,
    ):
        self._records, self._name = records, name
        self.files = [shard for shard, _ in shards]
        self._shards = [epath.Path(shard).name for shard in self.files]
        self._ends = list(itertools.accumulate(rows for _, rows in shards))
        if len(records) != self._ends[-1]:
            raise self._error(f"{len(records)} rows, but {self._ends[-1]} were written")
        first = self._raw([0])[0]
        try:
            tokens = np.ascontiguousarray(features.deserialize_example_np(first)["tokens"])
            self._frame = frame_of(first, tokens)
        except Exception as error:  # TFDS raises many kinds
            raise self._error(f"{self._shards[0]}: {error}") from error
        self.dtype, self.row_length = tokens.dtype, len(tokens)
        self._memory: np.ndarray | None = None
        if rows_hash is not None and len(self) * tokens.nbytes <= IN_MEMORY_BYTES:
            self._memory = np.concatenate(
                [self._read(range(i, min(i + _CHUNK, len(self)))) for i in range(0, len(self), _CHUNK)]
            )
            if hashlib.sha256(self._memory.data).hexdigest() != rows_hash:
                raise self._error("the rows are not those that were written (their SHA-256 differs)")

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, index: int) -> np.ndarray:
        return self.take([index])[0]

    def take(self, indices: Sequence[int]) -> np.ndarray:
        """Returns rows [len(indices), T + 1] in the stored type; `UserError` names the shard that is damaged."""
        return self._read(indices) if self._memory is None else self._memory[np.asarray(indices, np.intp)]

    _getitems = take  # Grain's protocol for batched reads

    def _raw(self, indices: Sequence[int]) -> list[bytes]:
        try:
            return [bytes(record) for record in self._records.__getitems__(list(indices))]
        except Exception as error:  # array_record raises many kinds, and names no file
            raise self._error(self._damage(indices, error)) from error

    def _damage(self, indices: Sequence[int], error: Exception) -> str:
        """Says which shard gave `error`, by reading each row again."""
        for index in indices:
            try:
                bytes(self._records[index])
            except Exception as again:
                return f"{self._shard_of(index)}: {again}"
        return str(error)

    def _shard_of(self, index: int) -> str:
        return self._shards[bisect.bisect_right(self._ends, index)]

    def _error(self, reason: str) -> UserError:
        return UserError(
            f"{self._name} cannot be read ({reason}); restore the file or, to make the data set again, delete it."
        )

    def _read(self, indices: Sequence[int]) -> np.ndarray:
        raw = self._raw(indices)
        before, after = self._frame
        size = self.row_length * self.dtype.itemsize
        length = len(before) + size + len(after)
        for index, record in zip(indices, raw, strict=True):
            if len(record) != length or not (record.startswith(before) and record.endswith(after)):
                raise self._error(f"{self._shard_of(index)}: a record does not hold one row")
        data = np.frombuffer(b"".join(raw), np.uint8).reshape(len(raw), length)
        return np.ascontiguousarray(data[:, len(before) : len(before) + size]).view(self.dtype)

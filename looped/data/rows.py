"""Random access to the rows of one split of a prepared data set, fast enough to read in the training loop."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

IN_MEMORY_BYTES = 2**29
"""A split whose rows take no more than this is read once and kept (15 MB of bytes take 30 MB as uint16)."""
_CHUNK = 4096


class RowSource:
    """Rows [T + 1] of a split by index; a random-access source for Grain, with batched reads.

    `data_source` is TFDS's, giving raw records.  Rows have one size, so records differ in the tokens' bytes
    alone: their place is found in the first record, then many records decode as one array.  (TFDS's own
    decoding took 68 µs a row of 129 tokens, so 2 ms a batch of 32.)
    """

    def __init__(self, data_source, features, rows_hash: str):
        self._records = data_source
        first = bytes(data_source.__getitems__([0])[0])
        tokens = np.ascontiguousarray(features.deserialize_example_np(first)["tokens"])
        self.dtype, self.row_length = tokens.dtype, len(tokens)
        self._offset = first.find(tokens.tobytes())
        self._frame = first[: self._offset], first[self._offset + tokens.nbytes :]
        if self._offset < 0:
            raise ValueError("the tokens of a record are not stored as plain bytes")
        self._memory: np.ndarray | None = None
        if len(self) * tokens.nbytes <= IN_MEMORY_BYTES:
            self._memory = np.concatenate(
                [self._read(range(i, min(i + _CHUNK, len(self)))) for i in range(0, len(self), _CHUNK)]
            )
            if hashlib.sha256(self._memory.data).hexdigest() != rows_hash:
                raise ValueError("the rows are not those that were written (their SHA-256 differs)")

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, index: int) -> np.ndarray:
        return self.take([index])[0]

    def take(self, indices: Sequence[int]) -> np.ndarray:
        """Returns rows [len(indices), T + 1] in the stored type."""
        return self._read(indices) if self._memory is None else self._memory[np.asarray(indices, np.intp)]

    _getitems = take  # Grain's protocol for batched reads

    def _read(self, indices: Sequence[int]) -> np.ndarray:
        raw = [bytes(record) for record in self._records.__getitems__(list(indices))]
        before, after = self._frame
        for record in raw:
            if not (record.startswith(before) and record.endswith(after)):
                raise ValueError("a record does not hold one row")
        size = self.row_length * self.dtype.itemsize
        length = len(before) + size + len(after)
        if any(len(record) != length for record in raw):
            raise ValueError("a record does not hold one row")
        data = np.frombuffer(b"".join(raw), np.uint8).reshape(len(raw), length)
        return np.ascontiguousarray(data[:, self._offset : self._offset + size]).view(self.dtype)

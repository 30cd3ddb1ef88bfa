"""Rows of T + 1 tokens that each begin with BOS: best fit, then a crop of the shortest (the paper's rule)."""

from __future__ import annotations

import dataclasses
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from typing import Literal

import numpy as np

LongDocuments = Literal["cut", "crop"]
RULE_VERSION = 1
"""Raise it when the rules below change which rows come out: prepared data is then made anew."""
_ARRIVAL_BITS = 40


@dataclasses.dataclass
class PackingStatistics:
    """Where every token went: `document_tokens` = `placed_tokens` + `cropped_tokens`, with BOS counted apart.

    `pieces` is the number of BOS-led pieces: the documents, or their parts where long ones are cut.
    `rows` · row length = `placed_tokens` + `bos_tokens`, as rows are always full.
    """

    documents: int = 0
    empty_documents: int = 0
    pieces: int = 0
    document_tokens: int = 0
    placed_tokens: int = 0
    cropped_tokens: int = 0
    bos_tokens: int = 0
    rows: int = 0


class Packer:
    """Packs documents into rows of `row_length` = T + 1 tokens: equal documents in equal order, equal rows.

    A piece is its tokens behind a BOS.  A row takes the longest of the `buffer_size` buffered pieces that
    still fits, the earliest of equals, until none fits; then the shortest is cropped to fill the row, and
    what is cut off is dropped. Tokens left when the documents end, too few to fill a row, count as cropped
    too.

    A document longer than a row is cut into pieces that fit (`long_documents` "cut"), or is one piece of
    which only a crop is ever used ("crop", as in the paper, whose documents are plenty).

    `statistics` is filled as the rows are drawn.
    """

    def __init__(
        self,
        row_length: int,
        bos: int,
        dtype: np.dtype,
        buffer_size: int = 1000,
        long_documents: LongDocuments = "cut",
    ):
        self.row_length = row_length
        self.bos = bos
        self.dtype = dtype
        self.buffer_size = buffer_size
        self.long_documents = long_documents
        self.statistics = PackingStatistics()
        self._pieces: dict[int, np.ndarray] = {}  # by arrival, without BOS
        self._keys: list[int] = []  # sorted length with BOS, then arrival, as one integer

    def rows(self, documents: Iterable[np.ndarray]) -> Iterator[np.ndarray]:
        """Yields rows [row_length] of the documents' tokens, each document [n] given without BOS."""
        stats, pieces = self.statistics, self._split(documents)
        while True:
            row, at = np.empty(self.row_length, self.dtype), 0
            bos_tokens = 0
            while at < self.row_length:
                self._refill(pieces)
                if not self._keys:  # the documents ended inside this row
                    stats.cropped_tokens += at - bos_tokens
                    return
                piece = self._take(self.row_length - at)
                row[at] = self.bos
                kept = min(len(piece), self.row_length - at - 1)
                row[at + 1 : at + 1 + kept] = piece[:kept]
                stats.cropped_tokens += len(piece) - kept
                bos_tokens += 1
                at += 1 + kept
            stats.rows += 1
            stats.bos_tokens += bos_tokens
            stats.placed_tokens += at - bos_tokens
            yield row

    def _split(self, documents: Iterable[np.ndarray]) -> Iterator[np.ndarray]:
        room = self.row_length - 1
        for document in documents:
            self.statistics.documents += 1
            self.statistics.document_tokens += len(document)
            if not len(document):
                self.statistics.empty_documents += 1
            elif self.long_documents == "crop":
                yield document
            else:
                for start in range(0, len(document), room):
                    yield document[start : start + room]

    def _refill(self, pieces: Iterator[np.ndarray]) -> None:
        while len(self._keys) < self.buffer_size:
            piece = next(pieces, None)
            if piece is None:
                return
            arrival = self.statistics.pieces
            self.statistics.pieces += 1
            self._pieces[arrival] = piece
            insort(self._keys, (len(piece) + 1) << _ARRIVAL_BITS | arrival)

    def _take(self, room: int) -> np.ndarray:
        """Removes and returns the longest piece of at most `room` tokens with BOS, or else the shortest."""
        fits = bisect_left(self._keys, (room + 1) << _ARRIVAL_BITS) - 1
        length = self._keys[max(fits, 0)] >> _ARRIVAL_BITS
        key = self._keys.pop(bisect_left(self._keys, length << _ARRIVAL_BITS))
        return self._pieces.pop(key & ((1 << _ARRIVAL_BITS) - 1))

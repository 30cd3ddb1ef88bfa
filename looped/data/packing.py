"""Rows of T + 1 tokens that each begin with BOS: best fit, then a crop of the shortest (the paper's rule)."""

from __future__ import annotations

import dataclasses
import heapq
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Literal

import numpy as np

LongDocuments = Literal["cut", "crop"]
EmptyDocuments = Literal["refuse", "skip"]
RULE_VERSION = 1
"""Raise it when the rules below change which rows come out: prepared data is then made anew."""


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

    Pieces that fit a row wait in a queue for each length, found by the highest bit of an integer that has a
    bit for each length with a queue; longer ones wait in a heap.  So a piece costs O(T / 64 + log buffer),
    hardly more in a buffer of a million than in one of a hundred.

    `statistics` is filled as the rows are made.
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
        self._queues: dict[int, deque[np.ndarray]] = {}  # by length with BOS; pieces without it
        self._lengths = 0  # bit n is set where a queue of length n is
        self._longer: list[tuple[int, int, np.ndarray]] = []  # a heap of length, arrival and what can be used
        self._buffered = 0
        self._row, self._at, self._row_bos = np.empty(row_length, dtype), 0, 0

    def rows(self, documents: Iterable[np.ndarray]) -> Iterator[np.ndarray]:
        """Yields rows [row_length] of the documents' tokens, each document [n] given without BOS."""
        for document in documents:
            yield from self.add(document)
        yield from self.finish()

    def add(self, document: np.ndarray) -> list[np.ndarray]:
        """Buffers a document [n], given without BOS, and returns the rows [row_length] that became full."""
        self.statistics.documents += 1
        self.statistics.document_tokens += len(document)
        if not len(document):
            self.statistics.empty_documents += 1
        room = self.row_length - 1 if self.long_documents == "cut" else max(1, len(document))
        rows = []
        for start in range(0, len(document), room):
            self._insert(document[start : start + room])
            if self._buffered >= self.buffer_size:
                rows += self._place()
        return rows

    def finish(self) -> list[np.ndarray]:
        """Empties the buffer and returns the rows of it; tokens left over count as cropped."""
        rows = []
        while self._buffered:
            rows += self._place()
        self.statistics.cropped_tokens += self._at - self._row_bos
        self._at = self._row_bos = 0
        return rows

    def state(self) -> dict[str, np.ndarray]:
        """Returns everything that the next rows depend on; `restore` takes it."""
        fitting = [(length, piece) for length, queue in self._queues.items() for piece in queue]
        waiting = fitting + [
            (length, piece) for length, _, piece in sorted(self._longer, key=lambda p: p[:2])
        ]
        return {
            "piece_lengths": np.array([length for length, _ in waiting], np.int64),
            "piece_sizes": np.array([len(piece) for _, piece in waiting], np.int64),
            "piece_tokens": np.concatenate([np.empty(0, self.dtype), *(piece for _, piece in waiting)]),
            "row": self._row[: self._at],
            "row_bos": np.array(self._row_bos),
            "statistics": np.array(dataclasses.astuple(self.statistics), np.int64),
        }

    def restore(self, state: dict[str, np.ndarray]) -> None:
        """Goes on from `state`, in a packer of the same arguments that has seen no document."""
        self.statistics = PackingStatistics(*state["statistics"].tolist())
        pieces = np.split(state["piece_tokens"], np.cumsum(state["piece_sizes"])[:-1])
        for arrival, (length, piece) in enumerate(zip(state["piece_lengths"].tolist(), pieces, strict=False)):
            self._enqueue(length, arrival, piece)
        self._at, self._row_bos = len(state["row"]), int(state["row_bos"])
        self._row[: self._at] = state["row"]

    def _insert(self, piece: np.ndarray) -> None:
        # What can never be used is left out, and the rest copied: a view would keep all of its array alive.
        kept = np.array(piece[: self.row_length - 1], self.dtype)
        self._enqueue(len(piece) + 1, self.statistics.pieces, kept)
        self.statistics.pieces += 1

    def _enqueue(self, length: int, arrival: int, piece: np.ndarray) -> None:
        self._buffered += 1
        if length > self.row_length:
            heapq.heappush(self._longer, (length, arrival, piece))
            return
        if length not in self._queues:
            self._queues[length] = deque()
            self._lengths |= 1 << length
        self._queues[length].append(piece)

    def _take(self, room: int) -> tuple[int, np.ndarray]:
        """Removes the longest piece of at most `room` tokens with BOS, or else the shortest; its length first."""
        self._buffered -= 1
        fitting = self._lengths & ((1 << (room + 1)) - 1)
        if not self._lengths:
            length, _, piece = heapq.heappop(self._longer)
            return length, piece
        length = (fitting.bit_length() if fitting else (self._lengths & -self._lengths).bit_length()) - 1
        queue = self._queues[length]
        piece = queue.popleft()
        if not queue:
            del self._queues[length]
            self._lengths ^= 1 << length
        return length, piece

    def _place(self) -> list[np.ndarray]:
        """Moves one piece into the row; returns the row once it is full, else nothing."""
        length, piece = self._take(self.row_length - self._at)
        kept = min(length - 1, self.row_length - self._at - 1)
        self._row[self._at] = self.bos
        self._row[self._at + 1 : self._at + 1 + kept] = piece[:kept]
        self._at += 1 + kept
        self._row_bos += 1
        self.statistics.cropped_tokens += length - 1 - kept
        if self._at < self.row_length:
            return []
        row, self._row = self._row, np.empty(self.row_length, self.dtype)
        self.statistics.rows += 1
        self.statistics.bos_tokens += self._row_bos
        self.statistics.placed_tokens += self._at - self._row_bos
        self._at = self._row_bos = 0
        return [row]

"""Tokenizes documents in other processes, in order: what comes out does not depend on how many there are."""

from __future__ import annotations

import collections
import dataclasses
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool

import numpy as np

from looped.data.sources import Cursor
from looped.data.tokenizers import Tokenizer, encode_all
from looped.errors import UserError

CHUNK_DOCUMENTS = 512
CHUNK_CHARACTERS = 2**20
"""A chunk, the unit of work, ends with the document that takes it over either."""


@dataclasses.dataclass(frozen=True)
class Chunk:
    """Documents that follow each other in a source; `cursors[i]` is where document i begins, the last where all end."""

    texts: list[str]
    cursors: list[Cursor]


def chunks(documents: Iterable[tuple[str, Cursor]], start: Cursor) -> Iterator[Chunk]:
    """Groups documents, each with the cursor after it."""
    texts, cursors, characters = [], [start], 0
    for text, after in documents:
        texts.append(text)
        cursors.append(after)
        characters += len(text)
        if len(texts) >= CHUNK_DOCUMENTS or characters >= CHUNK_CHARACTERS:
            yield Chunk(texts, cursors)
            texts, cursors, characters = [], [after], 0
    if texts:
        yield Chunk(texts, cursors)


def tokenized(
    pieces: Iterable[Chunk], tokenizer: Tokenizer, workers: int
) -> Iterator[tuple[Chunk, list[np.ndarray]]]:
    """Yields each chunk with the tokens of its documents, in order.

    With 0 `workers` it works here, else in so many processes, with at most two chunks waiting for each, so memory does
    not grow with the data.  They are started afresh (spawned), so a script that calls this needs the usual
    `if __name__ == "__main__":`.
    """
    if not workers:
        for chunk in pieces:
            yield chunk, encode_all(tokenizer, chunk.texts)
        return
    pool = ProcessPoolExecutor(
        workers, multiprocessing.get_context("spawn"), initializer=_begin, initargs=(tokenizer, os.getpid())
    )
    waiting: collections.deque[tuple[Chunk, Future]] = collections.deque()
    try:
        for chunk in pieces:
            waiting.append((chunk, pool.submit(_encode, chunk.texts)))
            if len(waiting) > 2 * workers:
                yield _finished(*waiting.popleft())
        while waiting:
            yield _finished(*waiting.popleft())
    except BrokenProcessPool:
        raise UserError(
            f"workers is {workers}; one of these processes was ended, perhaps for want of memory: run the same command"
            " again, with fewer if it recurs."
        ) from None
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _finished(chunk: Chunk, future: Future) -> tuple[Chunk, list[np.ndarray]]:
    tokens, lengths = future.result()
    return chunk, np.split(tokens, np.cumsum(lengths)[:-1])


_tokenizer: Tokenizer


def _begin(tokenizer: Tokenizer, parent: int) -> None:
    global _tokenizer
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends its workers
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # each worker is one core's
    _tokenizer = tokenizer
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()


def _end_with(parent: int) -> None:
    """Ends this process when its parent has ended, killed perhaps: nobody else would."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def _encode(texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
    """Returns the tokens of all texts and how many each has: one array travels faster than many."""
    encoded = encode_all(_tokenizer, texts)
    return np.concatenate(encoded), np.array([len(ids) for ids in encoded])

"""Prepared data to batches: each a function of (data, seed, step, batch size) alone, read ahead by Grain."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import json
import os
import sys
import time
import uuid
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import grain
import numpy as np
from etils import epath

from looped.data.corpus import SOURCES, Split, get_source
from looped.data.metadata import FORMAT_VERSION, PackMetadata
from looped.data.rows import RowSource
from looped.data.tokenizers import Tokenizer, get_tokenizer
from looped.errors import UserError
from looped.jsonable import from_json

if TYPE_CHECKING:
    from looped.data.builder import PackPlan

METADATA_FILE = "metadata.json"
VALIDATION_SEED = 0
"""The order of the validation rows: fixed, so that every run's loss is over the same ones."""
IGNORED = -1
"""Target that counts in no loss."""


class PackedData:
    """A prepared data set, opened.  Rows are read when first needed.

    `hash` identifies what is trained on and evaluated on (rows and tokenizer); `corpus_hash` the text alone.
    """

    def __init__(self, directory: epath.PathLike):
        self.directory = epath.Path(directory)
        self.metadata = _read_metadata(self.directory)
        self.hash = self.metadata.hash
        self.corpus_hash = self.metadata.corpus_hash
        self.sequence_length = self.metadata.sequence_length
        self.vocab_size = self.metadata.tokenizer.vocab_size
        self.train_rows = self.metadata.train.statistics.rows
        self.validation_rows = self.metadata.validation.statistics.rows
        self._opened: dict[Split, RowSource] = {}
        self._orders: dict[int, Any] = {}

    @functools.cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer that made the rows; `UserError` if the one of that name has changed since."""
        tokenizer = get_tokenizer(self.metadata.tokenizer.name)
        if tokenizer.fingerprint != self.metadata.tokenizer.fingerprint:
            raise UserError(
                f"{self.directory}: tokenizer {tokenizer.name!r} is another now; delete it to make it again."
            )
        return tokenizer

    def check_model(self, vocab_size: int, sequence_length: int) -> None:
        """Raises `UserError` unless the rows suit a model of this vocabulary and sequence length."""
        if vocab_size != self.vocab_size:
            raise UserError(
                f"vocab_size is {vocab_size}; the data's tokenizer {self.metadata.tokenizer.name!r} has"
                f" {self.vocab_size} ids, so set it to {self.vocab_size}."
            )
        _check_length(self, sequence_length)

    def epochs(self, steps: int, batch_size: int) -> float:
        """Returns how often `steps` batches go through the training split."""
        return steps * batch_size / self.train_rows

    def train_batch(self, seed: int, step: int, batch_size: int, rows: slice | None = None) -> np.ndarray:
        """Returns the tokens of batch `step`: int32 [batch_size, T + 1], or its part `rows` (one process's).

        Row i is sample `step`·`batch_size` + i (both from 0) of an endless sequence: the training rows in a
        shuffled order, epoch after epoch, each in an order of its own.  `seed` alone chooses the orders.
        """
        if seed not in self._orders:
            self._orders[seed] = _shuffled(self.train_rows, seed)
        order, first = self._orders[seed], step * batch_size
        part = range(batch_size)[rows if rows is not None else slice(None)]
        return self._rows("train").take([int(order[first + i]) for i in part]).astype(np.int32)

    def train_batches(
        self, seed: int, start_step: int, batch_size: int, rows: slice | None = None
    ) -> Iterator[np.ndarray]:
        """Returns the endless iterator of `train_batch` from `start_step`; a thread of Grain reads ahead."""
        self._rows("train")  # opened here, so that an error is raised here
        steps = grain.MapDataset.range(start_step, sys.maxsize)
        batches = steps.map(lambda step: self.train_batch(seed, int(step), batch_size, rows))
        return iter(batches.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=8)))

    def validation_batches(
        self, sequences: int, batch_size: int, rows: slice | None = None
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yields inputs and targets, int32 [batch_size, T] each, over the fixed validation set, once.

        It is the first `sequences` rows of the validation split in a fixed shuffled order, or all where they
        are fewer.  The last batch is filled up with rows whose targets are all `IGNORED`, so every batch has
        one shape.  `rows` is the part of each batch to return (one process's).
        """
        count = min(sequences, self.validation_rows)
        order = _shuffled(self.validation_rows, VALIDATION_SEED)
        source = self._rows("validation")
        for first in range(0, count, batch_size):
            tokens = np.zeros((batch_size, self.sequence_length + 1), np.int32)
            held = source.take([order[i] for i in range(first, min(first + batch_size, count))])
            tokens[: len(held)] = held
            inputs, targets = tokens[:, :-1], tokens[:, 1:].copy()
            targets[len(held) :] = IGNORED
            part = rows if rows is not None else slice(None)
            yield inputs[part], targets[part]

    def _rows(self, split: Split) -> RowSource:
        if split not in self._opened:
            self._opened[split] = _open_rows(self, split)
        return self._opened[split]


def _shuffled(rows: int, seed: int) -> Any:
    """Returns an endless order of `rows` indices, by random access: each epoch shuffled in its own way."""
    return grain.MapDataset.range(rows).seed(seed).shuffle().repeat()


def prepare(source: str, sequence_length: int, tokenizer: str = "bytes") -> PackedData:
    """Opens the data of `source` packed for `sequence_length` = T; makes it first where there is none yet.

    `source` is a known name, made once in the folder that the environment variable LOOPED_DATA names
    (~/.cache/looped without one), or the folder of a prepared data set.  Raises `UserError` if it is neither
    or was packed for another T.
    """
    if sequence_length < 1:
        raise UserError(f"sequence_length is {sequence_length}; it must be at least 1.")
    if source not in SOURCES and epath.Path(source).expanduser().is_dir():
        data = PackedData(epath.Path(source).expanduser())
        _check_length(data, sequence_length)
        return data
    from looped.data.builder import PackPlan

    plan = PackPlan(get_source(source), get_tokenizer(tokenizer), sequence_length)
    root = epath.Path(os.environ.get("LOOPED_DATA") or "~/.cache/looped").expanduser()
    directory = root / plan.name
    if not directory.exists():
        try:
            root.mkdir(parents=True, exist_ok=True)
            with _lock(root, plan.name) as alone:
                if not directory.exists():  # another process may have made it while this one waited
                    _prepare(plan, root, directory, alone)
        except OSError as error:
            raise UserError(
                f"LOOPED_DATA is {root}: cannot write there ({error}); name a folder that has room."
            ) from error
    return PackedData(directory)


def _prepare(plan: PackPlan, root: epath.Path, directory: epath.Path, alone: bool) -> None:
    """Writes the data set into a temporary folder and renames that: what has the final name is complete."""
    from looped.data.builder import write_packed

    _say(f"data: preparing {plan.source.name!r} for sequence length {plan.sequence_length}, once …")
    start = time.monotonic()
    if alone:
        for left in root.glob(f"incomplete-{plan.name}-*"):
            left.rmtree(missing_ok=True)  # a process that was killed left it
    temporary = root / f"incomplete-{plan.name}-{uuid.uuid4().hex[:8]}"
    try:
        written = write_packed(plan, temporary)
        try:
            written.rename(directory)
        except OSError:
            if not directory.exists():  # else another process was first, where there is no lock
                raise
    finally:
        temporary.rmtree(missing_ok=True)
    data = PackedData(directory)
    _say(
        f"data: {data.train_rows:,} + {data.validation_rows:,} rows (training + validation) in"
        f" {time.monotonic() - start:.0f} s, hash {data.hash[:12]}, {directory}"
    )


@contextlib.contextmanager
def _lock(root: epath.Path, name: str) -> Iterator[bool]:
    """Holds a lock that ends with the process and yields True; False on remote storage, which has none."""
    if "://" in os.fspath(root):
        yield False
        return
    with open(root / f"lock-{name}", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _say("data: another process is preparing it; waiting …")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield True


def _say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def _check_length(data: PackedData, sequence_length: int) -> None:
    if sequence_length != data.sequence_length:
        raise UserError(
            f"sequence_length is {sequence_length}; {data.directory} was packed for {data.sequence_length}:"
            " use that, or other data."
        )


def _read_metadata(directory: epath.Path) -> PackMetadata:
    path = directory / METADATA_FILE
    try:
        data = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UserError(
            f"{directory}: no prepared data ({METADATA_FILE}: {error}); name another, or delete it and retry."
        ) from None
    version = data.get("format_version") if isinstance(data, dict) else None
    if version != FORMAT_VERSION:
        raise UserError(
            f"{path}: format {version!r}, this version reads {FORMAT_VERSION}; delete it to make it again."
        )
    return from_json(PackMetadata, data, f"{path}: ")


def _open_rows(data: PackedData, split: Split) -> RowSource:
    """Opens a split's rows; `UserError` where they are not those that were written."""
    import tensorflow_datasets as tfds

    described = data.metadata.train if split == "train" else data.metadata.validation
    try:
        raw = tfds.decode.DeserializeMethod.RAW_BYTES
        builder = tfds.builder_from_directory(data.directory)
        records = builder.as_data_source(split, deserialize_method=raw)  # pyright: ignore[reportCallIssue]
        source = RowSource(records, builder.info.features, described.rows_hash)
        if len(source) != described.statistics.rows:
            raise ValueError(f"{len(source)} rows, but {described.statistics.rows} were written")
    except Exception as error:  # array_record and TFDS raise many kinds
        raise UserError(
            f"{data.directory}: the {split} rows cannot be read ({error}); delete it to make it again."
        ) from error
    return source

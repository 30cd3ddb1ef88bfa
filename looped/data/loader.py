"""Prepared data to batches: each a function of (data, seed, step, batch size) alone, read ahead by Grain."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import os
import sys
import time
import uuid
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

import grain
import numpy as np
from etils import epath

from looped.data import published
from looped.data import rows as row_sources
from looped.data.corpus import SOURCES, SPLITS, Split, get_source
from looped.data.metadata import read_metadata
from looped.data.rows import RowSource
from looped.data.shards import hash_file
from looped.data.sources import PRESETS
from looped.data.tfds_folder import check_folder
from looped.data.tokenizers import Tokenizer, get_tokenizer
from looped.errors import UserError, nearest, unwritable
from looped.files import is_remote

if TYPE_CHECKING:
    import jax

    from looped.data.builder import PackPlan

T = TypeVar("T")
VALIDATION_SEED = 0
"""The order of the validation rows: fixed, so that every run's loss is over the same ones."""
IGNORED = -1
"""Target that counts in no loss."""


class RepeatedDataWarning(UserWarning):
    """Training goes through the data once more."""


class PackedData:
    """A prepared data set, or the published packed data, opened.  Rows are read when first needed.

    `hash` identifies what is trained on and evaluated on (rows and tokenizer); `corpus_hash` the text alone.
    The published data's batches take its rows in their order, all others' in an order shuffled for each epoch.
    """

    def __init__(self, directory: epath.PathLike):
        self.directory = epath.Path(directory)
        self._opened: dict[Split, Any] = {}
        self.shuffled = not published.is_published(self.directory)
        if self.shuffled:
            self.metadata = read_metadata(self.directory)
        else:
            data = published.PublishedData(self.directory)
            self.metadata = data.metadata()
            self._opened.update(data.rows)
        self.hash = self.metadata.hash
        self.corpus_hash = self.metadata.corpus_hash
        self.sequence_length = self.metadata.sequence_length
        self.vocab_size = self.metadata.tokenizer.vocab_size
        self.tokenizer_fingerprint = self.metadata.tokenizer.fingerprint
        self.train_rows = self.metadata.train.statistics.rows
        self.validation_rows = self.metadata.validation.statistics.rows
        self._orders: dict[int, Any] = {}

    def __reduce__(self):
        return PackedData, (str(self.directory),)  # a process opens its own files

    @functools.cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer that made the rows; `UserError` if it is not there or has changed since."""
        described, file = self.metadata.tokenizer, self.metadata.tokenizer_file
        if file is not None:
            from looped.data import subword

            content = (self.directory / file.name).read_bytes()
            tokenizer = subword.load(described.name, file.name, content, file.added_tokens, file.bos_token)
        elif not self.shuffled:
            raise UserError(
                f"{self.directory}: the published data comes without a tokenizer; put its tokenizer.json or"
                " tokenizer.model into the folder."
            )
        else:
            tokenizer = get_tokenizer(described.name)
        if self.shuffled and tokenizer.fingerprint != described.fingerprint:
            raise UserError(
                f"{self.directory}: tokenizer {tokenizer.name!r} is another now; delete it to make it again."
            )
        return tokenizer

    def check_model(self, vocab_size: int, sequence_length: int) -> None:
        """Raises `UserError` unless the rows suit a model of this vocabulary and sequence length."""
        _check_vocabulary(vocab_size, self.vocab_size, self.metadata.tokenizer.name)
        _check_length(self, sequence_length)

    def check_rows(self) -> None:
        """Reads every row of both splits; `UserError` where one is damaged or not what was written."""
        for split in SPLITS:
            source, digest = self._rows(split), hashlib.sha256()
            if self.shuffled:
                _check_files(self, split, source.files)
            for first in range(0, len(source), 1024):
                digest.update(source.take(range(first, min(first + 1024, len(source)))).data)
            if self.shuffled and digest.hexdigest() != self.metadata.split(split).rows_hash:
                raise UserError(
                    f"{self.directory}: the {split} rows are not those that were written (their SHA-256 differs);"
                    " restore the files or, to make the data set again, delete it."
                )

    def epochs(self, steps: int, batch_size: int) -> float:
        """Returns how often `steps` batches go through the training split."""
        return steps * batch_size / self.train_rows

    def train_batch(self, seed: int, step: int, batch_size: int, rows: slice | None = None) -> np.ndarray:
        """Returns the tokens of batch `step`: int32 [batch_size, T + 1], or its part `rows` (one process's).

        Row i is sample `step`·`batch_size` + i (both from 0) of an endless sequence: the training rows in a
        shuffled order, epoch after epoch, each in an order of its own.  `seed` alone chooses the orders.
        """
        if seed not in self._orders:
            self._orders[seed] = self._order(self.train_rows, seed)
        order, first = self._orders[seed], step * batch_size
        part = range(batch_size)[rows if rows is not None else slice(None)]
        return self._rows("train").take([int(order[first + i]) for i in part]).astype(np.int32)

    def train_batches(
        self, seed: int, start_step: int, batch_size: int, rows: slice | None = None, workers: int = 1
    ) -> Iterator[np.ndarray]:
        """Returns the endless iterator of `train_batch` from `start_step`, which `workers` threads of Grain read ahead.

        With 0 workers nothing is read ahead.  Whatever their number, the batches are the same.  Warns
        (`RepeatedDataWarning`) when the second epoch begins.
        """
        return self._stream(
            lambda step: self.train_batch(seed, step, batch_size, rows), start_step, batch_size, workers, 8
        )

    def device_batches(
        self,
        seed: int,
        start_step: int,
        batch_size: int,
        sharding: jax.sharding.Sharding | None = None,
        workers: int = 1,
        ahead: int = 2,
    ) -> Iterator[jax.Array]:
        """Returns the endless iterator of `train_batch` from `start_step` on devices: int32 [batch_size, T + 1].

        With a `sharding`, such as one over a mesh's data axis, each is a global array, of which every process reads
        only the rows that its own devices hold; without one it is on the default device.  `ahead` batches are on the
        devices before they are asked for, or none with 0 `workers`.
        """
        import jax

        shape = (batch_size, self.sequence_length + 1)

        def batch(step: int) -> jax.Array:
            if sharding is None:
                return jax.device_put(self.train_batch(seed, step, batch_size))
            parts: dict[tuple[int, int], np.ndarray] = {}

            def part(index: Any) -> np.ndarray:
                start, stop, _ = index[0].indices(batch_size)
                if (start, stop) not in parts:  # devices that differ in another axis hold the same rows
                    parts[start, stop] = self.train_batch(seed, step, batch_size, slice(start, stop))
                return parts[start, stop][:, index[1]]

            return jax.make_array_from_callback(shape, sharding, part)

        return self._stream(batch, start_step, batch_size, workers, ahead)

    def _stream(
        self, batch: Callable[[int], T], start_step: int, batch_size: int, workers: int, ahead: int
    ) -> Iterator[T]:
        self._rows("train")  # opened here, so that an error is raised here
        if workers < 0:
            raise UserError(f"workers is {workers}; it must be at least 0.")
        if workers:
            steps = grain.MapDataset.range(start_step, sys.maxsize)
            options = grain.ReadOptions(num_threads=workers, prefetch_buffer_size=max(ahead, workers))
            batches = iter(steps.map(lambda step: batch(int(step))).to_iter_dataset(options))
        else:
            batches = map(batch, range(start_step, sys.maxsize))
        return self._noting_epochs(batches, start_step, batch_size)

    def _noting_epochs(self, batches: Iterator[T], step: int, batch_size: int) -> Iterator[T]:
        for batch in batches:
            step += 1
            if step * batch_size > self.train_rows:
                warnings.warn(
                    f"the second epoch over {self.directory} begins at step {self.train_rows // batch_size + 1}: its"
                    f" {self.train_rows:,} rows are read again, and losses on repeated data are no longer those of"
                    " fresh data.",
                    RepeatedDataWarning,
                    stacklevel=2,
                )
                yield batch
                break
            yield batch
        yield from batches

    def validation_batches(
        self, sequences: int, batch_size: int, rows: slice | None = None
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yields inputs and targets, int32 [batch_size, T] each, over the fixed validation set, once.

        It is the first `sequences` rows of the validation split in a fixed shuffled order, or all where they
        are fewer.  The last batch is filled up with rows whose targets are all `IGNORED`, so every batch has
        one shape.  `rows` is the part of each batch to return (one process's).
        """
        count = min(sequences, self.validation_rows)
        order = self._order(self.validation_rows, VALIDATION_SEED)
        source = self._rows("validation")
        part = range(batch_size)[rows if rows is not None else slice(None)]
        for first in range(0, count, batch_size):
            tokens = np.zeros((len(part), self.sequence_length + 1), np.int32)
            held = source.take([int(order[first + i]) for i in part if first + i < count])
            tokens[: len(held)] = held
            inputs, targets = tokens[:, :-1], tokens[:, 1:].copy()
            targets[len(held) :] = IGNORED
            yield inputs, targets

    def _order(self, rows: int, seed: int) -> Any:
        """Returns an endless order of `rows` indices, by random access: each epoch shuffled in its own way."""
        order = grain.MapDataset.range(rows)
        return (order.seed(seed).shuffle() if self.shuffled else order).repeat()

    def _rows(self, split: Split) -> Any:
        if split not in self._opened:
            self._opened[split] = _open_rows(self, split)
        return self._opened[split]


def process_rows(batch_size: int, process: int | None = None, processes: int | None = None) -> slice:
    """Returns the rows of each batch that a process reads: equal shares in order, this process's by default."""
    if process is None or processes is None:
        import jax

        process, processes = jax.process_index(), jax.process_count()
    if batch_size % processes:
        raise UserError(
            f"batch_size is {batch_size}; {processes} processes read equal shares of it, so make it a multiple of that."
        )
    share = batch_size // processes
    return slice(process * share, (process + 1) * share)


def data_root() -> epath.Path:
    """The folder of data sets: LOOPED_DATA of the environment, ~/.cache/looped without it."""
    return epath.Path(os.environ.get("LOOPED_DATA") or "~/.cache/looped").expanduser()


def prepare(
    source: str, sequence_length: int, tokenizer: str = "bytes", vocab_size: int | None = None
) -> PackedData:
    """Opens the data of `source` packed for `sequence_length` = T; makes it first where there is none yet.

    `source` is a known name, made once in the folder that the environment variable LOOPED_DATA names
    (~/.cache/looped without one), or the folder of a prepared data set or of the published packed data, by its path
    or by its name in LOOPED_DATA: a spec that gives a name is one run on every machine.  Raises
    `UserError` if it is neither, was packed for another T, or has another vocabulary than `vocab_size`, before
    anything is made.
    """
    if sequence_length < 1:
        raise UserError(f"sequence_length is {sequence_length}; it must be at least 1.")
    if source not in SOURCES:
        data = PackedData(_folder_of(source))
        if vocab_size is not None:
            data.check_model(vocab_size, sequence_length)
        else:
            _check_length(data, sequence_length)
        return data
    from looped.data.builder import PackPlan

    plan = PackPlan(get_source(source), get_tokenizer(tokenizer), sequence_length)
    if vocab_size is not None:
        _check_vocabulary(vocab_size, plan.tokenizer.vocab_size, plan.tokenizer.name)
    root = data_root()
    directory = root / plan.name
    if not directory.exists():
        try:
            root.mkdir(parents=True, exist_ok=True)
            with _lock(root, plan.name) as alone:
                if not directory.exists():  # another process may have made it while this one waited
                    _prepare(plan, root, directory, alone)
        except OSError as error:
            raise unwritable(error, f"LOOPED_DATA is {root}", "name another folder") from error
    return PackedData(directory)


def _folder_of(source: str) -> epath.Path:
    root = data_root()
    for folder in (epath.Path(source).expanduser(), root / source):
        if folder.is_dir():
            return folder
    fitting = source if source in PRESETS else "…"
    raise UserError(
        f"source {source!r} is neither a known name nor a folder of prepared data, nor one in {root}."
        f"{nearest(source, SOURCES)} Another corpus is packed once: `looped data pack --source {fitting} --tokenizer …"
        f" --output {root / epath.Path(source).name}`."
    )


def _prepare(plan: PackPlan, root: epath.Path, directory: epath.Path, alone: bool) -> None:
    """Writes the data set into a temporary folder and renames that: what has the final name is complete."""
    from looped.data import pack

    _say(f"data: preparing {plan.source.name!r} for sequence length {plan.sequence_length}, once …")
    start = time.monotonic()
    temporary = root / f"incomplete-{plan.name}"  # where a process that was killed left it, this one goes on
    if not alone:
        temporary = root / f"{temporary.name}-{uuid.uuid4().hex[:8]}"
    try:
        pack.pack(plan, temporary)
        try:
            temporary.rename(directory)
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
    if is_remote(root):
        yield False
        return
    with open(root / f"lock-{name}", "a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _say("data: another process is preparing it; waiting …")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield True


def _say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def _check_vocabulary(vocab_size: int, ids: int, tokenizer: str) -> None:
    if vocab_size != ids:
        raise UserError(
            f"vocab_size is {vocab_size}; the data's tokenizer {tokenizer!r} has {ids} ids, so set it to {ids}."
        )


def _check_length(data: PackedData, sequence_length: int) -> None:
    if sequence_length != data.sequence_length:
        raise UserError(
            f"sequence_length is {sequence_length}; {data.directory} was packed for {data.sequence_length}:"
            " use that, or other data."
        )


def _check_files(data: PackedData, split: Split, paths: Iterable[epath.PathLike]) -> None:
    """Raises `UserError` where a shard's file is not byte for byte the one written (data made before has no hashes)."""
    for path, digest in zip(paths, data.metadata.split(split).shard_hashes, strict=False):
        if hash_file(path) != digest:
            raise UserError(
                f"{data.directory}: the {split} rows cannot be read ({epath.Path(path).name}: its SHA-256 is not"
                " that of the file written); restore the file or, to make the data set again, delete it."
            )


def _open_rows(data: PackedData, split: Split) -> RowSource:
    """Opens a split's rows; `UserError` where they are not those that were written."""
    import tensorflow_datasets as tfds

    described = data.metadata.split(split)
    check_folder(data.directory)
    try:
        raw = tfds.decode.DeserializeMethod.RAW_BYTES
        builder = tfds.builder_from_directory(data.directory)
        records = builder.as_data_source(split, deserialize_method=raw)  # pyright: ignore[reportCallIssue]
        info = builder.info.splits[split]
        shards = list(zip(info.filepaths, info.shard_lengths, strict=True))
        if sum(rows for _, rows in shards) != described.statistics.rows:
            raise ValueError(f"{len(records)} rows, but {described.statistics.rows} were written")
        if described.statistics.rows * (data.sequence_length + 1) * 2 <= row_sources.IN_MEMORY_BYTES:
            _check_files(data, split, info.filepaths)
        return RowSource(
            records, builder.info.features, f"{data.directory}: the {split} rows", shards, described.rows_hash
        )
    except UserError:
        raise
    except Exception as error:  # array_record and TFDS raise many kinds
        raise UserError(
            f"{data.directory}: the {split} rows cannot be read ({error}); delete it to make it again."
        ) from error

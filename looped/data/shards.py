"""Shards of rows on disk: written under another name until whole, and the state that packing goes on from."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import io
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from etils import epath

from looped.data.metadata import STATE_FILE
from looped.data.rows import RowSource, frame_of
from looped.errors import UserError, out_of_room

DATASET = "packed_rows"
TEMPLATE = "{DATASET}-{SPLIT}.{FILEFORMAT}-{SHARD_INDEX}"
"""TFDS's template of a shard's name; without the number of shards, which is known at the end only."""
FORMAT = "array_record"
_UNFINISHED = ".unfinished"


def shard_path(directory: Path, split: str, index: int) -> Path:
    return directory / f"{DATASET}-{split}.{FORMAT}-{index:05d}"


class ShardWriter:
    """Writes rows [T + 1] as records of the TFDS features `features` into one shard.

    The file has its own name once `close` has found all its rows on disk, and no earlier.
    """

    def __init__(self, path: Path, features: Any):
        from array_record.python import array_record_module  # pyright: ignore[reportAttributeAccessIssue]
        from tensorflow_datasets.core import example_serializer

        self.path, self.rows = path, 0
        self._features = features
        self._serializer = example_serializer.ExampleSerializer(features.get_serialized_info())
        self._frame: tuple[bytes, bytes] | None = None
        self._temporary = path.with_name(path.name + _UNFINISHED)
        with writing(path):
            self._writer = array_record_module.ArrayRecordWriter(str(self._temporary), "group_size:1")

    def write(self, row: np.ndarray) -> None:
        if self._frame is None:
            record = self._serializer.serialize_example(self._features.encode_example({"tokens": row}))
            self._frame = frame_of(record, row)
        with writing(self.path):
            self._writer.write(self._frame[0] + row.tobytes() + self._frame[1])
        self.rows += 1

    def close(self) -> str:
        """Gives the file its own name, whole and on disk; returns the SHA-256 of its bytes."""
        with writing(self.path):
            self._writer.close()
            if count_rows(self._temporary) != self.rows:
                raise OSError(f"{self._temporary.name} does not hold the rows written to it")
            _sync(self._temporary)
            digest = hash_file(self._temporary)
            os.replace(self._temporary, self.path)
            _sync(self.path.parent)
        return digest


def hash_file(path: epath.PathLike) -> str:
    """Returns the SHA-256 of a file's bytes."""
    with epath.Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()  # pyright: ignore[reportArgumentType]


def read_shard(path: Path, features: Any, rows: int, digest: str) -> Iterator[np.ndarray]:
    """Yields the rows of a shard in blocks [n, T + 1]; `UserError` where it is not what was written."""
    from array_record.python.array_record_data_source import ArrayRecordDataSource

    try:
        if hash_file(path) != digest:
            raise ValueError("its SHA-256 is not that of the file written")
        records = ArrayRecordDataSource([str(path)])
    except Exception as error:  # array_record raises many kinds
        raise UserError(f"{path} cannot be read ({error}); delete {path.parent} to pack again.") from None
    source = RowSource(records, features, str(path.parent), [(path, rows)])
    for start in range(0, rows, 1024):
        yield source.take(range(start, min(start + 1024, rows)))


def count_rows(path: Path) -> int:
    from array_record.python import array_record_module  # pyright: ignore[reportAttributeAccessIssue]

    reader = array_record_module.ArrayRecordReader(str(path))
    try:
        return reader.num_records()
    finally:
        reader.close()


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Has a failure to write `path` name it: an OSError where the disk is full, a `UserError` otherwise."""
    try:
        yield
    except (OSError, RuntimeError) as error:  # array_record raises the latter
        if (full := out_of_room(error)) is not None:
            raise OSError(full.errno, full.strerror, str(path)) from error
        why = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise UserError(
            f"{path}: cannot be written ({why}); name another folder, or mend the disk and run the same command again:"
            " finished shards stay."
        ) from error


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@dataclasses.dataclass
class PackState:
    """How far a pack is: the plan's key, finished splits, and the one in work.

    `shard_rows` and `shard_hashes` are of each finished shard of the split in work, `cursor` where its next document
    begins, and `packer` the packer's state there.
    """

    key: str
    plan: dict[str, Any]
    finished: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    split: str = ""
    shard_rows: list[int] = dataclasses.field(default_factory=list)
    shard_hashes: list[str] = dataclasses.field(default_factory=list)
    cursor: tuple[int, int] = (0, 0)
    text_bytes: int = 0
    text_digest: str = ""
    packer: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)

    def save(self, directory: Path) -> None:
        """Replaces the state of `directory`, atomically."""
        words = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "packer"}
        buffer = io.BytesIO()
        np.savez(buffer, state=np.frombuffer(json.dumps(words).encode(), np.uint8), **self.packer)  # pyright: ignore
        path = directory / STATE_FILE
        temporary = path.with_name(path.name + _UNFINISHED)
        with writing(path):
            temporary.write_bytes(buffer.getvalue())
            _sync(temporary)
            os.replace(temporary, path)
            _sync(directory)

    @classmethod
    def load(cls, directory: Path) -> PackState | None:
        """Returns the state of `directory`, or None where nothing is unfinished."""
        path = directory / STATE_FILE
        if not path.exists():
            return None
        try:
            with np.load(path) as arrays:
                words = json.loads(arrays["state"].tobytes())
                packer = {name: arrays[name] for name in arrays.files if name != "state"}
            words["cursor"] = tuple(words["cursor"])
            return cls(**words, packer=packer)
        except Exception as error:  # a zip, its members and JSON fail in many ways
            raise UserError(f"{path}: cannot be read ({error}); delete {directory} to pack again.") from None


def remove_unfinished(directory: Path, state: PackState) -> None:
    """Removes half-written files, and shards that were finished after `state` was saved: they are made again."""
    kept = {shard_path(directory, state.split, i) for i in range(len(state.shard_rows))}
    for split, facts in state.finished.items():
        kept |= {shard_path(directory, split, i) for i in range(len(facts["shard_rows"]))}
    for path in directory.iterdir():
        if path.name.endswith(_UNFINISHED) or (path.name.startswith(f"{DATASET}-") and path not in kept):
            path.unlink()


@contextlib.contextmanager
def alone_in(directory: Path) -> Iterator[None]:
    """Holds `directory` for this process, until it ends; `UserError` where another process holds it."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"{directory}: another process is packing into this folder; wait for it, or choose another folder."
            ) from None
        yield
    finally:
        os.close(descriptor)

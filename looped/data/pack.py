"""Packs a source into a TFDS data set: shard by shard, going on after a stop, the same bytes in the end."""

from __future__ import annotations

import dataclasses
import hashlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from etils import epath

from looped.config import LARGEST
from looped.data import sources
from looped.data.builder import PackedRows, PackPlan
from looped.data.corpus import SPLITS, Split
from looped.data.metadata import (
    METADATA_FILE,
    STATE_FILE,
    PackMetadata,
    SplitMetadata,
    TokenizerFile,
    TokenizerMetadata,
    read_metadata,
)
from looped.data.packing import PackingStatistics
from looped.data.parallel import chunks, tokenized
from looped.data.shards import (
    PackState,
    ShardWriter,
    alone_in,
    read_shard,
    remove_unfinished,
    shard_path,
    writing,
)
from looped.data.tokenizers import token_dtype
from looped.errors import UserError
from looped.files import is_remote
from looped.jsonable import from_json, to_json

SHARD_BYTES = 2**26
"""Bytes of tokens after which a shard ends; a stop loses the work on one shard at most."""


@dataclasses.dataclass(frozen=True)
class PackProgress:
    """How far the packing of a split is.  Documents, tokens and seconds are of this call alone."""

    split: Split
    documents: int
    tokens: int
    seconds: float
    fraction: float | None
    """Part of the split that is done, with what was before; None where that is not known."""
    begun_at: float = 0.0
    """`fraction` when this call began."""

    @property
    def seconds_left(self) -> float | None:
        """Until the split is done, at the speed so far."""
        if self.fraction is None or self.fraction <= self.begun_at:
            return None
        return self.seconds * (1 - self.fraction) / (self.fraction - self.begun_at)


def pack(
    plan: PackPlan,
    directory: epath.PathLike,
    workers: int = 0,
    progress: Callable[[PackProgress], None] | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> PackMetadata:
    """Packs `plan` into `directory`, or goes on where an earlier call was stopped, and returns the data's metadata.

    The bytes written depend on the plan and `shard_bytes` alone: on neither `workers`, the number of processes that
    tokenize beside this one, nor stops.  A folder is finished when it has no `unfinished.npz`.  Raises `UserError` for
    input that cannot be read, a folder that holds anything else, and where writing fails, OSError where the disk is
    full; finished shards stay.
    """
    folder = _local(directory)
    if workers < 0 or shard_bytes < 1 or plan.buffer_size < 1 or plan.sequence_length < 1:
        raise UserError(
            f"workers is {workers}, shard_bytes {shard_bytes}, buffer_size {plan.buffer_size} and sequence_length"
            f" {plan.sequence_length}; all but workers must be at least 1, workers 0."
        )
    if plan.sequence_length > LARGEST:
        raise UserError(f"sequence_length is {plan.sequence_length}; it must be at most {LARGEST}.")
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    with alone_in(folder):
        state = _begin(plan, folder)
        if state is None:
            return read_metadata(epath.Path(folder))
        builder = PackedRows(plan, folder)
        for split in SPLITS:
            if split not in state.finished:
                _SplitPacking(plan, folder, split, state, builder.info.features, shard_bytes, progress).run(
                    workers
                )
        return _finish(plan, folder, state, builder)


def _local(directory: epath.PathLike) -> Path:
    if is_remote(directory):
        raise UserError(
            f"output is {directory}; array_record files are written to a local disk alone: name a local folder (or a"
            " mounted bucket) and copy it when it is finished."
        )
    return Path(directory).expanduser().absolute()


def _begin(plan: PackPlan, folder: Path) -> PackState | None:
    """Returns the state to go on from, or None where all is done; `UserError` where something else is there."""
    state = PackState.load(folder)
    if state is not None:
        # Without a finished shard there is nothing to lose, as after a first try with a mistake in it.
        if state.key != plan.key and (state.finished or state.shard_rows):
            raise UserError(
                f"{folder} holds an unfinished pack of another {_difference(state.plan, plan.decides)}; choose another"
                " folder, or delete it."
            )
        remove_unfinished(folder, state)
        if state.key == plan.key:
            return state
    if (folder / METADATA_FILE).exists():
        if read_metadata(epath.Path(folder)).key != plan.key:
            raise UserError(f"{folder} holds another finished data set; choose another folder, or delete it.")
        return None
    left = [path for path in folder.iterdir() if not path.name.startswith(STATE_FILE)]
    if left:
        raise UserError(f"{folder} is not empty ({left[0].name}) and no pack; choose another folder.")
    state = PackState(plan.key, plan.decides)
    state.save(folder)
    return state


def _difference(a: dict[str, Any], b: dict[str, Any]) -> str:
    return " and ".join(key for key in b if a.get(key) != b[key]) or "plan"


class _SplitPacking:
    """Packs one split from `state` on, and saves it with every shard that is finished."""

    def __init__(self, plan, folder, split: Split, state: PackState, features, shard_bytes: int, progress):
        self._plan: PackPlan = plan
        self._folder: Path = folder
        self._split: Split = split
        self._state, self._features, self._progress = state, features, progress
        if state.split != split:
            state.split, state.shard_rows, state.shard_hashes = split, [], []
            state.cursor, state.text_bytes, state.text_digest, state.packer = sources.START, 0, "", {}
        row_bytes = (plan.sequence_length + 1) * token_dtype(plan.tokenizer.vocab_size).itemsize
        self._rows_a_shard = max(1, shard_bytes // row_bytes)
        self._packer = plan.packer()
        if state.packer:
            self._packer.restore(state.packer)
        self._rows_hash = hashlib.sha256()
        self._text = _TextHash(sources.is_seekable(plan.source), state.text_bytes, state.text_digest)
        self._shard: ShardWriter | None = None
        self._began, self._said = time.monotonic(), 0.0

    def run(self, workers: int) -> None:
        plan, state = self._plan, self._state
        self._hash_finished_shards()
        if not self._text.chained and state.cursor != sources.START:  # no state of its hash could be saved
            for text, after in sources.read(plan.source, self._split, sources.START):
                if after[1] > state.cursor[1]:
                    break
                self._text.add(text.encode())
        self._before = self._packer.statistics.documents, self._packer.statistics.document_tokens
        self._begun_at = self._fraction(state.cursor) or 0.0
        documents = sources.read(plan.source, self._split, state.cursor)
        for chunk, encoded in tokenized(chunks(documents, state.cursor), plan.tokenizer, workers):
            for i, (text, tokens) in enumerate(zip(chunk.texts, encoded, strict=True)):
                if not len(tokens) and plan.empty_documents == "refuse":
                    raise UserError(
                        f"{self._where(chunk.cursors[i])}: a document of no tokens; remove it, or have such documents"
                        " skipped and counted (--empty-documents skip)."
                    )
                self._text.add(text.encode())
                self._write(self._packer.add(tokens))
                if self._shard is not None and self._shard.rows >= self._rows_a_shard:
                    self._finish_shard(chunk.cursors[i + 1])
            self._report(chunk.cursors[-1])
        self._end()

    def _hash_finished_shards(self) -> None:
        """Takes up the hash of the rows so far, by which damage to a finished shard is found as well."""
        facts = zip(self._state.shard_rows, self._state.shard_hashes, strict=True)
        for index, (rows, digest) in enumerate(facts):
            path = shard_path(self._folder, self._split, index)
            for block in read_shard(path, self._features, rows, digest):
                self._rows_hash.update(block.data)

    def _write(self, rows: list[np.ndarray]) -> None:
        for row in rows:
            if self._shard is None:
                path = shard_path(self._folder, self._split, len(self._state.shard_rows))
                self._shard = ShardWriter(path, self._features)
            self._rows_hash.update(row.data)
            self._shard.write(row)

    def _finish_shard(self, cursor: sources.Cursor) -> None:
        state = self._state
        self._close_shard()
        state.cursor, state.packer = cursor, self._packer.state()
        state.text_bytes, state.text_digest = self._text.bytes, self._text.state
        state.save(self._folder)

    def _close_shard(self) -> None:
        if self._shard is not None:
            self._state.shard_hashes.append(self._shard.close())
            self._state.shard_rows.append(self._shard.rows)
            self._shard = None

    def _end(self) -> None:
        self._write(self._packer.finish())
        statistics, state, plan = self._packer.statistics, self._state, self._plan
        if not statistics.documents:
            raise UserError(
                f"the {self._split} split of {plan.source.name!r} is empty: it has no documents; add some."
            )
        if not statistics.rows:
            raise UserError(
                f"sequence_length is {plan.sequence_length}; the {self._split} text of {plan.source.name!r} has"
                f" {statistics.document_tokens} tokens, not a full row: shorten it or add text."
            )
        self._close_shard()
        state.finished[self._split] = {
            "metadata": to_json(self._metadata(statistics)),
            "shard_rows": state.shard_rows,
        }
        state.packer = {}
        state.save(self._folder)

    def _metadata(self, statistics: PackingStatistics) -> SplitMetadata:
        held = statistics.placed_tokens + statistics.bos_tokens
        return SplitMetadata(
            self._text.bytes,
            self._text.hexdigest(),
            self._rows_hash.hexdigest(),
            statistics,
            row_fill=held / (statistics.rows * (self._plan.sequence_length + 1)),
            cropped_share=statistics.cropped_tokens / max(1, statistics.document_tokens),
            shard_hashes=tuple(self._state.shard_hashes),
        )

    def _where(self, cursor: sources.Cursor) -> str:
        source: Any = self._plan.source
        if sources.is_seekable(source):
            return source.where(self._split, cursor)
        return f"source {source.name!r}, {self._split} document {cursor[1]}"

    def _fraction(self, cursor: sources.Cursor) -> float | None:
        source: Any = self._plan.source
        return source.fraction(self._split, cursor) if sources.is_seekable(source) else None

    def _report(self, cursor: sources.Cursor) -> None:
        seconds = time.monotonic() - self._began
        if self._progress is None or seconds - self._said < 0.2:
            return
        self._said = seconds
        statistics, (documents, tokens) = self._packer.statistics, self._before
        self._progress(
            PackProgress(
                self._split,
                statistics.documents - documents,
                statistics.document_tokens - tokens,
                seconds,
                self._fraction(cursor),
                self._begun_at,
            )
        )


class _TextHash:
    """SHA-256 of documents behind their lengths: of them all in one, or a chain that can be gone on with."""

    def __init__(self, chained: bool, size: int, state: str):
        self.chained = chained
        self.bytes = size if chained else 0
        self._stream, self._chain = hashlib.sha256(), bytes.fromhex(state)

    def add(self, text: bytes) -> None:
        self.bytes += len(text)
        data = len(text).to_bytes(8, "little") + text  # the length, so that edges count
        if self.chained:
            self._chain = hashlib.sha256(self._chain + data).digest()
        else:
            self._stream.update(data)

    @property
    def state(self) -> str:
        return self._chain.hex()

    def hexdigest(self) -> str:
        return self._chain.hex() if self.chained else self._stream.hexdigest()


def _finish(plan: PackPlan, folder: Path, state: PackState, builder: PackedRows) -> PackMetadata:
    """Describes the finished splits; the data set is complete once the state is removed."""
    tokenizer: Any = plan.tokenizer
    splits = {
        split: from_json(SplitMetadata, facts["metadata"], f"{folder / STATE_FILE}: ")
        for split, facts in state.finished.items()
    }
    file = None
    with writing(folder):
        if hasattr(tokenizer, "content"):
            file = TokenizerFile(tokenizer.file, tokenizer.added_tokens, tokenizer.bos_token)
            (folder / tokenizer.file).write_bytes(tokenizer.content)
        metadata = PackMetadata(
            key=plan.key,
            source_name=plan.source.name,
            source=plan.source.description(),
            sequence_length=plan.sequence_length,
            buffer_size=plan.buffer_size,
            long_documents=plan.long_documents,
            tokenizer=TokenizerMetadata(
                tokenizer.name, tokenizer.fingerprint, tokenizer.vocab_size, tokenizer.bos
            ),
            train=splits["train"],
            validation=splits["validation"],
            tokenizer_file=file,
        )
        builder.describe(
            folder,
            metadata,
            {split: facts["shard_rows"] for split, facts in state.finished.items()},  # pyright: ignore
        )
        (folder / STATE_FILE).unlink()
    return metadata

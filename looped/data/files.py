"""Documents in text, JSON Lines and Parquet files, local or remote, read from any position on."""

from __future__ import annotations

import bz2
import contextlib
import dataclasses
import gzip
import io
import json
import lzma
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any, Literal

from looped.errors import UserError

Format = Literal["text", "jsonl", "parquet"]
SUFFIXES: dict[str, Format] = {
    ".txt": "text",
    ".text": "text",
    ".md": "text",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".parquet": "parquet",
}
COMPRESSIONS = (".gz", ".bz2", ".xz", ".zst")
MAX_DOCUMENT_BYTES = 2**28
"""A longer document is refused: memory would follow the data's size."""
_BLOCK = 2**20
_EXTRAS = {"gs": "gcs", "gcs": "gcs", "hf": "text"}


@dataclasses.dataclass(frozen=True)
class File:
    """A file of documents and its size in bytes, as stored."""

    path: str
    size: int

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2]

    @property
    def compressed(self) -> bool:
        return self.name.endswith(COMPRESSIONS)

    def format(self, given: Format | None = None) -> Format:
        """`given`, or what the name's ending says; `UserError` where it says nothing."""
        name = self.name
        for ending in COMPRESSIONS:
            name = name.removesuffix(ending)
        found = given or SUFFIXES.get(Path(name).suffix.lower())
        if found is None:
            raise UserError(
                f"{self.path}: the ending tells no format ({', '.join(SUFFIXES)}); say which it is (--format)."
            )
        return found


def find(pattern: str) -> list[File]:
    """Returns the files that a path or glob names, sorted; `UserError` where there are none."""
    with _filesystem(pattern) as (fs, path):
        if fs.isdir(path):
            raise UserError(
                f"source {pattern!r} is a folder; name its files, as in '{pattern.rstrip('/')}/*.jsonl'."
            )
        found = fs.glob(path, detail=True) if any(c in path for c in "*?[") else {}
        if not found and fs.exists(path):
            found = {path: fs.info(path)}
        files = [
            File(_full_name(fs, name), int(info.get("size") or 0))
            for name, info in sorted(found.items())
            if info.get("type") == "file"
        ]
    if not files:
        raise UserError(f"source {pattern!r}: no such file; check the path (a glob is written in quotes).")
    return files


@contextlib.contextmanager
def _filesystem(path: str) -> Iterator[tuple[Any, str]]:
    import fsspec

    try:
        yield fsspec.core.url_to_fs(str(Path(path).expanduser()) if "://" not in path else path)
    except UserError:
        raise
    except ImportError:
        scheme = path.partition("://")[0]
        extra = _EXTRAS.get(scheme)
        remedy = f"pip install 'looped[{extra}]'" if extra else f"install what fsspec needs for {scheme}://"
        raise UserError(f"source {path!r}: {remedy}.") from None
    except Exception as error:  # each kind of storage raises its own
        raise UserError(
            f"source {path!r} cannot be listed ({type(error).__name__}: {error}); check path, access and network."
        ) from None


def _full_name(fs, name: str) -> str:
    protocols = (fs.protocol,) if isinstance(fs.protocol, str) else fs.protocol
    return name if "file" in protocols else fs.unstrip_protocol(name)


@contextlib.contextmanager
def _reading(file: File, what: str = "") -> Iterator[None]:
    """Turns what goes wrong while reading `file` into a `UserError` that names it."""
    try:
        yield
    except UserError:
        raise
    except FileNotFoundError:
        raise UserError(f"{file.path}: the file is gone; put it back, or pack into a new folder.") from None
    except Exception as error:  # of the storage, the decompressor or Arrow
        raise UserError(
            f"{file.path}: cannot be read{what} ({type(error).__name__}: {error}); it may be truncated or damaged:"
            " fetch it again."
        ) from None


@contextlib.contextmanager
def open_file(file: File) -> Iterator[IO[bytes]]:
    """Opens a file for reading, decompressed by its ending."""
    import fsspec

    fs, path = fsspec.core.url_to_fs(file.path)
    with fs.open(path, "rb") as raw, _decompressed(file, raw) as stream:
        yield stream


def _decompressed(file: File, raw: Any) -> Any:
    ending = Path(file.name).suffix
    if ending == ".gz":
        return gzip.GzipFile(fileobj=raw)
    if ending == ".bz2":
        return bz2.BZ2File(raw)
    if ending == ".xz":
        return lzma.LZMAFile(raw)
    if ending == ".zst":
        import pyarrow as pa  # which notices a truncated stream, as zstandard does not

        return io.BufferedReader(pa.CompressedInputStream(raw, "zstd"))  # pyright: ignore[reportArgumentType]
    return contextlib.nullcontext(raw)


def read(
    file: File, format: Format, start: int = 0, column: str = "text", separator: str | None = None
) -> Iterator[tuple[str, int]]:
    """Yields the documents of `file` from position `start` on, each with the position after it.

    A position is a byte of the uncompressed text, or a row of a Parquet file.  In text files a document is what stands
    between two `separator`s, or the whole file without one.  `UserError` names the file and where in it.
    """
    with _reading(file):
        if format == "parquet":
            yield from _read_parquet(file, start, column)
        else:
            with open_file(file) as stream:
                _skip(stream, start)
                if format == "jsonl":
                    yield from _read_jsonl(file, stream, start, column)
                else:
                    yield from _read_text(file, stream, start, separator)


def _skip(stream: IO[bytes], size: int) -> None:
    """Goes to byte `size`, by reading where the stream cannot jump."""
    if stream.seekable():
        stream.seek(size)
        return
    while size > 0:
        size -= len(stream.read(min(size, _BLOCK))) or size


def _read_text(file: File, stream: IO[bytes], start: int, separator: str | None) -> Iterator[tuple[str, int]]:
    mark = separator.encode() if separator else b""
    pending, at = bytearray(), start
    while block := stream.read(_BLOCK):
        searched = max(0, len(pending) - len(mark))
        pending += block
        if mark and pending.find(mark, searched) >= 0:
            *whole, rest = bytes(pending).split(mark)
            for part in whole:
                yield _decode(part, file, at), at + len(part) + len(mark)
                at += len(part) + len(mark)
            pending = bytearray(rest)
        if len(pending) > MAX_DOCUMENT_BYTES:
            raise UserError(
                f"{file.path}: the document at byte {at} is over {MAX_DOCUMENT_BYTES >> 20} MiB; say what separates"
                " documents (--separator)."
            )
    if pending.strip() or not (mark or start):
        yield _decode(bytes(pending), file, at), at + max(1, len(pending))


def _read_jsonl(file: File, stream: IO[bytes], start: int, column: str) -> Iterator[tuple[str, int]]:
    at = start
    while line := stream.readline(MAX_DOCUMENT_BYTES + 1):
        if len(line) > MAX_DOCUMENT_BYTES:
            raise UserError(
                f"{file.path}: the line at byte {at} is over {MAX_DOCUMENT_BYTES >> 20} MiB; is it JSON Lines,"
                " one object a line?"
            )
        after = at + len(line)
        if line.strip():
            try:
                value = json.loads(_decode(line, file, at))
            except json.JSONDecodeError as error:
                raise UserError(
                    f"{file.path}: the line at byte {at} is not JSON ({error}); mend or remove it."
                ) from None
            if not isinstance(value, dict) or column not in value:
                keys = f"has {', '.join(map(repr, value))}" if isinstance(value, dict) else "is no object"
                raise UserError(
                    f"{file.path}: the line at byte {at} has no {column!r} ({keys}); name the text's key (--column)."
                )
            yield _text(value[column], file, f"the line at byte {at}", column), after
        at = after


def _read_parquet(file: File, start: int, column: str) -> Iterator[tuple[str, int]]:
    import pyarrow.parquet as pq

    with open_file(file) as stream, pq.ParquetFile(stream, page_checksum_verification=True) as parquet:
        names = parquet.schema_arrow.names
        if column not in names:
            raise UserError(
                f"{file.path}: no column {column!r}; it has {', '.join(map(repr, names))}: name the text's (--column)."
            )
        row = 0
        for group in range(parquet.num_row_groups):
            rows = parquet.metadata.row_group(group).num_rows
            if row + rows <= start:
                row += rows
                continue
            for batch in parquet.iter_batches(1024, row_groups=[group], columns=[column]):
                if row + len(batch) > start:
                    skip = max(0, start - row)
                    for i, value in enumerate(_values(batch.column(0).slice(skip), file, row), row + skip):
                        yield _text(value, file, f"row {i}", column), i + 1
                row += len(batch)


def _values(column, file: File, row: int) -> Sequence[Any]:
    try:
        return column.to_pylist()
    except UnicodeDecodeError as error:
        raise UserError(
            f"{file.path}: text at row {row} or soon after is not UTF-8 ({error}); convert it first."
        ) from None


def rows_of(file: File) -> int:
    """Returns the number of rows of a Parquet file."""
    import pyarrow.parquet as pq

    with _reading(file), open_file(file) as stream, pq.ParquetFile(stream) as parquet:
        return parquet.metadata.num_rows


def _text(value: Any, file: File, where: str, column: str) -> str:
    if value is None:
        return ""  # a document of no tokens: whoever reads decides
    if isinstance(value, bytes):
        return _decode(value, file, 0, where)
    if not isinstance(value, str):
        raise UserError(
            f"{file.path}: {where} has {type(value).__name__} in {column!r}, not text; name the text's column"
            " (--column)."
        )
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"{file.path}: {where} is not text ({error}); mend or remove it.") from None
    return value


def _decode(data: bytes, file: File, at: int, where: str = "") -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        place = where or f"byte {at + error.start}"
        raise UserError(
            f"{file.path}: not UTF-8 at {place} ({error.reason}); convert it first, as with iconv."
        ) from None

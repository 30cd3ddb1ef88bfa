"""Rows of final losses as they are given: run records, CSV or Parquet, local or gs://, one dictionary a row."""

from __future__ import annotations

import csv
import dataclasses
import io
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

from etils import epath

from looped.errors import UserError
from looped.record import ParameterGroups, RunRecord, find_records
from looped.text import one_line

MAX_ROWS = 5_000
MAX_BYTES = 2**27
_BATCH = 100  # rows
_TOO_LARGE = f"is over {MAX_BYTES >> 20} MiB, and a losses table is small; keep one row a run and the columns it needs."
EXAMPLES = pathlib.Path(__file__).parent / "data"
GROUP_PREFIX = "params_"
GROUPS = tuple(field.name for field in dataclasses.fields(ParameterGroups))


@dataclasses.dataclass(frozen=True)
class RawRow:
    """One row before validation: what to call it in messages, which source it came from, and its values by column.

    `origin` names the source where there are several.  `recorded`: it is a run's record, whose units are known.
    """

    label: str
    source: int
    values: dict[str, Any]
    origin: str = ""
    recorded: bool = False


def read_source(path: epath.PathLike, index: int = 0, named: bool = False) -> Iterator[RawRow]:
    """Yields the rows of a directory of runs or of a CSV or Parquet file; labels start with its name if `named`.

    `paper-vanilla` and `paper-truncated` name the published losses that come with this package, unless there is such a
    path.  Raises `UserError` for a path that is missing, is neither, or holds more rows than a sweep has runs.
    """
    path = epath.Path(path)
    example = EXAMPLES / f"{path}.csv"
    try:
        if not path.exists() and example.exists():
            path = epath.Path(example)
        is_directory = path.is_dir()
    except ImportError as error:  # remote paths need a package of their own
        raise UserError(f"{path}: cannot be reached; {str(error)[:1].lower() + str(error)[1:]}.") from None
    prefix = f"{one_line(path.name)} " if named else ""
    if is_directory:
        yield from _read_runs(path, index, prefix)
        return
    try:
        content = path.read_bytes() if path.stat().length <= MAX_BYTES else None
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(
            f"{path}: no such file or directory; give a CSV or Parquet file, or a directory of runs."
        ) from None
    except OSError as error:
        raise UserError(
            f"{path}: cannot be read ({error.strerror or error}); check its permissions."
        ) from None
    if content is None:
        raise UserError(f"{path}: {_TOO_LARGE}")
    rows = _parquet_rows(path, content) if content[:4] == b"PAR1" else _csv_rows(path, content)
    for number, (line, values) in enumerate(rows, 1):
        if number > MAX_ROWS:
            raise UserError(
                f"{path}: row {number} is one too many (at most {MAX_ROWS:,}); the law is fitted to final losses, one"
                " row a run, so keep the last row of each run of a training log."
            )
        where = f" (line {line})" if line else ""
        yield RawRow(f"{prefix}row {number}{where}", index, values, prefix.strip())


def _read_runs(path: epath.Path, index: int, prefix: str) -> Iterator[RawRow]:
    found = False
    for run_dir, record in find_records(path):
        found = True
        name = epath.Path(run_dir).name
        if isinstance(record, UserError):
            values: dict[str, Any] = {"status": "unreadable", "reason": str(record), "run_id": name}
        else:
            values = record_values(record)
        yield RawRow(f"{prefix}run {one_line(name)}", index, values, prefix.strip(), recorded=True)
    if not found:
        raise UserError(
            f"{path}: holds no runs; give the directory whose sub-directories are runs, or a CSV file."
        )


def record_values(record: RunRecord) -> dict[str, Any]:
    """The columns of a run's row in a losses table."""
    keep = (
        "run_id", "status", "reason", "arm", "recurrences", "backprop_recurrences", "d_model", "n_once", "n_rec",
        "convention", "flops_per_token", "budget_flops", "tokens", "steps", "seed", "loss", "validation_tokens",
        "data_hash", "epochs",
    )  # fmt: skip
    values = {name: getattr(record, name) for name in keep}
    return values | {GROUP_PREFIX + name: getattr(record.parameters, name) for name in GROUPS}


def _parquet_rows(path: epath.Path, content: bytes) -> Iterator[tuple[int, dict[str, Any]]]:
    import pyarrow
    import pyarrow.parquet

    rows, size = [], 0
    try:
        with pyarrow.parquet.ParquetFile(io.BytesIO(content)) as parquet:
            _check_names(path, parquet.schema_arrow.names)
            for batch in parquet.iter_batches(_BATCH):
                size += batch.nbytes  # which a few bytes of the file may stand for
                if size > MAX_BYTES:
                    raise UserError(f"{path}: {_TOO_LARGE}")
                rows += batch.to_pylist()
                if len(rows) > MAX_ROWS:
                    break
    except UserError:
        raise
    except (
        pyarrow.ArrowException,
        OSError,
        ValueError,
    ) as error:  # OSError: its own checks; ValueError: text
        raise UserError(
            f"{path}: begins like Parquet but cannot be read as it ({one_line(error, 200)}); write it again."
        ) from None
    for values in rows:
        yield 0, values


def _check_names(path: epath.Path, names: Sequence[str]) -> None:
    twice = next((n for n in names if n and names.count(n) > 1), None)
    if twice is not None:
        raise UserError(f"{path}: column {one_line(repr(twice), 60)} appears twice; rename or remove one.")


def _csv_rows(path: epath.Path, content: bytes) -> Iterator[tuple[int, dict[str, Any]]]:
    not_csv = f"{path}: is not a CSV file of losses"
    remedy = (
        "give comma-separated text whose first line names the columns, or Parquet, or a directory of runs."
    )
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise UserError(f"{not_csv} (it is not UTF-8 text); {remedy}") from None
    if not text.strip():
        raise UserError(f"{not_csv} (it is empty); {remedy}")
    if "\0" in text or text.lstrip()[0] in "{[<":
        raise UserError(f"{not_csv} (it looks like JSON, markup or binary data); {remedy}")
    header = text.lstrip().splitlines()[0]
    delimiter = max(",;\t", key=header.count)
    if not header.count(delimiter):
        raise UserError(f"{not_csv} (its first line, {header[:60]!r}, names one column); {remedy}")
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, skipinitialspace=True)
    names: list[str] | None = None
    try:
        for fields in reader:
            if not any(field.strip() for field in fields):
                continue
            if names is None:
                names = [field.strip() for field in fields]
                _check_names(path, names)
                continue
            if len(fields) != len(names):
                raise UserError(
                    f"{path}: line {reader.line_num} has {len(fields)} fields and the header {len(names)}; complete the"
                    " line."
                )
            yield reader.line_num, dict(zip(names, (f.strip() for f in fields), strict=True))
    except csv.Error as error:
        raise UserError(f"{not_csv} ({error} at line {reader.line_num}); {remedy}") from None

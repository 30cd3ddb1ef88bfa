"""Sources of documents by name: files by glob, TFDS and Hugging Face data sets, and presets of known corpora."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from looped.credentials import check_address
from looped.data import files
from looped.data.corpus import SOURCES, SPLITS, Source, Split, get_source
from looped.data.tfds_folder import check_folder
from looped.data.tokenizers import fingerprint_of
from looped.errors import UserError, first_line, nearest

Cursor = tuple[int, int]
"""Where a source is: (file, position in it); (0, documents) where it has no files."""
START: Cursor = (0, 0)


class SeekableSource(Source, Protocol):
    """A source that can be read from any of its cursors on, without reading what is before."""

    def read(self, split: Split, start: Cursor) -> Iterator[tuple[str, Cursor]]:
        """Yields the documents of `split` from `start` on, each with the cursor after it."""
        ...

    def fraction(self, split: Split, cursor: Cursor) -> float | None:
        """Returns about what part of the split lies before `cursor`; None where it cannot be told."""
        ...

    def where(self, split: Split, cursor: Cursor) -> str:
        """Names the place of the document at `cursor`, for errors."""
        ...


def is_seekable(source: Source) -> bool:
    return hasattr(source, "read")


def read(source: Any, split: Split, start: Cursor) -> Iterator[tuple[str, Cursor]]:
    """Yields the documents of any source from `start` on, each with the cursor after it."""
    if is_seekable(source):
        yield from source.read(split, start)
        return
    for i, text in enumerate(source.documents(split), 1):
        if i > start[1]:
            yield text, (0, i)


@dataclasses.dataclass(frozen=True)
class Preset:
    """A known corpus: where it is published and which of it is for validation."""

    train: str
    validation: str | None = None
    validation_files: int | None = None


PRESETS = {
    # The paper's: FineWeb-Edu's 100 B sample in shuffled shards, the last two for validation.
    "fineweb-edu": Preset(
        "hf://datasets/karpathy/fineweb-edu-100b-shuffle/shard_*.parquet", validation_files=2
    ),
    "c4": Preset(
        "hf://datasets/allenai/c4/en/c4-train.*.json.gz",
        "hf://datasets/allenai/c4/en/c4-validation.*.json.gz",
    ),
}


@dataclasses.dataclass(frozen=True)
class SourceOptions:
    """How a source is read.  What does not apply to a kind of source is an error there."""

    validation: str | None = None
    """Files for validation, by glob; else --validation-files or --validation-share."""
    validation_files: int | None = None
    """The last files, this many, are for validation."""
    validation_share: float | None = None
    """Share of the documents drawn for validation by their hash; 0.005 where nothing else is said."""
    column: str = "text"
    """The text's column, key or feature."""
    format: files.Format | None = None
    """Format of the files, where their names do not end in it."""
    separator: str | None = None
    """What separates the documents of a text file (\\n for a new line); else a file is one document."""
    mirror: str | None = None
    """For a preset: the folder, local or gs://, that has its files."""
    train_split: str = "train"
    """Split of a TFDS or Hugging Face data set to train on."""
    validation_split: str = "validation"
    """Its split for validation; slices are understood: train[99%:]."""
    seed: int | None = None
    """Shuffles the order of the training files; else they are read as sorted."""


def make_source(spec: str, options: SourceOptions | None = None) -> Source:
    """Returns the source that `spec` names.

    A preset or a registered corpus by its name; `tfds:NAME` or `tfds:FOLDER`; `hf:NAME[:CONFIG]` or `hf:FOLDER`;
    anything else is a path or glob of files.  `UserError` for what is not there.
    """
    options = options or SourceOptions()
    for field, given in (("source", spec), ("validation", options.validation), ("mirror", options.mirror)):
        check_address(field, given)
    if spec in PRESETS:
        return _preset(spec, options)
    if options.mirror is not None:
        raise UserError(
            f"mirror is for a preset ({', '.join(PRESETS)}), and source is {spec!r}; leave it out."
        )
    if spec in SOURCES:
        return get_source(spec)
    if spec.startswith(("tfds:", "hf:")) and not spec.startswith("hf://"):
        return IndexedSource(spec, options)
    if "/" not in spec and "." not in spec and "*" not in spec:
        raise UserError(
            f"source {spec!r} is neither a known name nor files.{nearest(spec, {*PRESETS, *SOURCES})}"
        )
    return _file_source(spec, spec, options)


def _preset(name: str, options: SourceOptions) -> FileSource:
    preset = PRESETS[name]
    given = (options.validation, options.validation_files, options.validation_share)
    if any(value is not None for value in given):
        raise UserError(f"source {name!r} has its own validation files; leave the options for them out.")

    def place(pattern: str) -> str:
        if options.mirror is None:
            return pattern
        return f"{options.mirror.rstrip('/')}/{pattern.rpartition('/')[2]}"

    options = dataclasses.replace(
        options,
        validation=place(preset.validation) if preset.validation else None,
        validation_files=preset.validation_files,
    )
    return _file_source(name, place(preset.train), options)


def _file_source(name: str, pattern: str, options: SourceOptions) -> FileSource:
    ways = ("validation", "validation_files", "validation_share")
    said = [way for way in ways if getattr(options, way) is not None]
    if len(said) > 1:
        raise UserError(f"{' and '.join(said)} are both given; say in one way what is for validation.")
    train = files.find(pattern)
    share = None
    if options.validation is not None:
        validation = files.find(options.validation)
        both = sorted({f.path for f in train} & {f.path for f in validation})
        if both:
            raise UserError(f"{both[0]} is both in source and in validation; name different files.")
    elif options.validation_files is not None:
        if not 0 < options.validation_files < len(train):
            raise UserError(
                f"validation_files is {options.validation_files} and {pattern!r} has {len(train)} files; leave at least"
                " one file for each split."
            )
        train, validation = train[: -options.validation_files], train[-options.validation_files :]
    else:
        validation = train
        share = 0.005 if options.validation_share is None else options.validation_share
        if not 0 < share < 1:
            raise UserError(f"validation_share is {share}; it must lie between 0 and 1.")
    if options.seed is not None:
        train = random.Random(options.seed).sample(train, len(train))
        validation = train if share is not None else validation
    for file in (*train, *validation):
        file.format(options.format)
    return FileSource(name, {"train": tuple(train), "validation": tuple(validation)}, share, options)


class FileSource:
    """Documents of files, in the files' order.  With `share`, documents go to validation by their text's hash."""

    def __init__(
        self,
        name: str,
        found: dict[Split, tuple[files.File, ...]],
        share: float | None,
        options: SourceOptions,
    ):
        self.name = _slug(name)
        self._given, self._files, self._share, self._options = name, found, share, options
        self._separator = (
            options.separator.encode().decode("unicode_escape").encode("latin-1").decode()
            if options.separator
            else None
        )
        self._rows: dict[str, int] = {}

    def description(self) -> dict:
        """Names and sizes of the files, not their folder: the same files elsewhere are the same source."""
        return {
            "source": self._given if self._given in PRESETS else "files",
            "files": {
                split: {
                    "count": len(found),
                    "bytes": sum(file.size for file in found),
                    "names": fingerprint_of({"files": [[file.name, file.size] for file in found]}),
                    "first": found[0].name,
                    "last": found[-1].name,
                }
                for split, found in self._files.items()
            },
            "validation_share": self._share,
            "column": self._options.column,
            "format": self._options.format,
            "separator": self._separator,
            "seed": self._options.seed,
        }

    def documents(self, split: Split) -> Iterator[str]:
        return (text for text, _ in self.read(split, START))

    def read(self, split: Split, start: Cursor) -> Iterator[tuple[str, Cursor]]:
        first, position = start
        for index in range(first, len(self._files[split])):
            file = self._files[split][index]
            found = files.read(
                file,
                file.format(self._options.format),
                position if index == first else 0,
                self._options.column,
                self._separator,
            )
            for text, after in found:
                if self._share is None or _is_validation(text, self._share) == (split == "validation"):
                    yield text, (index, after)

    def fraction(self, split: Split, cursor: Cursor) -> float | None:
        found, (index, position) = self._files[split], cursor
        file = found[index]
        inside = 0.0
        if file.format(self._options.format) == "parquet":
            if file.path not in self._rows:
                self._rows[file.path] = files.rows_of(file)
            inside = position / max(1, self._rows[file.path])
        elif not file.compressed:
            inside = position / max(1, file.size)
        done = sum(f.size for f in found[:index]) + inside * file.size
        return min(1.0, done / max(1, sum(f.size for f in found)))

    def where(self, split: Split, cursor: Cursor) -> str:
        index, position = cursor
        file = self._files[split][index]
        unit = "row" if file.format(self._options.format) == "parquet" else "byte"
        return f"{file.path}, {unit} {position}"


def _is_validation(text: str, share: float) -> bool:
    digest = hashlib.sha256(text.encode()).digest()
    return int.from_bytes(digest[:8], "big") < share * 2**64


def _slug(name: str) -> str:
    """A short name for folders."""
    words = [word for word in re.split(r"[^A-Za-z0-9_.]+", name.rpartition("://")[2]) if word.strip(".")]
    return "-".join(words)[-40:].strip("-.") or "files"


class IndexedSource:
    """Rows of a TFDS or Hugging Face data set, by number."""

    _BATCH = 256

    def __init__(self, spec: str, options: SourceOptions):
        kind, _, self._what = spec.partition(":")
        self.name = _slug(spec.replace(":", "-"))
        self._spec, self._options = spec, options
        open_split: Callable[[str, str], tuple[Any, dict]] = {"tfds": _open_tfds, "hf": _open_hf}[kind]
        self._open = functools.cache(lambda split: open_split(self._what, self._split(split)))
        if options.train_split == options.validation_split:
            raise UserError(
                f"train_split and validation_split are both {options.train_split!r}; name different ones."
            )
        for split in SPLITS:
            self._open(split)  # what is missing is said before anything is made

    def _split(self, split: Split) -> str:
        return self._options.train_split if split == "train" else self._options.validation_split

    def description(self) -> dict:
        return {
            "source": self._spec.partition(":")[0],
            "splits": {split: self._open(split)[1] | {"split": self._split(split)} for split in SPLITS},
            "column": self._options.column,
        }

    def documents(self, split: Split) -> Iterator[str]:
        return (text for text, _ in self.read(split, START))

    def read(self, split: Split, start: Cursor) -> Iterator[tuple[str, Cursor]]:
        rows, column = self._open(split)[0], self._options.column
        for first in range(start[1], len(rows), self._BATCH):
            indices = range(first, min(first + self._BATCH, len(rows)))
            for i, row in zip(indices, rows.__getitems__(list(indices)), strict=True):
                if column not in row:
                    raise UserError(
                        f"source {self._spec!r}: no {column!r}; it has {', '.join(map(repr, row))}: name the text's"
                        " (--column)."
                    )
                yield self._text(row[column], split, i), (0, i + 1)

    def _text(self, value: Any, split: Split, row: int) -> str:
        try:
            return "" if value is None else value.decode() if isinstance(value, bytes) else str(value)
        except UnicodeDecodeError as error:
            raise UserError(
                f"{self.where(split, (0, row))}: not UTF-8 ({error.reason}); convert it first."
            ) from None

    def fraction(self, split: Split, cursor: Cursor) -> float | None:
        return cursor[1] / max(1, len(self._open(split)[0]))

    def where(self, split: Split, cursor: Cursor) -> str:
        return f"{self._spec}, split {self._split(split)!r}, row {cursor[1]}"


def _open_tfds(what: str, split: str) -> tuple[Sequence[Any], dict]:
    """Opens a TFDS data set that is prepared already, in a format of random access: without TensorFlow."""
    import tensorflow_datasets as tfds
    from etils import epath
    from tensorflow_datasets.core import naming

    try:
        if "/" in what and epath.Path(what).expanduser().is_dir():
            check_folder(epath.Path(what).expanduser())
            builder = tfds.builder_from_directory(epath.Path(what).expanduser())
        else:
            if naming.parse_builder_name_kwargs(what)[0].namespace:
                raise UserError(
                    f"source 'tfds:{what}' is of others, whose code TFDS would fetch and run; pack files."
                )
            builder = tfds.builder(what, file_format="array_record")
        rows: Any = builder.as_data_source(split)  # pyright: ignore[reportCallIssue]
    except UserError:
        raise
    except Exception as error:  # TFDS raises many kinds
        raise UserError(
            f"source 'tfds:{what}': split {split!r} cannot be opened ({first_line(error)}). It must be prepared as"
            f" array_record: `tfds build {what} --file_format=array_record`, or `tfds convert_format` from another"
            " format; both may need TensorFlow (pip install 'looped[tensorflow]'), reading does not."
        ) from None
    info = builder.info
    return rows, {"name": info.name, "version": str(info.version), "rows": len(rows)}


class _HuggingFaceRows:
    def __init__(self, dataset):
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitems__(self, indices: list[int]) -> list[dict]:
        columns = self._dataset[indices[0] : indices[-1] + 1]
        return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def _open_hf(what: str, split: str) -> tuple[Any, dict]:
    from pathlib import Path

    try:
        import datasets  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise UserError(
            f"source 'hf:{what}' needs the library datasets: pip install 'looped[datasets]'."
        ) from None
    try:
        if Path(what).expanduser().is_dir():
            loaded: Any = datasets.load_from_disk(str(Path(what).expanduser()))
            named = loaded if isinstance(loaded, datasets.DatasetDict) else {"train": loaded}
            dataset = _hf_slice(datasets, named, split)
        else:
            name, _, config = what.partition(":")
            dataset = datasets.load_dataset(name, config or None, split=split)
    except Exception as error:  # the library raises many kinds
        raise UserError(
            f"source 'hf:{what}': split {split!r} cannot be opened ({first_line(error)}); check name, configuration"
            " (hf:NAME:CONFIG), split and network."
        ) from None
    facts = {"name": what, "rows": len(dataset), "fingerprint": str(dataset._fingerprint)}
    return _HuggingFaceRows(dataset), facts


def _hf_slice(datasets: Any, named: Mapping[str, Any], split: str) -> Any:
    """What `load_dataset` makes of `split`, such as `train[:99%]`, from data sets that are loaded already."""
    lengths = {name: len(dataset) for name, dataset in named.items()}
    try:
        parts = datasets.ReadInstruction.from_spec(split).to_absolute(lengths)
    except ValueError as error:
        whole = next(iter(named))
        raise ValueError(f"{error} Parts of one are, for example, {whole}[:99%] and {whole}[99%:]") from None
    return datasets.concatenate_datasets([named[p.splitname].select(range(p.from_, p.to)) for p in parts])

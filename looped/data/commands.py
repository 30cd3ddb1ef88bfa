"""Sub-commands that make data sets and look at them: `looped data …`."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import TYPE_CHECKING, Annotated

import tyro

from looped.data.packing import EmptyDocuments, LongDocuments
from looped.data.sources import SourceOptions
from looped.machine import available_cores
from looped.text import ProgressLine, clock

if TYPE_CHECKING:
    from looped.data.metadata import PackMetadata
    from looped.data.pack import PackProgress

_MUCH = 0.2  # of the tokens cropped: a user should then know of the other rule


@dataclasses.dataclass
class DataPack:
    """Tokenize and pack a corpus of one's own into a data set that runs read.

    Rows of T + 1 tokens, each beginning with BOS, are filled by best fit: the longest buffered document that
    still fits, until none does; then the shortest is cropped to fill. Interrupted or killed, the same command
    goes on where it was, and ends with the same bytes; so it does with any number of workers.
    """

    source: str
    """Files by glob (text, JSON Lines, Parquet; local, gs://, hf://), tfds:NAME, hf:NAME, or a preset: fineweb-edu,
    c4."""
    options: Annotated[SourceOptions, tyro.conf.arg(name="")] = dataclasses.field(
        default_factory=SourceOptions
    )
    sequence_length: int = 2048
    """Tokens that a row predicts, T."""
    tokenizer: str = "bytes"
    """bytes, a tokenizer.json or SentencePiece .model by path, or a name on the Hugging Face hub."""
    add_token: tuple[str, ...] = ()
    """Tokens added behind the tokenizer's own ids; none comes from text."""
    bos_token: str | None = None
    """The tokenizer's beginning of sequence, where it has no usual name."""
    buffer: int = 1000
    """Documents to choose from."""
    long_documents: LongDocuments = "crop"
    """Documents longer than a row: crop uses a row's worth of each at most, as the paper does; cut makes pieces."""
    empty_documents: EmptyDocuments = "refuse"
    """Documents of no tokens: an error, or skipped and counted."""
    output: Annotated[
        str | None, tyro.conf.arg(metavar="DIR", help_behavior_hint="(default: a folder in LOOPED_DATA)")
    ] = None
    """The data set's folder."""
    workers: Annotated[
        int | None, tyro.conf.arg(metavar="INT", help_behavior_hint="(default: the cores, less one)")
    ] = None
    """Processes that tokenize; 0 for none beside this one."""

    def run(self) -> int:
        from looped.data.builder import PackPlan
        from looped.data.loader import data_root
        from looped.data.pack import pack
        from looped.data.sources import make_source
        from looped.data.tokenizers import get_tokenizer

        plan = PackPlan(
            make_source(self.source, self.options),
            get_tokenizer(self.tokenizer, self.add_token, self.bos_token),
            self.sequence_length,
            self.buffer,
            self.long_documents,
            self.empty_documents,
        )
        directory = self.output or str(data_root() / plan.name)
        line = ProgressLine()
        with contextlib.closing(line):
            metadata = pack(
                plan,
                directory,
                _workers(self.workers, self.tokenizer),
                progress=lambda at: line.show(_progress(at)),
            )
        print(f"{directory}: T = {metadata.sequence_length}, hash {metadata.hash}")
        print(_statistics(metadata))
        if self.long_documents == "crop" and (metadata.train.cropped_share or 0) > _MUCH:
            print(
                "Of a document longer than a row one row is used at most; --long-documents cut keeps the rest."
            )
        return 0


@dataclasses.dataclass
class DataCheck:
    """Read every row of a data set, compare it with what was written, and show its statistics."""

    directory: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="DIR")]
    """The data set's folder."""

    def run(self) -> int:
        from looped.data.loader import PackedData

        data = PackedData(self.directory)
        data.check_rows()
        print(
            f"{data.directory}: T = {data.sequence_length}, hash {data.hash}; every row is as it was written"
        )
        print(_statistics(data.metadata))
        return 0


def _progress(at: PackProgress) -> str:
    left = "" if at.seconds_left is None else f"  {clock(at.seconds_left)} left"
    return (
        f"{at.split}: {at.documents:,} documents ({at.documents / at.seconds:,.0f}/s)"
        f"  {at.tokens / 1e6:,.1f} M tokens ({at.tokens / 1e6 / at.seconds:,.2f} M/s){left}"
    )


def _workers(given: int | None, tokenizer: str) -> int:
    if given is not None:
        return given
    return (
        0 if tokenizer == "bytes" else max(1, len(available_cores()) - 1)
    )  # bytes cost less than handing them over


def _statistics(metadata: PackMetadata) -> str:
    lines = [f"{'':<12}{'rows':>12}{'documents':>14}{'tokens':>18}{'cropped':>10}{'row fill':>10}"]
    for name in ("train", "validation"):
        split = getattr(metadata, name)
        counted = split.statistics
        cropped = "" if split.cropped_share is None else f"{split.cropped_share:.2%}"
        fill = "" if split.row_fill is None else f"{split.row_fill:.2%}"
        lines.append(
            f"{name:<12}{counted.rows:>12,}{counted.documents:>14,}{counted.document_tokens:>18,}{cropped:>10}{fill:>10}"
        )
    return "\n".join(lines)

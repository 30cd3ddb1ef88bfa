"""Sub-commands on one run and on data."""

from __future__ import annotations

import dataclasses
import sys
import time
from typing import Annotated

import tyro

from looped.config import RunSpec
from looped.text import clock


@dataclasses.dataclass
class Train:
    """Train one run, or go on with it, and leave its record.

    Give either --budget-flops or --steps. Interrupted with Ctrl-C or killed, the same command goes on
    from the last checkpoint; a finished run is left as it is.
    """

    spec: Annotated[RunSpec, tyro.conf.arg(name="")]
    output: Annotated[
        str | None, tyro.conf.arg(metavar="DIR", help_behavior_hint="(default: runs/RUN_ID)")
    ] = None
    """The run's folder."""

    def run(self) -> int:
        from looped.train import train

        directory = self.output or f"runs/{self.spec.run_id}"
        with _ProgressLine() as progress:
            record = train(self.spec, directory, progress=progress)
        if record.status == "failed":
            print(f"Run {record.run_id} failed: {record.reason}. Its record is in {directory}.")
            return 1
        print(
            f"Run {record.run_id}: loss {record.loss:.4f} nats per token on {record.validation_tokens:,};"
            f" trained on {record.tokens:,} in {clock(record.train_seconds)}. Its record is in {directory}."
        )
        return 0


class _ProgressLine:
    """One line that is rewritten on a terminal; elsewhere a line now and then."""

    def __init__(self):
        self._live = sys.stderr.isatty()
        self._seconds = 0.2 if self._live else 10.0
        self._last = float("-inf")

    def __call__(
        self, step: int, steps: int, loss: float, tokens_per_second: float, seconds_left: float
    ) -> None:
        now = time.monotonic()
        if now - self._last < self._seconds and step < steps:
            return
        self._last = now
        speed = f"{tokens_per_second:,.0f} tokens/s  {clock(seconds_left)} left"
        line = f"step {step} of {steps}  loss {loss:.4f}  {speed}"
        print(
            f"\r{line:<78}" if self._live else line,
            end="" if self._live else "\n",
            file=sys.stderr,
            flush=True,
        )

    def __enter__(self) -> _ProgressLine:
        return self

    def __exit__(self, *exception) -> None:
        if self._live and self._last > float("-inf"):
            print(file=sys.stderr)


@dataclasses.dataclass
class DataPrepare:
    """Tokenize and pack a corpus into the data set that runs read, once.

    Runs do this by themselves where it is missing. The data set lies in the folder that the environment
    variable LOOPED_DATA names, ~/.cache/looped without one.
    """

    source: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="[SOURCE]")] = "docstrings"
    """A known corpus, or the folder of a data set."""
    sequence_length: int = 128
    """Tokens that a row predicts."""
    tokenizer: str = "bytes"
    """The tokenizer's name."""

    def run(self) -> int:
        from looped.data.loader import prepare

        data = prepare(self.source, self.sequence_length, self.tokenizer)
        print(
            f"{data.directory}: {data.train_rows:,} training and {data.validation_rows:,} validation rows of"
            f" {data.sequence_length} tokens, vocabulary {data.vocab_size}, hash {data.hash}"
        )
        return 0

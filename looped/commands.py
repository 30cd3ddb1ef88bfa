"""Sub-commands on one run and on data."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Annotated

import tyro

from looped.config import RunSpec
from looped.execution import DEFAULT, SAVE_EVERY_SECONDS, Execution
from looped.text import ProgressLine, clock


@dataclasses.dataclass
class Train:
    """Train one run, or go on with it, and leave its record.

    Give either --budget-flops or --steps. Interrupted with Ctrl-C, told to stop with SIGTERM or killed, the same
    command goes on from the last checkpoint; a finished run is left as it is. Exit status: 0 when the run is done; 1
    when it failed; 2 for bad input; 75 after SIGTERM, to be started again; 130 after Ctrl-C.
    """

    spec: Annotated[RunSpec, tyro.conf.arg(name="")]
    output: Annotated[
        str | None, tyro.conf.arg(metavar="DIR", help_behavior_hint="(default: runs/RUN_ID)")
    ] = None
    """The run's folder."""
    execution: Annotated[Execution, tyro.conf.arg(name="")] = DEFAULT
    """How it is carried out, which changes its loss by rounding alone."""
    save_every_seconds: float = SAVE_EVERY_SECONDS
    """Seconds between two checkpoints, which is what a kill or a lost machine can cost."""
    distributed: bool = False
    """This is one of several processes that train the run together, such as the hosts of a TPU slice. Where the cluster
    does not say who they are, set JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID."""
    track: Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME ...", help_behavior_hint="")] = ()
    """Show the curve in tensorboard, wandb or trackio as well; RUN/metrics.jsonl has it always."""

    def run(self) -> int:
        from looped import distributed
        from looped.leftovers import check_machine
        from looped.machine import keep_freed_memory
        from looped.preemption import raised_on_sigterm
        from looped.tracking import check_trackers

        check_trackers(self.track)
        keep_freed_memory()
        check_machine(self.distributed)  # before JAX takes the devices
        if self.distributed:
            distributed.initialize()
            return self._train()  # JAX has taken SIGTERM
        with raised_on_sigterm():  # while it compiles; the training loop itself saves first
            return self._train()

    def _train(self) -> int:
        from looped import distributed
        from looped.train import train

        directory = self.output or f"runs/{self.spec.run_id}"
        line = ProgressLine()

        def progress(step: int, steps: int, loss: float, tokens_per_second: float, left: float) -> None:
            speed = f"{tokens_per_second:,.0f} tokens/s  {clock(left)} left"
            line.show(f"step {step} of {steps}  loss {loss:.4f}  {speed}", last=step == steps)

        with contextlib.closing(line):
            shown = progress if distributed.is_writer() else None
            record = train(
                self.spec,
                directory,
                progress=shown,
                save_every_seconds=self.save_every_seconds,
                execution=self.execution,
                track=self.track,
            )
        if not distributed.is_writer():
            return int(record.status == "failed")
        if record.status == "failed":
            print(f"Run {record.run_id} failed: {record.reason}. Its record is in {directory}.")
            return 1
        print(
            f"Run {record.run_id}: loss {record.loss:.4f} nats per token on {record.validation_tokens:,};"
            f" trained on {record.tokens:,} in {clock(record.train_seconds)}. Its record is in {directory}."
        )
        return 0


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

"""Sub-commands on grids and sweeps."""

from __future__ import annotations

import dataclasses
import functools
import os
import sys
import traceback
from typing import Annotated, Any, NoReturn

import tyro

from looped.execution import DEFAULT, Execution


@dataclasses.dataclass
class Grid:
    """List a preset's runs: parameters, FLOPs, steps, tokens and learning rates.

    Without a name it lists the presets. Nothing is trained or written.
    """

    preset: Annotated[
        str | None, tyro.conf.Positional, tyro.conf.arg(metavar="[PRESET]", help_behavior_hint="")
    ] = None
    """The preset's name, such as paper-vanilla or quickstart."""
    json: bool = False
    """Print a JSON array with one object a run, and nothing else."""

    def run(self) -> int:
        from experiments.console import print_presets, print_runs
        from experiments.presets import PRESETS, preset

        if self.preset is None:
            print_presets(PRESETS.values(), self.json)
        else:
            print_runs(preset(self.preset), self.json)
        return 0


@dataclasses.dataclass
class SweepRun:
    """Train what is missing of a preset's runs; finished runs are skipped.

    Each run has a folder of its own in the output folder, local or gs://. Interrupted with Ctrl-C, told to stop
    with SIGTERM or killed, the same command goes on from the last checkpoints. A folder that holds anything else is
    refused, and so is a second command on the same share. Exit status: 0 when every run is done; 1 when a run
    failed or crashed; 2 for bad input; 75 after SIGTERM, to be started again; 130 after Ctrl-C.
    """

    preset: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="PRESET", help_behavior_hint="")]
    """The preset's name (`looped grid` lists them), or the file that `looped plan --json` wrote."""
    output: Annotated[
        str | None, tyro.conf.arg(metavar="DIR", help_behavior_hint="(default: runs/PRESET)")
    ] = None
    """The sweep's folder."""
    share: Annotated[str | None, tyro.conf.arg(metavar="I/N", help_behavior_hint="(default: all)")] = None
    """Train the I-th of N shares of the sweep, such as 3/8. Shares are alike in cost and depend on the runs alone;
    the same folder may be given to every share, at once."""
    workers: int = 1
    """Runs trained at once, each by a process with its share of the cores. On a CPU, small models train
    faster one to a core."""
    distributed: bool = False
    """This process is one of several, such as the hosts of a TPU slice, that train every run together; start the
    same command on each."""
    seeds: Annotated[tuple[int, ...], tyro.conf.arg(metavar="SEED ...", help_behavior_hint="")] = ()
    """Train every run once with each of these seeds, in place of the preset's."""
    budgets: Annotated[tuple[float, ...], tyro.conf.arg(metavar="FLOPS ...", help_behavior_hint="")] = ()
    """Train the runs of these of the preset's budgets alone."""
    retry_failed: bool = False
    """Start runs again that ended as failed: afresh after a loss that was not finite, from the last checkpoint
    after three attempts that got nowhere."""
    track: Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME ...", help_behavior_hint="")] = ()
    """Show the curves in tensorboard, wandb or trackio as well; RUN/metrics.jsonl has them always."""
    execution: Annotated[Execution, tyro.conf.arg(name="")] = DEFAULT
    """How runs are carried out, which changes their losses by rounding alone."""

    def run(self) -> int:
        from experiments.console import run_sweep
        from experiments.presets import preset
        from experiments.shares import WHOLE, Share
        from looped.errors import UserError
        from looped.preemption import raised_on_sigterm

        chosen = preset(self.preset)
        specs = chosen.specs(self.seeds, self.budgets)
        if self.distributed and self.workers != 1:
            raise UserError(
                f"workers is {self.workers}; with --distributed one run is trained at a time: leave it out."
            )
        options: dict[str, Any] = {} if self.execution == DEFAULT else {"execution": self.execution}
        if self.track:
            from looped.tracking import check_trackers

            check_trackers(self.track)
            options["track"] = self.track
        share = WHOLE if self.share is None else Share.parse(self.share)
        sweep = functools.partial(
            run_sweep,
            chosen.name,
            specs,
            self.output,
            share=share,
            retry_failed=self.retry_failed,
            options=options,
        )
        if not self.distributed:
            with raised_on_sigterm():
                return sweep(workers=self.workers).exit_status
        _join()
        try:
            return sweep(workers=None).exit_status
        except UserError:
            raise
        except Exception as error:
            _leave(error)


def _join() -> None:
    from looped.distributed import initialize
    from looped.leftovers import check_machine

    check_machine(joined=True)
    initialize()


def _leave(error: Exception) -> NoReturn:
    """Ends this process at once after an error: JAX would first wait for the others, which wait for this one."""
    from experiments.joined import CrashedError
    from looped.credentials import without
    from looped.preemption import REQUEUE

    print(without(traceback.format_exc()), file=sys.stderr)
    print(
        f"looped: {without(str(error))}; started again, it goes on from the last checkpoint.", file=sys.stderr
    )
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(REQUEUE if isinstance(error, CrashedError) and error.again else 1)


@dataclasses.dataclass
class SweepStatus:
    """Show what is done, running, waiting and failed in a sweep's folder.

    It reads the records alone, from anywhere: a run is running if its record was written in the last five minutes
    (training writes it about every minute) while a sweep is at work on the folder.
    """

    directory: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="DIR", help_behavior_hint="")]
    """The sweep's folder, local or gs://."""
    json: bool = False
    """Print a JSON object, and nothing else."""
    watch: bool = False
    """Show it anew until every run is over; Ctrl-C ends it."""

    def run(self) -> int:
        from experiments.console import show_status

        try:
            show_status(self.directory, as_json=self.json, watch=self.watch)
        except KeyboardInterrupt:
            if not self.watch:
                raise
        return 0


@dataclasses.dataclass
class SweepCollect:
    """Gather the records of one or many sweeps into one losses table for `looped fit`, each run once.

    Runs that are not done are in the table too, with their status and why. Two finished records of one run with
    different losses are an error.
    """

    directories: Annotated[
        tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="DIR ...", help_behavior_hint="")
    ]
    """The sweeps' folders, local or gs://."""
    output: Annotated[str | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="(default: print it)")] = (
        None
    )
    """The CSV file; one that this command wrote before is replaced."""

    def run(self) -> int:
        from experiments.console import collect_losses

        collect_losses(self.directories, self.output)
        return 0

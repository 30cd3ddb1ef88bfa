"""Sub-commands on grids and sweeps."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import tyro


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

    Each run has a folder of its own in the output folder. Interrupted with Ctrl-C or killed, the same
    command goes on from the last checkpoints. A folder that holds anything else is refused.
    """

    preset: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="PRESET", help_behavior_hint="")]
    """The preset's name; `looped grid` lists them."""
    output: Annotated[
        str | None, tyro.conf.arg(metavar="DIR", help_behavior_hint="(default: runs/PRESET)")
    ] = None
    """The sweep's folder."""
    workers: int = 1
    """Runs trained at once, each by a process with its share of the cores. On a CPU, small models train
    faster one to a core."""
    seeds: Annotated[tuple[int, ...], tyro.conf.arg(metavar="SEED ...", help_behavior_hint="")] = ()
    """Train every run once with each of these seeds, in place of the preset's."""
    budgets: Annotated[tuple[float, ...], tyro.conf.arg(metavar="FLOPS ...", help_behavior_hint="")] = ()
    """Train the runs of these of the preset's budgets alone."""
    retry_failed: bool = False
    """Start runs afresh that ended as failed."""

    def run(self) -> int:
        from experiments.console import run_sweep
        from experiments.presets import preset

        specs = preset(self.preset).specs(self.seeds, self.budgets)
        return run_sweep(
            self.preset, specs, self.output, workers=self.workers, retry_failed=self.retry_failed
        ).exit_status


@dataclasses.dataclass
class SweepStatus:
    """Show what is done, running and left in a sweep's folder."""

    directory: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="DIR", help_behavior_hint="")]
    """The sweep's folder."""

    def run(self) -> int:
        from experiments.console import show_status

        show_status(self.directory)
        return 0

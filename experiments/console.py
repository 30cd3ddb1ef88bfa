"""What the commands on grids and sweeps print."""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from experiments import claims, manifest, sweep
from experiments.board import Board, load
from experiments.display import show, summary, table
from experiments.grid import rows
from experiments.presets import Preset
from looped.config import RunSpec
from looped.errors import UserError
from looped.text import clock, short

Columns = dict[str, Callable[[Any], str]]
"""How to show each field of a row."""


@dataclasses.dataclass(frozen=True)
class Result:
    """A finished call of `run_sweep`."""

    directory: str
    outcome: sweep.Outcome
    seconds: float

    @property
    def exit_status(self) -> int:
        return 0 if len(self.outcome.having("done")) == len(self.outcome.runs) else 1


def run_sweep(
    preset: str, specs: Sequence[RunSpec], directory: str | None, *, workers: int, retry_failed: bool = False
) -> Result:
    """Trains what `directory` (default runs/PRESET) lacks of `specs`, shows it and says how it ended."""
    directory = directory or f"runs/{preset}"
    began = time.monotonic()
    with show(f"sweep {preset} in {directory}") as view:
        outcome = sweep.run(
            specs, directory, preset=preset, workers=workers, retry_failed=retry_failed, view=view
        )
    result = Result(directory, outcome, time.monotonic() - began)
    print("\n".join(_closing(result)), flush=True)
    return result


def _closing(result: Result) -> list[str]:
    outcome, total = result.outcome, len(result.outcome.runs)
    done = len(outcome.having("done"))
    if outcome.log is None:
        lines = [f"All {total} runs were there in {result.directory}: nothing to train."]
    else:
        new = done + len(outcome.having("failed")) - outcome.there_before
        lines = [
            f"{done} of {total} runs are done in {result.directory}:"
            f" {new} trained in {clock(result.seconds)}, {outcome.there_before} were there."
        ]
    for run in outcome.having("failed"):
        lines.append(f"Failed: {run.describe()} ({run.run_id}): {run.reason}.")
    if outcome.having("failed"):
        lines.append("Failed runs stay as they are; --retry-failed starts them afresh.")
    for run in outcome.having("crashed"):
        lines.append(f"Crashed: {run.describe()} ({run.run_id}): {run.reason}.")
    if outcome.having("crashed", "waiting"):
        lines.append(f"The same command goes on with what is left; the workers' logs are in {outcome.log}.")
    return lines


def show_status(directory: str) -> None:
    """Prints a sweep's table; `UserError` where the folder holds no sweep."""
    there = manifest.read(directory)
    if there is None:
        raise UserError(f"{directory} holds no sweep; name the folder that `looped sweep run` was given.")
    board = Board(load(there.specs, directory))
    at_work = "a sweep is at work on it" if claims.holders(directory) else "no sweep is at work on it"
    Console().print(table(board.runs, f"sweep {there.preset} in {directory}: {summary(board)}; {at_work}"))


def print_presets(presets: Iterable[Preset], as_json: bool) -> None:
    """Prints every preset's name, number of runs and summary."""
    found = [{"preset": p.name, "runs": len(p.specs()), "summary": p.summary} for p in presets]
    if as_json:
        _print_json(found)
        return
    _print_table("presets", found, {"preset": str, "runs": str, "summary": str}, left=("preset", "summary"))


def print_runs(preset: Preset, as_json: bool) -> None:
    """Prints every run of `preset` with its counts and rates."""
    found = rows(preset.specs())
    if as_json:
        _print_json(found)
        return
    columns: Columns = {
        "arm": str,
        "budget_flops": short,
        "recurrences": str,
        "backprop_recurrences": str,
        "d_model": str,
        "n_once": _count,
        "n_rec": _count,
        "params_total": _count,
        "flops_per_token": short,
        "steps": _count,
        "tokens": _count,
        "matrix_lr": "{:.5f}".format,
        "run_id": str,
    }
    flops = sum(row["flops_per_token"] * row["tokens"] for row in found)
    _print_table(
        f"{preset.name}: {len(found)} runs, {short(flops)} FLOPs in all", found, columns, left=("arm",)
    )


def _print_json(value: list) -> None:
    json.dump(value, sys.stdout, indent=1, allow_nan=False)
    print()


def _print_table(title: str, found: list[dict], columns: Columns, left: tuple[str, ...]) -> None:
    result = Table(title=title, title_justify="left", title_style="bold")
    for name in columns:
        result.add_column(_HEADERS.get(name, name), justify="left" if name in left else "right")
    for row in found:
        result.add_row(*("" if row[name] is None else show(row[name]) for name, show in columns.items()))
    Console(width=None if sys.stdout.isatty() else _PIPE_WIDTH).print(result)


_PIPE_WIDTH = 200  # where no terminal sets one: as much as the widest table takes
_HEADERS = {
    "budget_flops": "budget",
    "recurrences": "r",
    "backprop_recurrences": "k",
    "d_model": "width",
    "params_total": "parameters",
    "flops_per_token": "FLOPs/token",
    "matrix_lr": "matrix rate",
    "run_id": "run",
}


def _count(number: int) -> str:
    return f"{number:,}"

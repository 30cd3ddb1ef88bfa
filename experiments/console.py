"""What the commands on grids and sweeps print."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from experiments import sweep
from experiments.collect import collect, write_table
from experiments.display import most_telling, room_for_runs, show, summary, table
from experiments.grid import rows
from experiments.presets import Preset
from experiments.shares import WHOLE, Share
from experiments.status import Status, read_status, sign_age, to_data, trouble
from looped.config import RunSpec
from looped.files import is_remote
from looped.text import clock, one_line, short

Columns = dict[str, Callable[[Any], str]]
"""How to show each field of a row."""


@dataclasses.dataclass(frozen=True)
class Result:
    """A finished call of `run_sweep`."""

    directory: str
    outcome: sweep.Outcome
    seconds: float
    share: Share = WHOLE

    @property
    def exit_status(self) -> int:
        return 0 if len(self.outcome.having("done")) == len(self.outcome.runs) else 1


def run_sweep(
    preset: str,
    specs: Sequence[RunSpec],
    directory: str | None,
    *,
    workers: int | None = 1,
    share: Share = WHOLE,
    retry_failed: bool = False,
    options: Mapping[str, Any] = {},
) -> Result:
    """Trains what `directory` (default runs/PRESET) lacks of this share of `specs`, shows it and says how it ended.

    `workers` None trains in this process, one of several that have been joined; one of them shows and says.
    """
    directory = directory or f"runs/{preset}"
    began = time.monotonic()
    common = {"preset": preset, "share": share, "retry_failed": retry_failed, "options": options}
    title = f"sweep {preset} in {directory}" + ("" if share.is_whole else f", share {share}")
    if workers is None:
        from experiments import joined
        from looped import distributed

        speaks = distributed.is_writer()
        with show(title) if speaks else contextlib.nullcontext() as view:
            outcome = joined.run(specs, directory, view=view, **common)
    else:
        speaks = True
        with show(title) as view:
            outcome = sweep.run(specs, directory, workers=workers, view=view, **common)
    result = Result(directory, outcome, time.monotonic() - began, share)
    if speaks:
        print("\n".join(map(one_line, _closing(result))), flush=True)
    return result


def _closing(result: Result) -> list[str]:
    outcome, total = result.outcome, len(result.outcome.runs)
    done = len(outcome.having("done"))
    of = "" if result.share.is_whole else f" of share {result.share}"
    if outcome.log is None:
        lines = [f"All {total} runs{of} were there in {result.directory}: nothing to train."]
    else:
        new = done + len(outcome.having("failed")) - outcome.there_before
        lines = [
            f"{done} of {total} runs{of} are done in {result.directory}:"
            f" {new} trained in {clock(result.seconds)}, {outcome.there_before} were there."
        ]
    for run in outcome.having("failed"):
        lines.append(f"Failed: {run.describe()} ({run.run_id}): {run.reason}.")
    if outcome.having("failed"):
        lines.append("Failed runs stay as they are; --retry-failed starts them again.")
    for run in outcome.having("crashed"):
        lines.append(f"Crashed: {run.describe()} ({run.run_id}): {run.reason}.")
    if outcome.having("crashed", "waiting"):
        lines.append(f"The same command goes on with what is left; the workers' logs are in {outcome.log}.")
    return lines


def show_status(directory: str, as_json: bool = False, watch: bool = False) -> None:
    """Prints a sweep's table, or JSON; `watch` shows it anew until every run is over.

    `UserError` where the folder holds no sweep.
    """
    console, status = Console(), read_status(directory)
    if watch and console.is_terminal:
        with Live(console=console, auto_refresh=False, transient=True) as live:
            while not status.over:
                live.update(_status_table(status, room_for_runs(console)), refresh=True)
                time.sleep(_watch_seconds(directory))
                status = read_status(directory)
    elif watch:
        said = None
        while not status.over:
            if (line := one_line(f"{summary(status.board)}; {_at_work(status)}")) != said:
                print(line, flush=True)
            said = line
            time.sleep(_watch_seconds(directory))
            status = read_status(directory)
    if as_json:
        _print_json(to_data(status))
        return
    console.print(_status_table(status))
    for line in _troubles(status):
        console.print(one_line(line), markup=False, highlight=False, soft_wrap=True)


def _watch_seconds(directory: str) -> float:
    return 15.0 if is_remote(directory) else 2.0


def _status_table(status: Status, room: int | None = None) -> Table:
    board = status.board
    runs = board.runs if room is None else most_telling(board, room)
    title = f"sweep {status.preset} in {status.directory}: {summary(board)}; {_at_work(status)}"
    return table(runs, title, {run.run_id: sign_age(run) for run in runs})


def _at_work(status: Status) -> str:
    if not status.holders:
        return "no sweep is at work on it"
    return "; ".join(holder.describe() for holder in status.holders)


def _troubles(status: Status) -> list[str]:
    lines = [
        f"Failed: {run.describe()} ({run.run_id}): {run.reason}." for run in status.board.having("failed")
    ]
    for run in status.board.runs:
        if said := trouble(run):
            lines.append(f"In trouble: {run.describe()} ({run.run_id}): {said}.")
    return lines


def collect_losses(directories: Sequence[str], output: str | None) -> None:
    """Writes the losses table of `directories` to `output`, or prints it; says on stderr what it holds."""
    collected = collect(directories)
    if output is None:
        sys.stdout.write(collected.to_csv())
    else:
        write_table(output, collected)
    counts = ", ".join(
        f"{collected.having(s)} {s}" for s in ("done", "running", "failed") if collected.having(s)
    )
    print(f"{output or 'losses'}: {len(collected.records)} runs, each once: {counts}.", file=sys.stderr)
    for why in collected.unreadable:
        print(f"Left out: {why}", file=sys.stderr)


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


def _print_json(value: list | dict) -> None:
    json.dump(value, sys.stdout, indent=1, allow_nan=False)
    print()


def _print_table(title: str, found: list[dict], columns: Columns, left: tuple[str, ...]) -> None:
    result = Table(title=escape(one_line(title)), title_justify="left", title_style="bold")
    for name in columns:
        result.add_column(_HEADERS.get(name, name), justify="left" if name in left else "right")
    for row in found:
        cells = ("" if row[name] is None else show(row[name]) for name, show in columns.items())
        result.add_row(*(escape(one_line(cell)) for cell in cells))
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

"""Shows a sweep: a live table on a terminal, plain lines anywhere else."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence

from rich.console import Console, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from experiments.board import Board, Run, State
from looped.text import clock, one_line, short

_MARKS: dict[State, str] = {
    "waiting": "[dim]waiting[/]",
    "running": "[cyan]running[/]",
    "done": "[green]done[/]",
    "failed": "[red]failed[/]",
    "crashed": "[red]crashed[/]",
}
_STOPPING = "Stopping; the runs under way are saving. Ctrl-C once more gives up what they have not saved."
_PLAIN_SECONDS = 30.0  # between two lines on the same run
_FRAME_LINES = 8  # that the title, the header and the terminal's prompt take


@contextlib.contextmanager
def show(title: str, console: Console | None = None) -> Iterator[Tables | Plain]:
    """Yields a view for `experiments.sweep.run` and leaves the last state of the board on the screen."""
    console = console or Console()
    if not console.is_terminal:
        yield Plain(title, console)
        return
    view = Tables(title, console)
    with Live(console=console, get_renderable=view.render, refresh_per_second=4, transient=True):
        yield view
    if view.board is not None:
        console.print(table(view.board.runs, title))


class Tables:
    """The board as a table that fits the terminal: runs under way, last finished and next."""

    def __init__(self, title: str, console: Console):
        self.title, self.console = title, console
        self.board: Board | None = None

    def update(self, board: Board) -> None:
        self.board = board

    def stopping(self) -> None:
        self.console.print(_STOPPING)

    def render(self) -> RenderableType:
        if self.board is None:
            return "starting …"
        room = room_for_runs(self.console)
        return table(most_telling(self.board, room), f"{self.title}: {summary(self.board)}")


def room_for_runs(console: Console) -> int:
    """How many runs a table on this terminal may have."""
    return max(4, console.height - _FRAME_LINES)


def most_telling(board: Board, room: int) -> list[Run]:
    """About `room` runs in the board's order: those under way, some that are next and some that are over."""
    if len(board.runs) <= room:
        return board.runs
    running, waiting = board.having("running"), board.having("waiting")
    over = board.having("done", "failed", "crashed")
    waiting = waiting[: max(1, (room - len(running)) // 2)]
    over = over[-max(1, room - len(running) - len(waiting)) :]
    chosen = {run.run_id for run in (*running, *waiting, *over)}
    return [run for run in board.runs if run.run_id in chosen]


class Plain:
    """One line when a run starts or ends, and now and then one in between."""

    def __init__(self, title: str, console: Console):
        self.title, self.console = title, console
        self._seen: dict[str, State] = {}
        self._spoke: dict[str, float] = {}

    def update(self, board: Board) -> None:
        if not self._seen:
            self._print(f"{self.title}: {summary(board)}")
            self._seen = {run.run_id: run.state for run in board.runs}
        now = time.monotonic()
        for run in board.runs:
            changed = run.state != self._seen[run.run_id]
            silent = now - self._spoke.get(run.run_id, now)
            if changed or (run.state == "running" and run.step and silent > _PLAIN_SECONDS):
                self._seen[run.run_id], self._spoke[run.run_id] = run.state, now
                over = len(board.having("done", "failed", "crashed"))
                self._print(f"[{over}/{len(board.runs)}] {run.describe()}: {_state(run)}")

    def stopping(self) -> None:
        self._print(_STOPPING)

    def _print(self, line: str) -> None:
        self.console.print(one_line(line), markup=False, highlight=False, soft_wrap=True)


def summary(board: Board) -> str:
    """`3 of 30 done, 2 running, 25 left, about 4 min left`."""
    parts = [f"{len(board.having('done'))} of {len(board.runs)} done"]
    if board.note:
        parts.append(board.note)
    for state in ("failed", "crashed", "running"):
        if count := len(board.having(state)):
            parts.append(f"{count} {state}")
    if left := len(board.having("waiting")):
        parts.append(f"{left} left")
    seconds = board.seconds_left()
    if seconds is not None and board.having("running"):
        parts.append(f"about {clock(seconds)} left")
    return ", ".join(parts)


def table(runs: Sequence[Run], title: str, ages: Mapping[str, float | None] | None = None) -> Table:
    """The runs as a table; with `ages`, seconds since their last sign of life by run id, as records tell of them."""
    seeds = any(run.spec.seed for run in runs)
    columns = ["arm", "r", "width", "budget", "state", "loss", "tokens/s", "left"]
    if ages is not None:
        columns[-2:] = ["step", "last sign"]
    if seeds:
        columns.insert(4, "seed")
    result = Table(title=escape(one_line(title)), title_justify="left", title_style="bold")
    for column in columns:
        result.add_column(column, justify="left" if column in ("arm", "state") else "right")
    for run in runs:
        model, spec = run.spec.model, run.spec
        budget = f"{spec.steps} steps" if spec.budget_flops is None else short(spec.budget_flops)
        result.add_row(
            escape(one_line(spec.arm)),
            str(model.recurrences),
            str(model.d_model),
            budget,
            *([str(spec.seed)] if seeds else []),
            _mark(run),
            "" if run.loss is None else f"{run.loss:.4f}",
            *(_progress(run) if ages is None else _sign(run, ages.get(run.run_id))),
        )
    return result


def _progress(run: Run) -> tuple[str, str]:
    speed = "" if run.tokens_per_second is None else f"{run.tokens_per_second:,.0f}"
    return speed, clock(run.seconds_left) if run.state == "running" else ""


def _sign(run: Run, age: float | None) -> tuple[str, str]:
    if not run.begun or run.state == "done":
        return "", ""
    return f"{run.step:,} of {run.steps:,}" if run.steps else "", "" if age is None else f"{clock(age)} ago"


def _mark(run: Run) -> str:
    mark = "[dim]begun[/]" if run.state == "waiting" and run.begun else _MARKS[run.state]
    is_partial = run.state in ("waiting", "running", "crashed") and run.step and run.steps
    return f"{mark} {run.step / run.steps:.0%}" if is_partial and run.steps else mark


def _state(run: Run) -> str:
    if run.state in ("failed", "crashed"):
        return f"{run.state}: {run.reason}"
    if run.state == "done":
        return f"done, loss {run.loss:.4f} nats per token, {clock(run.train_seconds)}"
    if run.state == "running" and run.steps and run.tokens_per_second:  # its first report is in
        loss = f"loss {run.loss:.4f}, {run.tokens_per_second:,.0f} tokens/s, {clock(run.seconds_left)} left"
        return f"step {run.step} of {run.steps}, {loss}"
    return run.state

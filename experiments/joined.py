"""Trains a sweep's runs in this process, which is one of several that train every run together: the hosts of a slice.

One process decides and writes, the others are told: which run is next, what is given up, when to stop.  So all are
always at the same one.  An error ends the process, since the others can no longer be reached; whoever started them
starts all of them again, and they go on from the last checkpoint.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from etils import epath

from experiments import attempts
from experiments.board import Board, Run
from experiments.schedule import Schedule, program
from experiments.shares import WHOLE, Share
from experiments.sweep import Outcome, View, opened
from looped import distributed
from looped.config import RunSpec
from looped.errors import UserError, first_line
from looped.preemption import Preemption
from looped.record import RunRecord

_SHOW_SECONDS = 0.5  # between two looks at a run's progress


class CrashedError(Exception):
    """A run ended with an error, which has been counted (`experiments.attempts`).

    `again` says whether starting again is worth it: not where a run was given up for the same reason before.
    """

    def __init__(self, run: Run, why: str, again: bool):
        super().__init__(f"{run.describe()} ({run.run_id}) crashed: {why}")
        self.again = again


def run(
    specs: Sequence[RunSpec],
    directory: epath.PathLike,
    *,
    preset: str,
    share: Share = WHOLE,
    retry_failed: bool = False,
    view: View | None = None,
    options: Mapping[str, Any] = {},
    train: Callable[..., RunRecord] | None = None,
) -> Outcome:
    """As `experiments.sweep.run`, by all processes that have been joined (`looped.distributed`), one run after another.

    All call it alike.  Every process returns the outcome that the one which writes has seen.  Raises `CrashedError` for
    an error of a run, and `KeyboardInterrupt` or `Preempted` at the same step of all once the run under way has saved.
    """
    if train is None:
        from looped.train import train
    root = epath.Path(directory)
    with contextlib.ExitStack() as held, Preemption() as preemption:
        writer = distributed.is_writer()
        board = Board([])

        def begin() -> list[str]:
            runs, _ = held.enter_context(opened(root, specs, preset, share, retry_failed))
            board.runs = runs
            board.restart()
            return [run.run_id for run in in_order(board.having("waiting"))]

        order = distributed.from_writer(begin)
        if not writer:
            board.runs = [Run(spec, str(root / spec.run_id)) for spec in specs]
        by_id = {run.run_id: run for run in board.runs}
        distributed.check_same("the list of runs", " ".join(sorted(spec.run_id for spec in specs)))
        for run_id in order:
            if preemption.requested():
                raise preemption.stop()
            _train(by_id[run_id], board, view if writer else None, train, options)
        return Outcome(tuple(board.runs), str(root) if order else None)


def in_order(runs: Sequence[Run]) -> list[Run]:
    """The runs one after another, so that those of one program follow each other and long ones come first."""
    schedule, found, held = Schedule(runs), [], None
    while (run := schedule.take(held)) is not None:
        held = program(run)
        found.append(run)
    return found


def _train(
    run: Run, board: Board, view: View | None, train: Callable[..., RunRecord], options: Mapping[str, Any]
) -> None:
    def progress(step: int, steps: int, loss: float, tokens_per_second: float, seconds_left: float) -> None:
        run.step, run.steps, run.loss = step, steps, loss
        run.tokens_per_second, run.seconds_left = tokens_per_second, seconds_left
        nonlocal shown
        now = time.monotonic()
        if view is not None and (now - shown > _SHOW_SECONDS or step == steps):
            shown = now
            view.update(board)

    shown = float("-inf")
    run.state = "running"
    if view is not None:
        view.update(board)
    try:
        record = attempts.attempt(
            run.spec,
            run.directory,
            train,
            options={"progress": progress} | dict(options),
            shared=distributed.from_writer,
            writer=distributed.is_writer(),
        )
    except UserError:
        raise
    except Exception as error:
        run.state, run.reason = "crashed", first_line(error)
        given_up = {other.attempts.why for other in board.having("failed") if other.attempts.reasons}
        raise CrashedError(run, run.reason, run.reason not in given_up) from error
    run.take(record)
    if view is not None:
        view.update(board)

"""Where a sweep stands, from its records alone: nothing of the processes that train it is asked."""

from __future__ import annotations

import dataclasses
from typing import Any

from etils import epath

from experiments import claims, manifest
from experiments.attempts import LIMIT
from experiments.board import Board, Run, State, load
from experiments.claims import Holder
from looped.errors import UserError
from looped.files import forget_listings
from looped.text import seconds_since

SIGN_SECONDS = 300.0
"""A run whose record is older than this is not under way: training refreshes it at every save, about every minute."""


@dataclasses.dataclass(frozen=True)
class Status:
    """A sweep's runs, those under way marked so, and who is at work on it."""

    directory: str
    preset: str
    board: Board
    holders: tuple[Holder, ...]

    @property
    def over(self) -> bool:
        return not self.board.having("waiting", "running")


def read_status(directory: epath.PathLike) -> Status:
    """Reads the records in `directory`, local or gs://; `UserError` where it holds no sweep."""
    forget_listings(directory)
    there = manifest.read(directory)
    if there is None:
        raise UserError(f"{directory} holds no sweep; name the folder that `looped sweep run` was given.")
    runs, at_work = load(there.specs, directory), tuple(claims.holders(directory))
    if at_work or not claims.was_claimed(directory):  # the records are all there is to go by
        for run in runs:
            age = sign_age(run)
            if run.state == "waiting" and age is not None and age < SIGN_SECONDS:
                run.state = "running"
    return Status(str(directory), there.preset, Board(runs), at_work)


def sign_age(run: Run) -> float | None:
    """Seconds since the record of a run that has begun was last written; None where it does not say."""
    return seconds_since(run.updated_at)


def trouble(run: Run) -> str | None:
    """What went wrong with a run that is not over: how many of its starts, and why the last one ended."""
    found = run.attempts
    if run.state in ("done", "failed") or not found.reasons:
        return None
    return f"{found.count} of {LIMIT} attempts got no further than step {max(0, found.step)}: {found.why}"


def to_data(status: Status) -> dict[str, Any]:
    """The status as JSON data."""
    counts: dict[State, int] = {
        state: len(status.board.having(state)) for state in ("done", "running", "waiting", "failed")
    }
    return {
        "directory": status.directory,
        "preset": status.preset,
        **counts,
        "at_work": [
            {
                "share": str(holder.share),
                "host": holder.host,
                "pid": holder.pid,
                "since": holder.since,
                "silent_seconds": round(holder.silent_seconds, 1),
            }
            for holder in status.holders
        ],
        "runs": [_run_data(run) for run in status.board.runs],
    }


def _run_data(run: Run) -> dict[str, Any]:
    spec, age = run.spec, sign_age(run)
    return {
        "run_id": run.run_id,
        "arm": spec.arm,
        "recurrences": spec.model.recurrences,
        "d_model": spec.model.d_model,
        "budget_flops": spec.budget_flops,
        "seed": spec.seed,
        "state": run.state,
        "step": run.step,
        "steps": run.steps,
        "loss": run.loss,
        "updated_at": run.updated_at,
        "age_seconds": None if age is None else round(age, 1),
        "reason": run.reason or trouble(run),
    }

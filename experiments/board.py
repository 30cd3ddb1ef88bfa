"""Where every run of a sweep stands."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

from etils import epath

from experiments import attempts
from experiments.shares import training_flops
from looped.config import RunSpec
from looped.record import RunRecord, read_record
from looped.text import short

State = Literal["waiting", "running", "done", "failed", "crashed"]


@dataclasses.dataclass
class Run:
    """One run and where it stands.

    `failed` is an outcome, in the run's record: a loss that is not finite, or too many attempts.  `crashed` means that
    training raised or its process died in this sweep, and the record still says that the run is under way.
    """

    spec: RunSpec
    directory: str
    state: State = "waiting"
    was_there: bool = False
    begun: bool = False
    loss: float | None = None
    reason: str | None = None
    step: int = 0
    steps: int | None = None
    tokens_per_second: float | None = None
    seconds_left: float | None = None
    train_seconds: float | None = None
    updated_at: str | None = None
    attempts: attempts.Attempts = attempts.NONE

    @property
    def run_id(self) -> str:
        return self.spec.run_id

    @property
    def cost(self) -> float:
        """Training FLOPs."""
        return training_flops(self.spec)

    @property
    def work_done(self) -> float:
        """Training FLOPs so far."""
        if self.state in ("done", "failed"):
            return self.cost
        return self.cost * self.step / self.steps if self.steps else 0.0

    def take(self, record: RunRecord) -> None:
        """Takes over what the run's record says."""
        self.state = "waiting" if record.status == "running" else record.status
        self.begun = True
        self.loss, self.reason = record.loss, record.reason
        self.step, self.steps = record.step, record.steps
        self.train_seconds, self.updated_at = record.train_seconds, record.updated_at
        over = record.status != "running" and record.train_seconds
        self.tokens_per_second = record.tokens / record.train_seconds if over else None

    def describe(self) -> str:
        model, spec = self.spec.model, self.spec
        length = f"{spec.steps} steps" if spec.budget_flops is None else f"{short(spec.budget_flops)} FLOPs"
        seed = f", seed {spec.seed}" if spec.seed else ""
        return f"{spec.arm} r = {model.recurrences}, width {model.d_model}, {length}{seed}"


class Board:
    """All runs of a sweep, in the preset's order."""

    def __init__(self, runs: list[Run]):
        self.runs = runs
        self.note = ""  # on what the sweep is at besides the runs
        self.restart()

    def restart(self) -> None:
        """Has `seconds_left` go by the rate of work from now on."""
        self.started = time.monotonic()
        self._work_at_start = self._work()

    def having(self, *states: State) -> list[Run]:
        return [run for run in self.runs if run.state in states]

    def _work(self) -> float:
        return sum(run.work_done for run in self.runs)

    def seconds_left(self) -> float | None:
        """Time left at the rate of work so far, compilation included (None before there is any)."""
        gained = self._work() - self._work_at_start
        if gained <= 0:
            return None
        left = sum(run.cost - run.work_done for run in self.having("waiting", "running"))
        return left / gained * (time.monotonic() - self.started)


def load(specs: Iterable[RunSpec], directory: epath.PathLike) -> list[Run]:
    """Returns every run with what its record says; `UserError` for a record that is unreadable."""
    root = epath.Path(directory)
    runs = [Run(spec, str(root / spec.run_id)) for spec in specs]
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(_read, runs))
    return runs


def _read(run: Run) -> None:
    record = read_record(run.directory)
    if record is not None:
        run.take(record)
    if run.state != "done":
        run.attempts = attempts.read(run.directory)
    if run.state == "failed" and run.attempts.again:
        run.state, run.reason = "waiting", None
    run.was_there = run.state in ("done", "failed")

"""Runs what is missing of a sweep.

Runs are trained by worker processes: a run that dies takes no other with it, workers share the cores
out evenly, and the sweep itself needs no accelerator.  Interrupted or killed, the next call goes on
from every run's last checkpoint.  Several machines may each train a share of the sweep in one folder.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import multiprocessing
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Hashable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any, Protocol

from etils import epath

from experiments import attempts, claims, manifest
from experiments.board import Board, Run, load
from experiments.claims import Claim
from experiments.schedule import Schedule, program
from experiments.shares import WHOLE, Share
from looped.config import RunSpec
from looped.errors import UserError
from looped.files import is_remote
from looped.machine import available_cores
from looped.preemption import Preempted, raised_on_sigterm

TRAIN = "looped.train:train"
PREPARE = "looped.train:prepare_data"
_SAVE_SECONDS = 60.0  # that an interrupted worker may take to save
_LOST_AT_MOST = (
    3  # workers killed before they had a run, as by a machine out of memory, before the sweep gives up
)


class View(Protocol):
    """Shows the board; `update` is called often, `stopping` once the sweep is interrupted."""

    def update(self, board: Board) -> None: ...

    def stopping(self) -> None: ...


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Every run of the sweep, as it stands at the end."""

    runs: tuple[Run, ...]
    log: str | None
    """The folder of the workers' logs; None where nothing was trained."""

    @property
    def there_before(self) -> int:
        return sum(run.was_there for run in self.runs)

    def having(self, *states: str) -> list[Run]:
        return [run for run in self.runs if run.state in states]


def run(
    specs: Sequence[RunSpec],
    directory: epath.PathLike,
    *,
    preset: str,
    share: Share = WHOLE,
    workers: int = 1,
    retry_failed: bool = False,
    view: View | None = None,
    options: Mapping[str, Any] = {},
    train: str = TRAIN,
    prepare: str = PREPARE,
) -> Outcome:
    """Trains every run of `specs` that is of this `share` and that `directory` lacks, each in `directory/<run id>`, up
    to `workers` at once; `options` are keywords for `train`.

    Shares are those of the whole sweep in the folder, of which `specs` may be a part.  Runs whose record says failed
    are left as they are unless `retry_failed`, which starts them afresh, or from their checkpoint if they were given up
    (`experiments.attempts`).  Raises `UserError`, touching nothing, where the folder holds anything else or another
    sweep is at work on it, and `KeyboardInterrupt` once the runs under way have saved: `Preempted` after SIGTERM.
    """
    if workers < 1:
        raise UserError(f"workers is {workers}; it must be at least 1.")
    root = epath.Path(directory)
    with opened(root, specs, preset, share, retry_failed) as (runs, claim):
        board = Board(runs)
        if not board.having("waiting"):
            return Outcome(tuple(board.runs), None)
        log = _log_folder(root, share)
        with raised_on_sigterm():
            team = _Team(board, workers, claim.descriptor, log, train, prepare, view, options)
            try:
                team.work()
            except KeyboardInterrupt:
                if view is not None:
                    view.stopping()
                raise
            finally:
                team.dismiss()
        return Outcome(tuple(board.runs), str(log))


@contextlib.contextmanager
def opened(
    root: epath.Path, specs: Sequence[RunSpec], preset: str, share: Share, retry_failed: bool
) -> Iterator[tuple[list[Run], Claim]]:
    """Holds the share while the context lasts; yields its runs among `specs`, as they stand, with the claim.

    The folder's manifest is the whole sweep then.  Raises `UserError` as `run` does.
    """
    wanted = manifest.settle(root, preset, specs)
    with claims.hold(root, share, wanted.fingerprint) as claim:
        now = manifest.settle(root, preset, specs)  # as another may have left it since
        if now.fingerprint != wanted.fingerprint:
            raise UserError(f"output is {root}, whose sweep has just grown; give the same command again.")
        if manifest.read(root) != wanted:
            manifest.write(root, wanted)
        own = share.run_ids(wanted.specs)
        mine = [spec for spec in specs if spec.run_id in own]
        runs = load(mine, root)
        failed = [run for run in runs if run.state == "failed"] if retry_failed else []
        for run in failed:
            attempts.retry(run.directory)
        yield (load(mine, root) if failed else runs), claim


def _log_folder(root: epath.Path, share: Share) -> pathlib.Path:
    if is_remote(root):
        return pathlib.Path(tempfile.mkdtemp(prefix="looped-sweep-"))
    log = pathlib.Path(root) / "logs"
    if not share.is_whole:
        log /= f"share-{share.index}-of-{share.count}"
    log.mkdir(parents=True, exist_ok=True)
    return log


@dataclasses.dataclass
class _Worker:
    process: subprocess.Popen
    connection: Connection
    log: pathlib.Path
    run: Run | None = None
    program: Hashable = None

    def order(self, kind: str, *arguments: Any) -> None:
        with contextlib.suppress(OSError):  # it has died, which `wait` reports
            self.connection.send((kind, arguments))


class _Team:
    """The workers of one sweep and what they are at."""

    def __init__(self, board, workers, lock, log, train, prepare, view, options):
        self.board: Board = board
        self.lock, self.log, self.functions, self.view = lock, log, (train, prepare), view
        self.options = dict(options)
        waiting = board.having("waiting")
        self.schedule = Schedule(waiting)
        data_sets = {(run.spec.data.source, run.spec.model.sequence_length): run.spec for run in waiting}
        self.unprepared = deque(data_sets.values())
        self.size = min(workers, len(waiting))
        self.cpus = _share_cores(self.size)
        self.members: dict[Connection, _Worker] = {}
        self.crashes: set[str] = set()
        self.preparing: _Worker | None = None
        self.lost = 0

    def work(self) -> None:
        """Returns when no run is left to train, or the same crash has happened twice."""
        for index in range(self.size):
            self._hire(index)
        first = next(iter(self.members.values()))
        self._prepare_next(first)
        while any(worker.run for worker in self.members.values()) or self.unprepared or self.schedule:
            self._show()
            for connection in wait(list(self.members), timeout=0.25):
                assert isinstance(connection, Connection)
                worker = self.members[connection]
                try:
                    kind, payload = connection.recv()
                except (EOFError, ConnectionResetError):
                    self._bury(worker)
                else:
                    self._hear(worker, kind, payload)
        self._show()

    def dismiss(self) -> None:
        """Interrupts the workers and waits until they have saved; a second Ctrl-C ends them at once."""
        for worker in self.members.values():
            worker.connection.close()
        try:
            for worker in self.members.values():
                worker.process.wait(_SAVE_SECONDS)
        except (subprocess.TimeoutExpired, KeyboardInterrupt):
            for worker in self.members.values():
                worker.process.kill()
                worker.process.wait()

    def _hire(self, index: int) -> None:
        ours, theirs = multiprocessing.Pipe()
        log = self.log / f"worker-{index}.log"
        inherited = [theirs.fileno()] + ([] if self.lock is None else [self.lock])
        command = [sys.executable, "-P", "-m", "experiments.worker", str(theirs.fileno()), *self.functions]
        with open(log, "ab") as output:
            process = subprocess.Popen(
                [*command, self.cpus[index]],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=inherited,
                start_new_session=True,  # so that Ctrl-C reaches the sweep alone, which passes it on
                env=os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
            )
        theirs.close()
        self.members[ours] = _Worker(process, ours, log)

    def _prepare_next(self, worker: _Worker) -> None:
        """Has each data set prepared by one worker, while the others start up; then hands out runs."""
        self.preparing = worker if self.unprepared else None
        if self.unprepared:
            self.board.note = "preparing data"
            worker.order("prepare", self.unprepared[0])
        else:
            self.board.note = ""
            for member in self.members.values():
                self._assign(member)

    def _assign(self, worker: _Worker) -> None:
        worker.run = self.schedule.take(worker.program)
        if worker.run is not None:
            worker.program = program(worker.run)
            worker.run.state = "running"
            worker.order("train", worker.run.spec, worker.run.directory, self.options)

    def _hear(self, worker: _Worker, kind: str, payload: Any) -> None:
        if kind == "refused":
            raise UserError(payload)
        if kind == "full":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), payload)
        if kind == "stopped":  # the machine's SIGTERM came to the worker first
            raise Preempted
        if kind == "prepared":
            self.unprepared.popleft()
            self._prepare_next(worker)
            return
        if worker.run is None:  # crashed while preparing
            raise UserError(f"the data could not be prepared: {payload}; see {worker.log}.")
        if kind == "progress":
            run = worker.run
            run.step, run.steps, run.loss, run.tokens_per_second, run.seconds_left = payload
            return
        if kind == "finished":
            worker.run.take(payload)
        else:
            self._crashed(worker.run, payload)
        self._assign(worker)

    def _bury(self, worker: _Worker) -> None:
        """A worker's process has died: its run has crashed, and another worker takes its place."""
        del self.members[worker.connection]
        status = worker.process.wait()
        if status == -signal.SIGTERM:
            raise Preempted
        how = f"killed by signal {-status}" if status < 0 else f"ended with status {status}"
        index = int(worker.log.stem.rpartition("-")[2])
        if worker.run is not None:
            self._crashed(worker.run, f"its process {how}" + (" (out of memory?)" if status == -9 else ""))
        elif status > 0 or self.lost == _LOST_AT_MOST:
            raise UserError(f"a worker process was {how} before it could train; see {worker.log}.")
        else:
            self.lost += 1
        if self.schedule or self.unprepared:
            self._hire(index)
            successor = list(self.members.values())[-1]
            if worker is self.preparing:
                self._prepare_next(successor)
            elif not self.unprepared:
                self._assign(successor)

    def _crashed(self, run: Run, why: str) -> None:
        run.state, run.reason = "crashed", why
        if why in self.crashes:  # no accident: spare the rest
            self.schedule.clear()
        self.crashes.add(why)

    def _show(self) -> None:
        if self.view is not None:
            self.view.update(self.board)


def _share_cores(workers: int) -> list[str]:
    """The cores each worker keeps to: an even share, or any (empty) where there are not enough to share."""
    cores = available_cores()
    if workers == 1 or len(cores) < workers:
        return [""] * workers
    share = len(cores) // workers
    return [",".join(map(str, cores[i * share : (i + 1) * share])) for i in range(workers)]

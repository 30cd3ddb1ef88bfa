"""Which runs compile and fit on a slice, how long they take there, and what helps those that do not.

Runs that share a compiled program, same model and batch, are one cell.  Cells are compiled by worker processes
(`tpu_launch.compile_check`), and each result is kept in a file, so that a check that was stopped goes on.
"""

from __future__ import annotations

import dataclasses
import os
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any

from looped.config import OptimizerConfig, RunSpec
from looped.errors import UserError
from looped.execution import Execution
from looped.jsonable import to_json
from looped.machine import available_cores
from looped.sharding import MeshAxes
from looped.slices import GIB, Slice
from tpu_launch.check_store import Store
from tpu_launch.check_worker import Worker
from tpu_launch.compile_check import Compiled, Job, require_libtpu

_IN_THE_PROGRAM = ("momentum", "adam_b1", "adam_b2", "adam_eps", "polar_dtype")
"""Fields of `OptimizerConfig` that a compiled step contains; the rest make rates, which are arguments."""

MAX_ACCUMULATE = 16
"""Parts of a batch that are tried at most."""


@dataclasses.dataclass(frozen=True)
class Cell:
    """Runs with one compiled program."""

    runs: tuple[RunSpec, ...]

    @property
    def first(self) -> RunSpec:
        return self.runs[0]

    @property
    def name(self) -> str:
        model = self.first.model
        k = "" if model.backprop_recurrences is None else f", k = {model.k}"
        return f"r = {model.recurrences}{k}, width {model.d_model}"


@dataclasses.dataclass(frozen=True)
class Checked:
    """A cell with what came of it; `remedy` is the first way of execution tried that fits, where the given did not."""

    cell: Cell
    execution: Execution
    compiled: Compiled
    fits: bool
    remedy: tuple[Execution, Compiled] | None = None
    tried: int = 0
    """Remedies compiled."""


WORKER_BYTES = 5 * GIB
"""Memory that one compiling process may take: after two of the largest models of the published grid it held 4.2 GB."""


def default_workers() -> int:
    """A process a core, as far as memory goes: compiling keeps little more than one core busy."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(1, min(len(available_cores()), memory // WORKER_BYTES))


Progress = Callable[[int, int, Checked | None], None]
"""Called with (cells done, cells, the one just done or None at the start)."""


def cells_of(specs: Sequence[RunSpec]) -> list[Cell]:
    """The distinct cells of `specs`, largest model first: what is likeliest not to fit is known soonest."""
    groups: dict[Any, list[RunSpec]] = {}
    for spec in specs:
        program = tuple(getattr(spec.optimizer, name) for name in _IN_THE_PROGRAM)
        groups.setdefault((spec.model, spec.batch_size, program), []).append(spec)
    cells = [Cell(tuple(runs)) for runs in groups.values()]
    return sorted(cells, key=lambda cell: (-cell.first.model.d_model, cell.first.model.recurrences))


def job_of(cell: Cell, slices: Slice, execution: Execution) -> Job:
    optimizer = OptimizerConfig(**{name: getattr(cell.first.optimizer, name) for name in _IN_THE_PROGRAM})
    spec = cell.first
    return Job(slices.name, slices.slices, spec.model, optimizer, spec.batch_size, to_json(execution))


def remedies(cell: Cell, execution: Execution) -> Iterator[Execution]:
    """Other ways to carry out `cell`, in order of what they cost: the mesh, what is computed again, the batch in parts.

    A mesh that was asked for is first given up.  Computing each layer's attention again costs least, then whole layers,
    then whole passes; parts of a batch make every product smaller.
    """
    model, batch = cell.first.model, cell.first.batch_size
    if execution.mesh != MeshAxes():
        execution = dataclasses.replace(execution, mesh=MeshAxes())
        yield execution
    order = ("none", "dots", "layer", "pass")
    stronger = order[order.index(execution.remat) + 1 :]
    for remat in stronger:
        if remat != "pass" or model.recurrences > 1:
            yield dataclasses.replace(execution, remat=remat)
    parts = execution.accumulate * 2
    while parts <= min(MAX_ACCUMULATE, batch):
        if batch % parts == 0:
            yield dataclasses.replace(execution, accumulate=parts)
            if "layer" in stronger:
                yield dataclasses.replace(execution, accumulate=parts, remat="layer")
        parts *= 2


class Checker:
    """Compiles jobs by `workers` processes, each result once; close it, or use it in a `with`."""

    def __init__(self, slices: Slice, store: Store, workers: int):
        if workers < 1:
            raise UserError(f"workers is {workers}; it must be at least 1.")
        require_libtpu()
        self.slices, self.store = slices, store
        self._all = [Worker() for _ in range(workers)]
        self._idle: queue.SimpleQueue[Worker] = queue.SimpleQueue()
        for worker in self._all:
            self._idle.put(worker)
        self._closed = threading.Event()

    def __enter__(self) -> Checker:
        return self

    def __exit__(self, *_: Any) -> None:
        self._closed.set()
        for worker in self._all:
            worker.kill()

    def run(
        self, cells: Sequence[Cell], execution: Execution, progress: Progress | None = None
    ) -> list[Checked]:
        """Checks every cell and returns them in the order given."""
        done: dict[int, Checked] = {}
        if progress is not None:
            progress(0, len(cells), None)
        with ThreadPoolExecutor(len(self._all)) as pool:
            left: dict[Future[Checked], int] = {
                pool.submit(self.check, cell, execution): i for i, cell in enumerate(cells)
            }
            try:
                while left:
                    for future in wait(left, return_when=FIRST_COMPLETED).done:
                        index = left.pop(future)
                        done[index] = future.result()
                        if progress is not None:
                            progress(len(done), len(cells), done[index])
            except (
                BaseException
            ):  # also Ctrl-C: the threads wait for their workers, which would go on for minutes
                for future in left:
                    future.cancel()
                self.__exit__()
                raise
        return [done[i] for i in range(len(cells))]

    def check(self, cell: Cell, execution: Execution) -> Checked:
        """Compiles one cell and, where it does not fit, remedies until one does."""
        compiled = self.compile(job_of(cell, self.slices, execution))
        checked = Checked(cell, execution, compiled, compiled.fits(self.slices))
        if checked.fits or compiled.status not in ("too large", "compiled"):
            return checked
        tried = 0
        for other in remedies(cell, execution):
            result = self.compile(job_of(cell, self.slices, other))
            tried += result.status != "refused"
            if result.fits(self.slices):
                return dataclasses.replace(checked, remedy=(other, result), tried=tried)
        return dataclasses.replace(checked, tried=tried)

    def compile(self, job: Job) -> Compiled:
        """The result of one job, from the store where it is there."""
        known = self.store.get(job)
        if known is not None:
            return known
        worker = self._idle.get()
        try:
            result = worker.compile(job)
        finally:
            self._idle.put(worker)
        # A worker that died is no property of the program, nor one that was stopped from here.
        if result.status != "failed" or result.compile_seconds is not None:
            self.store.put(job, result)
        return result

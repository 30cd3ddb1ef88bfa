"""A process that trains the runs it is handed, one after another, so that they share compiled programs.

Started by `experiments.sweep`.  Its orders arrive on one end of a duplex pipe, its reports leave by it.
When the other end closes, because the sweep ends, is interrupted or is killed, the run in hand is
interrupted as by Ctrl-C, which lets it save; so it does on a SIGTERM of its own.  Standard output and error are a log
file.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import queue
import signal
import sys
import threading
import time
import traceback
from multiprocessing.connection import Connection
from typing import Any

from experiments.attempts import attempt
from looped.config import RunSpec
from looped.credentials import without
from looped.errors import UserError, first_line, out_of_room
from looped.leftovers import check_machine
from looped.machine import keep_freed_memory
from looped.preemption import raised_on_sigterm

_REPORT_SECONDS = 0.5  # between two reports of one run's progress


def main(connection_fd: int, train: str, prepare: str, cpus: str) -> None:
    """Carries out orders until the connection closes.

    `train` and `prepare` are functions as `module:name`; `cpus` lists the cores to keep to (empty:
    all), which also sizes XLA's thread pool and must therefore come before JAX is imported.
    """
    if cpus and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, map(int, cpus.split(",")))
    keep_freed_memory()
    connection = Connection(connection_fd)
    orders: queue.SimpleQueue[tuple[str, Any] | None] = queue.SimpleQueue()
    busy = threading.Event()
    threading.Thread(target=_listen, args=(connection, orders, busy), daemon=True).start()
    try:
        with raised_on_sigterm():
            check_machine(joined=False)  # before JAX takes the devices
            functions = {"train": _load(train), "prepare": _load(prepare)}
            while (order := orders.get()) is not None:
                kind, arguments = order
                report = _carry_out(connection, functions[kind], kind, arguments)
                _return_memory()
                busy.clear()  # before the report, which brings the next order
                _report(connection, *report)
    except UserError as error:
        _report(connection, "refused", str(error))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr, flush=True)
        _report(connection, "stopped", None)


def _load(path: str) -> Any:
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


def _return_memory() -> None:
    """Hands back what compilation freed, which glibc would keep: of a first run's 952 MB, 601 MB stay."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def _listen(connection: Connection, orders: queue.SimpleQueue, busy: threading.Event) -> None:
    try:
        while True:
            order = connection.recv()
            busy.set()
            orders.put(order)
    except (EOFError, OSError):
        orders.put(None)
        if busy.is_set():
            os.kill(os.getpid(), signal.SIGINT)


def _report(connection: Connection, kind: str, payload: Any) -> None:
    with contextlib.suppress(OSError):  # nobody listens any more; `_listen` interrupts
        connection.send((kind, payload))


def _carry_out(connection: Connection, function: Any, kind: str, arguments: tuple) -> tuple[str, Any]:
    """Returns (`finished`, record), (`prepared`, None), (`refused`, why: bad input), (`crashed`, why) or, for data that
    the disk has no room for, (`full`, where).

    A run that has crashed too often is finished, as failed.
    """
    try:
        if kind == "prepare":
            function(*arguments)
            return "prepared", None
        spec, run_dir, options = arguments
        print(f"\n== {spec.run_id}: {spec.arm}, r = {spec.model.recurrences}", file=sys.stderr, flush=True)
        options = {"progress": _Progress(connection, spec)} | options
        return "finished", attempt(spec, run_dir, function, options=options)
    except UserError as error:
        return "refused", str(error)
    except Exception as error:
        print(without(traceback.format_exc()), file=sys.stderr, flush=True)
        if kind == "prepare" and (full := out_of_room(error)) is not None:
            return "full", full.filename
        return "crashed", first_line(error)


class _Progress:
    """Reports a run's progress, not more often than is worth showing."""

    def __init__(self, connection: Connection, spec: RunSpec):
        self._connection, self._run_id, self._last = connection, spec.run_id, float("-inf")

    def __call__(
        self, step: int, steps: int, loss: float, tokens_per_second: float, seconds_left: float
    ) -> None:
        now = time.monotonic()
        if now - self._last >= _REPORT_SECONDS or step == steps:
            self._last = now
            fields = (int(step), int(steps), float(loss), float(tokens_per_second), float(seconds_left))
            _report(self._connection, "progress", fields)


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:5])

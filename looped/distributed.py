"""Several processes that train one run together, such as the hosts of a TPU slice.

With one process everything here is immediate, so callers need not tell the cases apart.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from looped.errors import UserError, first_line

T = TypeVar("T")
COORDINATOR, PROCESSES, PROCESS_ID = "JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"
"""Environment variables that say who the processes are where the cluster does not: on plain machines."""


def initialize(timeout_seconds: int = 300) -> None:
    """Joins this process with the others; before JAX is used for anything.

    Who they are is found by JAX on Cloud TPU, GKE and Slurm, and elsewhere is said by the environment variables
    JAX_COORDINATOR_ADDRESS (host:port of process 0), JAX_NUM_PROCESSES and JAX_PROCESS_ID.  Raises `UserError` where
    neither knows.  Where not all have come after `timeout_seconds`, it says so and ends the process with status 1: JAX
    would abort it with a C++ stack trace, and no exception can be raised meanwhile.
    """
    if jax.distributed.is_initialized():
        return
    address, count, own = (os.environ.get(name) for name in (COORDINATOR, PROCESSES, PROCESS_ID))
    options: dict[str, Any] = {"initialization_timeout": timeout_seconds + 60}
    who = "the others"
    if count is not None or own is not None:
        if address is None or count is None or own is None:
            raise UserError(
                f"of {COORDINATOR}, {PROCESSES} and {PROCESS_ID} some are set and some are not ({address}, {count},"
                f" {own}); set all three."
            )
        number, index = _whole(PROCESSES, count), _whole(PROCESS_ID, own)
        if not index < number:
            raise UserError(f"{PROCESS_ID} is {index} of {PROCESSES} {number}; it must be below that.")
        options |= {"coordinator_address": address, "num_processes": number, "process_id": index}
        who = f"all {number} processes, of which this is {index}, at {address}"
    timer = threading.Timer(timeout_seconds, _give_up, (who, timeout_seconds))
    timer.daemon = True
    timer.start()
    try:
        jax.distributed.initialize(**options)
    except ValueError as error:  # JAX found no cluster
        raise UserError(
            f"the other processes are not known ({first_line(error)}); set {COORDINATOR}, {PROCESSES} and {PROCESS_ID}."
        ) from None
    except RuntimeError as error:
        raise UserError(f"{who} did not come together ({first_line(error)}); {_MISSING}.") from None
    finally:
        timer.cancel()


_MISSING = (
    "see that each was started, that it reaches the coordinator's port, and that no process of an earlier start is"
    " left"
)


def _give_up(who: str, seconds: int) -> None:
    print(f"looped: {who} did not come together within {seconds} s; {_MISSING}.", file=sys.stderr, flush=True)
    os._exit(1)


def _whole(name: str, value: str) -> int:
    try:
        return int(value)
    except ValueError:
        raise UserError(f"{name} is {value!r}; it must be a whole number.") from None


def is_writer() -> bool:
    """Whether this process is the one that writes records and everything else that is written once."""
    return jax.process_index() == 0


def from_writer(make: Callable[[], T]) -> T:
    """What `make` returns on the writer, given to every process; it must survive JSON.

    A `UserError` that it raises there is raised everywhere.
    """
    if jax.process_count() == 1:
        return make()
    answer, error = {}, None
    if is_writer():
        try:
            answer = {"value": make()}
        except UserError as raised:
            answer, error = {"error": str(raised)}, raised
        except BaseException as raised:  # the others must not wait for ever
            answer, error = {"error": f"{type(raised).__name__} in the process that writes: {raised}"}, raised
    text = np.frombuffer(json.dumps(answer).encode(), np.uint8)
    length = int(multihost_utils.broadcast_one_to_all(np.int32(len(text))))
    if not is_writer():
        text = np.zeros(length, np.uint8)
    answer = json.loads(np.asarray(multihost_utils.broadcast_one_to_all(text)).astype(np.uint8).tobytes())
    if error is not None:
        raise error
    if "error" in answer:
        raise UserError(answer["error"])
    return answer["value"]


def any_process(flag: bool) -> bool:
    """Whether `flag` is set on at least one process; all must ask at the same point."""
    if jax.process_count() == 1:
        return flag
    return bool(np.any(multihost_utils.process_allgather(np.bool_(flag))))


def barrier(name: str) -> None:
    """Waits until every process is here."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(name)


def check_same(what: str, value: str) -> None:
    """Raises `UserError` unless every process has this `value` of `what`."""
    first = from_writer(lambda: value)
    if any_process(value != first):
        raise UserError(
            f"{what} is not the same on all processes (here {value[:12]}, in the process that writes {first[:12]});"
            " give every machine the same files and package versions."
        )

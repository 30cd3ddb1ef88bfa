"""Being told to stop: by a signal, or by the cluster, to all processes of a run at one and the same step.

A machine that is about to be taken away gets SIGTERM and some seconds, 30 on Cloud TPU.  The state is saved within
them, and the process ends with status REQUEUE, which tells whoever started it to start it again.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
from collections.abc import Iterator
from typing import Any

REQUEUE = 75
"""Exit status after SIGTERM: saved, start it again.  EX_TEMPFAIL of sysexits.h; Ctrl-C stays 130."""
STOPPED = "stopped by SIGTERM; the same command goes on from what is there (status 75: start it again)"

_polls = itertools.count(1)
"""Of this process: later runs go on counting, since the cluster's answer names a number."""


class Preempted(KeyboardInterrupt):
    """SIGTERM, here or on another machine of the run; what had to be saved is saved."""


class Preemption:
    """Whether a training loop is to stop; a context that takes the signals while it lasts.

    One process alone: Ctrl-C or SIGTERM.  A signal in the middle of a step would lose donated state, so it is only
    noted; the second Ctrl-C acts at once.  One that came after the last question acts when the context ends.  Outside
    the main thread signals are left alone.

    Processes joined by `jax.distributed`: SIGTERM at any of them is carried to all, and each is told to stop at the
    same poll, after a second or two (`multihost_utils.reached_preemption_sync_point`).  XLA has taken SIGTERM then, so
    this leaves it alone; Ctrl-C is passed on as SIGTERM.
    """

    def __enter__(self) -> Preemption:
        import jax

        self._joined = jax.distributed.is_initialized()
        self._received: list[int] = []
        self._told = False
        self._previous: dict[int, Any] = {}
        with contextlib.suppress(ValueError):
            for number in (signal.SIGINT,) if self._joined else (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        if self._received and kind is None and not self._told and not self._joined:
            os.kill(os.getpid(), self._received[0])

    def _note(self, number: int, frame: Any) -> None:
        del frame
        self._received.append(number)
        signal.signal(signal.SIGINT, self._act)
        if self._joined:
            os.kill(os.getpid(), signal.SIGTERM)

    def _act(self, number: int, frame: Any) -> None:
        del number, frame
        self._told = True
        raise KeyboardInterrupt

    def requested(self) -> bool:
        """Whether to save and stop now.  Ask once a step: joined processes must all ask equally often."""
        if not self._joined:
            self._told = bool(self._received)
            return self._told
        from jax.experimental.multihost_utils import reached_preemption_sync_point

        return reached_preemption_sync_point(next(_polls))

    def stop(self) -> KeyboardInterrupt:
        """What to raise once the state is saved: `KeyboardInterrupt` after Ctrl-C here, `Preempted` otherwise."""
        return KeyboardInterrupt() if signal.SIGINT in self._received else Preempted()


@contextlib.contextmanager
def raised_on_sigterm() -> Iterator[None]:
    """Has SIGTERM raise `Preempted` in the main thread, once; for a process that waits, compiles or leads others.

    A `Preemption` inside takes the signal for as long as it lasts.  Not for processes joined by `jax.distributed`.
    """

    def stop(number: int, frame: Any) -> None:
        del frame
        signal.signal(number, signal.SIG_IGN)  # a second one must not break off the saving
        raise Preempted

    previous = None
    with contextlib.suppress(ValueError):  # outside the main thread
        previous = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        if previous is not None:
            signal.signal(signal.SIGTERM, previous)

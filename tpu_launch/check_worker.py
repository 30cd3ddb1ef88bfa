"""A process that compiles, as its parent sees it."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
from typing import IO

from looped.jsonable import from_json, to_json
from tpu_launch.compile_check import ENVIRONMENT, Compiled, Job, involuntary_rematerialisations

ATTEMPTS = 2
ARGUMENTS = ("-P", "-m", "tpu_launch.compile_check")
"""Of Python, to start the worker: without the folder that it is in, whose files might be taken for packages."""


class Worker:
    """Starts when it is first needed, and again after it died; it keeps what JAX and libtpu have loaded."""

    def __init__(self):
        self._process: subprocess.Popen[str] | None = None
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - as long as this object
        self._killed = False

    def compile(self, job: Job) -> Compiled:
        """Compiles `job`; a process that dies over it is given one more chance, then the result says how it ended."""
        ended = ""
        for _ in range(ATTEMPTS):
            if self._killed:
                break
            process = self._running()
            assert process.stdin is not None
            assert process.stdout is not None
            before = os.fstat(self._log.fileno()).st_size
            try:
                process.stdin.write(json.dumps(to_json(job)) + "\n")
                process.stdin.flush()
                answer = process.stdout.readline()
            except BrokenPipeError:
                answer = ""
            if answer.endswith("\n"):
                result = from_json(Compiled, json.loads(answer))
                return dataclasses.replace(
                    result, involuntary_remat=involuntary_rematerialisations(self._text(before))
                )
            ended = _ending(process.wait(), self._text(before))
            self._process = None
        return Compiled("failed", f"the compiling process {ended or 'was stopped'}")

    def kill(self) -> None:
        """Ends the process at once, and for good."""
        self._killed = True
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def _running(self) -> subprocess.Popen[str]:
        if self._process is None:
            root = str(pathlib.Path(__file__).parents[1])
            path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
            self._process = subprocess.Popen(
                [sys.executable, *ARGUMENTS],
                env=os.environ | ENVIRONMENT | {"PYTHONPATH": path},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,  # file descriptor 2, on which C++ prints
                text=True,
                encoding="utf-8",
                start_new_session=True,  # Ctrl-C is for the parent to deal with
            )
        return self._process

    def _text(self, start: int) -> str:
        """What the process has printed on standard error from `start` bytes on."""
        size = os.fstat(self._log.fileno()).st_size - start
        return os.pread(self._log.fileno(), size, start).decode("utf-8", "replace")


def _ending(code: int, log: str) -> str:
    """How a process ended, in words."""
    if code < 0:
        name = signal.Signals(-code).name
        memory = "; there may be too little memory, fewer --workers need less" if name == "SIGKILL" else ""
        return f"was ended by {name} twice{memory}"
    last = next((line for line in reversed(log.splitlines()) if line.strip()), "nothing said")
    return f"ended with status {code} twice: {last.strip()[:300]}"

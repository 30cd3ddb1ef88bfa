"""On a machine: trains a share, starts it again when it was told to stop or failed, and says how far it is.

`python -m tpu_launch.machine --folder SWEEP/.launch --share 3/8 -- sweep run PRESET …`, as the start-up script does.
Status of the sweep: 0 ends it; 75 (told to stop, saved) starts it again; anything else counts as a failure, and after
three the share is given up.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import os
import pathlib
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator

from etils import epath

from looped import leftovers
from looped.credentials import hidden, without
from looped.preemption import REQUEUE
from tpu_launch import marks
from tpu_launch.marks import Mark

FAILURES = 3
PAUSE = float(os.environ.get("LOOPED_RETRY_SECONDS", 30.0))
"""Before the first start after a failure, in seconds; twice as long before the next."""
SIGN_SECONDS = 60.0
"""Between two signs of life of a share."""
LOG_LINES = 400
_METADATA = "http://{}/computeMetadata/v1/instance/attributes/{}"
_VARIABLES = ("MEGASCALE_COORDINATOR_ADDRESS", "MEGASCALE_NUM_SLICES", "MEGASCALE_SLICE_ID", "MEGASCALE_PORT")


def main(argv: list[str] | None = None) -> int:
    """Returns the status of the sweep that ended it: 0 when the share is done."""
    parser = argparse.ArgumentParser(prog="python -m tpu_launch.machine")
    parser.add_argument("--folder", required=True)
    parser.add_argument("--share", required=True)
    parser.add_argument("--slices", type=int, default=1)
    parser.add_argument("--once", action="store_true")
    parser.add_argument("--release", default="")
    parser.add_argument("--hide", nargs="*", default=[])
    parser.add_argument("command", nargs="+")
    given = parser.parse_args(argv)
    share, shares = map(int, given.share.split("/"))
    machine = Machine(given.folder, share, shares, hide=[os.environ.get(name, "") for name in given.hide])
    signal.signal(signal.SIGTERM, machine.stop)
    environment = dict(os.environ)
    if given.slices == 1:
        drop_multi_slice(environment)
    status = machine.work([sys.executable, "-m", "looped", *given.command], environment, once=given.once)
    if given.release and machine.over and machine.first:
        print(f"looped: {given.release}", flush=True)
        subprocess.run(shlex.split(given.release), stdin=subprocess.DEVNULL, check=False)
    return status


class Machine:
    """One machine's part in a share.  The first machine of a share writes its mark; the others only work."""

    def __init__(self, folder: str, share: int, shares: int, hide: list[str] | None = None):
        self.folder, self.share, self.shares = folder, share, shares
        self.first = is_first()
        self.over = False
        self._hidden = [text for text in hide or [] if text]
        self._process: subprocess.Popen | None = None
        self._stopping = threading.Event()
        self._lines: collections.deque[str] = collections.deque(maxlen=LOG_LINES)

    def stop(self, number: int, frame: object) -> None:
        """On SIGTERM: passes it on; once the sweep has saved, `work` returns."""
        del number, frame
        self._stopping.set()
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)

    def work(self, command: list[str], environment: dict[str, str], once: bool = False) -> int:
        """Runs `command` until it is done, was told to stop from outside, or has failed three times."""
        before = self._read()
        failures = before.failures if before else 0
        if before is not None and before.over:
            self.over = True
            print(f"looped: share {self.share}/{self.shares} is {before.state} already", flush=True)
            return 0 if before.state == "done" else 1
        while True:
            clear_lock()
            with self._signs_of_life(failures):
                status = self._run(command, environment)
            if status == 0:
                return self._end("done", failures, 0)
            if self._stopping.is_set():
                self._mark("stopped", failures, status)
                return status
            if status == REQUEUE:
                self._mark("stopped", failures, status)
            else:
                failures += 1
                if failures >= FAILURES:
                    return self._end("failed", failures, status)
                self._mark("stopped", failures, status)
            if once:
                return status
            pause = 1.0 if status == REQUEUE else PAUSE * 2 ** (failures - 1)
            print(f"looped: status {status}; starting again in {pause:.0f} s", flush=True)
            if self._stopping.wait(pause):
                return status

    def _run(self, command: list[str], environment: dict[str, str]) -> int:
        print(f"looped: {shlex.join(command)}", flush=True)
        self._process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        if self._stopping.is_set():  # told between two starts
            self._process.send_signal(signal.SIGTERM)
        assert self._process.stdout is not None
        for line in self._process.stdout:
            for text in self._hidden:
                line = hidden(line, text)
            line = without(line)
            self._lines.append(line)
            print(line, end="", flush=True)
        status = self._process.wait()
        return status if status >= 0 else 128 - status  # as a shell says: 137 after SIGKILL

    @contextlib.contextmanager
    def _signs_of_life(self, failures: int) -> Iterator[None]:
        """Marks the share as running, now and again as long as the context lasts."""
        ended = threading.Event()

        def tell() -> None:
            self._mark("running", failures)
            while not ended.wait(SIGN_SECONDS):
                self._mark("running", failures)

        thread = threading.Thread(target=tell, daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()  # so that no sign of it comes after its end

    def _read(self) -> Mark | None:
        try:
            return marks.read(self.folder, self.share, self.shares)
        except Exception as error:  # of whichever file system it is; the sweep says more of it
            print(f"looped: {self.folder} cannot be read: {error}", flush=True)
            return None

    def _end(self, state: str, failures: int, status: int) -> int:
        self.over = True
        self._mark(state, failures, status)
        if self.first:
            log = epath.Path(self.folder) / "logs" / f"{self.share}-of-{self.shares}.log"
            self._carefully(
                lambda: (log.parent.mkdir(parents=True, exist_ok=True), log.write_text("".join(self._lines)))
            )
        return status

    def _mark(self, state, failures: int, status: int | None = None) -> None:
        if not self.first:
            return
        said = next((line.strip() for line in reversed(self._lines) if line.strip()), None)
        reason = said[-300:] if said and status else None
        mark = Mark(self.share, self.shares, state, failures, status, reason, socket.gethostname())
        self._carefully(lambda: marks.write(self.folder, mark))

    def _carefully(self, write: Callable[[], object]) -> None:
        """Training goes on where a mark cannot be written; the next one may be."""
        for attempt in range(3):
            try:
                write()
                return
            except Exception as error:  # of whichever file system it is
                print(f"looped: {self.folder} cannot be written: {error}", flush=True)
                time.sleep(attempt)


def clear_lock(lock: pathlib.Path = leftovers.LOCK) -> None:
    """Removes libtpu's lock file where no process holds it, and says so; libtpu may be kept out by it."""
    if not lock.exists():
        return
    own = leftovers.holder(lock)
    if own is not None:
        print(f"looped: {lock} is held by process {own}; left alone", flush=True)
        return
    try:
        lock.unlink()
        print(f"looped: removed {lock}, which an earlier process left and none holds", flush=True)
    except OSError as error:
        print(
            f"looped: {lock} is held by no process and cannot be removed ({error}): sudo rm {lock}",
            flush=True,
        )


def drop_multi_slice(environment: dict[str, str]) -> None:
    """Takes the variables of several slices out of `environment`, where there is one, and says which there were."""
    left = [name for name in _VARIABLES if environment.pop(name, None) is not None]
    if left:
        print(f"looped: dropped {', '.join(left)}, left from training over several slices", flush=True)


def is_first() -> bool:
    """Whether this is the first machine of its share, by what the cluster says; alone where nothing does."""
    for variables in (("JAX_PROCESS_ID",), ("TPU_WORKER_ID", "MEGASCALE_SLICE_ID")):
        if os.environ.get(variables[0]) is not None:
            return all(os.environ.get(name, "0") == "0" for name in variables)
    if _metadata("agent-worker-number") not in (None, "0"):
        return False
    for line in (_metadata("tpu-env") or "").splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "MEGASCALE_SLICE_ID" and value.strip().strip("'\"") not in ("", "0"):
            return False
    return True


def _metadata(key: str) -> str | None:
    """An attribute of this machine on Google Cloud (JAX reads the same ones); None anywhere else."""
    server = os.environ.get("GCE_METADATA_IP", "metadata.google.internal")
    request = urllib.request.Request(_METADATA.format(server, key), headers={"Metadata-Flavor": "Google"})
    try:
        with urllib.request.urlopen(request, timeout=5) as answer:
            return answer.read().decode().strip()
    except (urllib.error.URLError, OSError):
        return None


if __name__ == "__main__":
    sys.exit(main())

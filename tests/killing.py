"""`looped train` in a process of its own, killed at chosen moments, and what its folder must hold in the end."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import numpy as np

from looped.record import RunRecord, read_record
from looped.tracking import FILE

PHASES = ("start", "compilation", "step", "save", "evaluation", "last save", "record")
"""Start: imports, data and restoring.  Save and last save: Orbax is writing a checkpoint beside the training, and
beside the end.  Record: the last checkpoint is whole and the record does not yet say that the run is done."""
DEVICES = 2
_POLL = 0.002
_LIMIT = 600.0  # seconds that no phase takes on any machine


@dataclasses.dataclass(frozen=True)
class Job:
    """One small run; its folder is said when it starts."""

    data: str
    steps: int

    def start(self, directory: pathlib.Path, save_every: float, cached: bool = False) -> Watched:
        """Starts it, or goes on with it; `cached` programs are read from beside the folder, sooner than compiled."""
        environment = os.environ | {
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": f"--xla_force_host_platform_device_count={DEVICES}",
            "PYTHONPATH": str(pathlib.Path(__file__).parents[1]),
        }
        if cached:
            environment |= {
                "JAX_COMPILATION_CACHE_DIR": str(directory.parent / "compiled"),
                "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1",
            }
        return Watched(self, directory, self.command(directory, save_every), environment)

    def command(self, directory: pathlib.Path, save_every: float) -> list[str]:
        options = {
            "output": directory,
            "save-every-seconds": save_every,
            "source": self.data,
            "steps": self.steps,
            "sequence-length": 32,
            "d-model": 16,
            "n-heads": 1,
            "recurrent-layers": 1,
            "recurrences": 2,
            "polar-dtype": "float32",
            "reference-batch-tokens": 256,
            "reference-tokens": 50_000,
            "batch-size": 8,
            "validation-sequences": 256,
        }
        words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        return [sys.executable, "-m", "looped", "train", *words]


class Watched:
    """One start of a run, seen through its folder alone."""

    def __init__(
        self, job: Job, directory: pathlib.Path, command: list[str], environment: dict[str, str]
    ) -> None:
        self._directory, self._steps = directory, job.steps
        self._curve = self._curve_file()
        self.saved_before = max(self._checkpoints()[0], default=0)
        with open(directory.parent / f"{directory.name}.log", "ab") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=log, env=environment, start_new_session=True
            )

    def phase(self) -> str:
        """One of PHASES, or "done"."""
        if self._curve_file() in (None, self._curve):  # it is written afresh just before the first step
            return "start"
        saved, saving = self._checkpoints()
        last = self._last_step()
        if saving:
            return "last save" if self._steps in saving else "save"
        if self._steps in saved:
            record = read_record(self._directory)
            if record is not None and record.status != "running":
                return "done"
            return "evaluation" if self.saved_before == self._steps else "record"
        if last <= self.saved_before:
            return "compilation"
        return "evaluation" if last >= self._steps - 1 else "step"

    def got_further(self) -> bool:
        """Whether this start has saved a checkpoint."""
        return max(self._checkpoints()[0], default=0) > self.saved_before

    def wait_for(self, reached: Callable[[], bool]) -> bool:
        """Waits until `reached` or until the process ends; returns whether it still runs."""
        began = time.monotonic()
        while self.process.poll() is None:
            if reached():
                return True
            assert time.monotonic() - began < _LIMIT, f"still in {self.phase()} after {_LIMIT:.0f} s"
            time.sleep(_POLL)
        return False

    def kill(self) -> str | None:
        """Kills the process group; returns the phase that it was in, None where it had ended by itself."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        return self.phase() if self.process.wait() == -signal.SIGKILL else None

    def _curve_file(self) -> int | None:
        try:
            return (self._directory / FILE).stat().st_ino
        except FileNotFoundError:
            return None

    def _last_step(self) -> int:
        lines = (self._directory / FILE).read_text().splitlines(keepends=True)
        whole = [line for line in lines if line.endswith("\n")]
        return json.loads(whole[-1])["step"] if whole else 0

    def _checkpoints(self) -> tuple[set[int], set[int]]:
        """The steps of those that are whole and of those that are being written."""
        try:
            names = os.listdir(self._directory / "checkpoints")
        except FileNotFoundError:
            names = []
        partial = {int(name.partition(".")[0]) for name in names if ".orbax-checkpoint-tmp" in name}
        return {int(name) for name in names if name.isdigit()}, partial


def prepare(folder: pathlib.Path) -> str:
    """The folder of a small data set of numbers counted upwards."""
    from corpora import Counting

    from looped.data import corpus
    from looped.data.loader import prepare

    os.environ["LOOPED_DATA"] = str(folder)
    corpus.SOURCES["counting"] = Counting
    return str(prepare("counting", 32).directory)


def undisturbed(job: Job, directory: pathlib.Path, save_every: float) -> dict[str, float]:
    """Trains the run and returns the longest time that each phase took without a break, and "a step", in seconds."""
    watched = job.start(directory, save_every)
    longest, training = dict.fromkeys((*PHASES, "a step"), 0.0), 0.0
    phase, since = "start", time.monotonic()
    try:
        while watched.process.poll() is None:
            now, found = time.monotonic(), watched.phase()
            if found != phase:
                training += (now - since) * (phase in ("step", "save"))
                longest[phase] = max(longest.get(phase, 0.0), now - since)
                phase, since = found, now
            time.sleep(_POLL)
    finally:
        watched.kill()
    assert watched.process.returncode == 0, f"the undisturbed run ended with {watched.process.returncode}"
    return longest | {"a step": training / job.steps}


def kill_in(
    phase: str,
    job: Job,
    directory: pathlib.Path,
    *,
    save_every: float,
    longest: float,
    chance: random.Random,
    further: bool = True,
) -> str | None:
    """Starts the run, kills it in `phase`, up to `longest` seconds after its beginning, and returns the phase hit.

    It is killed where the phase ends sooner, too, and may then be in the next.
    Steps and saves wait for a checkpoint of this start first, where `further` is true, so that the run gets on.
    """
    before = read_record(directory)
    watched = job.start(directory, save_every, cached=phase not in ("start", "compilation"))
    further = further and phase in ("step", "save")
    try:
        runs = watched.wait_for(
            lambda: (not further or watched.got_further()) and watched.phase() in (phase, "done")
        )
        due = time.monotonic() + chance.uniform(0, longest)
        if runs:
            watched.wait_for(lambda: time.monotonic() > due or watched.phase() != phase)
    finally:
        hit = watched.kill()
    after = read_record(directory)
    if before is not None:
        assert after is not None, f"a kill in {hit} lost the record"
        assert after.started_at == before.started_at, f"a kill in {hit} began the record again"
    return hit


def finish(job: Job, directory: pathlib.Path) -> None:
    """Lets the run come to its end."""
    watched = job.start(directory, save_every=60)
    try:
        watched.wait_for(lambda: False)
    finally:
        watched.kill()
    assert watched.process.returncode == 0, f"the run ended with {watched.process.returncode}: see its log"


def curve(directory: pathlib.Path) -> list[tuple[int, float, float]]:
    lines = map(json.loads, (directory / FILE).read_text().splitlines())
    return [(line["step"], line["loss"], line["learning_rate_multiplier"]) for line in lines]


def lasting(record: RunRecord | None) -> dict:
    """What of a record no kill may change: all but the times."""
    assert record is not None
    times = ("started_at", "updated_at", "train_seconds")
    return {name: value for name, value in dataclasses.asdict(record).items() if name not in times}


def arrays(directory: pathlib.Path, step: int) -> dict[str, np.ndarray]:
    """By name, every array of a checkpoint: parameters, the optimizer's state and the step."""
    import jax
    import orbax.checkpoint as ocp

    with ocp.StandardCheckpointer() as checkpointer:
        state = checkpointer.restore((directory / "checkpoints" / str(step) / "state").absolute())
    return {
        jax.tree_util.keystr(path): np.asarray(leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(state)
    }


def check_equal(job: Job, wanted: pathlib.Path, found: pathlib.Path) -> int:
    """Raises `AssertionError` unless both folders hold one run bit for bit; returns the bytes of state compared."""
    assert curve(found) == curve(wanted), "the curves differ"
    assert [step for step, *_ in curve(found)] == list(range(1, job.steps + 1)), (
        "a step is missing or there twice"
    )
    assert lasting(read_record(found)) == lasting(read_record(wanted)), "the records differ"
    left = {name for name in os.listdir(found) if not name.startswith(".")} - set(os.listdir(wanted))
    assert not left, f"{left} is left in the folder"
    assert len(os.listdir(found / "checkpoints")) <= 2, "checkpoints or parts of them were left"
    states = [arrays(folder, job.steps) for folder in (wanted, found)]
    assert states[0].keys() == states[1].keys()
    for name, value in states[0].items():
        other = states[1][name]
        assert (value.dtype, value.shape) == (other.dtype, other.shape), name
        assert value.tobytes() == other.tobytes(), f"{name} of the last checkpoint differs"
    said = (found.parent / f"{found.name}.log").read_text()
    for word in ("damaged", "Traceback", "not tracked"):
        assert word not in said, f"{word!r} in the log of {found.name}"
    return sum(value.nbytes for value in states[0].values())

"""A sweep whose processes are killed at random moments ends with the losses, bit for bit, of an undisturbed one.

    python tests/benchmarks/sweep_kills.py [SEED]

Twelve small real runs are trained twice, by two shares at once, through the command line.  The second time, a
supervisor starts each share again whenever it ends otherwise than with status 0, and at random moments a process of
the sweep, the command or its worker, gets SIGKILL or SIGTERM: at least 30 in all.  Compared are every loss, every curve
and the table that `looped sweep collect` makes.

How long a start takes is measured first, and the runs are made so long, and the moments so far apart, that about half
of the kills hit a start and half the training, on a machine of any speed.

Seed 1, on two cores that other work used as well: 72 s undisturbed, 131 s with 30 kills (17 by SIGKILL), 38
starts of a run, no bit of a loss and no point of a curve different; 3:54 minutes in all.
"""

from __future__ import annotations

import collections
import contextlib
import csv
import functools
import json
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time

KILLS = 30
SHARES = ("1/2", "2/2")
CALIBRATION_STEPS = 200
KINDS = (signal.SIGKILL, signal.SIGTERM)
HERE = pathlib.Path(__file__).parent


def command(name: str, *arguments: str) -> int:
    """`looped` itself, with a preset of twelve runs and saves every half second."""
    from experiments import presets, sweep
    from looped.__main__ import main

    presets.PRESETS["kills"] = presets.Preset("kills", "twelve runs", specs)
    sweep.run = functools.partial(sweep.run, train="sweep_kills:train")
    return main([*name.split(), *arguments])


def specs():
    from looped.config import DataConfig, ModelConfig, OptimizerConfig, RunSpec

    base = int(os.environ["KILLS_STEPS"])
    return tuple(
        RunSpec(
            model=ModelConfig(
                sequence_length=32, d_model=16, n_heads=1, recurrent_layers=1, recurrences=recurrences
            ),
            optimizer=OptimizerConfig(
                polar_dtype="float32", reference_batch_tokens=128, reference_tokens=50_000
            ),
            data=DataConfig(source=os.environ["KILLS_DATA"]),
            steps=steps,
            seed=seed,
            batch_size=4,
            validation_sequences=64,
        )
        for recurrences in (1, 2)
        for steps in (base, base + base // 2)
        for seed in (0, 1, 2)
    )


def train(spec, run_dir, **options):
    from looped.train import train

    return train(spec, run_dir, save_every_seconds=0.5, **options)


def prepare(folder: pathlib.Path) -> str:
    """A small data set of numbers counted upwards."""
    sys.path[:0] = [str(HERE.parents[1]), str(HERE.parent)]
    from corpora import Counting

    from looped.data import corpus
    from looped.data.loader import prepare

    os.environ["LOOPED_DATA"] = str(folder / "data")
    corpus.SOURCES["counting"] = Counting
    return str(prepare("counting", 32).directory)


def start(directory: pathlib.Path, share: str) -> subprocess.Popen:
    """A share's command, kept to a core of its own where there are enough."""
    arguments = ["sweep run", "kills", "--output", str(directory), "--share", share, "--retry-failed"]
    cores = sorted(os.sched_getaffinity(0))
    core = {cores[int(share[0]) % len(cores)]}
    with open(directory.parent / f"{directory.name}-{share[0]}.log", "ab") as log:
        return subprocess.Popen(
            [sys.executable, __file__, "--command", *arguments],
            stdout=log,
            stderr=log,
            preexec_fn=lambda: os.sched_setaffinity(0, core),
        )


def calibrate(folder: pathlib.Path) -> tuple[float, float]:
    """Seconds from the start of a command to its first step, with the programs compiled before, and seconds a step."""
    os.environ["KILLS_STEPS"] = str(CALIBRATION_STEPS)
    directory = folder / "calibration"
    times = []
    for _ in range(2):  # the first time compiles
        shutil.rmtree(directory, ignore_errors=True)
        began = time.monotonic()
        process = start(directory, SHARES[0])
        try:
            times = [_seconds_until(directory, steps) for steps in (1, CALIBRATION_STEPS)]
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait()
        first = times[0] - began
    return first, (times[1] - times[0]) / CALIBRATION_STEPS


def _seconds_until(directory: pathlib.Path, steps: int) -> float:
    """The time at which the first run of the sweep has a curve of so many steps."""
    while True:
        for curve in directory.glob("*/metrics.jsonl"):
            if curve.read_bytes().count(b"\n") >= steps:
                return time.monotonic()
        time.sleep(0.02)


def workers(parent: int) -> list[int]:
    found = []
    for stat in pathlib.Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == parent and fields[0] != "Z":
            found.append(int(stat.parent.name))
    return found


def undisturbed(directory: pathlib.Path) -> None:
    processes = [start(directory, share) for share in SHARES]
    statuses = [process.wait() for process in processes]
    assert statuses == [0, 0], f"the undisturbed sweep ended with {statuses}"


class Supervised:
    """One share: started again whenever it ends without being done, killed at random moments until told otherwise."""

    def __init__(self, directory: pathlib.Path, share: str, scale: float, chance: random.Random):
        self.directory, self.share, self.scale, self.chance = directory, share, scale, chance
        self.statuses: dict[int, int] = {}
        self.killed: dict[str, int] = {}
        self.done = False
        self._start()

    def _start(self) -> None:
        self.process = start(self.directory, self.share)
        self._plan()

    def _plan(self) -> None:
        self.due = time.monotonic() + self.chance.uniform(0, 2 * self.scale)

    def look(self) -> None:
        status = self.process.poll()
        if status is None:
            return
        self.statuses[status] = self.statuses.get(status, 0) + 1
        assert status != 2, "refused: see the log"
        self.done = status == 0
        if not self.done:
            self._start()

    def kill(self) -> None:
        """Kills a process of this share if it is due."""
        if self.done or time.monotonic() < self.due:
            return
        self._plan()
        number = self.chance.choice(KINDS)
        target = self.chance.choice([self.process.pid, *workers(self.process.pid)[:1]])
        with contextlib.suppress(ProcessLookupError):
            os.kill(target, number)
            what = f"{'command' if target == self.process.pid else 'worker'} {number.name}"
            self.killed[what] = self.killed.get(what, 0) + 1


def disturbed(directory: pathlib.Path, scale: float, chance: random.Random) -> int:
    """Kills until there were KILLS of them, lets every share end and returns how many there were."""
    shares = [Supervised(directory, share, scale, chance) for share in SHARES]
    while not all(share.done for share in shares):
        time.sleep(0.02)
        for share in shares:
            if not share.done:
                share.look()
            if sum(sum(other.killed.values()) for other in shares) < KILLS:
                share.kill()
    total = collections.Counter()
    for share in shares:
        total.update(share.killed)
        print(f"share {share.share}: killed {share.killed}, exit statuses {share.statuses}")
    return total.total()


def results(directory: pathlib.Path) -> tuple[dict, dict]:
    """Each run's row of the table that `looped sweep collect` makes, and its curve without what time decides."""
    table = directory.parent / f"{directory.name}.csv"
    subprocess.run(
        [sys.executable, "-m", "looped", "sweep", "collect", str(directory), "--output", str(table)],
        check=True,
    )
    with open(table) as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len({row["run_id"] for row in rows}), "a run is in the table twice"
    curves = {}
    for row in rows:
        lines = map(json.loads, (directory / row["run_id"] / "metrics.jsonl").read_text().splitlines())
        curves[row["run_id"]] = [
            (line["step"], line["loss"], line["learning_rate_multiplier"]) for line in lines
        ]
    return {row["run_id"]: row for row in rows}, curves


def main(seed: int) -> int:
    folder = pathlib.Path(tempfile.mkdtemp(prefix="sweep-kills-"))
    print(f"seed {seed}; in {folder}, which stays if this fails", flush=True)
    os.environ |= {
        "JAX_PLATFORMS": "cpu",
        "KILLS_DATA": prepare(folder),
        "JAX_COMPILATION_CACHE_DIR": str(folder / "compiled"),  # the same programs, sooner
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1",
        "PYTHONPATH": os.pathsep.join([str(HERE.parents[1]), str(HERE)]),
    }
    scale, step = calibrate(folder)
    os.environ["KILLS_STEPS"] = str(max(100, round(1.5 * scale / step)))
    length = os.environ["KILLS_STEPS"]
    print(f"a start takes {scale:.1f} s, a step {1e3 * step:.1f} ms: runs of {length} steps and half more")
    began = time.monotonic()
    undisturbed(folder / "undisturbed")
    print(f"undisturbed: {time.monotonic() - began:.0f} s", flush=True)
    began = time.monotonic()
    killed = disturbed(folder / "disturbed", scale, random.Random(seed))
    print(f"disturbed: {time.monotonic() - began:.0f} s", flush=True)
    compare(folder / "undisturbed", folder / "disturbed")
    assert killed >= KILLS, f"only {killed} kills before all was done"
    shutil.rmtree(folder)
    return 0


def compare(undisturbed: pathlib.Path, disturbed: pathlib.Path) -> None:
    expected, expected_curves = results(undisturbed)
    got, curves = results(disturbed)
    losses = {run_id: (row["status"], row["loss"]) for run_id, row in got.items()}
    assert losses == {run_id: ("done", row["loss"]) for run_id, row in expected.items()}, "the losses differ"
    assert len(got) == len(specs())
    missing = 0
    for run_id, curve in curves.items():
        known = {step: rest for step, *rest in expected_curves[run_id]}
        assert all(known[step] == rest for step, *rest in curve), f"the curve of {run_id} differs"
        missing += len(known) - len(curve)
    starts = sum(path.read_text().count("\n== ") for path in disturbed.glob("logs/**/*.log"))
    print(
        f"{len(got)} runs, each once in the table, losses equal bit for bit; {starts} starts of a run in all"
    )
    print(
        f"curves equal point for point, but for {missing} points of {sum(map(len, curves.values()))} that are missing"
    )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--command"]:
        sys.exit(command(*sys.argv[2:]))
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else random.SystemRandom().randrange(10**6)))

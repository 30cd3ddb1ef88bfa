"""A run that is killed with SIGKILL again and again ends, bit for bit, as one that never was.

    python tests/benchmarks/run_kills.py [SEED]

One small run is trained undisturbed by `looped train` on two devices of the CPU, which also measures how long each
phase of it takes.  Then it is trained anew, in a folder of its own each time, while it is killed ten times: in its
start, its compilation, its steps and its saves in random order, then in its evaluation, in its last save and before its
record says that it is done.  A phase is recognised by what the folder shows, and the moment within it is random.  That
goes on until there were 50 kills, and three at least in every phase.  A start that is to get beyond compilation reads
its programs from a cache; the undisturbed run and the last start of each other one compile them.

Compared with the undisturbed run are the losses of all steps, each there once, the record, and every array of the last
checkpoint (parameters, the optimizer's state with the norms of MuonH, the step).

On two cores that other work used as well: seed 1, 50 kills (3 in a start, 6 in compilation, 7 in steps, 19 in saves,
4 in the evaluation, 6 in the last save, 5 before the record), 9.7 minutes; seed 2, 60 kills (5, 7, 9, 21, 3, 9, 6),
11.4 minutes; no bit different.
"""

from __future__ import annotations

import collections
import pathlib
import random
import shutil
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE.parent)]

import killing  # noqa: E402
from killing import PHASES, Job  # noqa: E402

KILLS, IN_EVERY_PHASE, RUNS = 50, 3, 12
STEPS = 500
STEPS_BETWEEN_SAVES = 20
ANYWHERE = ("start", "compilation", "step", "step", "save", "save", "save")
AT_THE_END = ("evaluation", "last save", "record")
PART = dict.fromkeys(PHASES, 1.0) | {"save": 0.5, "evaluation": 0.5, "last save": 0.5, "record": 0.0}
"""Of a phase, where a kill can fall; the last is over before it is looked at twice."""


def disturbed(
    job: Job, directory: pathlib.Path, save_every: float, longest: dict[str, float], chance: random.Random
) -> collections.Counter[str]:
    """Trains the run to its end with one kill aimed at each phase of the plan; returns how many hit which."""
    hits: collections.Counter[str] = collections.Counter()
    for phase in [*chance.sample(ANYWHERE, len(ANYWHERE)), *AT_THE_END]:
        hit = killing.kill_in(
            phase,
            job,
            directory,
            save_every=save_every,
            longest=PART[phase] * longest[phase],
            chance=chance,
            further=chance.random() < 0.75,
        )
        if hit is None:  # it came to its end before
            break
        if hit != phase:  # the machine has become faster
            longest[phase] /= 2
        hits[hit] += 1
    killing.finish(job, directory)
    return hits


def main(seed: int) -> int:
    folder = pathlib.Path(tempfile.mkdtemp(prefix="run-kills-"))
    print(f"seed {seed}; in {folder}, which stays if this fails", flush=True)
    job, chance = Job(killing.prepare(folder / "data"), STEPS), random.Random(seed)
    began = time.monotonic()
    longest = killing.undisturbed(job, folder / "undisturbed", save_every=0.3)
    print(f"undisturbed: {time.monotonic() - began:.0f} s; the phases took at most, in seconds:")
    print("  ".join(f"{phase} {seconds:.2f}" for phase, seconds in longest.items()), flush=True)
    save_every = STEPS_BETWEEN_SAVES * longest.pop("a step")
    total: collections.Counter[str] = collections.Counter()
    print(f"{'':8}{''.join(f'{phase:>13}' for phase in PHASES)}")
    for number in range(1, RUNS + 1):
        directory = folder / str(number)
        hits = disturbed(job, directory, save_every, longest, chance)
        size = killing.check_equal(job, folder / "undisturbed", directory)
        total += hits
        print(f"run {number:<4}{''.join(f'{hits[phase]:13}' for phase in PHASES)}", flush=True)
        if total.total() >= KILLS and all(total[phase] >= IN_EVERY_PHASE for phase in PHASES):
            break
    else:
        raise AssertionError(f"after {RUNS} runs some phase was hit too seldom: {dict(total)}")
    print(f"{'in all':8}{''.join(f'{total[phase]:13}' for phase in PHASES)}")
    print(
        f"{total.total()} kills, {number} runs: {STEPS} losses, the record and {size:,} bytes of the last checkpoint"
        f" are those of the undisturbed run; {(time.monotonic() - began) / 60:.1f} minutes in all"
    )
    shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else random.SystemRandom().randrange(10**6)))

"""Stands in for `looped.train` in worker processes: no model, the same contract, behaviour by arm."""

import json
import os
import pathlib
import signal
import time

import fake_bucket

from looped.errors import UserError
from looped.jsonable import to_json
from looped.record import ParameterGroups, RunRecord, read_record

STEPS = 40


def prepare(spec):
    if spec.data.source == "nowhere":
        raise UserError("source is 'nowhere', which is not known.")
    deaths = pathlib.Path(os.environ.get("DEATHS", "none"))  # a file with a line for each time to die here
    if deaths.exists() and (left := deaths.read_text().splitlines()):
        deaths.write_text("\n".join(left[1:]))
        os.kill(os.getpid(), signal.SIGKILL)


def train(spec, run_dir, *, progress=None):
    directory = local(run_dir)
    directory.mkdir(parents=True, exist_ok=True)
    before = read_record(run_dir)
    start = before.step if before else 0
    with open(directory / "calls", "a") as calls:
        calls.write(f"{os.getpid()} {start} {','.join(map(str, sorted(os.sched_getaffinity(0))))}\n")
    if spec.arm == "raises":
        raise RuntimeError("disk on fire")
    if spec.arm == "raises-later" and not (directory / "mended").exists():
        _write(directory, spec, status="running", step=7)
        raise RuntimeError("disk on fire")
    if spec.arm == "dies-once" and before is None:
        _write(directory, spec, status="running", step=7)
        os.kill(os.getpid(), signal.SIGKILL)
    for step in range(start, STEPS):
        if progress is not None:
            progress(step + 1, STEPS, 5.0 - step / STEPS, 1000.0, float(STEPS - step))
        try:
            time.sleep(float(os.environ.get("SLOW_STEP", 0.25)) if spec.arm == "slow" else 0.001)
        except KeyboardInterrupt:
            _write(directory, spec, status="running", step=step)
            raise
        if spec.arm == "slow" and step % 4 == 0:
            _write(directory, spec, status="running", step=step)
    if spec.arm == "nan":
        return _write(directory, spec, status="failed", step=3, reason="the training loss at step 3 is nan")
    return _write(directory, spec, status="done", step=STEPS, loss=3.0)


def local(path):
    """Where a path lies on this machine, gs:// included."""
    text = os.fspath(path)
    if text.startswith("gs://"):
        return pathlib.Path(os.environ[fake_bucket.VARIABLE], text.removeprefix("gs://"))
    return pathlib.Path(text)


def made(spec, *, status, step, loss=None, reason=None, updated_at=""):
    """The record of a run."""
    return RunRecord(
        run_id=spec.run_id,
        status=status,
        arm=spec.arm,
        recurrences=spec.model.recurrences,
        backprop_recurrences=spec.model.k,
        d_model=spec.model.d_model,
        n_once=1000 * spec.model.d_model,
        n_rec=2000 * spec.model.d_model,
        convention="published",
        parameters=ParameterGroups(1, 1, 1, 1, 1, 1, 1),
        flops_per_token=(spec.budget_flops or 1e9) / 100_000,
        budget_flops=spec.budget_flops,
        tokens=100_000,
        steps=STEPS,
        seed=spec.seed,
        loss=loss,
        validation_tokens=None,
        data_hash="",
        epochs=0.0,
        spec=to_json(spec),
        versions={},
        device="none",
        started_at="",
        updated_at=updated_at,
        step=step,
        reason=reason,
    )


def _write(directory, spec, **fields):
    directory, record = local(directory), made(spec, **fields)
    folder = directory / "record"
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / "partial"
    partial.write_text(json.dumps(to_json(record)))
    partial.replace(folder / "metadata")
    return record

"""One run, from its spec to its record; read it from top to bottom."""

from __future__ import annotations

import dataclasses
import datetime
import functools
import importlib.metadata
import math
import platform
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from etils import epath
from flax import nnx
from jax.sharding import Mesh

import looped
from looped import counting, distributed
from looped.checkpoint import FOLDER, Checkpoints, all_finite
from looped.config import ModelConfig, OptimizerConfig, RunSpec
from looped.data.loader import PackedData, prepare
from looped.errors import UserError
from looped.execution import DEFAULT, SAVE_EVERY_SECONDS, Execution
from looped.jsonable import from_json, to_json
from looped.jumps import JumpWatch
from looped.optimizer import decay, learning_rates
from looped.preemption import Preemption
from looped.programs import Metrics, Programs, TrainState, build, describe
from looped.record import RECORD_FOLDER, RunRecord, read_record, write_record
from looped.sharding import batch_sharding, global_batch, local_rows, mesh_for
from looped.tracking import FILE as CURVE
from looped.tracking import Tracking

Progress = Callable[[int, int, float, float, float], None]
"""Called with (step, steps, training loss in nats per token, tokens per second, seconds left)."""

PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "tensorflow-datasets", "numpy")


def train(
    spec: RunSpec,
    run_dir: epath.PathLike,
    *,
    progress: Progress | None = None,
    save_every_seconds: float = SAVE_EVERY_SECONDS,
    execution: Execution = DEFAULT,
    track: Sequence[str] = (),
) -> RunRecord:
    """Trains `spec` in `run_dir`, or goes on where a stopped process left it, and returns its record.

    A finished or failed run is returned as it is.  A loss or gradient that is not finite ends the run as failed.
    Ctrl-C or SIGTERM saves the state first, then raises KeyboardInterrupt (`Preempted` after SIGTERM).  The curve goes
    to metrics.jsonl and to the trackers named in `track` (`looped.tracking.TRACKERS`).  Processes that have been joined
    (`looped.distributed`) all call it alike, and one writes.

    Raises `UserError` for data that does not fit the model, a mesh that does not fit the run, seconds that are none, or
    a folder that holds another run.
    """
    if not save_every_seconds >= 0:
        raise UserError(f"save_every_seconds is {save_every_seconds}; it must be at least 0.")
    # 1. What was there: the same run, finished or not; never another one.
    previous = _shared_record(run_dir)
    if previous is not None:
        if previous.run_id != spec.run_id:
            raise UserError(
                f"{run_dir} holds run {previous.run_id}, not {spec.run_id} ({_differences(previous.spec, spec)});"
                " choose another folder."
            )
        if previous.status != "running":
            return previous

    # 2. Data and programs.
    data = prepare_data(spec)
    record = previous or new_record(spec, data)
    if record.data_hash != data.hash:
        raise UserError(
            f"{run_dir} began on data of hash {record.data_hash[:12]}, and {spec.data.source!r} now has"
            f" {data.hash[:12]} (other package versions make other docstrings); restore those versions, or move the"
            " folder away to begin again."
        )
    distributed.check_same(f"the data of {spec.data.source!r}", data.hash)
    steps, batch_size = record.steps, spec.batch_size
    mesh = mesh_for(spec, execution)
    programs = compiled(spec.model, spec.optimizer, execution, mesh)
    record = dataclasses.replace(record, execution=describe(execution, mesh, spec.model))
    rates = learning_rates(spec)
    multiplier_at = functools.partial(decay, steps=steps, final_fraction=spec.optimizer.final_lr_fraction)

    # 3. State: the newest checkpoint, or from the seed.
    checkpoints = Checkpoints(run_dir, training=True)
    restored = checkpoints.restore(programs.abstract, set_aside=True)
    start, state, notes = restored or (0, programs.init(spec.seed), {})
    watch = JumpWatch(notes.get("losses"))
    if previous is None:
        _write(run_dir, record)

    # 4. Steps.  The loss of step t is fetched once step t + 1 is on its way, so the device never waits for the host.
    began = last_save = time.monotonic()
    pending: Metrics | None = None
    timed: tuple[int, float] | None = None  # where speed is measured from: compiling is not training
    reason: str | None = None
    stopping = False
    batches = data.device_batches(spec.data.shuffle_seed + spec.seed, start, batch_size, batch_sharding(mesh))
    tracking = Tracking(
        run_dir,
        spec.run_id,
        start=start,
        steps=steps,
        config=record.spec,
        names=track,
        writer=distributed.is_writer(),
    )
    with Preemption() as preemption:
        step = start
        while step < steps:
            scaled = {group: np.float32(rate * multiplier_at(step)) for group, rate in rates.items()}
            state, metrics = programs.step(state, next(batches), scaled)
            step += 1
            speed: float | None = None
            if pending is not None:
                reason = _take(watch, step - 1, pending)
                if timed is None:
                    timed = step, time.monotonic()
                else:
                    speed = (step - timed[0]) * spec.batch_tokens / (time.monotonic() - timed[1])
                    if progress is not None:
                        left = (steps - step) * spec.batch_tokens / speed
                        progress(step - 1, steps, float(pending.loss), speed, left)
                tracking.point(step - 1, float(pending.loss), speed, multiplier_at(step - 2))
            pending = metrics
            stopping = preemption.requested()
            due = _save_is_due(step, time.monotonic() - last_save > save_every_seconds)
            if due and not reason:
                # So that the newest checkpoint is a good one.
                reason = _take(watch, step, pending) or _not_finite_state(state, step)
            if reason or stopping:
                break
            if due:
                # First, since a process that goes on from the checkpoint does not train this step again.
                tracking.point(step, float(pending.loss), speed, multiplier_at(step - 1))
                tracking.flush()
                checkpoints.save(step, state, notes={"losses": watch.notes()})
                record = _advanced(record, step, began, watch)
                began = last_save = time.monotonic()
                _write(run_dir, record)
        if pending is not None:
            reason = reason or _take(watch, step, pending)

        # 5. The end: stopped, failed, or the final loss over the fixed validation set.
        record = _advanced(record, step, began, watch)
        if reason is None and int(state.step) != step:
            reason = f"{int(state.step)} steps were made and {step} were to be"
        reason = reason or _not_finite_state(state, step)
        loss, tokens = None, None
        if reason is None and not stopping:
            loss, tokens = evaluate(programs, state.params, data, spec.validation_sequences, batch_size)
            if not math.isfinite(loss):
                reason = f"the validation loss is {loss}"
        if pending is not None:
            tracking.point(step, float(pending.loss), None, multiplier_at(step - 1))
            tracking.flush()
        if reason is not None:
            record = dataclasses.replace(record, status="failed", reason=reason)
        else:
            checkpoints.save(step, state, None if loss is None else {"loss": loss}, {"losses": watch.notes()})
            if loss is not None:
                record = dataclasses.replace(record, status="done", loss=loss, validation_tokens=tokens)
        tracking.close(record.loss)
        checkpoints.close()  # before the record: what it says is done is on disk
        _write(run_dir, record)
        if record.status == "running":
            raise preemption.stop()
    return record


def prepare_data(spec: RunSpec) -> PackedData:
    """Opens the run's data, made first where it is missing, and checks it against the model."""
    return _open_data(spec.data.source, spec.model.sequence_length, spec.model.vocab_size)


@functools.lru_cache(maxsize=2)
def _open_data(source: str, sequence_length: int, vocab_size: int) -> PackedData:
    return prepare(source, sequence_length, vocab_size=vocab_size)


def evaluate(
    programs: Programs, params: nnx.State, data: PackedData, sequences: int, batch_size: int
) -> tuple[float, int]:
    """Returns (loss in nats per token, tokens it is the mean of) over the first `sequences` validation sequences."""
    total, count, mesh = 0.0, 0, programs.mesh
    for rows in data.validation_batches(sequences, batch_size, local_rows(mesh, batch_size)):
        inputs, targets = (global_batch(x, mesh, batch_size) for x in rows)
        batch_total, batch_count = programs.loss_sum(params, inputs, targets)
        total, count = total + float(batch_total), count + int(batch_count)
    return total / count, count


@functools.lru_cache(maxsize=1)
def compiled(
    model: ModelConfig, optimizer: OptimizerConfig, execution: Execution = DEFAULT, mesh: Mesh | None = None
) -> Programs:
    """`looped.programs.build`, kept.

    The programs of the model before are dropped: each holds about 100 MB, and a sweep trains one model after another.
    """
    jax.clear_caches()
    return build(model, optimizer, execution, mesh)


def new_record(spec: RunSpec, data: PackedData) -> RunRecord:
    """The record of a run about to start."""
    model, steps = spec.model, counting.planned_steps(spec)
    n_once, n_rec = counting.n_once_n_rec(model)
    now = _now()
    return RunRecord(
        run_id=spec.run_id,
        status="running",
        arm=spec.arm,
        recurrences=model.recurrences,
        backprop_recurrences=model.k,
        d_model=model.d_model,
        n_once=n_once,
        n_rec=n_rec,
        convention=counting.CONVENTION,
        parameters=counting.count(model),
        flops_per_token=counting.flops_per_token(model),
        budget_flops=spec.budget_flops,
        tokens=steps * spec.batch_tokens,
        steps=steps,
        seed=spec.seed,
        loss=None,
        validation_tokens=None,
        data_hash=data.hash,
        epochs=data.epochs(steps, spec.batch_size),
        tokenizer_fingerprint=data.tokenizer_fingerprint,
        spec=to_json(spec),
        versions={"looped": looped.__version__, "python": platform.python_version()}
        | {p: importlib.metadata.version(p) for p in PACKAGES},
        device=f"{jax.device_count()} × {jax.devices()[0].device_kind}",
        started_at=now,
        updated_at=now,
    )


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def _shared_record(run_dir: epath.PathLike) -> RunRecord | None:
    """The record in `run_dir` as the process that writes sees it."""

    def read() -> Any:
        record = read_record(run_dir)
        if record is None:
            _check_new(epath.Path(run_dir))
            return None
        return to_json(record)

    found = distributed.from_writer(read)
    return None if found is None else from_json(RunRecord, found)


def _check_new(run_dir: epath.Path) -> None:
    """Raises `UserError` where a file that a run would write over or into is another's; there is no record."""
    for name, is_folder in ((FOLDER, True), (RECORD_FOLDER, True), (CURVE, False)):
        path = run_dir / name
        if path.exists() and not (is_folder and path.is_dir()):
            raise UserError(
                f"output is {run_dir}, which holds {name!r} and no run; name a new or empty folder."
            )


def _differences(there: dict[str, Any], spec: RunSpec) -> str:
    """The fields in which the spec of a record differs from `spec`, the first few of them."""
    flat = [
        dict(jax.tree_util.tree_leaves_with_path(s, is_leaf=lambda x: x is None))
        for s in (there, to_json(spec))
    ]
    missing = object()
    found = [
        f"{'.'.join(str(getattr(key, 'key', getattr(key, 'idx', key))) for key in path)} is"
        f" {flat[0].get(path, 'not')} there and {flat[1].get(path, 'not')} here"
        for path in {**flat[0], **flat[1]}
        if flat[0].get(path, missing) != flat[1].get(path, missing)
    ]
    return ", ".join(found[:5]) + (f" and {len(found) - 5} more fields" if len(found) > 5 else "")


def _write(run_dir: epath.PathLike, record: RunRecord) -> None:
    if distributed.is_writer():
        write_record(run_dir, record)


_AGREE_EVERY = 8
"""Steps between two times that several processes ask one another whether it is time to save."""


def _save_is_due(step: int, due: bool) -> bool:
    """The same on every process: their clocks are not."""
    if jax.process_count() == 1:
        return due
    return step % _AGREE_EVERY == 0 and distributed.any_process(due)


def _advanced(record: RunRecord, step: int, since: float, watch: JumpWatch) -> RunRecord:
    return dataclasses.replace(
        record,
        step=step,
        train_seconds=round(record.train_seconds + time.monotonic() - since, 3),
        updated_at=_now(),
        loss_jumps=tuple(watch.jumps),
    )


def _take(watch: JumpWatch, step: int, metrics: Metrics) -> str | None:
    """Notes the loss of `step`; returns what of it is not finite, which ends the run."""
    reason = _not_finite(metrics, step)
    if reason is None:
        watch.see(step, float(metrics.loss))
    return reason


def _not_finite_state(state: TrainState, step: int) -> str | None:
    return None if all_finite(state) else f"the state after step {step} is not finite"


def _not_finite(metrics: Metrics, step: int) -> str | None:
    for name, value in (
        ("training loss", float(metrics.loss)),
        ("gradient's norm", float(metrics.gradient_norm)),
    ):
        if not math.isfinite(value):
            return f"the {name} at step {step} is {value}"
    return None

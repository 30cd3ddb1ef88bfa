"""One run, from its spec to its record; read it from top to bottom."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import functools
import importlib.metadata
import math
import platform
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from etils import epath
from flax import nnx

import looped
from looped import counting
from looped.checkpoint import Checkpoints
from looped.config import ModelConfig, OptimizerConfig, RunSpec
from looped.data.loader import PackedData, prepare
from looped.errors import UserError
from looped.jsonable import to_json
from looped.loss import cross_entropy, cross_entropy_sum
from looped.model import LoopedLM
from looped.optimizer import decay, learning_rates, make_optimizer
from looped.record import RunRecord, read_record, write_record

Array = jax.Array
Progress = Callable[[int, int, float, float, float], None]
"""Called with (step, steps, training loss in nats per token, tokens per second, seconds left)."""

PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "tensorflow-datasets", "numpy")


class TrainState(NamedTuple):
    params: nnx.State
    optimizer: Any
    step: Array


def train(
    spec: RunSpec,
    run_dir: epath.PathLike,
    *,
    progress: Progress | None = None,
    save_every_seconds: float = 60.0,
) -> RunRecord:
    """Trains `spec` in `run_dir`, or goes on where a stopped process left it, and returns its record.

    A finished or failed run is returned as it is.  A loss that is not finite ends the run as failed.  Ctrl-C or SIGTERM
    saves the state first, then raises KeyboardInterrupt.  Raises `UserError` for data that does not fit the model
    or a folder that holds another run.
    """
    # 1. What was there: the same run, finished or not; never another one.
    previous = read_record(run_dir)
    if previous is not None:
        if previous.run_id != spec.run_id:
            raise UserError(
                f"{run_dir} holds run {previous.run_id}, not {spec.run_id}; choose another folder."
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
    steps, batch_size = record.steps, spec.batch_size
    programs = compiled(spec.model, spec.optimizer)
    rates = learning_rates(spec)

    # 3. State: the newest checkpoint, or from the seed.
    checkpoints = Checkpoints(run_dir)
    state = programs.init(spec.seed)
    start = checkpoints.latest_step()
    if start is not None:
        state = checkpoints.restore(start, state)
    start = start or 0
    if previous is None:
        write_record(run_dir, record)

    # 4. Steps.  The loss of step t is fetched once step t + 1 is on its way, so the device never waits for the host.
    began = last_save = time.monotonic()
    pending: Array | None = None
    timed: tuple[int, float] | None = None  # where speed is measured from: compiling is not training
    reason: str | None = None
    batches = data.device_batches(spec.data.shuffle_seed + spec.seed, start, batch_size)
    with _stop_signals() as stop:
        step = start
        while step < steps:
            multiplier = decay(step, steps, spec.optimizer.final_lr_fraction)
            scaled = {group: np.float32(rate * multiplier) for group, rate in rates.items()}
            state, loss = programs.step(state, next(batches), scaled)
            step += 1
            if pending is not None:
                reason = _not_finite(pending, step - 1)
                if timed is None:
                    timed = step, time.monotonic()
                elif progress is not None:
                    speed = (step - timed[0]) * spec.batch_tokens / (time.monotonic() - timed[1])
                    left = (steps - step) * spec.batch_tokens / speed
                    progress(step - 1, steps, float(pending), speed, left)
            pending = loss
            if reason or stop:
                break
            if time.monotonic() - last_save > save_every_seconds:
                checkpoints.save(step, state)
                last_save = time.monotonic()
        reason = reason or (_not_finite(pending, step) if pending is not None else None)

        # 5. The end: stopped, failed, or the final loss over the fixed validation set.
        seconds = record.train_seconds + time.monotonic() - began
        record = dataclasses.replace(record, step=step, train_seconds=round(seconds, 3), updated_at=_now())
        if reason is None and not stop:
            loss, tokens = evaluate(programs, state.params, data, spec.validation_sequences, batch_size)
            if math.isfinite(loss):
                checkpoints.save(step, state, {"loss": loss})
                record = dataclasses.replace(record, status="done", loss=loss, validation_tokens=tokens)
            else:
                reason = f"the validation loss is {loss}"
        elif reason is None:
            checkpoints.save(step, state)
        if reason is not None:
            record = dataclasses.replace(record, status="failed", reason=reason)
        checkpoints.close()  # before the record: what it says is done is on disk
        write_record(run_dir, record)
        if record.status == "running":
            raise KeyboardInterrupt
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
    total, count = 0.0, 0
    for inputs, targets in data.validation_batches(sequences, batch_size):
        batch_total, batch_count = programs.loss_sum(params, inputs, targets)
        total, count = total + float(batch_total), count + int(batch_count)
    return total / count, count


class Programs(NamedTuple):
    """The jitted functions of a model and optimizer; rates and data are arguments, so that
    runs of every length share them.
    """

    init: Callable[[int], TrainState]
    step: Callable[[TrainState, Array, dict[str, np.float32]], tuple[TrainState, Array]]
    loss_sum: Callable[[nnx.State, np.ndarray, np.ndarray], tuple[Array, Array]]


@functools.lru_cache(maxsize=1)
def compiled(model: ModelConfig, optimizer_config: OptimizerConfig) -> Programs:
    """Builds the programs of `model`.  On CPU scans are unrolled: the same function, faster steps.

    Those of the model before are dropped: each holds about 100 MB, and a sweep trains one model after another.
    """
    jax.clear_caches()
    unroll = jax.default_backend() == "cpu"
    abstract = nnx.eval_shape(lambda: LoopedLM(model, nnx.Rngs(0), unroll=unroll))
    graphdef, abstract_params = nnx.split(abstract, nnx.Param)
    optimizer = make_optimizer(optimizer_config, abstract_params)

    @jax.jit
    def init_params(seed):
        return nnx.split(LoopedLM(model, nnx.Rngs(jax.random.key(seed)), unroll=unroll), nnx.Param)[1]

    def init(seed):
        params = init_params(seed)
        return TrainState(params, optimizer.init(params), jnp.zeros((), jnp.int32))

    def loss_fn(params, tokens):
        return cross_entropy(nnx.merge(graphdef, params)(tokens[:, :-1]), tokens[:, 1:])

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state, tokens, rates):
        loss, gradients = jax.value_and_grad(loss_fn)(state.params, tokens)
        updates, optimizer_state = optimizer.update(
            gradients, state.optimizer, state.params, learning_rates=rates
        )
        params: Any = optax.apply_updates(state.params, updates)
        return TrainState(params, optimizer_state, state.step + 1), loss

    @jax.jit
    def loss_sum(params, inputs, targets):
        return cross_entropy_sum(nnx.merge(graphdef, params)(inputs), targets)

    return Programs(init, step, loss_sum)


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


def _not_finite(loss: Array, step: int) -> str | None:
    value = float(loss)
    return None if math.isfinite(value) else f"the training loss at step {step} is {value}"


@contextlib.contextmanager
def _stop_signals() -> Iterator[list[int]]:
    """Yields a list that Ctrl-C or SIGTERM makes non-empty: a signal in the middle of a step would lose donated state.

    The second Ctrl-C acts at once.  Outside the main thread, signals are left alone.
    """
    received: list[int] = []
    previous: dict[int, Any] = {}

    def note(number, frame):
        del frame
        received.append(number)
        signal.signal(signal.SIGINT, signal.default_int_handler)

    with contextlib.suppress(ValueError):
        for number in (signal.SIGINT, signal.SIGTERM):
            previous[number] = signal.signal(number, note)
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)

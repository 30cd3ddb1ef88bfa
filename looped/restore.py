"""A trained model from its run's folder."""

from __future__ import annotations

import dataclasses
import os

import jax
from etils import epath
from flax import nnx

from looped.checkpoint import Checkpoints
from looped.config import RunSpec
from looped.errors import UserError
from looped.jsonable import from_json
from looped.mechanisms import check_named
from looped.model import LoopedLM
from looped.record import RunRecord, find_records, read_record
from looped.train import compiled


@dataclasses.dataclass(frozen=True)
class TrainedRun:
    """A run with its model as of `step` steps, the newest checkpoint."""

    record: RunRecord
    spec: RunSpec
    model: LoopedLM
    step: int


def load_run(run_dir: epath.PathLike) -> TrainedRun:
    """Loads the newest checkpoint of a run, finished or not.  `UserError` where there is none."""
    record = read_record(run_dir)
    if record is None:
        runs = [path for path, _ in find_records(run_dir)]
        hint = f"it holds runs: name one, such as {runs[0]}" if runs else "`looped train` makes one"
        raise UserError(f"{os.fspath(run_dir)}: no run is there; {hint}.")
    check_named(record.spec, f"{os.fspath(run_dir)}: its record")
    spec = from_json(RunSpec, record.spec)
    checkpoints = Checkpoints(run_dir)
    found = checkpoints.restore(compiled(spec.model, spec.optimizer).abstract)
    checkpoints.close()
    if found is None:
        raise UserError(
            f"{os.fspath(run_dir)}: run {record.run_id} ({record.status}) has no checkpoint; train it first."
        )
    step, state, _ = found
    unroll = jax.default_backend() == "cpu"
    model = nnx.eval_shape(lambda: LoopedLM(spec.model, nnx.Rngs(0), unroll=unroll))
    return TrainedRun(record, spec, nnx.merge(nnx.graphdef(model), state.params), step)

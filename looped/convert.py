"""Checkpoints of the published code ↔ runs of this one, bit for bit.

A converted run is a folder like any other: an Orbax checkpoint of the training state (the optimizer's afresh), and a
record made from what the published meta JSON says.  Beside them, `published` keeps that JSON and the arrays' types, so
that the way back gives the same bits.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import reprlib
import types
from collections.abc import Iterator, Mapping
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from flax import nnx

from looped.checkpoint import Checkpoints
from looped.config import LARGEST, DataConfig, ModelConfig, RunSpec
from looped.errors import UserError, first_line, unwritable
from looped.files import check_folder, is_remote, write_whole
from looped.interop import config_to_reference, from_reference, to_reference
from looped.jsonable import read_json
from looped.optimizer import make_optimizer
from looped.programs import TrainState
from looped.record import RunRecord, write_record
from looped.restore import load_run
from looped.tensors import read_arrays, write_arrays
from looped.train import new_record

FOLDER = "published"
_DTYPES = {np.dtype(t).name: np.dtype(t) for t in (np.float64, np.float32, np.float16, ml_dtypes.bfloat16)}


def meta_path(arrays: epath.PathLike) -> epath.Path:
    """Where the meta JSON of an arrays file lies: meta_000100.json by model_000100.pt, x.json by x.safetensors."""
    path = epath.Path(arrays)
    stem = f"meta_{path.stem.removeprefix('model_')}" if path.stem.startswith("model_") else path.stem
    return path.with_name(f"{stem}.json")


def import_published(
    arrays_file: epath.PathLike, meta_file: epath.PathLike, run_dir: epath.PathLike, data: str = "fineweb-edu"
) -> RunRecord:
    """Makes a run of a published checkpoint in the new folder `run_dir` and returns its record.

    Where the meta JSON has no final loss, the record's status stays `running`.  `data` is the data set that evaluating
    and generating will read.
    """
    run_dir = epath.Path(run_dir)
    if run_dir.exists() and (not run_dir.is_dir() or any(run_dir.iterdir())):
        raise UserError(f"{run_dir}: is there already; name a new folder.")
    check_folder(run_dir, "target")
    meta = _read_meta(meta_file)
    fields = meta.get("model_config", meta)
    if not isinstance(fields, dict):
        raise UserError(f"{meta_file}: model_config is {reprlib.repr(fields)}; it must be an object.")
    config = ModelConfig.from_reference(fields)
    arrays = read_arrays(arrays_file)
    for name, array in arrays.items():
        if not np.array_equal(array, array.astype(np.float32).astype(array.dtype), equal_nan=True):
            raise UserError(f"{name} is {array.dtype}, of which float32 cannot hold every value.")

    record = _record(config, meta, data)
    params = nnx.state(from_reference(config, arrays), nnx.Param)
    optimizer = make_optimizer(RunSpec(steps=1).optimizer, params)
    state = TrainState(params, optimizer.init(params), jnp.asarray(record.step, jnp.int32))
    kept = {"meta": meta, "dtypes": {name: array.dtype.name for name, array in arrays.items()}}
    with _whole_folder(run_dir) as folder:
        checkpoints = Checkpoints(folder)
        checkpoints.save(record.step, state, None if record.loss is None else {"loss": record.loss})
        checkpoints.close()
        with ocp.Checkpointer(ocp.JsonCheckpointHandler()) as checkpointer:
            checkpointer.save(folder.absolute() / FOLDER, args=ocp.args.JsonSave(kept))
        write_record(folder, record)
    return record


@contextlib.contextmanager
def _whole_folder(run_dir: epath.Path) -> Iterator[epath.Path]:
    """Yields a folder that becomes `run_dir` if the context ends well, and is removed otherwise.

    On an object store, where nothing is renamed in one step, it is `run_dir`.
    """
    folder = run_dir
    if not is_remote(run_dir):
        folder = run_dir.absolute().parent / f".{run_dir.absolute().name}.{os.getpid()}"
    try:
        yield folder
        if folder != run_dir:
            folder.replace(run_dir)
    except BaseException as error:
        with contextlib.suppress(OSError):
            folder.rmtree(missing_ok=True)
        if isinstance(error, OSError):
            raise unwritable(error, f"target is {run_dir}", "name another folder") from None
        raise


def export_published(run_dir: epath.PathLike, arrays_file: epath.PathLike, meta_file: epath.PathLike) -> None:
    """Writes the newest checkpoint of a run, converted or trained here, as the published code would, to new files."""
    for path in map(epath.Path, (arrays_file, meta_file)):
        if path.exists():
            raise UserError(f"{path}: is there already; name a new file.")
    run = load_run(run_dir)
    arrays = to_reference(run.model)
    meta: dict[str, Any] = {
        "step": run.step,
        "tokens": run.step * run.spec.batch_tokens,
        "val_loss": run.record.loss,
        "model_config": config_to_reference(run.spec.model),
    }
    folder = epath.Path(run_dir).absolute() / FOLDER
    if folder.is_dir():
        with ocp.Checkpointer(ocp.JsonCheckpointHandler()) as checkpointer:
            kept = checkpointer.restore(folder, args=ocp.args.JsonRestore())
        try:
            if run.step == kept["meta"].get("step", 0):
                meta = kept["meta"]
                names = {name.removeprefix("_orig_mod."): name for name in kept["dtypes"]}
                arrays = {names[n]: a.astype(_DTYPES[kept["dtypes"][names[n]]]) for n, a in arrays.items()}
        except (KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{folder}: damaged ({first_line(error)}); remove it to write float32.") from None
    try:
        write_whole(meta_file, json.dumps(meta, indent=2))
        try:
            write_arrays(arrays_file, arrays)
        except BaseException:
            epath.Path(meta_file).unlink()
            raise
    except OSError as error:
        raise unwritable(error, f"target is {arrays_file} with {meta_file}", "name another file") from None


def _read_meta(path: epath.PathLike) -> dict[str, Any]:
    meta = read_json(path, "name the meta JSON that belongs to the arrays with --meta", "meta")
    if not isinstance(meta, dict):
        raise UserError(f"{path}: expected an object with `model_config`, got {type(meta).__name__}.")
    return meta


def _check_number(name: str, value: Any, most: float) -> None:
    kinds = (int, float) if most == math.inf else int
    if isinstance(value, bool) or not isinstance(value, kinds) or not 0 <= value <= most:
        raise UserError(f"meta {name} is {reprlib.repr(value)}; it must be a number from 0 to {most:,}.")


def _record(config: ModelConfig, meta: Mapping[str, Any], data: str) -> RunRecord:
    """The record of a published run: its steps, tokens and loss, where the meta JSON says them."""
    step, loss = meta.get("step", 0), meta.get("val_loss")
    _check_number("step", step, LARGEST)
    tokens = meta.get("tokens") or step * 2**18
    _check_number("tokens", tokens, 2**63 - 1)
    if loss is not None and not (isinstance(loss, (int, float)) and math.isnan(loss)):
        _check_number("val_loss", loss, math.inf)
    spec = RunSpec(
        model=config,
        data=DataConfig(source=data),
        arm="published",
        steps=max(step, 1),
        batch_size=max(round(tokens / max(step, 1) / config.sequence_length), 1),
    )
    unknown: Any = types.SimpleNamespace(
        hash="unknown", epochs=lambda steps, batch_size: 0.0, tokenizer_fingerprint=None
    )
    record = dataclasses.replace(new_record(spec, unknown), step=step)
    if loss is None or not math.isfinite(loss):
        return record
    return dataclasses.replace(record, status="done", loss=loss)

"""A run's Orbax checkpoints: the training state, restored in its own shapes, types and in any shardings.

Beside the state lies a sum of every array, so that a byte that has changed is found however many devices restore it.
"""

from __future__ import annotations

import logging
import sys
import uuid
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from looped import distributed
from looped.errors import UserError, first_line

FOLDER = "checkpoints"
DAMAGED = "damaged-checkpoints"
_KEPT = 2


def _show_errors_once() -> None:
    """Keeps tracebacks of a save that fails, as on a full disk, off standard error: Orbax raises what went wrong.

    It logs the same before, asyncio logs what came of the writes beside it, and TensorStore's threads find that the
    event loop to which they report is closed.
    """
    for name in ("absl", "asyncio"):
        logging.getLogger(name).addFilter(lambda entry: not entry.exc_info)
    show = sys.unraisablehook

    def shown(what: Any) -> None:
        if not (isinstance(what.exc_value, RuntimeError) and str(what.exc_value) == "Event loop is closed"):
            show(what)

    sys.unraisablehook = shown


_show_errors_once()


class Checkpoints:
    """The checkpoints of one run, newest two kept; saves are asynchronous and atomic.

    `training` says that this process trains the run, which clears away what a kill left of a checkpoint that was being
    written or removed.  Where several processes train it, each calls everything here.
    """

    def __init__(self, run_dir: epath.PathLike, training: bool = False):
        self._run_dir, self._training = epath.Path(run_dir).absolute(), training
        options = ocp.CheckpointManagerOptions(
            max_to_keep=_KEPT, create=True, enable_async_checkpointing=True, cleanup_tmp_directories=training
        )
        self._manager = ocp.CheckpointManager(self._run_dir / FOLDER, options=options)

    def latest_step(self) -> int | None:
        return self._manager.latest_step()

    def save(
        self,
        step: int,
        state: Any,
        metrics: dict[str, float] | None = None,
        notes: dict[str, Any] | None = None,
    ) -> None:
        """Starts to save `state` as of `step` steps done; a save of a step that is there already is skipped.

        `notes` are JSON that `restore` gives back.
        """
        if self._manager.latest_step() == step:
            return
        kept = {"sums": sums(state), "notes": notes or {}}
        items: dict[str, Any] = {"state": ocp.args.StandardSave(state), "kept": ocp.args.JsonSave(kept)}
        if metrics:
            items["metrics"] = ocp.args.JsonSave(metrics)
        self._manager.save(step, args=ocp.args.Composite(**items))

    def restore(self, like: Any, set_aside: bool = False) -> tuple[int, Any, dict[str, Any]] | None:
        """Returns (step, state, notes) of the newest checkpoint that is whole, or None where there is none at all.

        The state has the shapes, types and shardings of `like`.  Newer ones that are damaged get a word on standard
        error; `set_aside` moves them to `RUN/damaged-checkpoints`, for a training that will save their steps again.
        Raises `UserError` where all are damaged.
        """
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
        steps = sorted(self._manager.all_steps(), reverse=True)
        damaged: dict[int, str] = {}
        for step in steps:
            try:
                state, notes = self._read(step, abstract)
                why = None
            except Exception as error:  # Orbax, TensorStore and JSON raise many kinds
                state, notes, why = None, {}, first_line(error)
            if not distributed.any_process(why is not None):
                for bad, reason in damaged.items():
                    _say(f"the checkpoint of step {bad} is damaged ({reason}); going on from step {step}")
                if damaged and set_aside:
                    self._set_aside(list(damaged))
                return step, state, notes
            damaged[step] = why or "another process could not read it"
        if not steps:
            return None
        reasons = "; ".join(f"step {step}: {why}" for step, why in damaged.items())
        raise UserError(
            f"{self._run_dir / FOLDER}: no checkpoint can be read ({reasons}); restore the files from a copy, or move"
            " the run's folder away to begin again."
        )

    def _read(self, step: int, abstract: Any) -> tuple[Any, dict[str, Any]]:
        there = (self._manager.directory / str(step) / "kept").exists()  # not in those of earlier versions
        items: dict[str, Any] = {"state": ocp.args.StandardRestore(abstract)}
        if there:
            items["kept"] = ocp.args.JsonRestore()
        restored = self._manager.restore(step, args=ocp.args.Composite(**items))
        state = restored["state"]
        if not there:
            return state, {}
        wanted, found = restored["kept"]["sums"], sums(state)
        changed = sorted(name for name in wanted.keys() | found.keys() if wanted.get(name) != found.get(name))
        if changed:
            raise ValueError(f"{changed[0]} is not what was saved")
        return state, restored["kept"]["notes"]

    def _set_aside(self, damaged: list[int]) -> None:
        folder = self._run_dir / DAMAGED
        if distributed.is_writer():
            folder.mkdir(parents=True, exist_ok=True)
            for step in damaged:
                goal = folder / f"{step}-{uuid.uuid4().hex[:8]}"
                (self._manager.directory / str(step)).rename(goal)
                _say(f"the damaged checkpoint is now {goal}")
        distributed.barrier("damaged checkpoints are set aside")
        self._manager.reload()

    def close(self) -> None:
        """Waits for saves in flight."""
        self._manager.wait_until_finished()
        if self._training:
            # As a save does, which there may not have been.
            for step in sorted(self._manager.all_steps())[:-_KEPT]:
                self._manager.delete(step)
        self._manager.close()


def _say(message: str) -> None:
    if distributed.is_writer():
        print(f"looped: {message}.", file=sys.stderr, flush=True)


def sums(state: Any) -> dict[str, int]:
    """By name, the sum modulo 2³² of every array's words: whole numbers, so that it is the same in every sharding."""
    leaves = jax.tree_util.tree_leaves_with_path(state)
    arrays = [leaf for _, leaf in leaves]
    if all(map(_at_hand, arrays)):
        totals = [int(np.sum(_words(np.asarray(x)), dtype=np.uint32)) for x in arrays]
    else:
        totals = [int(total) for total in _sums_on_devices(arrays)]
    return {jax.tree_util.keystr(path): total for (path, _), total in zip(leaves, totals, strict=True)}


def all_finite(state: Any) -> bool:
    """Whether every number in `state` is finite; the same on every process."""
    arrays = jax.tree.leaves(state)
    if all(map(_at_hand, arrays)):
        return all(bool(np.isfinite(np.asarray(x)).all()) for x in arrays)
    return bool(_finite_on_devices(arrays))


def _at_hand(x: jax.Array | np.ndarray) -> bool:
    """Whether the host can read all of it without a copy from a device."""
    if isinstance(x, np.ndarray):
        return True
    return x.is_fully_addressable and next(iter(x.devices())).platform == "cpu"


def _words(x: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(x).reshape(-1).view(f"u{x.dtype.itemsize}")


@jax.jit
def _sums_on_devices(arrays: list[jax.Array]) -> list[jax.Array]:
    def total(x: jax.Array) -> jax.Array:
        words = jax.lax.bitcast_convert_type(x, jnp.dtype(f"u{x.dtype.itemsize}"))
        return jnp.sum(words.astype(jnp.uint32), dtype=jnp.uint32)

    return [total(x) for x in arrays]


@jax.jit
def _finite_on_devices(arrays: list[jax.Array]) -> jax.Array:
    return jnp.all(jnp.stack([jnp.all(jnp.isfinite(x)) for x in arrays]))

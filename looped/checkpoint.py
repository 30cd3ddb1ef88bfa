"""A run's Orbax checkpoints: the training state, restored in its own shapes, types and shardings."""

from __future__ import annotations

from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath

FOLDER = "checkpoints"


class Checkpoints:
    """The checkpoints of one run, newest two kept; saves are asynchronous and atomic."""

    def __init__(self, run_dir: epath.PathLike):
        options = ocp.CheckpointManagerOptions(max_to_keep=2, create=True, enable_async_checkpointing=True)
        self._manager = ocp.CheckpointManager(epath.Path(run_dir).absolute() / FOLDER, options=options)

    def latest_step(self) -> int | None:
        return self._manager.latest_step()

    def save(self, step: int, state: Any, metrics: dict[str, float] | None = None) -> None:
        """Starts to save `state` as of `step` steps done; a save of a step that is there already is skipped."""
        if self._manager.latest_step() == step:
            return
        items: dict[str, Any] = {"state": ocp.args.StandardSave(state)}
        if metrics:
            items["metrics"] = ocp.args.JsonSave(metrics)
        self._manager.save(step, args=ocp.args.Composite(**items))

    def restore(self, step: int, like: Any) -> Any:
        """Returns the state of `step`, with the shapes, types and shardings of `like`."""
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
        return self._manager.restore(step, args=ocp.args.Composite(state=ocp.args.StandardRestore(abstract)))[
            "state"
        ]

    def close(self) -> None:
        """Waits for saves in flight."""
        self._manager.close()

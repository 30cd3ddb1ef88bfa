"""How a run is carried out, as against what it computes: nothing here changes a loss by more than rounding.

So it is no part of a `RunSpec` nor of its run id; the record says what was used.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax
from jax.sharding import Mesh

from looped.attention_backends import choose_backend
from looped.config import ModelConfig, RunSpec
from looped.errors import UserError
from looped.jsonable import to_json
from looped.sharding import MeshAxes, choose_mesh, count_slices, make_mesh

Remat = Literal["none", "layer", "dots", "pass"]
Attention = Literal["auto", "xla", "splash", "cudnn"]
Precision = Literal["default", "high", "highest"]


@dataclasses.dataclass(frozen=True)
class Execution:
    """How to carry out a run."""

    mesh: MeshAxes = MeshAxes()  # noqa: RUF009 - frozen
    """Devices along each axis of the mesh."""
    remat: Remat = "none"
    """What the backward pass computes again: nothing; each layer; each layer but its matrix products (dots); each pass
    of the recurrent block."""
    accumulate: int = 1
    """Parts that a batch is computed in, one after the other."""
    attention: Attention = "auto"
    """What computes attention; auto chooses by platform and shape."""
    matmul_precision: Precision = "highest"
    """Of float32 products: highest is float32 on every platform; default is the platform's (bfloat16 passes on TPU,
    TF32 on GPU). Products of bfloat16 are not concerned."""
    unroll: bool | None = None
    """Unroll the scans over layers and passes: faster on CPU, where it is the default; longer to compile."""

    def __post_init__(self):
        if self.accumulate < 1:
            raise UserError(f"accumulate is {self.accumulate}; it must be at least 1.")


DEFAULT = Execution()


def mesh_for(spec: RunSpec, execution: Execution) -> Mesh:
    """The mesh of a run on the devices there are; `UserError` where the run does not divide over them.

    On CPU several devices are faked ones, for trying a mesh: without several processes and without an axis named, the
    run takes the first alone.
    """
    devices = jax.devices()
    asked = execution.mesh != MeshAxes() or jax.process_count() > 1
    if devices[0].platform == "cpu" and not asked:
        devices = devices[:1]
    slices = count_slices(devices)
    shape = choose_mesh(
        spec.model, spec.batch_size, len(devices), slices, execution.mesh, execution.accumulate
    )
    return make_mesh(shape, devices)


def describe(execution: Execution, mesh: Mesh, model: ModelConfig) -> dict[str, Any]:
    """What the record says of it: the options, with the mesh and the attention that were used."""
    chosen = choose_backend(mesh.devices.flat[0].platform, model, execution.attention, mesh.shape["sequence"])
    return to_json(execution) | {
        "mesh": {axis: int(size) for axis, size in mesh.shape.items()},
        "attention": chosen,
    }

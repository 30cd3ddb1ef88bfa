"""How a run is carried out, as against what it computes: nothing here changes a loss by more than rounding.

So it is no part of a `RunSpec` nor of its run id; the record says what was used.  No JAX is imported here.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

from looped.errors import UserError

AXES = ("replica", "fsdp", "sequence", "tensor")
"""Of the mesh, outermost first (`looped.sharding`)."""
Remat = Literal["none", "layer", "dots", "pass"]
Attention = Literal["auto", "xla", "splash", "cudnn"]
Precision = Literal["default", "high", "highest"]


@dataclasses.dataclass(frozen=True)
class MeshAxes:
    """Devices along each axis of the mesh; those left out are chosen."""

    replica: int | None = None
    """Whole copies of the model; a multiple of the number of slices."""
    fsdp: int | None = None
    """Parts of the batch and of every matrix."""
    sequence: int | None = None
    """Parts of every sequence."""
    tensor: int | None = None
    """Parts of heads and MLP; 1 where left out."""

    def __post_init__(self):
        for axis in AXES:
            if (size := getattr(self, axis)) is not None and size < 1:
                raise UserError(f"mesh axis {axis} is {size}; it must be at least 1.")


@dataclasses.dataclass(frozen=True)
class Execution:
    """How to carry out a run."""

    mesh: MeshAxes = MeshAxes()
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
SAVE_EVERY_SECONDS = 60.0
"""Between two checkpoints of a run, where nothing else is said."""
